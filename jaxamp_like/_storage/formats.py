"""How a number of a block becomes a code of few bits, and a number again."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import jax.numpy as jnp
import numpy as np

from .._dtypes import DType
from .._random_rounding import rounded_by
from .._suggestions import did_you_mean


class Format(Protocol):
    """How numbers are stored.

    Each block of them has a scale, its largest magnitude. A scale is negative if no
    number of its block is. So squares, by whose roots an optimizer divides, have all
    codes for themselves. What is above zero in such a block does not become zero, for
    an update divided by the root of zero would be huge."""

    @property
    def bits(self) -> int:
        """Of a code. Codes of 4 bits are stored by two, as uint8."""
        ...

    @property
    def has_scales(self) -> bool: ...

    def encoded(self, x: Any, scale: Any, chance: Any) -> Any:
        """The codes of numbers.

        Args:
            x: a float array.
            scale: for each number, that of its block; `None` without scales.
            chance: for each number, one from 0 to 1 below which it is rounded up; 0.5
                rounds to the nearest."""
        ...

    def decoded(self, codes: Any, scale: Any) -> Any:
        """The numbers that codes stand for, in the dtype of `scale`."""
        ...


@dataclass(frozen=True)
class PowerCodes:
    """Integers, of which a power is the number: codes are close together near zero.

    Moments of gradients differ by orders of magnitude within a block, and all of them
    matter: an update is a quotient of two. With the fourth power and 8 bits, numbers
    down to 1/255^4 = 2e-10 of the largest keep a code, and steps are 1.6 % near it. The
    8-bit optimizers of Dettmers et al. (arXiv:2110.02861) have a table to this end, in
    which steps are as fine; a power needs no table, and no gather from one.

    Args:
        bits: of a code.
        powers: of signed codes, and of codes of blocks without a negative number."""

    bits: int
    powers: tuple[int, int]
    has_scales: bool = True

    def encoded(self, x: Any, scale: Any, chance: Any) -> Any:
        is_signed = _is_positive(scale)
        magnitude = _over(jnp.abs(x), scale)

        def code(power: int, largest: int) -> Any:
            root = magnitude
            for _ in range(power.bit_length() - 1):
                root = jnp.sqrt(root)
            lower = jnp.floor(root * largest)
            below, above = (self._number(c, power, largest) for c in (lower, lower + 1))
            is_up = chance < (magnitude - below) / (above - below)
            code = lower.astype(jnp.int32) + is_up.astype(jnp.int32)
            return jnp.minimum(code, largest)

        signed, unsigned = (
            code(*pair) for pair in zip(self.powers, self._largest, strict=True)
        )
        zero = 1 << (self.bits - 1)
        signed = jnp.where(_is_positive(-x), zero - signed, zero + signed)
        unsigned = jnp.where(_is_positive(x), jnp.maximum(unsigned, 1), unsigned)
        return jnp.where(is_signed, signed, unsigned).astype(jnp.uint8)

    def decoded(self, codes: Any, scale: Any) -> Any:
        codes = codes.astype(jnp.int32)
        offset = codes - (1 << (self.bits - 1))
        signed, unsigned = (
            self._number(code.astype(scale.dtype), *pair)
            for code, *pair in zip(
                (offset, codes), self.powers, self._largest, strict=True
            )
        )
        signed = jnp.copysign(signed, offset.astype(scale.dtype))
        return jnp.where(_is_positive(scale), signed, unsigned) * jnp.abs(scale)

    @property
    def _largest(self) -> tuple[int, int]:
        return (1 << (self.bits - 1)) - 1, (1 << self.bits) - 1

    def _number(self, code: Any, power: int, largest: int) -> Any:
        number = code * np.float32(1 / largest)
        for _ in range(power.bit_length() - 1):
            number = number * number
        return number


@dataclass(frozen=True)
class FloatCodes:
    """Numbers of a float8 dtype, of which the largest is the largest of the block."""

    dtype: DType
    bits: int = 8
    has_scales: bool = True

    def encoded(self, x: Any, scale: Any, chance: Any) -> Any:
        largest, least = (
            np.float32(getattr(jnp.finfo(self.dtype), name))
            for name in ("max", "smallest_subnormal")
        )
        scaled = (_over(x, scale) * largest).astype(jnp.float32)
        is_kept = _is_positive(-scale) & _is_positive(x)
        scaled = jnp.where(is_kept, jnp.maximum(scaled, least), scaled)
        return rounded_by(scaled, self.dtype, chance)

    def decoded(self, codes: Any, scale: Any) -> Any:
        # In this order: the scale over the largest number might not be normal.
        share = codes.astype(scale.dtype) * np.float32(
            1 / float(jnp.finfo(self.dtype).max)
        )
        return share * jnp.abs(scale)


@dataclass(frozen=True)
class PlainCodes:
    """Numbers of a dtype of 16 bits, without scales."""

    dtype: DType
    bits: int = 16
    has_scales: bool = False

    def encoded(self, x: Any, scale: Any, chance: Any) -> Any:
        del scale
        return rounded_by(x.astype(jnp.float32), self.dtype, chance)

    def decoded(self, codes: Any, scale: Any) -> Any:
        del scale
        return codes


def _over(x: Any, scale: Any) -> Any:
    """Numbers over their scales; 0 where a scale is 0 or NaN.

    XLA multiplies by the inverse of a scale that all numbers share, and the inverse of
    the largest is not normal. So large numbers and scales are made smaller before."""
    scale = jnp.abs(scale)
    half = jnp.finfo(scale.dtype).maxexp // 2
    large, unit = (np.asarray(2.0**power, scale.dtype) for power in (half, -half))
    unit = jnp.where(scale > large, unit, jnp.ones((), scale.dtype))
    return (x * unit) / jnp.where(_is_positive(scale), scale * unit, jnp.inf)


def _is_positive(x: Any) -> Any:
    """Whether numbers are above zero, as which XLA takes those that are not normal.

    They are not compared with zero, of which there would be an array: XLA keeps it if
    there is one already, such as that in which a loop adds up a gradient."""
    return x >= jnp.finfo(x.dtype).tiny


FORMATS: Mapping[str, Format] = {
    "int8": PowerCodes(8, (4, 4)),
    "int4": PowerCodes(4, (2, 4)),
    "float8": FloatCodes(jnp.dtype("float8_e4m3fn")),
    "bfloat16": PlainCodes(jnp.dtype("bfloat16")),
}


def check_settings(format: Any, **least: tuple[Any, int]) -> None:
    """Raises where `format` is none, or an argument no integer of at least a number."""
    if format not in FORMATS:
        known = ", ".join(f'"{name}"' for name in FORMATS)
        raise ValueError(
            f"`format` must be one of {known}, but was given {format!r}."
            + did_you_mean(format, FORMATS)
        )
    for name, (value, minimum) in least.items():
        if isinstance(value, bool) or not isinstance(value, int) or value < minimum:
            raise ValueError(
                f"`{name}` must be an integer of at least {minimum}, but was given "
                f"{value!r}."
            )
