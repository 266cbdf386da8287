"""Copies in 8 bits that stand for values in the backward pass.

A copy is an array of codes of 8 bits, shaped as the value, and a scale for each block
of neighbours along the last axis. The forward pass reads the value itself. What the
backward pass runs again reads the numbers that the codes stand for, so that the value
need not be kept; see `stand_in`."""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple, NoReturn

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from .._dtypes import DType, bits
from .._errors import AmpError
from .._jax import Zero, new_primitive, recomputed_as, result_aval
from .._suggestions import did_you_mean
from .._tiles import largest_in_tiles, over_tiles, shard_shape
from .constant import no_derivative, tied_zeros

_FLOAT32, _BFLOAT16 = jnp.dtype("float32"), jnp.dtype("bfloat16")

FORMATS: Mapping[str, float] = {"float8_e4m3fn": 448, "float8_e5m2": 57344, "int8": 127}
"""The formats of codes, each with its largest number."""

_SMALLEST = {"float8_e4m3fn": 2.0**-9, "float8_e5m2": 2.0**-16, "int8": 1.0}
"""The smallest positive number of each format."""

SHORT_FORMATS = {"float8": "float8_e4m3fn"}

COPIES = ("amp_codes", "amp_scales")
"""The names of the primitives that make a copy, in programs and in reports."""

BLOCK = 32
"""How many numbers share a scale, which then adds half a bit to each."""


_LEAST = 32  # numbers; fewer are not worth the two kernels that make a copy


class LowBits(NamedTuple):
    """How values are kept for the backward pass.

    Args:
        format: of codes; one of `FORMATS`.
        block: how many numbers share a scale, at most.
        keeps_signs: so that no number but 0 becomes 0, for what asks for signs. Beside
            a large number all small ones of its block would seem to be 0 otherwise."""

    format: str
    block: int = BLOCK
    keeps_signs: bool = False

    def __str__(self) -> str:
        return f"{self.format} (a scale for every {self.block})"

    def pays_for(self, aval: Any, dtype: DType) -> bool:
        """Whether codes and scales take fewer bytes than an array of `dtype`.

        Small arrays, those of unknown sizes and float64 stay as they are."""
        shape = aval.shape
        if not shape or not all(isinstance(n, int) for n in shape) or bits(dtype) > 32:
            return False
        is_large = aval.size >= _LEAST
        return is_large and self.num_bytes(aval) < aval.size * (bits(dtype) // 8)

    def num_bytes(self, aval: Any) -> int:
        """The size of codes and scales of an array."""
        *_, length = aval.shape
        blocks = -(-length // _block_length(length, length, self.block))
        return aval.size + 2 * (aval.size // max(length, 1)) * blocks


def as_format(value: Any, argument: str, also: str = "") -> str:
    """Returns `value` as the name of a format, or says which `argument` was wrong.

    `also` says what else the argument may be."""
    name = value if isinstance(value, str) else getattr(value, "name", None)
    if not isinstance(name, str):
        try:
            name = jnp.dtype(value).name
        except TypeError:
            name = repr(value)
    name = SHORT_FORMATS.get(name, name)
    if name not in FORMATS:
        known = ", ".join(map(repr, (*SHORT_FORMATS, *FORMATS)))
        raise ValueError(
            f"`{argument}` is {value!r}, and values are kept in 8 bits as one of "
            f"{known}.{did_you_mean(value, (*SHORT_FORMATS, *FORMATS))}"
            f"{also and ' ' + also}"
        )
    return name


def as_low_bits(value: Any, block: Any, argument: str) -> LowBits:
    """How values are kept in the format `value`, with blocks of a given length."""
    name = as_format(value, argument)
    if isinstance(block, bool) or not isinstance(block, int | np.integer):
        raise TypeError(
            "`block` is how many numbers share a scale, a positive integer, but got "
            f"{block!r}. Leave it out for {BLOCK}."
        )
    if block < 1:
        raise ValueError(
            "`block` is how many numbers share a scale, so it must be at least 1, but "
            f"got {block}. Leave it out for {BLOCK}."
        )
    return LowBits(name, int(block))


@partial(
    jax.tree_util.register_dataclass,
    data_fields=["codes", "scales"],
    meta_fields=["how"],
)
@dataclass(frozen=True)
class Copy:
    """`x ≈ codes * scales`, where each block has one of the scales.

    Args:
        codes: int8, or the bits of numbers of float8 as uint8: what JAX does to a
            residual that is a float would make the largest numbers NaN.
        scales: bfloat16.
        how: how it was made."""

    codes: Any
    scales: Any
    how: LowBits


def copy_of(x: Any, how: LowBits) -> Copy:
    """A copy of `x` in 8 bits. A block with a NaN or an inf is NaN as a whole."""
    scales = _SCALES.bind(x, how=how)
    return Copy(_CODES.bind(x, scales, how=how), scales, how)


def stand_in(x: Any, copy: Copy) -> Any:
    """`x`; where JAX keeps residuals for a backward pass, it keeps the copy instead.

    So it is in code inside of a `jax.checkpoint`: what that runs again reads the
    numbers of the copy. In forward mode `x` itself is read."""
    return _STAND_IN.bind(x, copy.codes, copy.scales, how=copy.how, dtype=x.dtype)


# Rounding, and back.


def _block_length(length: int, shard: int, most: int) -> int:
    """How many numbers of an axis share a scale: a divisor if there is a large one.

    Where the axis lies on several devices, a block crosses no border between them."""
    length = max(length, 1)
    divisor = max(n for n in range(1, min(shard, most, length) + 1) if shard % n == 0)
    return divisor if shard < length or 2 * divisor >= most else min(most, length)


def _tile(x: Any, block: int) -> tuple[int, ...]:
    length, shard = x.shape[-1], max(shard_shape(x)[-1], 1)
    return (*(1 for _ in x.shape[1:]), _block_length(length, shard, block))


def _scales(x: Any, how: LowBits) -> Any:
    """The scales of blocks: powers of two for float8, whose numbers then stay exact.

    No scale is so small that a product with it, or the reciprocal of it, leaves the
    range of normal numbers. It is rounded up, so that no number gets too large."""
    if x.size == 0:
        return jnp.ones((*x.shape[:-1], 0), _BFLOAT16)
    amax = largest_in_tiles(_as_stored(x), _tile(x, how.block)).astype(_FLOAT32)
    scale = lax.max(amax * np.float32(1 / FORMATS[how.format]), np.float32(2.0**-100))
    mantissa = np.uint32(0xFFFF if how.format == "int8" else 0x7FFFFF)
    words = (lax.bitcast_convert_type(scale, jnp.uint32) + mantissa) & ~mantissa
    scale = lax.bitcast_convert_type(words, _FLOAT32)
    is_finite = lax.is_finite(amax)
    return lax.select(is_finite, scale, lax.full_like(scale, np.nan)).astype(_BFLOAT16)


def _codes(x: Any, scales: Any, how: LowBits) -> Any:
    inverse = _spread(1 / scales.astype(_FLOAT32), x, how)
    largest = np.float32(FORMATS[how.format])
    scaled = _as_stored(x).astype(_FLOAT32) * inverse
    scaled = lax.clamp(-largest, scaled, largest)
    if how.keeps_signs:
        least = np.float32(_SMALLEST[how.format])
        is_small = (lax.abs(scaled) < least) & (scaled != 0)
        scaled = lax.select(is_small, least * lax.sign(scaled), scaled)
    if how.format == "int8":
        return lax.round(scaled, lax.RoundingMethod.TO_NEAREST_EVEN).astype(jnp.int8)
    return lax.bitcast_convert_type(scaled.astype(how.format), jnp.uint8)


def _as_stored(x: Any) -> Any:
    """`x`, as the forward pass reads it.

    XLA would read it as it was before it was rounded to 16 bits, and store that too."""
    return lax.optimization_barrier(x)


def _decoded(codes: Any, scales: Any, how: LowBits, dtype: DType) -> Any:
    if how.format != "int8":
        codes = lax.bitcast_convert_type(codes, jnp.dtype(how.format))
    wide = codes.astype(_FLOAT32) * _spread(scales.astype(_FLOAT32), codes, how)
    return wide.astype(dtype)


def _spread(scales: Any, x: Any, how: LowBits) -> Any:
    """The scale of each number of `x`."""
    if x.size == 0:
        return jnp.ones(x.shape, scales.dtype)
    return over_tiles(scales, _tile(x, how.block), x.shape)


# The primitives. What is rounded has no derivative, so that a second derivative would
# silently lack what depends on it. Scales are tied to the value: where it is
# differentiated once more, so are they, and `_decoded_jvp` raises.


def _scales_aval(x: Any, *, how: LowBits) -> Any:
    return result_aval(partial(_scales, how=how), [x])


def _scales_jvp(primals: Any, tangents: Any, *, how: LowBits) -> Any:
    out, (t,) = _SCALES.bind(*primals, how=how), tangents
    return out, tied_zeros(t, out)


def _codes_jvp(primals: Any, tangents: Any, *, how: LowBits) -> Any:
    del tangents
    out = _CODES.bind(*primals, how=how)
    return out, Zero(jax.typeof(out).to_tangent_aval())


def _decoded_jvp(primals: Any, tangents: Any, **params: Any) -> Any:
    if not isinstance(tangents[1], Zero):
        raise AmpError(
            "This is a second derivative, and what the first one reads is kept in 8 "
            f"bits ({params['how'].format}), which can't be differentiated. `amp` sees "
            "that two are taken only where no `jit` or loop stands between them: take "
            "both inside of the `jit`, or say `lean=True`, which keeps 16 bits."
        )
    out = _DECODED.bind(*primals, **params)
    return out, Zero(jax.typeof(out).to_tangent_aval())


def _no_series(*_: Any, **__: Any) -> NoReturn:
    raise AmpError(
        "`jet` takes the Taylor series of what is kept in 8 bits for a backward pass. "
        "`amp` sees that only where no `jit` stands between them: take the series "
        "inside of the `jit`, or say `lean=True`, which keeps 16 bits."
    )


_SCALES = new_primitive(
    COPIES[1],
    compute=_scales,
    aval=_scales_aval,
    jvp=_scales_jvp,
    transpose=no_derivative,
    series=_no_series,
)

_CODES = new_primitive(
    COPIES[0],
    compute=_codes,
    aval=lambda x, scales, how: x.update(
        dtype=jnp.dtype("int8" if how.format == "int8" else "uint8"), weak_type=False
    ),
    jvp=_codes_jvp,
    transpose=no_derivative,
    series=_no_series,
)

_DECODED = new_primitive(
    "amp_decoded",
    compute=_decoded,
    aval=lambda codes, scales, dtype, **_: codes.update(dtype=dtype),
    jvp=_decoded_jvp,
    transpose=no_derivative,
)

_STAND_IN = new_primitive(
    "amp_stand_in",
    compute=lambda x, codes, scales, **_: x,
    aval=lambda x, codes, scales, **_: x,
    jvp=lambda xs, ts, **params: (_STAND_IN.bind(*xs, **params), ts[0]),
    transpose=lambda ct, x, codes, scales, **_: [ct, None, None],
    series=lambda x, codes, scales, **_: x,
)
recomputed_as(_STAND_IN, _DECODED, operands=(1, 2))
