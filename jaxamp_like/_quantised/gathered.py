"""Operands that lie on several devices: rounded there, and gathered as rounded numbers.

Rounding before a gather makes the same numbers as rounding after it, if all devices
take the scale of the whole array: its largest magnitude is the largest one of the
parts. So 8 bits are sent, and not 16."""

import functools
from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol, Self, runtime_checkable

import jax
from jax import lax

from .._jax import Eqn, bind_flat
from .._primitives import GATHERING, PLACING, WHOLE_VIEWS
from .._rules import Decision
from .constant import constant

# Views that repeat numbers are left out: of those, more would be moved than is read.
_WHOLE = WHOLE_VIEWS - {"broadcast_in_dim", "tile"} | {"pvary"}


@runtime_checkable
class ByMaxima(Protocol):
    """A rounding by scales that follow from the largest magnitudes of an array.

    What it makes is a named tuple: the numbers, and after them their scales."""

    @property
    def axes(self) -> tuple[int, ...] | None:
        """Those that share a scale, which is then 1 long along them; `None`: all."""
        ...

    def maxima(self, x: Any) -> Any:
        """The largest magnitudes, one for each scale."""
        ...

    def by_maxima(self, x: Any, maxima: Any) -> Any:
        """`x`, rounded by scales that follow from `maxima`."""
        ...

    def _replace(self, *, axes: tuple[int, ...]) -> Self: ...


class GatheredNumbers(NamedTuple):
    """Numbers that are to be made of a value, wherever it comes from.

    Args:
        how: their rounding.
        names: axes of devices over which the value is gathered later on, and whose
            devices share a scale."""

    how: ByMaxima
    names: tuple[str, ...] = ()

    def before(self, eqn: Eqn) -> "GatheredNumbers | None":
        """What to make of the operand of `eqn`, so that moving it gives these numbers.

        It is `None` where that can't be told, or is not to be had."""
        name, axes = eqn.primitive.name, self.how.axes
        if name in GATHERING:
            return self._before_gather(eqn)
        if axes is None or name in PLACING or name == "pvary":
            return self
        if name != "transpose":
            return None
        axes = sorted(eqn.params["permutation"][axis] for axis in axes)
        return self._replace(how=self.how._replace(axes=tuple(axes)))

    def _before_gather(self, eqn: Eqn) -> "GatheredNumbers | None":
        names = eqn.params["axis_name"]
        names = names if isinstance(names, tuple) else (names,)
        in_groups = eqn.params.get("axis_index_groups") is not None
        if in_groups or not all(isinstance(name, str) for name in names):
            return None  # there is no maximum over some devices of an axis
        how, axes = self.how, self.how.axes
        if self._spans(eqn):
            names = tuple(dict.fromkeys((*self.names, *names)))
        else:
            names = self.names
        if axes is not None and not eqn.params["tiled"]:
            new = eqn.params["all_gather_dimension"]
            axes = tuple(axis - (axis > new) for axis in axes if axis != new)
            how = how._replace(axes=axes)
        return GatheredNumbers(how, names)

    def _spans(self, eqn: Eqn) -> bool:
        """Whether numbers from several devices of a gather share a scale."""
        axes = self.how.axes
        return axes is None or eqn.params["all_gather_dimension"] in axes

    def made(self, x: Any) -> Any:
        """These numbers of a value at hand."""
        return jax.tree.map(constant, _made(constant(x), self))

    def moved(self, eqn: Eqn, numbers: Any) -> Any:
        """These numbers, from those that `before` says of the operand of `eqn`."""
        values, *scales = numbers
        if eqn.primitive.name == "sharding_constraint":
            # XLA would else lay the rounding out as its result, and gather before it.
            values = lax.optimization_barrier(values)
        (values,) = bind_flat(eqn.primitive, [values], eqn.params)
        return type(numbers)(values, *(self._moved_scale(eqn, x) for x in scales))

    def _moved_scale(self, eqn: Eqn, scale: Any) -> Any:
        name = eqn.primitive.name
        if self.how.axes is None or name in PLACING or name == "pvary":
            return scale
        if name in GATHERING and self._spans(eqn):
            tiled, new = eqn.params["tiled"], eqn.params["all_gather_dimension"]
            return scale if tiled else lax.expand_dims(scale, [new])
        (scale,) = bind_flat(eqn.primitive, [scale], eqn.params)
        return scale


@functools.partial(jax.jit, static_argnums=1)
def _made(x: Any, numbers: GatheredNumbers) -> Any:
    maxima = numbers.how.maxima(x)
    if numbers.names:
        maxima = lax.pmax(maxima, numbers.names)
    return numbers.how.by_maxima(x, maxima)


def numbers_read(decision: Decision, i: int) -> GatheredNumbers | None:
    """The numbers of operand `i` that a contraction reads, if they can be gathered."""
    quantisers = decision.quantisers
    how = getattr(quantisers[i], "how", None) if i < len(quantisers) else None
    return GatheredNumbers(how) if isinstance(how, ByMaxima) else None


def is_gather(eqn: Eqn) -> bool:
    """Whether an equation may bring an array together that lies on several devices."""
    is_one = len(eqn.invars) == len(eqn.outvars) == 1
    return is_one and eqn.primitive.name in GATHERING | PLACING


def is_whole_view(eqn: Eqn) -> bool:
    """Whether an equation shows all numbers of its operand, each of them once."""
    return len(eqn.invars) == 1 and eqn.primitive.name in _WHOLE


class OnlyForward(NamedTuple):
    """Numbers of an operand that only the forward pass is to read.

    A derivative reads the operand itself, and makes the numbers of that."""

    numbers: Any


def for_derivative(quantised: Sequence[Any]) -> list[Any]:
    """Of operands that were rounded already, what a derivative may read."""
    return [None if isinstance(one, OnlyForward) else one for one in quantised]


def forward_numbers(quantised: Sequence[Any]) -> list[Any]:
    """Of operands that were rounded already, what the forward pass reads."""
    return [one.numbers if isinstance(one, OnlyForward) else one for one in quantised]
