"""Where XLA has to be kept from moving what is bound in low precision."""

from collections.abc import Callable
from typing import Any

from jax import lax


def fenced(name: str, bind: Callable[..., Any]) -> Callable[..., Any]:
    """`bind` of a primitive `name` in a low dtype, with barriers where XLA needs them.

    XLA's compiler for GPUs moves a `ppermute` from the end of a loop's body to where
    the next iteration begins, past casts as well; the carry keeps its dtype, so the
    program no longer verifies (jaxlib 0.10.2, the pass collective-permute-motion). A
    barrier stands on either side, since the backward pass runs the other way."""
    if name != "ppermute":
        return bind
    fence = lax.optimization_barrier
    return lambda *operands: fence(bind(*map(fence, operands)))
