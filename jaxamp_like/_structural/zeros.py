"""Symbolic zeros of derivative rules: which tangents and cotangents are none.

A rule is differentiated by `jax.jvp` and `jax.vjp`, which take and return arrays only.
What an author's rule says of symbolic zeros, or asks for, goes around them."""

import contextlib
from collections.abc import Callable, Iterator, Set
from contextvars import ContextVar
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from .._jax import SymbolicZero, Zero, is_inexact, new_primitive, typeof


def recording_zero_tangents(
    fn: Callable[..., Any], still: set[int]
) -> Callable[..., Any]:
    """`fn` for `jax.jvp`, which makes known which results have a symbolic zero.

    The tangents that `jax.jvp` returns are arrays. What comes first, in and out, is a
    number that moves, so that the rule is asked even if nothing else does."""

    @jax.custom_jvp
    def results(*outs: Any) -> tuple[Any, ...]:
        return outs

    def rule(outs: Any, moves: Any) -> Any:
        zeros = [isinstance(t, SymbolicZero) for t in moves[1:]]
        still.update(i for i, is_zero in enumerate(zeros) if is_zero)
        return outs, moves

    results.defjvp(rule, symbolic_zeros=True)
    return lambda number, *args: results(number, *fn(*args))


def with_placed_results(fn: Callable[..., Any], asks: bool) -> Callable[..., Any]:
    """`fn` for `jax.vjp`: results that have a cotangent, and beside them all that it returns.

    An author who asks for symbolic zeros is given them, as `zero_cotangents` says,
    although the function that `jax.vjp` returns takes arrays only."""

    def placing(*args: Any) -> tuple[list[Any], Any]:
        outs, rest = fn(*args)
        places = [k for k, x in enumerate(outs) if is_inexact(typeof(x))]
        moving = [_PLACED.bind(outs[k], place=k) if asks else outs[k] for k in places]
        return moving, (outs, rest)

    return placing


_zeros: ContextVar[Set[int]] = ContextVar("zeros", default=frozenset())


@contextlib.contextmanager
def zero_cotangents(places: Set[int]) -> Iterator[None]:
    """In here, the results at `places` have no cotangent, whatever is given for it."""
    token = _zeros.set(places)
    try:
        yield
    finally:
        _zeros.reset(token)


def _transposed(ct: Any, x: Any, *, place: int) -> list[Any]:
    return [None if place in _zeros.get() else ct]


# The identity of one result of a function, which knows the place of the result.
_PLACED = new_primitive(
    "amp_placed",
    compute=lambda x, place: x,
    aval=lambda x, place: x,
    jvp=lambda xs, ts, place: (xs[0], _PLACED.bind(ts[0], place=place)),
    transpose=_transposed,
    batch=lambda xs, dims, place: (_PLACED.bind(*xs, place=place), dims[0]),
)


_recorded: ContextVar[set[int] | None] = ContextVar("recorded", default=None)


@contextlib.contextmanager
def recording_cotangents(places: set[int]) -> Iterator[None]:
    """Adds to `places` which operands have a cotangent other than a symbolic zero.

    The function that `jax.vjp` returns gives arrays of zeros for these."""
    token = _recorded.set(places)
    try:
        yield
    finally:
        _recorded.reset(token)


def with_recorded_operands(fn: Callable[..., Any]) -> Callable[..., Any]:
    """`fn` for `jax.vjp`, so that `recording_cotangents` knows of its cotangents."""
    return lambda *args: fn(*(_RECORDED.bind(x, place=k) for k, x in enumerate(args)))


def _record(ct: Any, x: Any, *, place: int) -> list[Any]:
    places = _recorded.get()
    if places is not None and not isinstance(ct, Zero):
        places.add(place)
    return [ct]


# The identity of one operand of a function, which knows the place of the operand.
_RECORDED = new_primitive(
    "amp_recorded",
    compute=lambda x, place: x,
    aval=lambda x, place: x,
    jvp=lambda xs, ts, place: (xs[0], _RECORDED.bind(ts[0], place=place)),
    transpose=_record,
    batch=lambda xs, dims, place: (_RECORDED.bind(*xs, place=place), dims[0]),
)


def instantiated(cotangent: Any) -> Any:
    if not isinstance(cotangent, SymbolicZero):
        return cotangent
    aval: Any = cotangent.aval
    if aval.dtype == jax.dtypes.float0:
        return np.zeros(aval.shape, jax.dtypes.float0)
    return jnp.zeros(aval.shape, aval.dtype)
