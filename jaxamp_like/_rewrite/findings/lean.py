"""`lean` where the gradient is taken inside of `amp`, and so has no effect."""

from ..._jax import are_differentiated, consts
from ..._structural import Step
from ..planner import Planner
from ..traced_call import TracedCall


def report_of_lean_inside_out(
    planner: Planner, call: TracedCall, steps: list[Step]
) -> str | None:
    """What to say of `lean` around a gradient that is taken inside of `amp`.

    `lean` decides what the backward pass of a rewritten function keeps. Of a gradient
    that the function takes itself, `amp` sees a program that has kept it already. Of
    `lean=True` nothing is said: it may be meant for a second derivative."""
    if not isinstance(planner.lean, str) or not any(step.backward for step in steps):
        return None
    is_differentiated = are_differentiated([*call.arrays, *consts(call.jaxpr)])
    if is_differentiated or not call.has_gradients():
        return None
    return (
        f"`lean={planner.lean!r}` changes nothing: the gradient is taken inside of "
        "`amp`, which then can't choose what is kept for the backward pass. Write "
        f"`jax.grad(amp(loss, lean={planner.lean!r}))`."
    )
