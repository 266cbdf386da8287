"""Symbolic zeros of derivative rules: tangents and cotangents that are known to be 0.

A rule is differentiated by `jax.jvp` and `jax.vjp`, which take and return arrays only.
What an author's rule says of symbolic zeros, or is told of them, bypasses these two."""

import contextlib
from collections.abc import Callable, Set
from contextvars import ContextVar
from typing import Any, TypeVar

import jax
import numpy as np

from .._jax import (
    SymbolicZero,
    Zero,
    is_inexact,
    new_primitive,
    typeof,
    zeros_like_aval,
)
from .._within import within

_T = TypeVar("_T")


def recording_zero_tangents(
    fn: Callable[..., Any], still: set[int]
) -> Callable[..., Any]:
    """`fn` for `jax.jvp`; adds to `still` the results whose tangent is a symbolic zero.

    The tangents that `jax.jvp` returns are arrays. The first argument, and the first
    result, is a number with a tangent: so `rule` is called even if no other has one."""

    @jax.custom_jvp
    def results(*outs: Any) -> tuple[Any, ...]:
        return outs

    def rule(outs: Any, tangents: Any) -> Any:
        zeros = [isinstance(t, SymbolicZero) for t in tangents[1:]]
        still.update(i for i, is_zero in enumerate(zeros) if is_zero)
        return outs, tangents

    results.defjvp(rule, symbolic_zeros=True)
    return lambda number, *args: results(number, *fn(*args))


def with_placed_results(fn: Callable[..., Any], asks: bool) -> Callable[..., Any]:
    """`fn` for `jax.vjp`; returns its float results, and all results beside them.

    A rule that `asks` for symbolic zeros is given those that `zero_cotangents` names,
    although the function that `jax.vjp` returns takes arrays only."""

    def placing(*args: Any) -> tuple[list[Any], Any]:
        outs, rest = fn(*args)
        places = [k for k, x in enumerate(outs) if is_inexact(typeof(x))]
        placed = [_RESULT.bind(outs[k], place=k) if asks else outs[k] for k in places]
        return placed, (outs, rest)

    return placing


def with_recorded_operands(fn: Callable[..., Any]) -> Callable[..., Any]:
    """`fn` for `jax.vjp`; `recording_cotangents` learns of its operands' cotangents."""
    return lambda *args: fn(*(_OPERAND.bind(x, place=k) for k, x in enumerate(args)))


def zero_cotangents(places: Set[int]) -> contextlib.AbstractContextManager[None]:
    """In here, the results at `places` have no cotangent, whatever is given for it."""
    return within(_zeros, places)


def recording_cotangents(places: set[int]) -> contextlib.AbstractContextManager[None]:
    """Adds to `places` which operands have a cotangent other than a symbolic zero.

    For the others, the function that `jax.vjp` returns gives arrays of zeros."""
    return within(_recorded, places)


_zeros: ContextVar[Set[int]] = ContextVar("zeros", default=frozenset())
_recorded: ContextVar[set[int] | None] = ContextVar("recorded", default=None)


def _unless_zero(ct: Any, place: int) -> Any:
    return None if place in _zeros.get() else ct


def _recording(ct: Any, place: int) -> Any:
    places = _recorded.get()
    if places is not None and not isinstance(ct, Zero):
        places.add(place)
    return ct


def _identity(name: str, of_cotangent: Callable[[Any, int], Any]) -> Any:
    """An identity primitive with a parameter `place`; `of_cotangent` transposes it."""
    made = new_primitive(
        name,
        compute=lambda x, place: x,
        aval=lambda x, place: x,
        jvp=lambda xs, ts, place: (xs[0], made.bind(ts[0], place=place)),
        transpose=lambda ct, x, *, place: [of_cotangent(ct, place)],
        batch=lambda xs, dims, place: (made.bind(*xs, place=place), dims[0]),
    )
    return made


_RESULT = _identity("amp_placed", _unless_zero)
_OPERAND = _identity("amp_recorded", _recording)


def instantiated(cotangent: Any) -> Any:
    return zeros(cotangent.aval) if isinstance(cotangent, SymbolicZero) else cotangent


def zeros(aval: Any) -> Any:
    """An array of zeros of a type of tangents, which may be float0."""
    if aval.dtype == jax.dtypes.float0:
        return np.zeros(aval.shape, jax.dtypes.float0)
    return zeros_like_aval(aval)
