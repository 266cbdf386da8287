"""Floating numbers of few bits with a scale.

`x ≈ values * scale`, where the scale is one number for the whole array, or one for each
row of it. A float8 format holds few magnitudes, so that its scale follows the largest
one of the array; by default it is a power of two, so that a product with it rounds
nothing."""

from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.ad_checkpoint import checkpoint_name

from .._dtypes import DType
from .axes import Axes

_FLOAT32 = jnp.dtype("float32")

# A result is multiplied by one scalar, the product of two scales, which is flushed to
# zero below 2^-126. So no scale is below 2^-112, which leaves room for another one of
# 2^-14, that of numbers up to 0.027; smaller numbers are left to float8's
# exponents. No upper bound is needed: the scale of the largest float32 is 2^120.
LEAST, MOST = 2.0**-112, 2.0**126


SCALE_NAME = "amp_scale"
"""The name of scalar scales, by which checkpoints keep them: what is run again need not
look for the maximum of a tensor again."""


class Scaled(NamedTuple):
    """An array as numbers of few bits and what they are to be multiplied by."""

    values: Any
    scale: Any  # float32: a scalar, or with an axis of length 1 for each of `axes`

    def restored(self) -> Any:
        """The numbers that they stand for, in float32."""
        return self.values.astype(_FLOAT32) * self.scale


class AsFloat8(NamedTuple):
    """How an array is rounded: to which dtype, and by what scales.

    Args:
        dtype: a float8 dtype.
        axes: over which a maximum is taken for each scale; `None` for one scale.
        power_of_two: whether scales are rounded up to powers of two."""

    dtype: DType
    axes: tuple[int, ...] | None = None
    power_of_two: bool = True

    def along(self, axes: Axes) -> "AsFloat8":
        return self if self.axes is None else self.with_axes(axes.summed)

    def with_axes(self, axes: tuple[int, ...]) -> "AsFloat8":
        return self._replace(axes=axes)

    def batched(self, ndim: int) -> "AsFloat8":
        axes = range(ndim) if self.axes is None else self.axes
        return self._replace(axes=tuple(axis + 1 for axis in axes))

    @property
    def largest(self) -> float:
        return float(jnp.finfo(self.dtype).max)

    def __call__(self, x: Any) -> Scaled:
        """Rounds `x` by scales from its own maxima."""
        return self.by_maxima(x, self.maxima(x))

    def maxima(self, x: Any) -> Any:
        return largest_of(x, self.axes)

    def by_maxima(self, x: Any, maxima: Any) -> Scaled:
        """Rounds `x` by scales from maxima that are known."""
        scale = scale_of(maxima, self.largest, self.power_of_two)
        if scale.ndim == 0:
            scale = checkpoint_name(scale, SCALE_NAME)
        return Scaled(self.divided(x, scale), scale)

    def divided(self, x: Any, scale: Any) -> Any:
        """`x / scale` in the format: what is too large is the largest, inf is NaN.

        A loss scaler then still sees an overflow. XLA's own conversion makes large
        numbers NaN in one format, and inf in another."""
        x = x.astype(_FLOAT32)
        x = x * (1 / scale) if self.power_of_two else x / scale
        return self.clipped(x).astype(self.dtype)

    def clipped(self, x: Any) -> Any:
        """`x` within the range of the format; NaN where it is infinite."""
        largest = x.dtype.type(self.largest)
        # `0 * x` is NaN for inf, else 0; for a `select` XLA would store a mask.
        return lax.clamp(-largest, x, largest) + 0 * x


def largest_of(x: Any, axes: tuple[int, ...] | None = None) -> Any:
    """The largest magnitude, in float32; 0 of an empty array.

    XLA may lose a NaN here (see `_magnitudes`). Of numbers that have a NaN themselves,
    as those of float8, it is not lost, and their scale matters no more."""
    least = 0 if 0 in x.shape else None
    keep = axes is not None
    amax = jnp.max(jnp.abs(x), axis=axes, keepdims=keep, initial=least)
    return amax.astype(_FLOAT32)


def scale_of(amax: Any, largest: float, power_of_two: bool = True) -> Any:
    """What numbers of magnitude `amax` are divided by to fit into `largest`.

    It is never 0, inf or NaN: for a tensor of zeros, or with an inf or NaN, it is 1."""
    known = lax.is_finite(amax) & (amax > 0)
    scale = lax.select(known, amax, lax.full_like(amax, largest)) / largest
    scale = within_bounds(scale)
    return round_up_to_power_of_two(scale) if power_of_two else scale


def within_bounds(scale: Any) -> Any:
    return lax.clamp(np.float32(LEAST), scale, np.float32(MOST))


def round_up_to_power_of_two(x: Any) -> Any:
    """The next power of two of positive normal numbers, by their bits."""
    bits = lax.bitcast_convert_type(x, jnp.uint32)
    bits = (bits + jnp.uint32(0x7FFFFF)) & jnp.uint32(0xFF800000)
    return lax.bitcast_convert_type(bits, _FLOAT32)


def rescaled(x: Any, one: Any, other: Any) -> Any:
    """`x * one * other`, for scales of operands.

    Two scalars are multiplied first: a kernel of a matrix product multiplies by one of
    them for free. The product of two arrays of scales may leave the range that the
    result is in, so that `x` is multiplied by each of them."""
    if one.ndim == other.ndim == 0:
        return x * (one * other).astype(x.dtype)
    low, high = jnp.minimum(one, other), jnp.maximum(one, other)
    return (x.astype(_FLOAT32) * low * high).astype(x.dtype)
