"""What rounding the operands of a contraction to 8 bits does to their numbers.

Numbers are clipped if they are beyond the largest number of the format, once they are
divided by their scale. They are flushed if they are at most half of its smallest
number, and so become zero."""

import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

from ..._dtypes import bits, is_float
from ..._jax import Eqn
from .. import walk
from .pairs import Pair, rounded_operand
from .statistics import rounded

Shares = tuple[Array | float, Array | float]


def shares(eqn: Eqn, at: walk.ReportContext, operands: Sequence[Pair]) -> Shares | None:
    """The shares of numbers that an equation clips and flushes.

    It is `None` for an equation that does not round an operand of a contraction."""
    if rounded_operand(eqn, at) is None:
        return None
    name, runs = eqn.primitive.name, [pair.run for pair in operands]
    if name == "clamp":
        return _clipped(runs[1], runs[2]), 0.0
    if name == "convert_element_type" and _is_8_bits(eqn.params["new_dtype"]):
        # Integers are rounded before, as floats.
        return 0.0, _flushed(runs[0], eqn.params["new_dtype"])
    return (0.0, _flushed(runs[0])) if name == "round" else None


def with_shares(made: Pair, both: Shares) -> Pair:
    """The result of such an equation, with the two shares in its measurements."""
    row, codes = made.measured
    return made._replace(measured=(_rounded(row, *both), codes))


def _is_8_bits(dtype: Any) -> bool:
    return is_float(dtype) and bits(dtype) == 8


_rounded = jax.jit(rounded)


@jax.jit
def _clipped(x: Array, most: Array) -> Array:
    return jnp.mean(jnp.abs(x) > most, dtype=jnp.float32)


@functools.partial(jax.jit, static_argnums=1)
def _flushed(x: Array, dtype: Any = None) -> Array:
    made = jnp.round(x) if dtype is None else x.astype(dtype).astype(x.dtype)
    return jnp.mean((made == 0) & (x != 0), dtype=jnp.float32)
