"""Rounding to a low precision and back, which no compiler leaves out."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import lax

from .._dtypes import DType
from .._quantised.passes import Rounding


class RoundingSteps(NamedTuple):
    """What an array is rounded to: to dtypes in turn, and then to 8 bits with scales.

    Without dtypes and 8 bits, the array stays as it is.

    Args:
        dtypes: the dtypes, in order.
        eight: the rounding to 8 bits.
        eight_bits: the name of the candidate that `eight` belongs to."""

    dtypes: tuple[DType, ...] = ()
    eight: Rounding | None = None
    eight_bits: str | None = None

    def __repr__(self) -> str:
        """What tells roundings apart: a calibration is resumed by a text with it."""
        return f"Rounding(dtypes={self.dtypes!r}, eight={self.eight!r})"

    def __call__(self, x: Any) -> Any:
        """`x`, rounded and back in its own dtype."""
        for dtype in self.dtypes:
            x = rounded(x, dtype)
        return x if self.eight is None else _quantised(x, self.eight)

    def batched(self, ndim: int) -> "RoundingSteps":
        """The same rounding of arrays of `ndim` axes, batched along a first axis."""
        eight = self.eight and self.eight.batched(ndim)
        return self._replace(eight=eight)


UNROUNDED = RoundingSteps()


def _quantised(x: Any, how: Rounding) -> Any:
    # Without the barrier, XLA might leave out a cast to float8 and back.
    numbers = lax.optimization_barrier(how(x))
    return numbers.restored().astype(x.dtype)


def rounded(x: Any, dtype: DType) -> Any:
    """`x`, rounded to `dtype` and back in its own dtype.

    This takes `reduce_precision`, since XLA may leave out two casts that are inverse to
    each other. But `reduce_precision` makes zeros of subnormal numbers, and those of
    float16 matter. They form a grid of equal steps: to add a large number, and subtract
    it again, rounds to that grid."""
    info = jnp.finfo(dtype)
    low = lax.reduce_precision(x, info.nexp, info.nmant)
    if info.minexp <= jnp.finfo(x.dtype).minexp:
        return low
    step = float(info.smallest_subnormal)
    large = jnp.asarray(1.5 * step * 2.0 ** jnp.finfo(x.dtype).nmant, x.dtype)
    # The barrier keeps the sum and the difference from being simplified to `x`.
    on_grid = lax.optimization_barrier(x + large) - large
    return jnp.where(jnp.abs(x) < float(info.tiny), on_grid, low)


def chosen(x: Any, choice: Any, roundings: Sequence[RoundingSteps]) -> Any:
    """`x` as it is if `choice` is 0, else rounded by the `choice`-th of `roundings`."""
    same = x
    for number, how in enumerate(roundings, 1):
        if how != UNROUNDED:
            x = jnp.where(choice == number, how(same), x)
    return x
