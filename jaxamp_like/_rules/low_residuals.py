"""What is computed in full and kept low for the backward pass."""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax

from .._dtypes import DType, cast_all
from .._jax import SymbolicZero
from .base import author_dtype


def keeping_low(
    forward: Callable[..., Any],
    again: Callable[..., Any],
    low: Sequence[DType | None],
    prevent_cse: bool | Sequence[bool] = True,
    mark: Callable[[Any], Any] | None = None,
) -> Callable[..., Any]:
    """`forward`, differentiated at operands that were rounded to `low`.

    Only these are kept for the backward pass, `mark`ed for a policy if there is one.
    All else is made again there, by `again`, which computes what `forward` does.
    `prevent_cse` is one for all operands, or one for each."""

    is_one = isinstance(prevent_cse, bool)
    among_arguments: Any = prevent_cse if is_one else ([*prevent_cse], True)

    @jax.custom_jvp
    def op(*operands):
        return forward(*operands)

    @functools.cache  # one function, which JAX traces once
    def derivative(live: tuple[int, ...], dtypes: tuple[DType | None, ...]):
        # With `prevent_cse` XLA can't use what the forward pass has in full.
        @functools.partial(jax.checkpoint, prevent_cse=among_arguments)
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
        moves = {
            i: t for i, t in enumerate(tangents) if not isinstance(t, SymbolicZero)
        }
        kept = cast_all(primals, low)
        kept = kept if mark is None else [mark(x) for x in kept]
        dtypes = tuple(author_dtype(jax.typeof(x)) for x in primals)
        linear = derivative(tuple(moves), dtypes)
        return op(*primals), linear(kept, tuple(moves.values()))

    op.defjvp(jvp, symbolic_zeros=True)
    return op
