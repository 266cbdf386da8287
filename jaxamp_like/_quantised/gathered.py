"""Operands that lie on several devices: rounded there, and gathered as rounded numbers.

Rounding before a gather makes the same numbers as rounding after it, if all devices
take the scale of the whole array: its largest magnitude is the largest one of the
parts. So 8 bits are sent, and not 16."""

import functools
from collections.abc import Iterable, Sequence
from math import prod
from typing import Any, NamedTuple, Protocol, Self, runtime_checkable

import jax
from jax import lax

from .._dtypes import DType
from .._jax import Eqn, bind_flat
from .._magnitudes import largest_over_devices
from .._primitives import GATHERING, PLACING, WHOLE_VIEWS
from .._rules import Decision
from .._rules.constant import constant
from .axes import Axes
from .blocks import Blocks, PowerOfTwoBlocks

# Views that repeat numbers are left out: of those, more would be moved than is read.
_WHOLE = WHOLE_VIEWS - {"broadcast_in_dim", "tile"} | {"pvary"}


@runtime_checkable
class ByMaxima(Protocol):
    """A rounding by scales that follow from the largest magnitudes of an array.

    What it makes is a named tuple: the numbers, and after them their scales."""

    @property
    def dtype(self) -> DType: ...

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

    def with_axes(self, axes: tuple[int, ...]) -> Self:
        """The same of an array in which other axes share a scale."""
        ...


class ScaledNumbers(NamedTuple):
    """Numbers whose scales follow from the maxima of all devices that share them.

    Args:
        how: their rounding.
        names: axes of devices over which the value is gathered later on, and whose
            devices share a scale."""

    how: ByMaxima
    names: tuple[str, ...] = ()

    @property
    def dtype(self) -> DType:
        return self.how.dtype

    @property
    def rounds_parameters_in_full(self) -> bool:
        """Whether a parameter is rounded as it comes, not in the compute dtype."""
        return True

    def before(self, eqn: Eqn) -> "ScaledNumbers | None":
        """What to make of the operand of `eqn`, so that moving it gives these numbers.

        It is `None` where no numbers of the operand do."""
        name, axes = eqn.primitive.name, self.how.axes
        if name in GATHERING:
            return self._before_gather(eqn)
        if axes is None or name in PLACING or name == "pvary":
            return self
        if name != "transpose":
            return None
        return self._along([eqn.params["permutation"][axis] for axis in axes])

    def _before_gather(self, eqn: Eqn) -> "ScaledNumbers | None":
        if (names := _device_axes(eqn)) is None:
            return None  # there is no maximum over some devices of an axis
        if self._spans(eqn):
            names = tuple(dict.fromkeys((*self.names, *names)))
            numbers = self._replace(names=names)
        else:
            numbers = self
        axes = self.how.axes
        return numbers if axes is None else numbers._along(_before_new(eqn, axes))

    def _along(self, axes: Iterable[int]) -> "ScaledNumbers":
        return self._replace(how=self.how.with_axes(tuple(sorted(axes))))

    def _spans(self, eqn: Eqn) -> bool:
        """Whether numbers from several devices of a gather share a scale."""
        axes = self.how.axes
        return axes is None or eqn.params["all_gather_dimension"] in axes

    def made(self, x: Any) -> Any:
        """These numbers of a value at hand."""
        return jax.tree.map(constant, _rounded(constant(x), self.how, self.names))

    def moved(self, eqn: Eqn, numbers: Any) -> Any:
        """These numbers, from those that `before` says of the operand of `eqn`."""
        values, *scales = numbers
        scales = [self._moved_scale(eqn, scale) for scale in scales]
        return type(numbers)(gathered(eqn, values), *scales)

    def _moved_scale(self, eqn: Eqn, scale: Any) -> Any:
        name = eqn.primitive.name
        if self.how.axes is None or name in PLACING or name == "pvary":
            return scale
        if name in GATHERING and self._spans(eqn):
            tiled, new = eqn.params["tiled"], eqn.params["all_gather_dimension"]
            return scale if tiled else lax.expand_dims(scale, [new])
        return gathered(eqn, scale)


@functools.partial(jax.jit, static_argnums=(1, 2))
def _rounded(x: Any, how: ByMaxima, names: tuple[str, ...]) -> Any:
    maxima = how.maxima(x)
    return how.by_maxima(x, largest_over_devices(maxima, names) if names else maxima)


class BlockNumbers(NamedTuple):
    """Numbers in blocks that each have a scale, of which no two devices share one.

    They are laid out as `(batch, rows, summed)`, whatever the order of the array's own
    axes: one that is transposed has the same numbers."""

    how: PowerOfTwoBlocks

    @property
    def dtype(self) -> DType:
        return self.how.dtype

    @property
    def rounds_parameters_in_full(self) -> bool:
        return False

    def before(self, eqn: Eqn) -> "BlockNumbers | None":
        name, axes = eqn.primitive.name, self.how.axes
        if name == "pvary":
            return self
        if name == "transpose":
            order = eqn.params["permutation"]
            return self._with_axes(*([order[x] for x in some] for some in axes.groups))
        if name not in GATHERING or _device_axes(eqn) is None:
            return None
        new, place = eqn.params["all_gather_dimension"], self._place(eqn)
        if axes.groups[place][0] != new:
            return None  # parts of rows lie between each other
        groups = [_before_new(eqn, some) for some in axes.groups]
        shape = eqn.invars[0].aval.shape
        summed = prod(shape[axis] for axis in groups[2])
        if place == 2 and summed % self.how.size != 0:
            return None  # a block of numbers from several devices
        return self._with_axes(*groups)

    def _with_axes(self, batch: Any, free: Any, summed: Any) -> "BlockNumbers":
        kept = tuple((axis, to) for to, axis in enumerate((*batch, *free)))
        return BlockNumbers(self.how.along(Axes(tuple(summed), kept, tuple(batch))))

    def _place(self, eqn: Eqn) -> int:
        """Along which of batch, rows and sums a gather puts its parts together."""
        new = eqn.params["all_gather_dimension"]
        return next(i for i, some in enumerate(self.how.axes.groups) if new in some)

    def made(self, x: Any) -> Any:
        return jax.tree.map(constant, _in_blocks(constant(x), self.how))

    def moved(self, eqn: Eqn, numbers: Any) -> Any:
        parts = numbers.values, numbers.scales
        if eqn.primitive.name in GATHERING:
            params = {"all_gather_dimension": self._place(eqn), "tiled": True}
            bind, params = eqn.primitive.bind, eqn.params | params
            parts = [bind(part, **params) for part in parts]
        return Blocks(*parts, None, eqn.outvars[0].aval.shape, self.how.axes)


@functools.partial(jax.jit, static_argnums=1)
def _in_blocks(x: Any, how: PowerOfTwoBlocks) -> Blocks:
    return how(x)


GatheredNumbers = ScaledNumbers | BlockNumbers
"""Numbers that are to be made of a value before it is gathered."""


def _device_axes(eqn: Eqn) -> tuple[str, ...] | None:
    """The axes of devices that a gather is over; `None` of some devices of an axis."""
    names = eqn.params["axis_name"]
    names = names if isinstance(names, tuple) else (names,)
    in_groups = eqn.params.get("axis_index_groups") is not None
    return None if in_groups or any(not isinstance(x, str) for x in names) else names


def _before_new(eqn: Eqn, axes: Iterable[int]) -> list[int]:
    """Axes of what a gather makes as axes of its operand, which may lack a new one."""
    if eqn.params["tiled"]:
        return [*axes]
    new = eqn.params["all_gather_dimension"]
    return [axis - (axis > new) for axis in axes if axis != new]


def gathered(eqn: Eqn, x: Any) -> Any:
    """What an equation makes of one value of few bits in place of its operand."""
    if eqn.primitive.name == "sharding_constraint":
        # XLA would else lay the rounding out as its result, and gather before it.
        x = lax.optimization_barrier(x)
    (out,) = bind_flat(eqn.primitive, [x], eqn.params)
    return out


def numbers_read(decision: Decision, i: int) -> list[GatheredNumbers]:
    """The numbers of operand `i` that a contraction reads, if they can be gathered.

    The second, if there are two, are those that a gradient reads."""
    quantiser = decision.quantisers[i] if i < len(decision.quantisers) else None
    how, again = (getattr(quantiser, x, None) for x in ("how", "for_gradient"))
    if isinstance(how, PowerOfTwoBlocks):
        return [BlockNumbers(one) for one in (how, again) if one is not None]
    return [ScaledNumbers(how)] if isinstance(how, ByMaxima) else []


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


class ForEachPass(NamedTuple):
    """Numbers of an operand that the forward pass reads, and others for a gradient."""

    forward: Any
    gradient: Any


def for_derivative(quantised: Sequence[Any]) -> list[Any]:
    """Of operands that were rounded already, what a derivative may read."""
    return [None if isinstance(one, OnlyForward) else one for one in quantised]


def forward_numbers(quantised: Sequence[Any]) -> list[Any]:
    """Of operands that were rounded already, what the forward pass reads."""
    return [
        one.numbers
        if isinstance(one, OnlyForward)
        else one.forward
        if isinstance(one, ForEachPass)
        else one
        for one in quantised
    ]
