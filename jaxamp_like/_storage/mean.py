"""The mean of gradients over devices, which send each other few bits."""

from collections.abc import Callable, Hashable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax import lax

from .._dtypes import is_float
from .._errors import hiding_frames, showing_call
from .._jax import (
    gathered_alike,
    is_array_or_shape,
    sharded_like,
    varying_axes,
    whole,
)
from .codes import LowBitArray, encoded, layout_of
from .formats import check_settings


class LowBitMeanState(NamedTuple):
    """The state of `low_bit_mean`.

    Args:
        errors: for each array that is sent in few bits, what rounding has taken from
            the means so far, of the shape `(1, *shape)` on each device; `None` for
            other arrays. `None` as a whole without `error_feedback`."""

    errors: Any


@showing_call('low_bit_mean("data", "int8")')
def low_bit_mean(
    axis_name: Hashable | Sequence[Hashable],
    format: str = "int8",
    *,
    block: int = 256,
    min_size: int = 4096,
    error_feedback: bool = True,
) -> optax.GradientTransformation:
    """Replaces gradients by their mean over devices, as `lax.pmean` does, in few bits.

    It is for `jax.shard_map`, where each device has the gradient of its own examples.
    Each device rounds its gradient and sends every other device a part of it, adds up
    the parts that it receives in float32, rounds the mean, and sends that to all. So
    a number is rounded twice, however many devices there are, and sent as 2 bytes in
    "int8" and "float8", 1 in "int4", and 4 in "bfloat16", in which a sum by `lax.psum`
    sends as much but is rounded at each device.

    What rounding takes from a gradient is added to the next one, so that it is applied
    later and not lost. A step whose mean has an inf or a NaN, which loss scaling skips,
    leaves these errors as they were.

    Args:
        axis_name: of the axis, or axes, of `jax.shard_map` or `jax.pmap`.
        format: "int8", "int4", "float8" or "bfloat16", as in `low_bit_state`.
        block: how many numbers share a scale, at most.
        min_size: arrays of fewer numbers are averaged in their dtype.
        error_feedback: whether errors are kept for the next step. They take 4 bytes
            for each parameter on each device.
    Returns:
        An Optax transformation. Its `init` and its `update` are called in the
        `shard_map`, and its state, which differs from device to device, comes and goes
        with the specification `P(axis_name)`.
    Raises:
        ValueError: an argument is out of its range; or, by `init` or `update`, no axis
            has this name, or a gradient is the same on all devices already.

    >>> from jax.sharding import PartitionSpec as P
    >>> mesh = jax.make_mesh((1,), ("data",))
    >>> mean = low_bit_mean("data")
    >>> params = jnp.ones((64, 64))
    >>> place = {"mesh": mesh, "out_specs": P("data")}
    >>> state = jax.shard_map(mean.init, in_specs=P(), **place)(params)
    >>> state.errors.shape
    (1, 64, 64)

    Errors are fed back as in Seide et al. (Interspeech 2014); that the sender of a mean
    keeps its error too is of Tang et al. (arXiv:1905.05957)."""
    axes = tuple(axis_name) if isinstance(axis_name, tuple | list) else (axis_name,)
    check_settings(format, block=(block, 16), min_size=(min_size, 0))
    least = max(min_size, 1)  # an empty array has no blocks

    def is_low(x: Any) -> bool:
        return is_array_or_shape(x) and is_float(x.dtype) and x.size >= least

    @hiding_frames
    def init(params: Any) -> LowBitMeanState:
        _size(axes)
        if not error_feedback:
            return LowBitMeanState(None)

        def no_error(x: Any) -> Any:
            if not is_low(x):
                return None
            return sharded_like(jnp.zeros(x.shape, _wide(x.dtype)), x)[None]

        return LowBitMeanState(jax.tree.map(no_error, params))

    @hiding_frames
    def update(
        updates: Any, state: Any, params: Any = None
    ) -> tuple[Any, LowBitMeanState]:
        del params
        size = _size(axes)
        # Gradients of `tx.value_and_grad` are in wrappers, and the errors are in none.
        paths, tree = jax.tree_util.tree_flatten_with_path(updates, is_leaf=_is_none)
        old, kept_tree = _errors(state, len(paths), error_feedback)
        means: list[Any] = []
        errors: list[Any] = []
        for (path, x), error in zip(paths, old, strict=True):
            name = jax.tree_util.keystr(path)
            _check_varies(name, x, axes)
            _check_error(name, error, x if error_feedback and is_low(x) else None)
            mean, error = (
                _mean(x, error, axes, size, format, block)
                if is_low(x)
                else (_plain_mean(x, axes), None)
            )
            means.append(mean)
            errors.append(error)
        if any(error is not None for error in errors):
            known = (jnp.isfinite(mean).all() for mean in means if mean is not None)
            is_finite = jnp.stack([*known]).all()
            errors = [
                error
                if error is None
                else lax.select(is_finite, error, sharded_like(before, error))
                for error, before in zip(errors, old, strict=True)
            ]
        kept = jax.tree.unflatten(kept_tree, errors) if error_feedback else None
        return jax.tree.unflatten(tree, means), LowBitMeanState(kept)

    return optax.GradientTransformation(init, update)


def _mean(
    x: Any, error: Any, axes: tuple[Any, ...], size: int, format: str, block: int
) -> tuple[Any, Any]:
    """The mean of an array over devices, and what this device is to add next time.

    Each device adds up the row of its own index. One alone rounds nothing."""
    if size == 1:
        return lax.pmean(x, axes), error  # pyright: ignore
    full = x.astype(_wide(x.dtype))
    if error is not None:
        full = full + error[0]
    rows = _in_rows(whole(full), size, block)
    tile = 1, min(block, rows.shape[1])
    layout = layout_of(rows, format, tile)
    sent = encoded(rows, layout, None)
    received = _sent(sent, lambda x: lax.all_to_all(x, axes, 0, 0, tiled=True))
    row = received.decoded().mean(0, keepdims=True)
    sent_row = encoded(row, layout, None)
    every = _sent(sent_row, lambda x: gathered_alike(x, axes))
    mean = _as_before(every.decoded(), x).astype(x.dtype)
    if error is None:
        return mean, None
    # The error of the mean is one of the sum's over the number of devices.
    is_mine = jnp.arange(size)[:, None] == lax.axis_index(axes)
    mine = jnp.where(is_mine, size * (row - sent_row.decoded()), 0)
    left = rows - sent.decoded() + mine
    return mean, _as_before(left, x)[None]


def _sent(array: LowBitArray, send: Callable[[Any], Any]) -> LowBitArray:
    """What `send` makes of the bits: XLA may send floats as wider ones."""

    def one(x: Any) -> Any:
        bits = lax.bitcast_convert_type(x, jnp.dtype(f"uint{8 * x.dtype.itemsize}"))
        return lax.bitcast_convert_type(send(bits), x.dtype)

    return jax.tree.map(one, array)


def _in_rows(x: Any, size: int, block: int) -> Any:
    """An array as one row for each device, each of whole blocks and of even length."""
    length = -(-x.size // size)
    tile = min(block, length + length % 2)
    length = -(-length // tile) * tile
    length += length % 2 * tile
    return jnp.pad(x.reshape(-1), (0, size * length - x.size)).reshape(size, length)


def _as_before(rows: Any, x: Any) -> Any:
    """What became of an array's rows, in the array's shape and sharding."""
    return sharded_like(rows.reshape(-1)[: x.size].reshape(x.shape), x)


def _wide(dtype: Any) -> Any:
    return jnp.promote_types(dtype, jnp.float32)


def _plain_mean(x: Any, axes: Any) -> Any:
    if x is None or jax.dtypes.result_type(x) == jax.dtypes.float0:
        return x
    return lax.pmean(x, axes)


def _is_none(x: Any) -> bool:
    return x is None


def _size(axes: Any) -> int:
    """Of the axes together: the number of devices."""
    try:
        return lax.psum(1, axes)
    except NameError as e:
        raise ValueError(
            f"`axis_name` of `low_bit_mean` names {axes!r}, but no such axis is bound "
            "here.\nCall `init` and `update` in the `jax.shard_map` or `jax.pmap` that "
            "has this axis, as `jax.shard_map(mean.init, mesh=mesh, in_specs=P(), "
            'out_specs=P("data"))(params)`. Under `jax.jit` alone, gradients of what '
            "is sharded are summed already."
        ) from e


def _check_varies(name: str, x: Any, axes: Any) -> None:
    """Raises if a gradient is known to be the same on all devices."""
    is_tracked = {*axes} <= varying_axes(lax.axis_index(axes))
    if x is not None and is_tracked and not {*axes} <= varying_axes(x):
        raise ValueError(
            f"The gradient `updates{name}` is the same on all devices of {axes!r}: "
            "`jax.shard_map` has summed it already, in full, since the parameters are "
            "the same on all.\nDifferentiate with respect to each device's own: "
            f'`params = jax.lax.pcast(params, {axes!r}, to="varying")` '
            "before `jax.grad` (`jax.lax.pvary(params, ...)` before JAX 0.8)."
        )


def _errors(state: Any, count: int, is_fed_back: bool) -> tuple[list[Any], Any]:
    """The errors of a state, one for each gradient, and their tree."""
    if not isinstance(state, LowBitMeanState):
        raise TypeError(
            "`state` of `low_bit_mean` is what its `init` or its last `update` "
            f"returned, but it was given a {type(state).__name__}."
        )
    if not is_fed_back:
        return [None] * count, None
    errors, tree = jax.tree.flatten(state.errors, is_leaf=_is_none)
    if len(errors) != count:
        raise ValueError(
            "The state of `low_bit_mean` was made for other parameters than these "
            f"gradients are of: it has {len(errors)} arrays, and there are {count} "
            "gradients."
        )
    return errors, tree


def _check_error(name: str, error: Any, x: Any) -> None:
    """Raises unless `error` is one of `x`; neither is there where `x` is `None`."""
    expected = None if x is None else (1, *jnp.shape(x))
    given = None if error is None else jnp.shape(error)
    if given != expected:
        raise ValueError(
            f"The error of `updates{name}` in the state of `low_bit_mean` has the "
            f"shape {given}, but must have {expected} on each device.\nMake the state "
            "by `init` in a `jax.shard_map` with `out_specs=P(axis_name)`, of "
            "parameters of the same shapes, and hand it in and out with the same "
            "specification."
        )
