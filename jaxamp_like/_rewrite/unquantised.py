"""Rules that quantise, and what to say where they did not, or can't."""

from collections import Counter

from .._errors import AmpError
from .._jax import names, source_line
from .._quantised.delayed import NO_STATE
from .._quantised.rule import MADE_OF_PARAMETERS, Quantising
from .._rules import Rule
from .plan import Step
from .unmatched import authors_scope

_MOST = 8  # reasons to list


def report_of_nothing_quantised(steps: list[Step]) -> str | None:
    """What to say where rules that quantise have left all contractions alone."""
    asked = [step for step in steps if _may_quantise(step)]
    if not asked or any(step.decision.eight_bits for step in asked):
        return None
    whys = Counter(map(_why_not, asked))
    listed = "; ".join(f"{n} since {why}" for why, n in whys.most_common(_MOST))
    return (
        f"No contraction is quantised. Of {len(asked)} that {_rules_of(asked)} would "
        f"quantise, there are {listed}. `explain` shows each; the arguments `where`, "
        "`leave` and `parameters_only` of the rule say which to leave alone: "
        "`float8(where=None)` quantises small ones too."
    )


def report_of_few_quantised(steps: list[Step]) -> str | None:
    """What to say where most parameters don't reach contractions as they came in."""
    asked = [
        step for step in steps if _may_quantise(step) and not names(step.eqn).backward
    ]
    made = sum(step.decision.eight_bits is not None for step in asked)
    left = [s for s in asked if MADE_OF_PARAMETERS in s.decision.why]
    if not made or len(left) <= 2 * made:
        return None
    return (
        f"Only {made} of the contractions that {_rules_of(asked)} would quantise are, "
        f"but of {len(left)} {MADE_OF_PARAMETERS}: in a loop that updates its "
        "parameters, or with weights that are normalised. The first is in "
        f"{source_line(left[0].eqn)}. `parameters_only=False` of the rule quantises "
        "such contractions too."
    )


def _may_quantise(step: Step) -> bool:
    return bool(_asked_of(step))


def _asked_of(step: Step) -> list[Rule]:
    """The rules of the policy that quantise for it, perhaps on a condition."""

    def asked(rule: Rule) -> list[Rule]:
        if isinstance(rule, Quantising):
            return [rule] * rule.is_for(step.eqn.primitive.name)
        return [one for part in rule.parts for one in asked(part)]

    return asked(step.found.rule)


def _rules_of(steps: list[Step]) -> str:
    return " or ".join(
        f"`{rule!r}`"
        for rule in dict.fromkeys(rule for step in steps for rule in _asked_of(step))
    )


def _why_not(step: Step) -> str:
    """Why a step is not quantised: what a rule says of it behind what it does instead.

    Where a condition leads to another rule, all that is said."""
    why = step.decision.why
    return why.partition(": ")[2] or why


def refuse_rules_with_state(steps: list[Step]) -> None:
    """Raises where a contraction is scaled by what was seen before.

    Nothing remembers that here."""
    for step in steps:
        made = step.decision.eight_bits
        if made is not None and made.needs_state:
            raise AmpError(
                f"{NO_STATE}\nThe first such contraction is in scope "
                f"{'/'.join(authors_scope(step.scope))!r}, {source_line(step.eqn)}."
            )
