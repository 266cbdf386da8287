"""Functions that compute in full and keep low copies for the backward pass."""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax

from .._dtypes import DType, cast, cast_all
from .._jax import SymbolicZero, checkpoint, is_inexact
from .base import author_dtype


def with_low_residuals(
    forward: Callable[..., Any],
    recompute: Callable[..., Any],
    prevent_cse: bool = True,
    mark_saved: Callable[[Any], Any] | None = None,
    policy: Callable[..., bool] | None = None,
    holds_rules: bool = False,
) -> Callable[[Sequence[Any], Sequence[Any]], Any]:
    """`forward` as a function of operands and of their copies, `None` where none is.

    For the backward pass a copy is kept where there is one, and else the operand;
    `mark_saved` then marks each for the policy of a checkpoint. The backward pass makes
    all else again by `recompute`, which computes what `forward` does, except what
    `policy` keeps of it. The derivative is by the operands, and taken at the copies.

    Where `forward` `holds_rules` (derivative rules of an author's), the rules return a
    value beside the first derivative, and a second derivative is that of this value, as
    in JAX."""

    @jax.custom_jvp
    def op(operands, copies):
        del copies
        return forward(*operands)

    @functools.cache  # one function, which JAX traces once
    def derivative(live: tuple[int, ...], dtypes: tuple[DType | None, ...]):
        # With `prevent_cse` XLA can't use what the forward pass has in full.
        @functools.partial(checkpoint, prevent_cse=prevent_cse, policy=policy)
        def linear(kept, moves):
            at = cast_all(kept, dtypes)
            moving = of_some(recompute, live, at)
            return jax.jvp(moving, tuple(at[i] for i in live), moves)[1]

        return linear

    @functools.cache
    def differentiated_once():
        if not holds_rules:
            return op
        fns = by_rules(forward), by_rules(recompute)
        return with_low_residuals(*fns, prevent_cse, mark_saved, policy, holds_rules)

    def jvp(primals, tangents):
        (operands, copies), (moving, _) = primals, tangents
        moves = {i: t for i, t in enumerate(moving) if not isinstance(t, SymbolicZero)}
        pairs = zip(operands, copies, strict=True)
        kept = [x if copy is None else copy for x, copy in pairs]
        kept = kept if mark_saved is None else [mark_saved(x) for x in kept]
        dtypes = tuple(author_dtype(jax.typeof(x)) for x in operands)
        linear = derivative(tuple(moves), dtypes)
        value = differentiated_once()(operands, copies)
        return value, linear(kept, tuple(moves.values()))

    op.defjvp(jvp, symbolic_zeros=True)
    return op


def by_rules(fn: Callable[..., Any]) -> Callable[..., Any]:
    """`fn`, whose value is the one that its derivative rules return."""

    def run(*operands):
        live = [i for i, x in enumerate(operands) if is_inexact(jax.typeof(x))]
        moving = of_some(fn, live, operands)
        return jax.linearize(moving, *(operands[i] for i in live))[0]

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
