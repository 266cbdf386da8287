"""How an operand becomes numbers of 8 bits, whatever it is contracted with.

So it can be done once for many contractions: before a loop that reads a weight in each
of its iterations. See `_rewrite.ahead`."""

import functools
from typing import Any, NamedTuple

import jax

from .constant import constant
from .formats import Format, Scaled, quantised
from .integers import Integers, rounded


class AsFloat8(NamedTuple):
    """Numbers of a format, and their scale."""

    fmt: Format

    def __call__(self, x: Any) -> Scaled:
        return quantised(x, self.fmt)


class AsInt8(NamedTuple):
    """Integers, and the multipliers of their rows; see `rounded`."""

    axes: tuple[int, ...]
    epsilon: float
    largest: float | None = None
    is_weight: bool = False

    def __call__(self, x: Any) -> Integers:
        return rounded(x, *self)


Rounding = AsFloat8 | AsInt8


class Alone(NamedTuple):
    """A rounding before the readers, which have derivatives of their own."""

    how: Rounding

    def __call__(self, x: Any) -> Any:
        return jax.tree.map(constant, _made(constant(x), self.how))


@functools.partial(jax.jit, static_argnums=1)
def _made(x: Any, how: Rounding) -> Any:
    return how(x)
