"""An array that is stored as codes of few bits, with a scale for each of its blocks."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from .._dtypes import DType
from .._errors import refuse_arithmetic
from .._frameworks.nnx import as_arrays
from .._random_rounding import chances
from .._tiles import Tile, over_tiles, range_in_tiles, shard_shape
from .formats import FORMATS


class Layout(NamedTuple):
    """How an array is stored.

    Args:
        format: the name of one.
        dtype: of the array.
        tile: lengths of its blocks, along each axis.
        pairs: of codes of 4 bits, the axis along which two are one uint8, counted from
            the last one; and whether the last of these has one code alone. `None` if
            each code is a uint8, as where a pair would cross a border of shards."""

    format: str
    dtype: DType
    tile: Tile
    pairs: tuple[int, bool] | None


def layout_of(x: Any, format: str, tile: Tile) -> Layout:
    pairs = _pairs(x.shape, shard_shape(x)) if FORMATS[format].bits == 4 else None
    return Layout(format, jnp.dtype(x.dtype), tile, pairs)


def _pairs(shape: Sequence[int], shards: Sequence[int]) -> tuple[int, bool] | None:
    axes = range(len(shape))
    even = [axis for axis in axes if shards[axis] and shards[axis] % 2 == 0]
    whole = [axis for axis in axes if shards[axis] == shape[axis]]
    if not (even or whole):
        return None
    axis = even[-1] if even else max(whole, key=lambda axis: shape[axis])
    return axis - len(shape), bool(shape[axis] % 2)


@partial(
    jax.tree_util.register_dataclass,
    data_fields=["codes", "scales"],
    meta_fields=["layout"],
)
@dataclass(frozen=True)
class LowBitArray:
    """An array in few bits: a pytree of two arrays.

    Where the array was in an NNX variable, each of the two is in one.

    Args:
        codes: of the numbers, shaped as the array. An axis is half as long in "int4".
        scales: of the blocks; `None` if the format has none.
        layout: how the numbers are stored."""

    codes: Any
    scales: Any
    layout: Layout

    @property
    def decoded_shape(self) -> tuple[int, ...]:
        """The shape of the array."""
        shape = list(as_arrays(self.codes).shape)
        if self.layout.pairs is not None:
            axis, is_odd = self.layout.pairs
            shape[axis] = 2 * shape[axis] - is_odd
        return tuple(shape)

    def decoded(self) -> Any:
        """The array, in its dtype."""
        format = FORMATS[self.layout.format]
        codes, scales = as_arrays((self.codes, self.scales))
        if self.layout.pairs is not None:
            codes = _apart(codes, *self.layout.pairs)
        if scales is not None:
            scales = over_tiles(scales, self.layout.tile, codes.shape)
        return format.decoded(codes, scales).astype(self.layout.dtype)


refuse_arithmetic(
    LowBitArray,
    "A `LowBitArray` holds an array in few bits, which the `update` of `low_bit_state` "
    "decodes: call that, and not the one of the optimizer within. For a plain array, "
    "take `.decoded()`, and for a whole state `storage.to_full_state(state)`.",
)


def to_saved(x: LowBitArray) -> dict[str, Any]:
    """An array in few bits as Flax saves it."""
    return {"codes": x.codes, "scales": x.scales, "format": x.layout.format}


def from_saved(mine: LowBitArray, saved: Any) -> LowBitArray:
    """The array that was saved, to be stored as `mine` is.

    Raises:
        ValueError: it was saved in another format, or not in few bits."""
    if not isinstance(saved, dict) or saved.get("format") != mine.layout.format:
        was = saved.get("format") if isinstance(saved, dict) else type(saved).__name__
        raise ValueError(
            f"An array in {mine.layout.format!r} was saved as {was!r}. Read it into "
            "the state of a `low_bit_state` with the format that it was saved in."
        )
    return LowBitArray(saved["codes"], saved["scales"], mine.layout)


def _scales(x: Any, layout: Layout) -> Any:
    """The scales of the blocks of an array; `None` if the format has none.

    Each is the largest magnitude of its block, negative if no number of the block is.
    That of a block with an inf or a NaN is NaN, as then is the block."""
    if not FORMATS[layout.format].has_scales:
        return None
    largest, is_signed = range_in_tiles(x, layout.tile)
    largest = jnp.where(jnp.isfinite(largest), largest, jnp.nan)
    return jnp.where(is_signed, largest, -largest)


def encoded(x: Any, layout: Layout, seed: Any) -> LowBitArray:
    """An array in few bits. Its derivative is zero, as codes have none.

    Args:
        x: a floating-point array.
        layout: how it is to be stored.
        seed: of rounding by chance, a uint32; `None` rounds to the nearest."""
    # Without this, a derivative would come through the scales alone.
    x = lax.stop_gradient(x if x.dtype.itemsize > 4 else x.astype(jnp.float32))
    scales = _scales(x, layout)
    chance = 0.5 if seed is None else chances(x.shape, seed)
    spread = None if scales is None else over_tiles(scales, layout.tile, x.shape)
    codes = FORMATS[layout.format].encoded(x, spread, chance)
    if layout.pairs is not None:
        codes = _in_pairs(codes, *layout.pairs)
    return LowBitArray(codes, scales, layout)


def _in_pairs(codes: Any, axis: int, is_odd: bool) -> Any:
    if is_odd:
        padding = [(0, 0)] * codes.ndim
        padding[axis] = (0, 1)
        codes = jnp.pad(codes, padding)
    axis %= codes.ndim
    shape = codes.shape
    codes = codes.reshape(*shape[:axis], shape[axis] // 2, 2, *shape[axis + 1 :])
    low, high = (jnp.take(codes, i, axis + 1) for i in range(2))
    return low | (high << 4)


def _apart(pairs: Any, axis: int, is_odd: bool) -> Any:
    axis %= pairs.ndim
    codes = jnp.stack([pairs & 15, pairs >> 4], axis + 1)
    shape = pairs.shape
    codes = codes.reshape(*shape[:axis], 2 * shape[axis], *shape[axis + 1 :])
    return jnp.delete(codes, -1, axis) if is_odd else codes
