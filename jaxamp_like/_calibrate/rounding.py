"""Rounding to a low dtype and back, which no compiler leaves out."""

from typing import Any

import jax.numpy as jnp
from jax import lax

from .._dtypes import DType


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


def chosen(x: Any, choice: Any, dtypes: tuple[DType, ...]) -> Any:
    """`x` as it is for a `choice` of 0, else rounded to the dtype of that number."""
    for number, dtype in enumerate(dtypes, 1):
        x = jnp.where(choice == number, rounded(x, dtype), x)
    return x
