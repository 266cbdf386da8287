"""Keys of a policy that matched nothing, and what they may have been meant to be."""

import re
from collections import Counter
from collections.abc import Iterator
from difflib import get_close_matches

from .._errors import AmpError
from .._jax import Primitive, names, source_line
from .._policies.classes import CLASSES
from .._policies.dictionary import (
    AMP_DEFAULT,
    REWRITTEN,
    Key,
    Scope,
    endings,
    paths_to,
    show_key,
)
from .._policies.frozen import EXPRESSION
from .._quantised.delayed import NO_STATE
from .._quantised.rule import MADE_OF_PARAMETERS, Quantising
from .._rules import Rule
from .plan import Plan, Step
from .planner import Planner
from .record import MARK

_MOST = 8  # scopes to list
_NONE_OF_IT = "The function has no such primitive: remove the key."


def reports_of_unmatched_keys(planner: Planner, plan: Plan) -> Iterator[str]:
    """What to say of each key that decided nothing in a plan."""
    unmatched = [key for key in planner.policy.own_keys() if key not in plan.keys]
    if not unmatched:
        return
    steps = list(steps_of(plan))
    for key in unmatched:
        yield (
            f"The key {show_key(key)} of `amp_policy` matched nothing in the function. "
            f"{_hint(key, steps)}"
        )


def report_of_nothing_quantised(plan: Plan) -> str | None:
    """What to say where rules that quantise have left all contractions alone."""
    asked = [step for step in steps_of(plan) if _may_quantise(step)]
    if not asked or any(step.decision.eight_bits for step in asked):
        return None
    whys = Counter(map(_why_not, asked))
    listed = "; ".join(f"{n} since {why}" for why, n in whys.most_common(_MOST))
    return (
        f"No contraction is quantised. Of {len(asked)} that the policy would quantise, "
        f"there are {listed}. `explain` shows each; the arguments `where`, `leave` and "
        "`parameters_only` of the rule say which to leave alone: `float8(where=None)` "
        "quantises small ones too."
    )


def report_of_few_quantised(plan: Plan) -> str | None:
    """What to say where most parameters don't reach contractions as they came in."""
    asked = [
        step
        for step in steps_of(plan)
        if _may_quantise(step) and not names(step.eqn).backward
    ]
    made = sum(step.decision.eight_bits is not None for step in asked)
    left = [s for s in asked if MADE_OF_PARAMETERS in s.decision.why]
    if not made or len(left) <= 2 * made:
        return None
    return (
        f"Only {made} of the contractions that the policy would quantise are, but of "
        f"{len(left)} {MADE_OF_PARAMETERS}: in a loop that updates its parameters, or "
        f"with weights that are normalised. The first is in "
        f"{source_line(left[0].eqn)}. `parameters_only=False` of the rule quantises "
        "such contractions too."
    )


def _may_quantise(step: Step) -> bool:
    """Whether the policy has a rule that quantises for it, perhaps on a condition."""

    def is_asked(rule: Rule) -> bool:
        if isinstance(rule, Quantising):
            return rule.is_for(step.eqn.primitive.name)
        return any(map(is_asked, rule.parts))

    return is_asked(step.found.rule)


def _why_not(step: Step) -> str:
    """Why a step is not quantised: what a rule says of it behind what it does instead.

    Where a condition leads to another rule, all that is said."""
    why = step.decision.why
    return why.partition(": ")[2] or why


def refuse_rules_with_state(plan: Plan) -> None:
    """Raises where a contraction is scaled by what was seen before.

    Nothing remembers that here."""
    for step in steps_of(plan):
        made = step.decision.eight_bits
        if made is not None and made.needs_state:
            raise AmpError(
                f"{NO_STATE}\nThe first such contraction is in scope "
                f"{'/'.join(authors_scope(step.scope))!r}, {source_line(step.eqn)}."
            )


def steps_of(plan: Plan) -> Iterator[Step]:
    """The steps of a plan, at any depth."""
    for step in plan.steps:
        yield step
        for inner in step.inner:
            yield from steps_of(inner)


def _hint(key: Key, steps: list[Step]) -> str:
    if isinstance(key, Primitive):
        hidden = [step for step in steps if step.eqn.primitive is key]
        return _hidden_by(hidden) if hidden else _NONE_OF_IT
    paths = _paths(steps)
    if isinstance(key, re.Pattern):
        hidden = [step for path, step in paths.items() if key.fullmatch("/".join(path))]
        return _hidden_by(hidden) if hidden else _of_expression(key, paths)
    names = _names(paths)
    is_exact = isinstance(key, tuple)  # its names are no expressions
    path = "/".join(key if is_exact else filter(None, key.split("/")))
    if path in names:
        return _hidden_by([names[path]])
    if path in CLASSES:
        return f"To name the primitive, write `jax.lax.{path}_p` as the key."
    if not is_exact and EXPRESSION.search(path):
        return (
            "In a dict of rules a string is a name, or a path of names; an expression "
            f"is compiled: `re.compile({path!r})`. {_list(paths)}"
        )
    close = get_close_matches(path, [*names, AMP_DEFAULT], 1)
    if not close:
        return _list(paths)
    where = f" ({source_line(names[close[0]].eqn)})" if close[0] in names else ""
    return f"Did you mean {close[0]!r}{where}?"


def _paths(steps: list[Step]) -> dict[Scope, Step]:
    """The paths of the scopes, each with the first equation in it."""
    paths: dict[Scope, Step] = {}
    for scope, step in {
        authors_scope(step.scope): step for step in steps[::-1]
    }.items():
        for end in range(1, len(scope) + 1):
            paths |= dict.fromkeys(paths_to(scope[:end]), step)
    return paths


def _names(paths: dict[Scope, Step]) -> dict[str, Step]:
    """What keys may be that match, each with an equation that it would match."""
    parts = {part: step for path, step in paths.items() for part in endings(path)}
    return {"/".join(part): step for part, step in parts.items()}


def authors_scope(scope: Scope) -> Scope:
    """The scope without the names that the library adds."""
    return tuple(x for x in scope if x != REWRITTEN and not x.startswith(MARK))


def _hidden_by(steps: list[Step]) -> str:
    keys = dict.fromkeys(step.found.key for step in steps)
    others = ", ".join(map(show_key, keys))
    return (
        f"It stands only where {others} comes first: of scopes the outermost wins, "
        "and scopes win over primitives."
    )


def _of_expression(pattern: re.Pattern[str], paths: dict[Scope, Step]) -> str:
    part = next((path for path in map("/".join, paths) if pattern.search(path)), None)
    if part is None:
        return _list(paths)
    return (
        f"It matches a part of {part!r}, but an expression must match a whole path, "
        f"from the outermost scope on: `re.compile({f'.*({pattern.pattern}).*'!r})`."
    )


def _list(paths: dict[Scope, Step]) -> str:
    known = [repr("/".join(path)) for path in paths]
    if not known:
        return (
            "The function has no scopes: put `with jax.named_scope(name):` around what "
            "the key is for; `scope_modules` names the modules of Equinox and NNX."
        )
    more = ", ..." * (len(known) > _MOST)
    return f"The scopes of the function are {', '.join(known[:_MOST])}{more}."
