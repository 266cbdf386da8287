"""Casts whose gradients add up in full, or are rounded once."""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from .._dtypes import DType, bits, cast, cast_as, is_float
from .._jax import SymbolicZero, Zero, new_primitive
from .._rules import behind_barrier, with_cotangent_barrier


@jax.custom_jvp
def with_full_gradient(full: Any, low: Any) -> Any:
    """The value `low`, differentiated as a cast of `full`.

    One cast serves many readers, and still the gradient adds up in full."""
    del full
    return low


@with_full_gradient.defjvp
def _(primals, tangents):
    return primals[1], cast(tangents[0], primals[1].dtype)


def moved_with_full_gradient(full: Any, low: Any, move: Callable[[Any], Any]) -> Any:
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
def round_cotangent(x: Any, low: DType) -> Any:
    """`x`; its cotangent is rounded to `low` once, before it goes anywhere.

    Without a fence, XLA would leave out a cast down that a cast up follows, and store
    the wide array."""
    del low
    return x


@round_cotangent.defjvp
def _(low, primals, tangents):
    return primals[0], _ROUNDED_BACK.bind(*tangents, low=low)


# In forward mode the tangent is not rounded, which no composition of JAX's can do.
_ROUNDED_BACK = new_primitive(
    "amp_rounded_back",
    compute=lambda t, low: t,
    aval=lambda t, low: t,
    jvp=lambda ts, dts, low: (ts[0], _ROUNDED_BACK.bind(*dts, low=low)),
    transpose=lambda ct, t, low: [_rounded(ct, low)],
    batch=lambda ts, dims, low: (_ROUNDED_BACK.bind(*ts, low=low), dims[0]),
)


def _rounded(ct: Any, low: DType) -> Any:
    return ct if isinstance(ct, Zero) else cast(behind_barrier(cast(ct, low)), ct.dtype)


@functools.partial(jax.custom_jvp, nondiff_argnums=(2,))
def residual_add(stream: Any, branch: Any, low: DType) -> Any:
    """The sum of both; its cotangent is rounded for the branch, and not for the stream.

    Both cotangents are made at once. Otherwise XLA would store only the rounded one,
    and compute the other again in each kernel that reads it, with those of later
    sums."""
    del low
    return lax.add(stream, branch)


def _residual_add_jvp(low, primals, tangents):
    (stream, branch), (t, u) = primals, tangents
    out = lax.add(stream, branch)
    if isinstance(u, SymbolicZero):
        return out, t
    rounded = _ROUNDED_BACK.bind(u, low=low)
    if isinstance(t, SymbolicZero):
        return out, rounded
    return out, lax.add(with_cotangent_barrier(t), rounded)


residual_add.defjvp(_residual_add_jvp, symbolic_zeros=True)


def rounded_for_all_readers(x: Any, aval: Any) -> Any:
    """`x`, of which all readers read the same number in the compiled program, too.

    `aval` is that of the result as written: what was low already is left as it is.

    XLA may leave out a rounding to 16 bits that a cast up follows, for one reader and
    not for another: the gradient would then be that of other logits than the loss. What
    `reduce_precision` rounds is rounded for every reader."""
    if x.dtype == aval.dtype or not is_float(x.dtype) or bits(x.dtype) != 16:
        return x
    info = jnp.finfo(x.dtype)
    return _ROUNDED.bind(x, exponent_bits=info.nexp, mantissa_bits=info.nmant)


# `lax.reduce_precision`, of which the derivative rounds nothing: the cotangent is read
# by contractions alone, which take 16 bits. JAX's own rounds it, and that cuts a TPU's
# fusions: what makes the cotangent would be stored instead of fused with its readers.
_ROUNDED = new_primitive(
    "reduce_precision",
    compute=lax.reduce_precision,
    aval=lambda x, **_: x,
    jvp=lambda xs, ts, **params: (_ROUNDED.bind(*xs, **params), ts[0]),
    transpose=lambda ct, x, **_: [ct],
    batch=lambda xs, dims, **params: (_ROUNDED.bind(*xs, **params), dims[0]),
)


def cast_of(var: Any, value: Any, dtype: DType) -> Any:
    """The value of `var` in `dtype`.

    In the author's dtype, it is weakly typed if `var` is."""
    if value.dtype == dtype:
        return value
    is_authors = dtype == var.aval.dtype
    return cast_as(value, var.aval) if is_authors else cast(value, dtype)
