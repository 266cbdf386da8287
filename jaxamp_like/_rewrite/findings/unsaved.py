"""Keys of `saving_low` under which the backward pass keeps nothing anyway."""

from collections.abc import Iterator

from ..._jax import source_line
from ..._policies.dictionary import AMP_DEFAULT, Key, show_key
from ..._primitives import CONTRACTIONS
from ..._rules import Fact, Rule
from ..._structural import Plan, Step
from ..facts import fact_of
from ..planner import Planner
from ..remat import is_kept_anyway

_JIT = ("jit", "pjit")


def reports_of_keys_that_save_nothing(
    planner: Planner, plan: Plan
) -> Iterator[tuple[Key, str]]:
    """Each key that asks for copies in 8 bits where none is ever made, and the report.

    It is sure only of contractions, each of which reads inputs of the function: what
    other operations are run again from depends on all that is around them."""
    for key, rule in planner.policy.items():
        is_asked = isinstance(rule, Rule) and rule.saves is not None
        if not is_asked or key == AMP_DEFAULT:
            continue
        found = [x for x in _run(plan) if x[0].match.saves and key in x[0].match.also]
        if found and all(_saves_nothing(*one) for one in found):
            yield (
                key,
                f"The key {show_key(key)} of `amp_policy` keeps nothing in 8 bits: "
                "there are only contractions there, of inputs of the function "
                "(parameters and data), which stay as they are for the backward pass. "
                f"The first is in {source_line(found[0][0].eqn)}. Name a scope that "
                "also holds what follows, such as an activation function, a norm or a "
                "contraction that reads their results, or leave out the key.",
            )


def _run(plan: Plan) -> Iterator[tuple[Step, list[Fact | None]]]:
    """The steps of a plan, at any depth, with the facts of their operands.

    A `jit` is not one of them, but what it holds."""
    for step in plan.steps:
        if step.eqn.primitive.name not in _JIT or not step.inner:
            yield step, [fact_of(plan.facts, atom) for atom in step.eqn.invars]
        for inner in step.inner:
            yield from _run(inner)


def _saves_nothing(step: Step, operands: list[Fact | None]) -> bool:
    is_contraction = step.eqn.primitive.name in CONTRACTIONS and not step.backward
    return is_contraction and all(map(is_kept_anyway, operands))
