"""Numbers of 8 bits as integers, and what they were multiplied by."""

from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from jax import lax

from .formats import largest_of

LARGEST = 127  # as many below zero as above
MOST_TERMS = (2**31 - 1) // LARGEST**2  # of a sum that int32 holds in any case
_LEAST = 2.0**-119  # of a maximum, so that what brings it to 127 is finite


class Integers(NamedTuple):
    """`x ≈ values / multiplier`, with a multiplier for each row."""

    values: Any
    multiplier: Any  # float32; NaN of a row with an inf or NaN in it


def rounded(
    x: Any,
    axes: tuple[int, ...],
    epsilon: float,
    largest: float | None = None,
    is_weight: bool = False,
) -> Integers:
    """`x` as int8, by multipliers of its rows, which extend along `axes`.

    From the magnitudes in the row, or from `largest`, where what is larger saturates.
    Integers hold no NaN, so the multiplier tells of it. That of a weight may be stored,
    so XLA is kept from what it would do with a quotient: a division by it would become
    another, with other bits."""
    x = x.astype(jnp.float32)
    amax = largest_of(x, axes)
    is_finite = lax.is_finite(amax)
    top = amax if largest is None else lax.full_like(amax, largest)
    top = lax.max(top + epsilon, lax.full_like(top, _LEAST))
    multiplier = LARGEST / lax.select(is_finite, top, lax.full_like(top, LARGEST))
    if is_weight:
        multiplier = lax.optimization_barrier(multiplier)
    values = lax.round(x * multiplier, lax.RoundingMethod.TO_NEAREST_EVEN)
    # NaN as an integer may be anything.
    values = lax.select(lax.is_finite(values), values, lax.full_like(values, 0))
    bound = np.float32(LARGEST)
    values = lax.clamp(-bound, values, bound).astype(jnp.int8)
    nan = lax.full_like(multiplier, jnp.nan)
    return Integers(values, lax.select(is_finite, multiplier, nan))
