"""Contractions that a policy made by measurement leaves as written."""

from collections.abc import Iterator

from ..._jax import source_line
from ..._rules.measured import NOT_MEASURED, Unmeasured
from ..._structural import Plan, Step
from .unmatched import first_of, place_of_step, without_amp_scopes


def reports_of_unmeasured(plan: Plan) -> Iterator[str]:
    """What to say of contractions that the policy of `calibrate` has not measured.

    They are told together: a function that has grown has many."""
    unknown = [s for s in _run(plan) if s.decision.why.startswith(NOT_MEASURED)]
    if not unknown:
        return
    places = {_place(step): source_line(step.eqn) for step in reversed(unknown)}
    listed = [f"{place} ({line})" for place, line in reversed(places.items())]
    paths = ("/".join(without_amp_scopes(step.scope)) for step in unknown)
    path = next(filter(None, paths), "scope")
    or_outside = _OUTSIDE if any(map(_shapes, unknown)) else ""
    yield (
        "`amp_policy` was found by `calibrate` for a function without "
        f"{first_of(listed)}: computed as written, for the budget was not measured "
        "there. Calibrate the function as it is now; or give the scope a policy of its "
        "own, `PolicyMap(policy, "
        f"{{{path!r}: 'bfloat16'}})`, or `policy | {{...}}` if it is a map.{or_outside}"
    )


def _run(plan: Plan) -> Iterator[Step]:
    """The steps that were measured, if the function was measured.

    Where its gradient was measured, the body of a function with a derivative rule has
    not run. The rule has run instead, and is planned by itself."""
    for step in plan.steps:
        yield step
        if not step.eqn.primitive.name.startswith(("custom_jvp", "custom_vjp")):
            for inner in step.inner:
                yield from _run(inner)


_OUTSIDE = " Under `jax.grad`, make `amp` of the loss and differentiate that."


def _place(step: Step) -> str:
    shapes = _shapes(step)
    return place_of_step(step) + f" of {shapes}" * bool(shapes)


def _shapes(step: Step) -> str:
    """The shapes of a step that was not measured, if others in its scope were."""
    rule = step.match.rule
    return rule.shapes if isinstance(rule, Unmeasured) else ""
