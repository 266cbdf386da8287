"""What a contraction costs: FLOPs, bytes kept, or seconds on a device."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

import jax.numpy as jnp

from .._rules.low_bits import BLOCK
from .candidates import EIGHT_BITS, compute_of


@dataclass(frozen=True)
class Device:
    """A device by what bounds its speed, for the objective "time".

    A contraction takes the longer of its arithmetic and its traffic: the roofline of
    Williams, Waterman and Patterson (2009).

    Args:
        flops: operations per second, by the name of a dtype or 8-bit candidate. One
            that is not named has the speed of the narrowest that is named, has at least
            16 bits and is at least as wide.
        bandwidth: bytes per second.
    Raises:
        ValueError: a speed is not positive, or float32's is missing.

    >>> Device({"float32": 67e12, "bfloat16": 990e12}, 3.35e12).speed("float16") / 1e12
    990.0
    """

    flops: Mapping[str, float]
    bandwidth: float

    def __post_init__(self) -> None:
        if "float32" not in self.flops:
            raise ValueError(
                f"`flops` of a `Device` needs a speed for 'float32', but names "
                f"{sorted(self.flops)}."
            )
        if not all(speed > 0 for speed in (*self.flops.values(), self.bandwidth)):
            raise ValueError(
                "The speeds of a `Device` must be positive numbers, but got "
                f"{dict(self.flops)} and a bandwidth of {self.bandwidth}."
            )

    def speed(self, dtype: str) -> float:
        """Operations per second in a dtype or 8-bit candidate."""
        if dtype in self.flops:
            return self.flops[dtype]
        width = max(_width(dtype), 16)
        wide = [name for name in self.flops if _width(name) >= width]
        return self.flops[min(wide, key=_width)]


def _width(name: str) -> int:
    """Bits of a dtype, or of a candidate."""
    if name in EIGHT_BITS:
        return EIGHT_BITS[name].bits
    return 8 * jnp.dtype(compute_of(name)).itemsize


H200 = Device(
    {"float32": 395e12, "float16": 790e12, "float8": 1580e12, "int8": 1580e12}, 4.3e12
)
"""An NVIDIA H200. Speeds of 32 and 16 bits were measured, with TF32 for float32; the
speed of 8 bits is taken as twice that of 16."""


class ContractionCost(NamedTuple):
    """One contraction, in numbers that don't depend on a precision.

    All iterations of loops around it count.

    Args:
        flops: multiply-adds, times two.
        read: elements of its operands.
        made: elements of its result.
        saved_read: elements of operands that are kept for the backward pass.
        saved_made: elements of the result that are kept for the backward pass.
        quantised_by: the 8-bit candidates that round its operands to 8 bits; with the
            others they have 16."""

    flops: float
    read: int
    made: int
    saved_read: int = 0
    saved_made: int = 0
    quantised_by: frozenset[str] = frozenset()

    def bits(self, name: str) -> int:
        """The bits of its operands with a candidate, or as written."""
        is_left = name in EIGHT_BITS and name not in self.quantised_by
        return 16 if is_left else _width(name)

    def saved_bytes(self, name: str) -> float:
        """Bytes kept for the backward pass.

        Operands are kept in 8 bits only if the candidate's rule keeps them rounded, and
        results never. Candidates such as "bfloat16+int8" keep both so."""
        if compute_of(name) != name:
            bits = 8 + 16 / BLOCK  # a scale for each block
            return (self.saved_read + self.saved_made) * bits / 8
        rest = max(self.bits(name), 16)
        is_kept = name in EIGHT_BITS and EIGHT_BITS[name].keeps_rounded
        read = self.bits(name) if is_kept else rest
        return (self.saved_read * read + self.saved_made * rest) / 8

    def seconds(self, name: str, device: Device) -> float:
        """The time by a roofline, with that of quantising.

        To quantise, operands are read twice in 16 bits, and written once in 8."""
        own, rest = self.bits(name), max(self.bits(name), 16)
        is_rounded = name in self.quantised_by
        runs_in = name if is_rounded or name not in EIGHT_BITS else "float16"
        moved = (self.read * own + self.made * rest) / 8
        more = self.read * (2 * rest + own) / 8 if is_rounded else 0.0
        time = max(self.flops / device.speed(runs_in), moved / device.bandwidth)
        return time + more / device.bandwidth
