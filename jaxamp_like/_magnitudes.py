"""Largest magnitudes, of which NaN is the largest.

XLA for CPUs loses a NaN in the maximum of a large array (jaxlib 0.10 to 0.12), and
devices that agree on a maximum may lose one, too. The bits of a float without its sign
are an integer, and these integers have the order of magnitudes, with inf above all
numbers, and NaN above inf. Their maximum loses nothing."""

from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
from jax import lax


def words(x: Any) -> Any:
    """The bits of floats as signed integers, which are negative where a sign is set."""
    return lax.bitcast_convert_type(x, jnp.dtype(f"int{8 * x.dtype.itemsize}"))


def largest_magnitude(
    x: Any, axes: Sequence[int] | None = None, keepdims: bool = False
) -> Any:
    """The largest magnitude of floats, 0 of an empty array, NaN if there is a NaN.

    Args:
        x: an array of floats of 16 bits or more.
        axes: along which the largest is taken; `None` is all of them.
        keepdims: whether these axes stay, 1 long."""
    bits = words(x)
    unsigned = bits & bits.dtype.type(jnp.iinfo(bits.dtype).max)
    most = jnp.max(unsigned, axis=axes, keepdims=keepdims, initial=0)
    return lax.bitcast_convert_type(most, x.dtype)


def largest_over_devices(magnitudes: Any, names: tuple[str, ...]) -> Any:
    """The largest of what devices along axes of a mesh hold, NaN if one holds it."""
    bits = lax.pmax(words(magnitudes), names)
    return lax.bitcast_convert_type(bits, magnitudes.dtype)
