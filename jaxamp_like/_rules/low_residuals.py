"""What is computed in full and kept low for the backward pass."""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax

from .._dtypes import DType, cast, cast_all
from .._jax import SymbolicZero, checkpoint
from .base import author_dtype


def keeping_copies(
    forward: Callable[..., Any],
    again: Callable[..., Any],
    prevent_cse: bool = True,
    mark: Callable[[Any], Any] | None = None,
    policy: Callable[..., bool] | None = None,
) -> Callable[[Sequence[Any], Sequence[Any]], Any]:
    """`forward` as a function of operands and of copies of them, or `None` for none.

    For the backward pass a copy is kept where there is one, and else the operand, which
    `mark` then marks for the policy of a checkpoint. All else is made again there, by
    `again`, which computes what `forward` does, but what `policy` keeps of it. The
    derivative is that of the operands, taken at the copies."""

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

            def moving(*some):
                operands = list(at)
                for i, x in zip(live, some, strict=True):
                    operands[i] = x
                return again(*operands)

            return jax.jvp(moving, tuple(at[i] for i in live), moves)[1]

        return linear

    def jvp(primals, tangents):
        (operands, copies), (moving, _) = primals, tangents
        moves = {i: t for i, t in enumerate(moving) if not isinstance(t, SymbolicZero)}
        pairs = zip(operands, copies, strict=True)
        kept = [x if copy is None else copy for x, copy in pairs]
        kept = kept if mark is None else [mark(x) for x in kept]
        dtypes = tuple(author_dtype(jax.typeof(x)) for x in operands)
        linear = derivative(tuple(moves), dtypes)
        return op(operands, copies), linear(kept, tuple(moves.values()))

    op.defjvp(jvp, symbolic_zeros=True)
    return op


def copies_in(values: Sequence[Any], dtypes: Sequence[DType | None]) -> list[Any]:
    """A copy of each value that has a dtype given, for `keeping_copies`."""
    pairs = zip(values, dtypes, strict=True)
    return [None if dtype is None else cast(x, dtype) for x, dtype in pairs]
