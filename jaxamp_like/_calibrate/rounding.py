"""Rounding to a low precision and back, which no compiler leaves out."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import lax

from .._dtypes import DType
from .._quantised.passes import Rounding as OfFormat


class Rounding(NamedTuple):
    """What an array is rounded to: to dtypes in turn, and then to 8 bits with scales.

    Of neither, it stays as it is.

    Args:
        dtypes: which those are.
        eight: the rounding to 8 bits.
        eight_bits: the candidate that this is of."""

    dtypes: tuple[DType, ...] = ()
    eight: OfFormat | None = None
    eight_bits: str | None = None

    def __call__(self, x: Any) -> Any:
        """`x` as it comes back, in its own dtype."""
        for dtype in self.dtypes:
            x = rounded(x, dtype)
        return x if self.eight is None else _quantised(x, self.eight)

    def batched(self, ndim: int) -> "Rounding":
        """That of a batch of arrays, along the first axis, each of `ndim` axes."""
        if self.eight is None:
            return self
        axes = range(ndim) if self.eight.axes is None else self.eight.axes
        inner = tuple(axis + 1 for axis in axes)
        return self._replace(eight=self.eight._replace(axes=inner))


AS_IT_IS = Rounding()


def _quantised(x: Any, how: OfFormat) -> Any:
    numbers = how(x)
    # A cast to float8 and back is one that XLA might leave out.
    values = lax.optimization_barrier(numbers.values)
    return numbers._replace(values=values).restored().astype(x.dtype)


def rounded(x: Any, dtype: DType) -> Any:
    """`x` as it comes back from `dtype`, in its own dtype.

    `reduce_precision` and not two casts: XLA may leave out a cast with its inverse. It
    makes zeros of subnormal numbers, of which those of float16 are worth having; they
    are a grid of equal steps, to which adding a large number rounds."""
    info = jnp.finfo(dtype)
    low = lax.reduce_precision(x, info.nexp, info.nmant)
    if info.minexp <= jnp.finfo(x.dtype).minexp:
        return low
    step = float(info.smallest_subnormal)
    large = jnp.asarray(1.5 * step * 2.0 ** jnp.finfo(x.dtype).nmant, x.dtype)
    # The barrier keeps the sum and the difference from being simplified to `x`.
    on_grid = lax.optimization_barrier(x + large) - large
    return jnp.where(jnp.abs(x) < float(info.tiny), on_grid, low)


def chosen(x: Any, choice: Any, roundings: Sequence[Rounding]) -> Any:
    """`x` as it is for a `choice` of 0, else rounded by the one of that number."""
    same = x
    for number, how in enumerate(roundings, 1):
        if how != AS_IT_IS:
            x = jnp.where(choice == number, how(same), x)
    return x
