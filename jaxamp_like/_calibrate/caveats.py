"""What a calibration can't show, for the data or the settings that it was given."""

from collections.abc import Sequence

import jax.numpy as jnp

from .measured_function import Point
from .program import MarkedProgram
from .runs import Runs


def nothing_held_out(points: Sequence[Point], checks: Sequence[Point]) -> str:
    """What to note if the policy is only checked on batches that decided; else ""."""
    if not all(any(_same_batch(a, b) for b in points) for a in checks):
        return ""
    return (
        "nothing was held out: the batches of the check are among those that decided; "
        "give more batches, or other ones as `held_out`"
    )


def _same_batch(a: Point, b: Point) -> bool:
    """Whether two points hold the same numbers. Data comes last, and so is read first.

    Parameters are mostly the same objects, whose numbers need not be compared."""
    pairs = [*zip(a.arrays, b.arrays, strict=True)]
    return all(x is y or bool(jnp.all(x == y)) for x, y in reversed(pairs))


def nothing_measured(runs: Runs, points: Sequence[Point]) -> str:
    """What to say if what the budget limits is zero at all points; else ""."""
    of_gradients = runs.program.subject.differentiates
    for point in points:
        true = runs.reference(point)
        limited = true.grads if of_gradients else true.outs
        if any(bool(jnp.any(x != 0)) for x in limited):
            return ""
    what = "the gradient is" if of_gradients else "all results are"
    return (
        f"`calibrate` measured nothing: as written, {what} zero in each batch, and no "
        "error is relative to zero. Give parameters and batches as training has them."
    )


def unscaled(program: MarkedProgram) -> str:
    """What to say of float16 without a loss scale; "" if there is no such thing."""
    in_float16 = any(one.compute == jnp.float16 for one in program.candidates)
    subject = program.subject
    if not (in_float16 and subject.differentiates and subject.loss_scale == 1):
        return ""
    return (
        "Gradients were measured without a loss scale, and below 6e-8 they become zero "
        "in float16: give the scale that training uses, such as `loss_scale=2.0**15`."
    )
