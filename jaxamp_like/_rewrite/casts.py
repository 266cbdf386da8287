"""Casts whose gradients add up in full, or are rounded once."""

import functools
from collections.abc import Callable
from typing import Any

import jax
from jax import lax

from .._dtypes import DType, cast, cast_as


@jax.custom_jvp
def attach(full: Any, low: Any) -> Any:
    """The value `low`, differentiated as a cast of `full`.

    One cast serves many readers, and still the gradient adds up in full."""
    del full
    return low


@attach.defjvp
def _(primals, tangents):
    return primals[1], cast(tangents[0], primals[1].dtype)


def attach_moved(full: Any, low: Any, move: Callable[[Any], Any]) -> Any:
    """The value `low`, differentiated as what `move` makes of a cast of `full`.

    The gradient is moved back low, and adds up in full where it arrives."""

    @jax.custom_jvp
    def attached(full, low):
        del full
        return low

    @attached.defjvp
    def _(primals, tangents):
        return primals[1], move(cast(tangents[0], primals[1].dtype))

    return attached(full, low)


@functools.partial(jax.custom_jvp, nondiff_argnums=(1,))
def settle(x: Any, low: DType) -> Any:
    """`x`; its cotangent is rounded to `low` once, before it goes anywhere.

    XLA would leave out a cast down that is cast up again, and store what is wide."""
    del low
    return x


@settle.defjvp
def _(low, primals, tangents):
    (x,), (t,) = primals, tangents
    return x, cast(lax.optimization_barrier(cast(t, low)), t.dtype)


def cast_of(var: Any, value: Any, dtype: DType) -> Any:
    """A cast of the value of `var`: to the author's dtype, as weakly typed as that."""
    if value.dtype == dtype:
        return value
    is_authors = dtype == var.aval.dtype
    return cast_as(value, var.aval) if is_authors else cast(value, dtype)
