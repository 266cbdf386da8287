"""Arrays as numbers of few bits, of which each block of a few has a scale.

The blocks lie along the axes that a contraction sums over, so that both operands of a
contraction are laid out alike: as `(batch, rows, summed)`, where each of the three is
the product of some axes. What is summed over is padded with zeros to whole blocks."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from math import prod
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from .._dtypes import DType
from .._magnitudes import largest_magnitude
from .._random_rounding import chances
from .axes import Axes
from .rotation import Signs, rotated, rotated_back
from .scaled import largest_of

_FLOAT32, _UINT32 = jnp.dtype("float32"), jnp.dtype("uint32")
_MANTISSA = 23  # bits of float32's


@partial(
    jax.tree_util.register_dataclass,
    data_fields=["values", "scales", "tensor_scale"],
    meta_fields=["shape", "axes", "signs"],
)
@dataclass(frozen=True)
class Blocks:
    """`x ≈ values * scales * tensor_scale`, in the layout `(batch, rows, summed)`.

    Args:
        values: the rounded numbers, padded to whole blocks.
        scales: one for each block, `(batch, rows, blocks)`.
        tensor_scale: a float32 for all of them, shaped `(1, 1, 1)`; `None` is 1.
        shape: that of the array that was rounded.
        axes: the axes of that array.
        signs: those of a rotation of each block before it was rounded, if any."""

    values: Any
    scales: Any
    tensor_scale: Any
    shape: tuple[int, ...]
    axes: Axes
    signs: Signs | None = None

    def restored(self) -> Any:
        """The numbers that they stand for, in the shape of the array, in float32."""
        rows = restored_rows(self.values, self.scales)
        if self.tensor_scale is not None:
            rows = rows * self.tensor_scale
        if self.signs is not None:
            size = len(self.signs)
            blocks = rows.reshape(*rows.shape[:2], -1, size)
            rows = rotated_back(blocks, 3, self.signs).reshape(rows.shape)
        length = prod(self.shape[axis] for axis in self.axes.summed)
        return from_rows(rows[..., :length], self.shape, self.axes)


def restored_rows(values: Any, scales: Any) -> Any:
    """Values times the scales of their blocks, in float32, as they are contracted."""
    size = values.shape[-1] // scales.shape[-1]
    return values.astype(_FLOAT32) * jnp.repeat(scales.astype(_FLOAT32), size, axis=-1)


class PowerOfTwoBlocks(NamedTuple):
    """How an array is rounded to float8, with a power of two for each block.

    Args:
        dtype: the float8 dtype of the numbers.
        axes: those of the array, by which blocks are laid.
        rounds_up: whether a scale is so large that its block is within the format's
            range. Else it is that of the standard: the largest number of a block may be
            too large by an eighth, and saturates.
        size: of a block."""

    dtype: DType
    axes: Axes
    rounds_up: bool
    size: int = 32

    def along(self, axes: Axes) -> "PowerOfTwoBlocks":
        return self._replace(axes=axes)

    def batched(self, ndim: int) -> "PowerOfTwoBlocks":
        del ndim
        return self._replace(axes=self.axes.batched())

    def __call__(self, x: Any) -> Blocks:
        blocks, axes = _in_blocks(x, self.axes, self.size)
        largest = np.float32(jnp.finfo(self.dtype).max)
        # XLA may lose a NaN here (see `_magnitudes`), whose number in float8 is NaN all
        # the same. XLA for GPUs reads a maximum of integers from a transposed copy.
        amax = jnp.max(jnp.abs(blocks), axes.summed[1:], keepdims=True, initial=0)
        amax = amax.astype(_FLOAT32)
        exponents = _exponents(amax, largest, self.rounds_up)
        # A power of two of normal size: bfloat16 is scaled as exactly as float32.
        inverse = _power_of_two(2 * _BIAS - exponents).astype(blocks.dtype)
        bound = blocks.dtype.type(largest)
        values = lax.clamp(-bound, blocks * inverse, bound).astype(self.dtype)
        is_finite = lax.is_finite(amax)
        # A block with an inf or a NaN gets the scale NaN, of which all bits are set.
        bits = lax.select(is_finite, exponents, lax.full_like(exponents, 255))
        scales = lax.bitcast_convert_type(bits.astype(jnp.uint8), jnp.float8_e8m0fnu)
        rows = to_rows(values, axes), to_rows(scales, axes)
        return Blocks(*rows, None, x.shape, self.axes)


_BIAS = 127  # of the exponents of float32, and of float8_e8m0fnu


def _exponents(amax: Any, largest: np.float32, rounds_up: bool) -> Any:
    """The biased exponents of the scales of blocks, from their largest magnitudes."""
    bits = lax.bitcast_convert_type(amax, _UINT32)
    top = int(np.float32(largest).view(np.uint32))
    if rounds_up:
        # A mantissa above that of the largest number carries into the exponent.
        bits = bits + np.uint32((1 << _MANTISSA) - 1 - top % (1 << _MANTISSA))
    shift = np.uint32(_MANTISSA)
    exponents = (bits >> shift).astype(jnp.int32) - (top >> _MANTISSA) + _BIAS
    # The least normal number is the least scale: XLA makes smaller ones zero.
    return lax.clamp(np.int32(1), exponents, np.int32(2 * _BIAS - 1))


def _power_of_two(exponents: Any) -> Any:
    bits = exponents.astype(_UINT32) << np.uint32(_MANTISSA)
    return lax.bitcast_convert_type(bits, _FLOAT32)


class TensorScaledBlocks(NamedTuple):
    """How an array is rounded to float4, with a float8 scale for each block.

    A float32 for the whole array brings the scales into the range of their format.

    Args:
        axes: those of the array, by which blocks are laid.
        is_square: whether a block is as many rows high as it is long. Then a weight is
            rounded to the same numbers whichever of its axes is summed over.
        signs: by which each block is rotated before it is rounded, which evens out
            what is large in it. Both operands of a contraction have to be.
        seed: for numbers that are rounded up or down at random, by chances that keep
            their mean; `None` rounds to the nearest.
        size: of a block."""

    axes: Axes
    is_square: bool = False
    signs: Signs | None = None
    seed: int | None = None
    size: int = 16

    def along(self, axes: Axes) -> "TensorScaledBlocks":
        return self._replace(axes=axes)

    def batched(self, ndim: int) -> "TensorScaledBlocks":
        del ndim
        return self._replace(axes=self.axes.batched())

    def __call__(self, x: Any) -> Blocks:
        if self.is_square:
            blocks, axes = _in_blocks(to_rows(x, self.axes), _ROWS, self.size)
        else:
            blocks, axes = _in_blocks(x, self.axes, self.size)
        if self.signs is not None:
            blocks = rotated(blocks, axes.summed[1], self.signs)
        blocks = blocks.astype(_FLOAT32)
        amax = largest_magnitude(blocks, axes.summed[1:], keepdims=True)
        if self.is_square:
            amax = _largest_of_rows(amax, self.size)
        is_finite = lax.is_finite(amax)
        largest = largest_of(lax.select(is_finite, amax, lax.full_like(amax, 0)))
        # As in `scaled`, no scale is below 2^-112. Each is one product with one
        # reciprocal: XLA reorders longer chains of products and quotients, and the
        # numbers would depend on what a program is compiled together with.
        tensor = lax.max(largest * (1 / (_E4M3 * _E2M1)), np.float32(2.0**-112))
        scales = amax * (1 / (tensor * _E2M1))
        scales = lax.min(scales, lax.full_like(amax, _E4M3)).astype(jnp.float8_e4m3fn)
        steps = scales.astype(_FLOAT32) * tensor
        # Of a block that is too small for a scale of its own, nothing is left.
        numbers = blocks * lax.select(steps > 0, 1 / steps, lax.full_like(steps, 0))
        numbers = lax.clamp(-_E2M1, numbers, _E2M1)
        values = _to_float4(numbers, self._chances(numbers)).astype(jnp.float4_e2m1fn)
        nan = lax.full_like(scales, jnp.nan)
        scales = lax.select(is_finite, scales, nan)
        rows = to_rows(values, axes), to_rows(scales, axes)
        return Blocks(*rows, tensor.reshape(1, 1, 1), x.shape, self.axes, self.signs)

    def _chances(self, numbers: Any) -> Any:
        """Of rounding up, if it is by chance; without a key, so by the numbers too."""
        if self.seed is None:
            return None
        words = lax.bitcast_convert_type(numbers, _UINT32)
        return chances(numbers.shape, words + np.uint32(self.seed % 2**32))


_E4M3, _E2M1 = np.float32(448), np.float32(6)  # the largest numbers of the formats


BlockRounding = PowerOfTwoBlocks | TensorScaledBlocks
"""How an array is rounded to blocks."""


def _largest_of_rows(amax: Any, size: int) -> Any:
    """The largest magnitudes of blocks of `size` rows, for each row."""
    batch, rows, blocks, _ = amax.shape
    # Lengths are given in full: one may be 0, or a symbol.
    squares = -(-rows // size)
    padding = squares * size - rows
    amax = jnp.pad(amax, [(0, 0), (0, padding), (0, 0), (0, 0)])
    amax = amax.reshape(batch, squares, size, blocks, 1)
    amax = largest_magnitude(amax, (2,))
    return jnp.repeat(amax, size, axis=1)[:, :rows]


def _to_float4(x: Any, chances: Any) -> Any:
    """Numbers of float4's range, rounded to it: to the nearest, or up by chances.

    XLA's own cast may round to float16 first, and numbers near a half then wrongly."""
    magnitude = jnp.abs(x)
    if chances is None:
        # Steps are a half below 1, and one bit of mantissa from there on.
        halves = lax.round(2 * x, lax.RoundingMethod.TO_NEAREST_EVEN) * np.float32(0.5)
        return jnp.where(magnitude < 1, halves, lax.reduce_precision(x, 8, 1))
    step = jnp.where(magnitude < 2, 0.5, jnp.where(magnitude < 4, 1.0, 2.0))
    step = step.astype(_FLOAT32)
    return jnp.sign(x) * jnp.floor(magnitude / step + chances) * step


def to_rows(x: Any, axes: Axes) -> Any:
    """An array as `(batch, rows, summed)`."""
    x = x.transpose((*axes.batch, *axes.free, *axes.summed))
    # One at a time: JAX then knows how examples of `vmap` stay sharded.
    for place, some in enumerate((axes.batch, axes.free, axes.summed)):
        x = _as_one(x, place, len(some))
    return x


def _as_one(x: Any, first: int, number: int) -> Any:
    """An array of which `number` axes, from the `first` one on, are one."""
    last = first + number
    length = prod(x.shape[first:last])
    return x.reshape(*x.shape[:first], length, *x.shape[last:])


def from_rows(rows: Any, shape: Sequence[int], axes: Axes) -> Any:
    order = (*axes.batch, *axes.free, *axes.summed)
    there = rows.reshape([shape[axis] for axis in order])
    return there.transpose([order.index(axis) for axis in range(len(shape))])


_ROWS = Axes((2,), ((0, 0), (1, 1)), (0,))
"""The axes of `(batch, rows, summed)`."""


def _in_blocks(x: Any, axes: Axes, size: int) -> tuple[Any, Axes]:
    """An array in which two axes stand for the summed ones: of blocks, and within them.

    It is bfloat16 if it was, else float32, whose range any rotation or scale needs.
    What is summed over is padded by zeros to whole blocks. All other axes stay where
    they are, if those that are summed over are neighbours: numbers are moved about only
    when they have few bits."""
    first, number = axes.summed[0], len(axes.summed)
    if axes.summed != tuple(range(first, first + number)):
        return _in_blocks(to_rows(x, axes), _ROWS, size)
    before, after = x.shape[:first], x.shape[first + number :]
    x = x if x.dtype == jnp.bfloat16 else x.astype(_FLOAT32)
    x = _as_one(x, first, number)
    length = x.shape[first]
    x = jnp.pad(
        x, [(0, -length % size if axis == first else 0) for axis in range(x.ndim)]
    )

    def now(axis: int) -> int:
        return axis if axis < first else axis + 2 - number

    kept = tuple((now(axis), to) for axis, to in axes.kept)
    there = Axes((first, first + 1), kept, tuple(map(now, axes.batch)))
    return x.reshape(*before, -(-length // size), size, *after), there
