"""`lean` where the gradient is taken inside of `amp`, and so has no effect."""

from ..._jax import are_differentiated, consts
from ..._structural import Step
from ..planner import Planner
from ..traced_call import TracedCall


def report_of_lean_inside_out(
    planner: Planner, call: TracedCall, steps: list[Step]
) -> str | None:
    """What to say of `lean` where nobody differentiates what `amp` has made.

    It says what that keeps for a backward pass. A gradient that is taken inside has
    kept what it reads when `amp` sees it."""
    # `lean=True` is also said to functions that are only sometimes differentiated.
    if not isinstance(planner.lean, str) or not any(step.backward for step in steps):
        return None
    if not call.returns_gradients or are_differentiated(
        [*call.arrays, *consts(call.jaxpr)]
    ):
        return None
    return (
        f"`lean={planner.lean!r}` changes nothing: the gradient is taken inside of "
        "`amp`, which then can't choose what is kept for the backward pass. Write "
        f"`jax.grad(amp(loss, lean={planner.lean!r}))`."
    )
