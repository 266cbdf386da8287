"""Codes of 4 bits in bytes, two to each."""

from typing import Any

import jax.numpy as jnp
from jax import lax

_UINT8 = jnp.dtype("uint8")


def in_pairs(codes: Any, axis: int = -1) -> Any:
    """Codes from 0 to 15 in bytes, two each, the first in the lower half.

    Args:
        codes: numbers of any dtype.
        axis: along which neighbours share a byte; it is padded if it is odd."""
    axis %= codes.ndim
    codes = codes.astype(_UINT8)
    before, length, after = (
        codes.shape[:axis],
        codes.shape[axis],
        codes.shape[axis + 1 :],
    )
    padding = [(0, length % 2 if i == axis else 0) for i in range(codes.ndim)]
    pairs = jnp.pad(codes, padding).reshape(*before, -(-length // 2), 2, *after)
    first, second = (
        lax.index_in_dim(pairs, i, axis + 1, keepdims=False) for i in range(2)
    )
    return first | (second << _UINT8.type(4))


def apart(pairs: Any, axis: int = -1) -> Any:
    """The codes of `in_pairs`, with that by which an odd axis was padded."""
    axis %= pairs.ndim
    # Two shifts side by side would be a concatenation, which XLA gives its own kernel.
    shifts = lax.iota(_UINT8, 2) * _UINT8.type(4)
    shifts = shifts.reshape(2, *[1] * (pairs.ndim - axis - 1))
    codes = (jnp.expand_dims(pairs, axis + 1) >> shifts) & _UINT8.type(15)
    before, length, after = (
        pairs.shape[:axis],
        pairs.shape[axis],
        pairs.shape[axis + 1 :],
    )
    return codes.reshape(*before, 2 * length, *after)
