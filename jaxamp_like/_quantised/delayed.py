"""Delayed scaling: the scale of a tensor follows from its maxima in steps before.

A rule can't carry state. It leaves a mark where a scale is wanted, a primitive that
reads the tensor and stands for its scale; `amp_with_state` puts the scale in its place
and takes the tensor's maximum from there. See `_delayed`."""

from collections.abc import Callable
from typing import Any, NamedTuple, NoReturn

import jax.numpy as jnp
from jax import lax

from .._dtypes import DType, cast
from .._errors import AmpError, without_derivative
from .._jax import empty_aval, new_primitive, result_aval, varying_in
from .._rules.bilinear import Bilinear, as_it_is
from .._rules.constant import no_series
from .scaled import (
    AsFloat8,
    largest_of,
    round_up_to_power_of_two,
    scale_of,
    within_bounds,
)


class ScaleRequest(NamedTuple):
    """What a mark says of the tensor that it wants the scale of.

    Args:
        scope: of the contraction that reads it.
        primitive: the name of that contraction's primitive.
        side: which of its operands it is, 0 or 1.
        backward: whether the contraction is one of a backward pass.
        cotangent: whether the tensor is a cotangent.
        fmt: what the tensor is quantised to.
        length: how many maxima are remembered."""

    scope: tuple[str, ...]
    primitive: str
    side: int
    backward: bool
    cotangent: bool
    fmt: AsFloat8
    length: int


class TensorScale(NamedTuple):
    """The state of one tensor; in a scan, one for each iteration, along a first axis.

    Args:
        scale: what the tensor was divided by in the last step, float32.
        history: its largest magnitudes, along the last axis: the newest first, then
            from the oldest on, the order of Flax and Transformer Engine."""

    scale: Any
    history: Any


def initial_scale(shape: tuple[int, ...], length: int) -> TensorScale:
    """The state of tensors that were never seen."""
    scale = jnp.ones(shape, jnp.float32)
    return TensorScale(scale, jnp.zeros((*shape, length), jnp.float32))


def next_scale(state: TensorScale, fmt: AsFloat8) -> Any:
    """What a tensor is divided by in this step, as follows from the steps before.

    It is never 0, inf or NaN. Where nothing is known, as in the first step, it is the
    last scale with a minus, which says that it is to be replaced by one that is
    `measured`. Unless scales are powers of two, it is computed exactly as Flax and
    Transformer Engine do with a margin of 0, except `within_bounds`."""
    amax = jnp.max(state.history, axis=-1)
    scale = _scale(amax, state.scale, fmt)
    return lax.select(_is_known(amax), scale, -scale)


def measured(scale: Any, amax: Any, fmt: AsFloat8) -> Any:
    """`scale` itself, if it follows from steps before; else the scale for `amax`.

    It is the last step's scale if `amax` tells nothing either."""
    return lax.select(scale > 0, scale, _scale(amax, abs(scale), fmt))


def _is_known(amax: Any) -> Any:
    return lax.is_finite(amax) & (amax > 0)


def _scale(amax: Any, before: Any, fmt: AsFloat8) -> Any:
    """The scale of numbers up to `amax`; as `before`, if that is not known."""
    known = _is_known(amax)
    if fmt.power_of_two:
        before = round_up_to_power_of_two(before)
        return lax.select(known, scale_of(amax, fmt.largest), before)
    return within_bounds(1 / lax.select(known, fmt.largest / amax, 1 / before))


NOT_SEEN = -1.0
"""Stands for the maximum of a tensor that was not made: all others are larger."""


def updated_scale(state: TensorScale, scale: Any, amax: Any) -> TensorScale:
    """The state after a step that used `scale` and saw the magnitude `amax`.

    It stays as it was if the tensor was not made (in a branch not taken) or held an inf
    or NaN, by which no later step may scale."""
    is_seen = lax.is_finite(amax) & (amax >= 0)
    history = jnp.roll(state.history, -1, axis=-1).at[..., 0].set(amax)
    return TensorScale(
        jnp.where(is_seen, scale, state.scale),
        jnp.where(is_seen[..., None], history, state.history),
    )


def contraction_by_delayed_scales(
    fn: Bilinear, requests: tuple[ScaleRequest, ScaleRequest], result: DType, out: DType
) -> Callable[..., Any]:
    """A contraction of float8 operands, whose scales are marks."""

    def bind(*operands: Any) -> Any:
        lhs, rhs = map(jnp.asarray, operands)
        left = SCALE.bind(lhs, rhs, of=requests[0])
        right = SCALE.bind(rhs, lhs, of=requests[1])
        values = (
            _divided(lhs, left, requests[0].fmt),
            _divided(rhs, right, requests[1].fmt),
        )
        made = fn(*values, as_it_is(result))
        return cast(made * (left * right).astype(result), out)

    return bind


def _divided(x: Any, scale: Any, fmt: AsFloat8) -> Any:
    """`x / scale`; in the dtype of `x`, as Flax does, if that is no power of two."""
    if fmt.power_of_two:
        return fmt.divided(x, scale)
    return fmt.clipped(x / scale.astype(x.dtype)).astype(fmt.dtype)


OUTSIDE = (
    "A contraction of a rule `float8(delayed=True)` is differentiated from outside of "
    "`amp_with_state`, where the largest cotangents would be lost. Put it around the "
    "gradient: `amp_with_state(jax.value_and_grad(loss))`, not "
    "`jax.value_and_grad(amp_with_state(loss))`."
)


def refuse_gradient(*_: Any, **__: Any) -> NoReturn:
    raise AmpError(OUTSIDE)


not_differentiated = without_derivative(OUTSIDE)


NO_STATE = (
    "The policy has a rule `float8(delayed=True)`, which scales by what was seen in "
    "steps before, and `amp` has no state to remember it in. Write `step = "
    "amp_with_state(jax.value_and_grad(loss), amp_policy=...)`, `state = "
    "init_amp_state(step, *args)` and `out, state = step(state, *args)`; or "
    "`float8()`, which needs no state."
)


def _without_state(*_: Any, **__: Any) -> NoReturn:
    raise AmpError(NO_STATE)


def _aval(x: Any, other: Any, *, of: ScaleRequest) -> Any:
    del other, of
    if varying_in(x):  # a scale that is measured here is one device's own
        return result_aval(largest_of, [x])
    return empty_aval((), jnp.dtype("float32"))


def _batch(args: Any, dims: Any, *, of: ScaleRequest) -> Any:
    del dims  # one scale for all examples
    return SCALE.bind(*args, of=of), None


SCALE = new_primitive(
    "amp_delayed_scale",
    compute=_without_state,
    aval=_aval,
    jvp=refuse_gradient,
    transpose=refuse_gradient,
    batch=_batch,
    series=no_series,
)
"""Stands for the scale of its first operand, which is contracted with the second."""
