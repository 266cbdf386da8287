"""Gradients that are too small for float16, since nothing scales the loss."""

from collections.abc import Sequence
from typing import Any

from ..._errors import place_of
from ..._frameworks.modules import optimizer_without_scale
from ..._jax import are_differentiated, source_line
from ..._recording import is_recorded
from ..._structural import Step
from ..switch import is_in_scaled_loss
from .unlowered import is_lowered_to_float16


def report_of_no_scale_in_keras(
    fn: Any, arrays: Sequence[Any], steps: list[Step]
) -> str | None:
    """What to say where Keras trains in float16 by an optimizer that scales no loss.

    `fn` is what `amp` was given, and `arrays` are what it is called with."""
    optimizer = optimizer_without_scale(fn)
    if optimizer is None or not are_differentiated(arrays):
        return None
    if is_in_scaled_loss() or is_recorded():
        return None
    lowered = next(filter(is_lowered_to_float16, steps), None)
    if lowered is None:
        return None
    model, name = type(fn.__self__).__name__, type(optimizer).__name__
    return (
        f"`{model}` was compiled with `{name}`, which does not scale the loss, and "
        f"{place_of(fn)} is differentiated in float16 (first in "
        f"{source_line(lowered.eqn)}): gradients below 6e-8 become zero. Write "
        f"`model.compile(keras.optimizers.LossScaleOptimizer({name}(...)), ...)`, and "
        "the `train_step` of the tutorial on Keras, which undoes a step that "
        "overflows; or `compute_dtype='bfloat16'`, which needs neither."
    )
