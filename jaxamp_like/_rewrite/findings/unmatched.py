"""Keys of a policy that matched nothing, and what they may have been meant to be."""

import re
from collections.abc import Iterator, Sequence
from typing import NamedTuple
from weakref import WeakKeyDictionary

from ..._jax import Eqn, Jaxpr, Primitive, raw, scopes, source_line, subjaxprs
from ..._policies.classes import CLASSES
from ..._policies.dictionary import (
    AMP_DEFAULT,
    AMP_STOP,
    REWRITTEN,
    Key,
    Lookup,
    Scope,
    endings,
    paths_to,
    show_key,
)
from ..._policies.frozen import EXPRESSION
from ..._policies.mistakes import instead_of_function_name, instead_of_primitive
from ..._policies.named import Policy
from ..._rules import Match
from ..._structural import Plan, Step, derivative_of
from ..._suggestions import closest
from ..planner import Planner
from ..record import number_in

_AS_IN_PYTHON = re.compile(r"""\w+([./]\w+|\[(\d+|'\w+'|"\w+")\])*""")
_NONE_OF_IT = "The function has no such primitive: remove the key."


# By policy and function, the keys that have matched in some call: a function may have
# parts that only a call in training has.
_matched: WeakKeyDictionary[Lookup, dict[str, set[Key]]] = WeakKeyDictionary()


class _Equation(NamedTuple):
    """What a key could have matched: part of a plan, or of an author's rule."""

    eqn: Eqn
    scope: Scope
    match: Match


def reports_of_unmatched_keys(
    planner: Planner, plan: Plan, steps: list[Step], place: str
) -> Iterator[tuple[Key, str]]:
    """Each key that decided nothing in a plan of `steps`, and what to say of it.

    Nothing is said of a key that has matched in another call of the function, which is
    told by its `place`."""
    matched = _matched.setdefault(planner.policy, {}).setdefault(place, set())
    matched |= {*plan.policy_keys}
    unmatched = [key for key in planner.policy.own_keys() if key not in matched]
    if not unmatched:
        return
    # A derivative rule is planned when JAX asks for it, which is later, or never.
    rules = list(_of_rules(planner, plan))
    of_map = {key for key, value in planner.policy.items() if isinstance(value, Policy)}
    known = {key for one in rules for key in (one.match.key, *one.match.also)}
    equations = [_Equation(step.eqn, step.scope, step.match) for step in steps]
    for key in unmatched:
        if key not in known:
            report = f"The key {show_key(key)} of `amp_policy` matched nothing in the "
            hint = _hint(key, [*equations, *rules], key in of_map)
            yield key, f"{report}function. {hint}"


def _of_rules(planner: Planner, plan: Plan) -> Iterator[_Equation]:
    """The equations of the derivative rules of functions in a plan, at any depth."""
    for step in plan.steps:
        if (jaxpr := derivative_of(step.eqn)) is not None:
            yield from _equations(planner, jaxpr, step.scope)
        else:
            for inner in step.inner:
                yield from _of_rules(planner, inner)


def _equations(planner: Planner, jaxpr: Jaxpr, around: Scope) -> Iterator[_Equation]:
    for eqn in raw(jaxpr).eqns:
        scope = around + scopes(eqn)
        yield _Equation(eqn, scope, planner.matching.of_equation(eqn, scope))
        for inner in subjaxprs(eqn.params):
            yield from _equations(planner, inner, scope)


def _hint(key: Key, steps: Sequence[_Equation], of_map: bool) -> str:
    """What to say of a key that matched nothing; `of_map`: it is of a `PolicyMap`."""
    if isinstance(key, Primitive):
        hidden = [step for step in steps if step.eqn.primitive is key]
        return _hidden_by(hidden) if hidden else _NONE_OF_IT
    paths = _paths(steps)
    if isinstance(key, re.Pattern):
        return _of_expression(key, paths, of_map)
    names = _names(paths)
    is_exact = isinstance(key, tuple)  # its names are no expressions
    path = "/".join(key if is_exact else filter(None, key.split("/")))
    if path in names:
        return _hidden_by([names[path]], of_map)
    primitive = path.removesuffix("_p")
    if primitive in CLASSES:
        name = f"To name the primitive, write `jax.lax.{primitive}_p` as the key."
        return instead_of_primitive(primitive) if of_map else name
    if near := _near(path, names):
        return near
    if not is_exact and EXPRESSION.search(path):
        if of_map:  # where a string may be an expression
            return _of_expression(re.compile(path), paths, of_map)
        return (
            "In a dict of rules a string is a name, or a path of names; an expression "
            f"is compiled: `re.compile({_whole(path, paths)!r})`. {_list(paths)}"
        )
    stack, _, index = path.rpartition("/")
    if index.isdigit() and stack in names:
        return (
            f"{stack!r} is a scope, and has none that is called {index!r} within: "
            "layers that one `scan` runs (`nn.scan`, `jax.lax.scan`) share a scope, "
            f"and the key {stack!r} is for all of them."
        )
    if close := closest(path, [*names, AMP_DEFAULT]):
        return _question(close, names)
    function = "" if is_exact or of_map else instead_of_function_name(path)
    return " ".join(filter(None, (function, _list(paths))))


def _question(name: str, names: dict[str, _Equation]) -> str:
    where = f" ({source_line(names[name].eqn)})" if name in names else ""
    return f"Did you mean {name!r}{where}?"


def _near(text: str, names: dict[str, _Equation]) -> str:
    """The question for a path that is written as in Python: "mlp.layers[0]"."""
    path = "/".join(re.findall(r"\w+", text)) if _AS_IN_PYTHON.fullmatch(text) else ""
    return _question(path, names) if path != text and path in names else ""


def _paths(steps: Sequence[_Equation]) -> dict[Scope, _Equation]:
    """The paths of the scopes, each with the first equation in it."""
    paths: dict[Scope, _Equation] = {}
    for scope, step in {
        without_amp_scopes(step.scope): step for step in steps[::-1]
    }.items():
        for end in range(1, len(scope) + 1):
            paths |= dict.fromkeys(paths_to(scope[:end]), step)
    return paths


def _names(paths: dict[Scope, _Equation]) -> dict[str, _Equation]:
    """The keys that would match, each with an equation that it would match."""
    parts = {part: step for path, step in paths.items() for part in endings(path)}
    return {"/".join(part): step for part, step in parts.items()}


def without_amp_scopes(scope: Scope) -> Scope:
    """The scope without the names that the library adds."""
    return tuple(x for x in scope if x != REWRITTEN and number_in(x) is None)


def first_of(items: Sequence[str]) -> str:
    """The first few of some items, as a report lists them."""
    return ", ".join(items[:8]) + ", ..." * (len(items) > 8)


def place_of_step(step: Step) -> str:
    """Where a step stands, in words."""
    path = "/".join(without_amp_scopes(step.scope))
    where = f"scope {path!r}" if path else "no scope"
    return f"`{step.eqn.primitive}` in {where}"


def _hidden_by(steps: Sequence[_Equation], of_map: bool = False) -> str:
    holding = dict.fromkeys(step.match.also[-1] for step in steps if step.match.also)
    if of_map and holding:  # nothing holds under `amp_stop`
        return (
            f"It stands only where {', '.join(map(show_key, holding))} comes first: "
            "of paths that match, the one that ends innermost holds, and paths win "
            "over regular expressions."
        )
    keys = dict.fromkeys(step.match.key for step in steps)
    others = ", ".join(map(show_key, keys))
    of_dict = not of_map and not {*keys} & {*AMP_STOP}
    return (
        f"It stands only where {others} comes first: of scopes the outermost wins, "
        "and scopes win over primitives."
        + " In a `PolicyMap`, which maps scopes to whole policies, the innermost wins."
        * of_dict
    )


def _of_expression(
    pattern: re.Pattern[str], paths: dict[Scope, _Equation], of_map: bool
) -> str:
    hidden = [step for path, step in paths.items() if pattern.fullmatch("/".join(path))]
    if hidden:
        return _hidden_by(hidden, of_map)
    if near := _near(pattern.pattern, _names(paths)):
        return near
    part = next((path for path in map("/".join, paths) if pattern.search(path)), None)
    if part is None:
        return _list(paths)
    return (
        f"It matches a part of {part!r}, but an expression must match a whole path, "
        f"from the outermost scope on: `re.compile({f'.*({pattern.pattern}).*'!r})`."
    )


def _whole(expression: str, paths: dict[Scope, _Equation]) -> str:
    """An expression that matches whole paths where this one matches parts of them."""
    try:
        pattern = re.compile(expression)
    except re.error:
        return expression
    known = [*map("/".join, paths)]
    is_part = any(map(pattern.search, known)) and not any(map(pattern.fullmatch, known))
    return f".*({expression}).*" if is_part else expression


def _list(paths: dict[Scope, _Equation]) -> str:
    known = [repr("/".join(path)) for path in paths]
    if not known:
        return (
            "The function has no scopes: put `with jax.named_scope(name):` around what "
            "the key is for; `scope_modules` names the modules of Equinox and NNX."
        )
    told = f"The scopes of the function are {first_of(known)}."
    if any(name.startswith("'eqx.") for name in known):  # which Equinox opens itself
        told += (
            " The fields of an Equinox model are scopes where it is called as "
            "`scope_modules(model)(x)`."
        )
    return told
