"""Rules that quantise, and what to say where they did not, or can't."""

from collections import Counter
from collections.abc import Iterator

import jax

from ..._errors import AmpError
from ..._jax import Primitive, source_line
from ..._policies.dictionary import Lookup
from ..._primitives import CONTRACTIONS
from ..._quantised.delayed import NO_STATE
from ..._quantised.rule import NO_PARAMETER, NOT_OF_PARAMETERS, Quantising
from ..._recording import is_recorded
from ..._rules import INPUT_SOURCES, Fact, Origin, RematSource, Rule
from ..._structural import Plan, Step
from ..facts import fact_of
from .unmatched import without_amp_scopes

_MOST = 8  # reasons to list


def reports_of_quantising(
    policy: Lookup, plan: Plan, steps: list[Step]
) -> Iterator[str | None]:
    """What to say of rules that quantise, for a plan of such steps."""
    rules = {id(step.match.rule): step.match.rule for step in steps}
    if any(map(_quantising, rules.values())):
        yield _of_nothing_quantised(steps)
        yield _of_few_quantised(steps)
        yield _of_weights_closed_over(plan)
        yield _of_data_as_a_weight(plan)
        yield _of_another_backend(steps)
    else:
        yield _of_other_contractions(policy, steps)


def _of_nothing_quantised(steps: list[Step]) -> str | None:
    """What to say where rules that quantise have left all contractions alone."""
    asked = [step for step in steps if _may_quantise(step)]
    if not asked or any(step.decision.eight_bits for step in asked):
        return None
    whys = Counter(map(why_not_quantised, asked))
    listed = "; ".join(f"{n} since {why}" for why, n in whys.most_common(_MOST))
    hint = f" {_WHICH} {_IN_LOOPS}" * any(NO_PARAMETER in why for why in whys)
    return (
        f"No contraction is quantised. Those that {rules_of(asked)} could quantise "
        f"stay as they were: {listed}. `explain` shows each; the arguments `where`, "
        "`leave` and `parameters_only` of the rule say which to leave alone: "
        f"`{asked_of(asked[0])[0].name}(where=None)` quantises small ones too.{hint}"
    )


def _of_other_contractions(policy: Lookup, steps: list[Step]) -> str | None:
    """What to say where all contractions are of kinds that no rule quantises."""
    rules = [
        (key, rule)
        for key, value in policy.items()
        if isinstance(value, Rule)
        for rule in _quantising(value)
    ]
    found = [
        step
        for step in steps
        if step.is_compute and step.eqn.primitive.name in CONTRACTIONS
    ]
    if not rules or not found:
        return None
    for key, rule in rules:
        kinds = {s.eqn.primitive for s in found if rule.is_for(s.eqn.primitive.name)}
        if key in kinds or (kinds and not isinstance(key, Primitive)):
            return None
    rule = rules[0][1]
    return (
        f"No contraction is quantised: `{rule!r}` is for dense ones, and leaves the "
        f"{len(found)} of `{found[0].eqn.primitive.name}` in the compute dtype, the "
        f"first in {source_line(found[0].eqn)}. `mxfp8()` and `nvfp4()` quantise "
        "ragged ones, too."
    )


def _of_few_quantised(steps: list[Step]) -> str | None:
    """What to say where most contractions of a forward pass read no parameter.

    Nothing is said where none is quantised, not even in a backward pass."""
    if not any(step.decision.eight_bits for step in steps):
        return None
    asked = [step for step in steps if _may_quantise(step) and not step.backward]
    made = sum(step.decision.eight_bits is not None for step in asked)
    left = [s for s in asked if NOT_OF_PARAMETERS in s.decision.why]
    if not left or len(left) <= 2 * made:
        return None
    how_many, verb = (f"Only {made}", "are") if made else ("None", "is")
    return (
        f"{how_many} of the contractions of the forward pass that {rules_of(asked)} "
        f"would quantise {verb}, but of {len(left)} {NOT_OF_PARAMETERS}, the first in "
        f"{source_line(left[0].eqn)}. {_WHICH} {_IN_LOOPS}"
    )


def _of_another_backend(steps: list[Step]) -> str | None:
    """What to say where a format has kernels only on another backend than JAX's own.

    A report tells it of each contraction, and may be of a program for another machine.
    """
    made = [step for step in steps if _backend_of(step)]
    if not made or is_recorded():
        return None
    here = jax.default_backend()  # which may begin to look for devices
    if here == _backend_of(made[0]):
        return None
    return (
        f"JAX runs on a {here.upper()}, where the {len(made)} contractions that "
        f"{rules_of(made)} would quantise run in the compute dtype: only NVIDIA's "
        "GPUs have them. `emulate=True` computes with the rounded numbers here, in "
        "float32. A program that is compiled for such a GPU is as it should be."
    )


def _backend_of(step: Step) -> str | None:
    made = step.decision.eight_bits
    return made and made.backend


def _of_weights_closed_over(plan: Plan) -> str | None:
    """What to say where all weights seem to be closed over, and data taken for one.

    Rules that quantise then find parameters only beside what is closed over."""
    beside: list[Step] = []  # they read what is closed over, and a parameter
    alone: list[Step] = []
    for step, facts in _operand_facts(plan):
        if not _may_quantise(step) or step.backward:
            continue
        origins = [fact.origin for fact in facts]
        if Origin.CLOSED_OVER not in origins:
            if max(origins) >= Origin.MADE:
                return None
        elif max(origins) >= Origin.MADE:
            beside.append(step)
        else:
            alone.append(step)
    if not beside or not alone:
        return None
    return (
        f"{rules_of(beside)} takes an argument for the weight of a contraction, in "
        f"{source_line(beside[0].eqn)}, but reads no other weight in the arguments: "
        f"those of {len(alone)} contractions are closed over. {_WHICH} Pass "
        "`argnums=()` if the function closes over all of its parameters, as in "
        "`amp(lambda x: model(x), argnums=())`."
    )


def _of_data_as_a_weight(plan: Plan) -> str | None:
    """What to say where the batch seems to be first, and the parameters after it.

    As in `f(x, params)`. One array is then taken for the only parameter, nothing that
    is computed from it meets a parameter again, but all later layers multiply by arrays
    of other arguments, which stand on the right, as weights do. On the left there may
    be a matrix of data, such as a graph's."""
    if sum(x.origin is Origin.PARAMETER for x in plan.in_facts if x) > 1:
        return None
    begins: list[Step] = []  # the parameter, beside an array as it was given
    later: list[Step] = []  # what was computed, beside an array as it was given
    for step, facts in _operand_facts(plan):
        if not _may_quantise(step) or step.backward:
            continue
        lhs, rhs = facts
        is_given = rhs.origin is Origin.DATA and rhs.remat_source in INPUT_SOURCES
        if lhs.origin is Origin.PARAMETER and is_given:
            begins.append(step)
        elif max(lhs.origin, rhs.origin) >= Origin.MADE:
            return None
        elif lhs.remat_source is RematSource.NONE and is_given:
            later.append(step)
    if not begins or not later:
        return None
    return (
        f"{rules_of(begins)} takes the first argument for the weight of a contraction, "
        f"in {source_line(begins[0].eqn)}, and leaves {len(later)} alone that multiply "
        f"by arrays of other arguments, the first in {source_line(later[0].eqn)}. If "
        "these are the weights, say which arguments hold them, as in `amp(lambda x, "
        "params: model(x, params), argnums=1)`, or make them the first. " + _WHICH
    )


_WHICH = (
    "Parameters are what the arguments hold that `argnums` names: by default the first "
    "one, or a module that is called itself."
)
_IN_LOOPS = (
    "In a loop that updates parameters with data they are none: "
    "`parameters_only=False` of the rule quantises such contractions too."
)


def _operand_facts(plan: Plan) -> Iterator[tuple[Step, list[Fact]]]:
    """The steps of a plan, at any depth, with the facts of two floating operands."""
    for step in plan.steps:
        facts = [fact_of(plan.facts, atom) for atom in step.eqn.invars[:2]]
        if all(facts) and facts:
            yield step, [fact for fact in facts if fact]
        for inner in step.inner:
            yield from _operand_facts(inner)


def _may_quantise(step: Step) -> bool:
    return bool(asked_of(step))


def asked_of(step: Step) -> list[Quantising]:
    """The rules of the policy that may quantise a step, perhaps on a condition."""
    name = step.eqn.primitive.name
    return [rule for rule in _quantising(step.match.rule) if rule.is_for(name)]


def _quantising(rule: Rule) -> list[Quantising]:
    """The rules that quantise among a rule and its parts."""
    if isinstance(rule, Quantising):
        return [rule]
    return [one for part in rule.parts for one in _quantising(part)]


def rules_of(steps: list[Step]) -> str:
    """The rules that may quantise some steps, as they are written."""
    return " or ".join(
        f"`{rule!r}`"
        for rule in dict.fromkeys(rule for step in steps for rule in asked_of(step))
    )


def why_not_quantised(step: Step) -> str:
    """Why a step is not quantised: what follows on the first colon in its `why`.

    Without a colon, as where a condition leads to another rule, it is all of `why`."""
    why = step.decision.why
    return why.partition(": ")[2] or why


def refuse_rules_with_state(steps: list[Step]) -> None:
    """Raises an error if scales follow from values that were seen in earlier calls.

    `amp` remembers no such values."""
    for step in steps:
        made = step.decision.eight_bits
        if made is not None and made.needs_state:
            scope = "/".join(without_amp_scopes(step.scope))
            raise AmpError(
                f"{NO_STATE}\nThe first such contraction is in scope {scope!r}, "
                f"{source_line(step.eqn)}."
            )
