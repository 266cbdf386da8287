"""Functions that compute in full and keep low copies for the backward pass."""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax

from .._dtypes import DType, cast, cast_all
from .._jax import SymbolicZero, checkpoint, is_inexact
from .base import author_dtype
from .low_bits import Copy, stand_in


def with_low_residuals(
    forward: Callable[..., Any],
    recompute: Callable[..., Any],
    prevent_cse: bool = True,
    mark_saved: Callable[[Any], Any] | None = None,
    policy: Callable[..., bool] | None = None,
    holds_rules: bool = False,
    is_apart: bool = False,
) -> Callable[[Sequence[Any], Sequence[Any]], Any]:
    """`forward` as a function `(operands, copies)`, which keeps the copies.

    A copy is an array of a lower dtype, a `Copy` in 8 bits, or `None`. The backward
    pass is given each copy, and where it is `None` the operand. From these it computes
    all else again by `recompute`, which computes what `forward` does. The derivative is
    with respect to the operands, and evaluated at the copies.

    Args:
        forward: computes from the operands.
        recompute: computes the same, in the backward pass.
        prevent_cse: as of `jax.checkpoint`.
        mark_saved: marks what is kept, for the policy of a checkpoint around this.
        policy: which results within `recompute` are kept as well.
        holds_rules: whether `forward` holds derivative rules of an author's. Such a
            rule returns a value beside the first derivative, and as in JAX, a second
            derivative is that of this value.
        is_apart: whether a copy in 8 bits is decoded only when the backward pass reads
            it."""

    @jax.custom_jvp
    def op(operands, copies):
        del copies
        return forward(*operands)

    @functools.cache  # one function, which JAX traces once
    def derivative(
        active: tuple[int, ...], dtypes: tuple[DType | None, ...], has_copies: bool
    ):
        def linear(residuals, tangents):
            read = [stand_in(*x) if _is_pair(x) else x for x in residuals]
            at = cast_all(read, dtypes)
            fn = of_some(recompute, active, at)
            return jax.jvp(fn, tuple(at[i] for i in active), tangents)[1]

        # Without a barrier, XLA would use values of the forward pass, or decode copies
        # early and keep the wide numbers until they are read.
        waits = prevent_cse or (is_apart and has_copies)
        return checkpoint(linear, prevent_cse=waits, policy=policy)

    @functools.cache
    def differentiated_once():
        if not holds_rules:
            return op
        fns = by_rules(forward), by_rules(recompute)
        return with_low_residuals(
            *fns, prevent_cse, mark_saved, policy, holds_rules, is_apart
        )

    def jvp(primals, tangents):
        (operands, copies), (of_operands, _) = primals, tangents
        ts = {
            i: t for i, t in enumerate(of_operands) if not isinstance(t, SymbolicZero)
        }
        pairs = zip(operands, copies, strict=True)
        mark = mark_saved or (lambda x: x)
        residuals = [_residual(x, copy, mark) for x, copy in pairs]
        dtypes = tuple(author_dtype(jax.typeof(x)) for x in operands)
        linear = derivative(tuple(ts), dtypes, any(map(_is_pair, residuals)))
        value = differentiated_once()(operands, copies)
        return value, linear(residuals, tuple(ts.values()))

    op.defjvp(jvp, symbolic_zeros=True)
    return op


def _residual(x: Any, copy: Any, mark_saved: Callable[[Any], Any]) -> Any:
    """What is kept of an operand: itself, its copy, or both where `stand_in` reads."""
    if isinstance(copy, Copy):
        return x, jax.tree.map(mark_saved, copy)
    return mark_saved(x if copy is None else copy)


def _is_pair(residual: Any) -> bool:
    return isinstance(residual, tuple)


def by_rules(fn: Callable[..., Any]) -> Callable[..., Any]:
    """`fn`, whose value is the one that its derivative rules return."""

    def run(*operands):
        active = [i for i, x in enumerate(operands) if is_inexact(jax.typeof(x))]
        primals = (operands[i] for i in active)
        return jax.linearize(of_some(fn, active, operands), *primals)[0]

    return run


def of_some(
    fn: Callable[..., Any], which: Sequence[int], operands: Sequence[Any]
) -> Callable[..., Any]:
    """`fn` as a function of the operands `which`; the others are as in `operands`."""

    def of(*some):
        changed = dict(zip(which, some, strict=True))
        return fn(*(changed.get(i, x) for i, x in enumerate(operands)))

    return of


def low_copies(values: Sequence[Any], dtypes: Sequence[DType | None]) -> list[Any]:
    """A copy of each value for which a dtype is given, for `with_low_residuals`."""
    pairs = zip(values, dtypes, strict=True)
    return [None if dtype is None else cast(x, dtype) for x, dtype in pairs]
