"""Steps in an order that binding can follow, and what each is the last to read."""

import heapq
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from graphlib import TopologicalSorter
from types import MappingProxyType
from typing import Any, NamedTuple

from ..._dtypes import DType
from ..._jax import variables
from ..._rules.low_bits import LowBits
from ..._structural.remat_mode import RematMode
from ..shared import shared
from .cost import Step


@dataclass(frozen=True, eq=False)
class Region:
    """Steps that are bound in one `jax.checkpoint`.

    `ins` are the variables that it reads, with the dtypes in which they are kept for
    the backward pass, and `outs` its results, with those in which they leave; `None`
    stands for the dtype that they have. `sharded` are those of `ins` that lie on
    several devices: the backward pass uses what was gathered for the forward pass. A
    region that `ends_in_loss` ends in the loss: XLA may use again what the forward pass
    made. Of `ins`, those of `in_8_bits` are kept so. Where it
    `keeps_reductions`, statistics of an array are not made again."""

    steps: tuple[Step, ...]
    ins: dict[Any, DType | None]
    outs: dict[Any, DType | None]
    sharded: frozenset[Any] = frozenset()
    ends_in_loss: bool = False
    in_8_bits: dict[Any, LowBits] = field(default_factory=dict)
    keeps_reductions: bool = False

    @property
    def recomputed_mode(self) -> RematMode:
        """How its steps are bound for the backward pass."""
        if self.keeps_reductions:
            return RematMode.SAVE_REDUCTIONS
        return RematMode.SAVE_STATISTICS


class Schedule(NamedTuple):
    """Steps and regions in an order that binding can follow.

    `last_reads` are the variables that each of them is the last to read.
    `rounded_cotangents` has the variables whose cotangents are rounded once: before
    they go anywhere or, where a number is given, only for that operand of a sum.
    `shared` are the variables of which JAX adds up several cotangents: they are read
    more than once, and not in disjoint parts. `kept_whole` are those that a region
    keeps for the backward pass, and not in 8 bits."""

    units: tuple[Step | Region, ...] = ()
    last_reads: tuple[tuple[Any, ...], ...] = ()
    rounded_cotangents: Mapping[Any, int | None] = MappingProxyType({})
    shared: frozenset[Any] = frozenset()
    kept_whole: frozenset[Any] = frozenset()

    def in_loop(self) -> "Schedule":
        """The same for the body of a loop.

        Cotangents with the number of an operand are rounded by `residual_add`, which
        pays in straight-line code, where chains of sums are long."""
        found = self.rounded_cotangents.items()
        return self._replace(rounded_cotangents={v: i for v, i in found if i is None})


def schedule(
    units: Iterable[Step | Region],
    outvars: Iterable[Any],
    cotangents: Mapping[Any, int | None] = MappingProxyType({}),
) -> Schedule:
    units = tuple(units)
    readers: dict[Any, list[Any]] = {}
    for v in variables(outvars):
        readers.setdefault(v, []).append(None)
    drops = []
    for unit in reversed(units):
        is_region = isinstance(unit, Region)
        read = list(unit.ins) if is_region else unit.variables_read
        drops.append(tuple(v for v in dict.fromkeys(read) if v not in readers))
        for v in read:
            readers.setdefault(v, []).append(None if is_region else unit.eqn)
    return Schedule(units, tuple(reversed(drops)), cotangents, shared(readers))


def in_order(steps: Sequence[Step], groups: dict[Step, list[Step]]) -> list[list[Step]]:
    """Steps one by one and regions as a whole, each after all that it reads."""
    number = {step: i for i, step in enumerate(steps)}
    # A region goes by its first step.
    first = {s: number[groups[s][0]] if s in groups else number[s] for s in steps}
    maker = {v: first[step] for step in steps for v in step.eqn.outvars}
    sorter: TopologicalSorter[int] = TopologicalSorter()
    previous: list[int] = []  # effects happen in the author's order
    for step in steps:
        needed = {maker[v] for v in step.variables_read if v in maker} - {first[step]}
        if step.eqn.effects:
            needed.update(previous)
            previous = [first[step]]
        sorter.add(first[step], *needed)
    sorter.prepare()
    ready: list[int] = []
    order: list[list[Step]] = []
    while sorter.is_active():
        for i in sorter.get_ready():
            heapq.heappush(ready, i)
        i = heapq.heappop(ready)
        order.append(groups.get(steps[i], [steps[i]]))
        sorter.done(i)
    return order
