"""Gathers and scatters in NumPy."""

from collections.abc import Callable, Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np

Array = Any


def _places(
    indices: Array,
    axes: Sequence[int],
    sizes: Sequence[int],
    shape: Sequence[int],
    batching: Sequence[tuple[int, int]],
    clip: bool,
) -> tuple[list[Array], Array]:
    """Where each element of a stack of windows is in an array of some shape.

    Windows of some sizes begin at the `indices` of some axes of the array; pairs of an
    axis and one of the indices' run along together. Also which windows are inside."""
    batch, rank = indices.shape[:-1], len(shape)
    inside = np.ones(batch, bool)
    places: list[Array] = []
    for d in range(rank):
        start = np.zeros(batch, np.int64)
        if d in axes:
            start = indices[..., list(axes).index(d)].astype(np.int64)
        last = shape[d] - sizes[d]
        if clip:
            start = np.clip(start, 0, last)
        inside &= (start >= 0) & (start <= last)
        for axis, along in batching:
            if axis == d:
                ramp = np.arange(shape[d])
                start = start + np.moveaxis(
                    np.broadcast_to(ramp, (*np.delete(batch, along), shape[d])),
                    -1,
                    along,
                )
        window = [1] * rank
        window[d] = sizes[d]
        start = np.reshape(start, [*batch, *[1] * rank])
        places.append(start + np.reshape(np.arange(sizes[d]), window))
    return places, np.reshape(inside, [*batch, *[1] * rank])


def _mode(mode: Any) -> str:
    name = str(mode).upper()
    return "CLIP" if "CLIP" in name else "FILL" if "FILL" in name else "INSIDE"


def gather(
    x: Array, indices: Array, *, dimension_numbers: Any, slice_sizes: Any, **params: Any
) -> Array:
    numbers, mode = dimension_numbers, _mode(params["mode"])
    batching = list(
        zip(
            numbers.operand_batching_dims,
            numbers.start_indices_batching_dims,
            strict=True,
        )
    )
    places, inside = _places(
        indices,
        numbers.start_index_map,
        slice_sizes,
        x.shape,
        batching,
        mode != "FILL",  # what is promised is not looked at
    )
    where = [np.where(inside, place, 0) for place in places]
    out = (
        x[tuple(where)]
        if x.size
        else np.zeros(np.broadcast_shapes(*map(np.shape, where)), x.dtype)
    )
    if mode == "FILL":
        out = np.where(inside, out, _fill(x.dtype, params.get("fill_value")))
    gone = (*numbers.collapsed_slice_dims, *numbers.operand_batching_dims)
    rank = len(indices.shape) - 1
    out = np.squeeze(out, tuple(rank + d for d in gone)).astype(x.dtype)
    others = [i for i in range(out.ndim) if i not in numbers.offset_dims]
    axes = np.empty(out.ndim, int)
    axes[others] = np.arange(rank)
    axes[list(numbers.offset_dims)] = np.arange(rank, out.ndim)
    return out.transpose(axes)


def _fill(dtype: Any, value: Any) -> Any:
    if value is not None:
        return np.asarray(value, dtype)
    if jnp.issubdtype(dtype, jnp.inexact):
        return np.asarray(np.nan, dtype)
    if np.issubdtype(dtype, np.bool_):
        return np.asarray(True)
    limits = np.iinfo(dtype)
    return np.asarray(limits.min if limits.min else limits.max, dtype)


def scatter(into: Callable[[Array, Any, Array], Any]) -> Callable[..., Array]:
    """A scatter that puts the elements of the updates `into` an array by a function."""

    def apply(
        x: Array,
        indices: Array,
        updates: Array,
        *,
        dimension_numbers: Any,
        **params: Any,
    ) -> Array:
        numbers = dimension_numbers
        batching = list(
            zip(
                numbers.operand_batching_dims,
                numbers.scatter_indices_batching_dims,
                strict=True,
            )
        )
        windows = list(numbers.update_window_dims)
        gone = (*numbers.inserted_window_dims, *numbers.operand_batching_dims)
        left = iter([updates.shape[i] for i in windows])
        sizes = [1 if d in gone else next(left) for d in range(x.ndim)]
        places, inside = _places(
            indices,
            numbers.scatter_dims_to_operand_dims,
            sizes,
            x.shape,
            batching,
            _mode(params["mode"]) == "CLIP",
        )
        rest = [i for i in range(updates.ndim) if i not in windows]
        updates = updates.transpose(*rest, *windows)
        updates = updates.reshape([*indices.shape[:-1], *sizes])
        is_in = np.broadcast_to(inside, updates.shape)
        where = tuple(np.broadcast_to(p, updates.shape)[is_in] for p in places)
        out = x.copy()
        into(out, where, updates[is_in])
        return out

    return apply


def put(out: Array, where: Any, updates: Array) -> None:
    out[where] = updates
