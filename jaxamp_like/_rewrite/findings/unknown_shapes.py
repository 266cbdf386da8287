"""Contractions that no row of a policy by shapes matches, and rows that match none."""

from collections.abc import Iterator
from typing import Any

from ..._jax import source_line
from ..._rules.by_shapes import NO_ROW, ByShapes, shapes_of
from ..._structural import Step
from ..planner import Planner
from ..solvers import without_solver_scope
from .unmatched import first_of, place_of_step


def reports_of_unknown_shapes(planner: Planner, steps: list[Step]) -> Iterator[str]:
    """What to say of contractions that a policy by shapes does not know, and of rows.

    Such a policy is made for one function: it says nothing of what changed in that."""
    entries: dict[Any, list[Step]] = {}
    for step in steps:
        match = planner.matching.of_primitive(step.eqn.primitive, step.scope)
        if (
            isinstance(match.rule, ByShapes)
            and without_solver_scope(step.scope) == step.scope
        ):
            entries.setdefault((match.rule, match.key, match.also), []).append(step)
    for (rule, *_), steps in entries.items():
        yield from _reports(rule, steps)


def _reports(rule: ByShapes, steps: list[Step]) -> Iterator[str]:
    patterns = [pattern for pattern, _ in rule.rules]
    known = {rule.pattern_of(*_given(step)) for step in steps}
    unused = [pattern for pattern in patterns if pattern not in known]
    unknown = [step for step in steps if step.decision.why.startswith(NO_ROW)]
    start = "`amp_policy` tells contractions apart by shapes"
    if unknown:
        shapes = [*dict.fromkeys(shapes_of(*_given(step)) for step in unknown)]
        yield (
            f"{start}, and says nothing of {place_of_step(unknown[0])} of "
            f"{first_of(shapes)} ({source_line(unknown[0].eqn)}): computed as written. "
            f"It was made for {', '.join(patterns)}. Calibrate the function "
            "as it is now, with data of these sizes; or, under `jax.grad`, make `amp` "
            "of the loss and differentiate that."
        )
    if unused:
        rows, place = ", ".join(unused), place_of_step(steps[0])
        yield (
            f"{start}, and its rows {rows} matched no {place}. Calibrate the function "
            "as it is now."
        )


def _given(step: Step) -> Any:
    return step.eqn.params, [atom.aval for atom in step.eqn.invars]
