"""Rounding by chance: up or down, so that the mean of many results is the number."""

from collections.abc import Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from ._dtypes import DType

_UINT32, _FLOAT32 = jnp.dtype("uint32"), jnp.dtype("float32")
_MANTISSA = 23  # bits of float32's


def chances(shape: Sequence[Any], seed: Any) -> Any:
    """Numbers from 0 to 1, evenly distributed: a hash of a seed and of places.

    They are the same however `jit` lays the array over devices, and cost some ten
    integer operations each, which XLA fuses with what reads them.

    Args:
        shape: of the result.
        seed: an integer, or a uint32 array that broadcasts to `shape`.
    Returns:
        A float32 array of multiples of 2^-24."""
    word = np.uint32(seed % 2**32) if isinstance(seed, int) else seed
    # Powers of an odd number are strides that need no lengths, which may be symbols.
    stride = 1
    for axis in reversed(range(len(shape))):
        stride = stride * 0x9E3779B1 % 2**32
        place = lax.broadcasted_iota(_UINT32, shape, axis)
        word = word + place * np.uint32(stride)
    return (mixed(word) >> np.uint32(8)).astype(_FLOAT32) * np.float32(2.0**-24)


def mixed(word: Any) -> Any:
    """A uint32 of which each bit depends on all bits of `word`.

    It is the last part of the hash function MurmurHash3."""
    for shift, factor in ((16, 0x85EBCA6B), (13, 0xC2B2AE35)):
        word = (word ^ (word >> np.uint32(shift))) * np.uint32(factor)
    return word ^ (word >> np.uint32(16))


@partial(jax.custom_jvp, nondiff_argnums=(1,))
def rounded_by(x: Any, dtype: DType, chance: Any) -> Any:
    """`x` in `dtype`, rounded up in magnitude where `chance` is below its remainder.

    What is beyond the range of `dtype` is its largest number, unless `x` is not finite.
    The derivative is that of `astype`, for steps have none.

    Args:
        x: a float32 array.
        dtype: a floating dtype of at most 16 bits.
        chance: numbers from 0 to 1, of the shape of `x`; 0.5 rounds to the nearest, and
            halves down."""
    info = jnp.finfo(dtype)
    largest = np.float32(info.max)
    magnitude = jnp.abs(x)
    step = step_at(magnitude, info.nmant, int(info.minexp))
    # A power of two divides exactly. The remainder is compared, for a sum of quotient
    # and chance would be rounded itself.
    whole = jnp.floor(magnitude / step)
    is_up = chance < magnitude / step - whole
    rounded = jnp.minimum((whole + is_up.astype(_FLOAT32)) * step, largest)
    return jnp.where(jnp.isfinite(x), jnp.copysign(rounded, x), x).astype(dtype)


@rounded_by.defjvp
def _(dtype: DType, primals: Any, tangents: Any) -> Any:
    x, chance = primals
    return rounded_by(x, dtype, chance), tangents[0].astype(dtype)


def step_at(magnitude: Any, mantissa: int, least_exponent: int) -> Any:
    """The distance of neighbouring numbers of a format, at a float32 magnitude.

    Args:
        magnitude: of numbers at least 0.
        mantissa: bits of the format's.
        least_exponent: of the format's normal numbers."""
    bits = lax.bitcast_convert_type(magnitude, _UINT32)
    exponents = (bits >> np.uint32(_MANTISSA)).astype(jnp.int32)
    # bfloat16 has float32's range: steps of its subnormal numbers would be subnormal
    # in float32, and zero for XLA. Its least step here is float32's least normal.
    exponents = lax.max(exponents, jnp.int32(least_exponent + 127)) - mantissa
    exponents = lax.clamp(np.int32(1), exponents, np.int32(254))
    return lax.bitcast_convert_type(
        exponents.astype(_UINT32) << np.uint32(_MANTISSA), _FLOAT32
    )
