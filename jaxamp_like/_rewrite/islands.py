"""Islands: what is cheap to make again is not kept for the backward pass.

Between contractions lie islands: norms, softmax, activations, gates. Each is bound
inside a `jax.checkpoint` of its own, so that the backward pass keeps what goes into it
and nothing from within. What goes in is low where a contraction made it. A float32 sum
that a contraction's result is part of, such as a residual stream, is no finer than that
result: of it a low copy is kept, from which the backward pass runs the island again,
while the forward pass reads the sum itself.

Here the islands of one jaxpr are found; `bind` binds them. Two steps are in one island
if a value flows between them and as many costly ops lie before the one as before the
other: so no path leaves an island and comes back. Linear steps that lead to an island
stay outside if their result takes no more to keep than what they are made of, as a sum
of two. Those that lead there from one result of a contraction alone (a bias, a factor,
a split) an island makes for itself, and so it does what is made of inputs and constants
alone, such as a mask.

Islands were islands of recomputation first in Chen et al., "Training Deep Nets with
Sublinear Memory Cost", arXiv:1604.06174; that cheap ops are best run again even where
memory is no concern, since reading costs more than computing, is the reason of the
min-cut partitioner of PyTorch's functorch."""

import heapq
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from graphlib import TopologicalSorter
from math import prod
from typing import Any, NamedTuple

from .._dtypes import DType, has_range, lowered
from .._jax import Literal
from .._primitives import LINEAR, RANKING, VIEWS, is_cheap
from .._rules import Demand, Fact, Leaf, author_dtype

Step = Any  # of `planner`, which builds on this module

# Linear in all that they read: the backward pass keeps none of it.
_KEEPING_NOTHING = VIEWS | {"add", "sub", "neg", "concatenate", "pad"}


@dataclass(frozen=True, eq=False)
class Region:
    """Steps that are bound in one `jax.checkpoint`.

    `ins` are the variables that it reads, with the dtypes in which they are kept for
    the backward pass, and `outs` its results, with those in which they leave; `None`
    stands for the dtype that they have."""

    steps: tuple[Step, ...]
    ins: dict[Any, DType | None]
    outs: dict[Any, DType | None]


class Schedule(NamedTuple):
    """Steps and regions in an order that binding can follow.

    `drops` are the variables that each of them is the last to read, `settled` those
    whose cotangents are rounded before they go anywhere."""

    units: tuple[Step | Region, ...]
    drops: tuple[tuple[Any, ...], ...]
    settled: frozenset[Any] = frozenset()


def schedule(
    units: Iterable[Step | Region],
    outvars: Iterable[Any],
    settled: Iterable[Any] = (),
) -> Schedule:
    units = tuple(units)
    seen = set(_variables(outvars))
    drops = []
    for unit in reversed(units):
        read = dict.fromkeys(unit.ins if isinstance(unit, Region) else _reads(unit))
        drops.append(tuple(v for v in read if v not in seen))
        seen.update(read)
    return Schedule(units, tuple(reversed(drops)), frozenset(settled))


def as_island(unit: Step | Region) -> Step | Region:
    """A step of its own as a region, if it may be one and has something to keep."""
    if isinstance(unit, Region) or not _is_cheap(unit):
        return unit
    if not _kept(unit, set(_reads(unit))):
        return unit
    outs = dict.fromkeys(unit.eqn.outvars)
    return Region((unit,), dict.fromkeys(_reads(unit)), outs)


def island_schedule(
    steps: Sequence[Step],
    facts: dict[Any, Fact | None],
    outvars: Sequence[Any],
) -> Schedule:
    """The schedule of a jaxpr's steps, islands put into regions.

    `facts` are those of all its variables."""
    flow = _Flow(steps, facts)
    # How each variable is read outside of islands: known from the end backwards.
    readers: dict[Any, set[DType | None]] = {v: set() for v in facts}

    def read(atoms, dtypes):
        for atom, dtype in zip(atoms, dtypes, strict=True):
            if not isinstance(atom, Literal):
                readers[atom].add(dtype or _held(facts[atom]))

    read(outvars, [None] * len(outvars))
    units: list[Step | Region] = []
    for group in reversed(_in_order(steps, flow.groups())):
        region = _region(group, flow, readers)
        if region is not None:
            read(region.ins, [None] * len(region.ins))
            units.append(region)
            continue
        for step in reversed(group):
            is_read = any(readers[v] for v in step.eqn.outvars)
            if is_read or not _is_cheap(step):
                read(step.eqn.invars, step.decision.reads)
                units.append(step)
    if not any(isinstance(unit, Region) for unit in units):
        return schedule(steps, outvars, flow.settled())
    return schedule(reversed(units), outvars, flow.settled())


def _region(
    group: Sequence[Step],
    flow: "_Flow",
    readers: dict[Any, set[DType | None]],
) -> Region | None:
    """The region of an island, if less is kept with it than without."""
    if group[0] not in flow.depth_of or _mixes_rows(group):
        return None
    outs = {
        v: _border(v, readers[v], flow.facts)
        for step in group
        for v in step.eqn.outvars
        if readers[v]
    }
    steps = [*flow.makers(group), *group]
    # What leads to an island may read what the island makes for itself.
    steps = sorted([*flow.roots_of(steps), *steps], key=flow.number.__getitem__)
    made = {v for step in steps for v in step.eqn.outvars}
    reads = dict.fromkeys(v for step in steps for v in _reads(step) if v not in made)
    paid = [v for v in reads if v in flow.active and v not in flow.free_vars]
    keeps = {v: low for v in paid if (low := _kept_as(flow.facts[v]))}
    if any(step.eqn.primitive.name in RANKING for step in group):
        keeps = {}  # run again from rounded numbers, it might choose otherwise
    if not any(outs.values()) and not any(map(flow.is_rounded, reads)):
        return None  # as its author wrote it, through and through
    gain = sum(_kept(step, flow.active) for step in group)
    gain -= sum(map(flow.kept, paid))
    ins = {v: keeps.get(v) for v in reads}
    return Region(tuple(steps), ins, outs) if gain > 0 else None


def _border(
    v: Any, readers: set[DType | None], facts: dict[Any, Fact | None]
) -> DType | None:
    """The dtype that all readers of an island's result read it in, if not its own."""
    dtype = next(iter(readers)) if len(readers) == 1 else None
    return None if dtype == _held(facts[v]) else dtype


def _kept_as(fact: Fact | None) -> DType | None:
    """The dtype in which an island's input is kept, if not in its own.

    Low if it is no finer than that: a contraction's rounded result is a part of it. And
    if it can't leave the range."""
    if fact is None or fact.coarse is None:
        return None
    low = lowered(fact.dtype, fact.coarse)
    return low if low != fact.dtype and has_range(low, fact.dtype) else None


def _mixes_rows(group: Sequence[Step]) -> bool:
    """Whether an island computes with sums over what other rows hold.

    Such as the statistics of a channel: made again, they are a kernel of their own, for
    which all that goes in must be read once more."""
    sizes: dict[Any, int] = {}  # of what was summed up, for all that is made of the sum
    for step in group:
        eqn = step.eqn
        summed = [sizes[v] for v in _reads(step) if v in sizes]
        if any(_elements(v.aval) >= n for v in eqn.outvars for n in summed):
            return True
        if eqn.primitive.name.startswith("reduce_") and not _is_trailing(eqn):
            summed.append(_elements(eqn.invars[0].aval))
        if summed:
            sizes |= dict.fromkeys(eqn.outvars, max(summed))
    return False


def _is_trailing(eqn: Any) -> bool:
    ndim = eqn.invars[0].aval.ndim
    axes = sorted(eqn.params["axes"])
    return axes == list(range(ndim - len(axes), ndim))


def _in_order(
    steps: Sequence[Step], groups: dict[Step, list[Step]]
) -> list[list[Step]]:
    """Steps one by one and islands as a whole, each after all that it reads."""
    number = {step: i for i, step in enumerate(steps)}
    # An island goes by its first step.
    first = {s: number[groups[s][0]] if s in groups else number[s] for s in steps}
    maker = {v: first[step] for step in steps for v in step.eqn.outvars}
    sorter: TopologicalSorter[int] = TopologicalSorter()
    previous: list[int] = []  # effects happen in the author's order
    for step in steps:
        needed = {maker[v] for v in _reads(step) if v in maker} - {first[step]}
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


class _Flow:
    """What flows through the steps of a jaxpr, and which of them make up islands.

    Attributes:
        facts: of all variables.
        active: variables that a derivative may go through.
        free_vars: those that the backward pass has anyway: inputs, and what is made of
            inputs and constants by moving them.
        free: the steps that make these.
        depth_of: the steps of islands, with the number of costly steps before them."""

    def __init__(self, steps: Sequence[Step], facts: dict[Any, Fact | None]):
        self.facts = facts
        self.free: set[Step] = set()
        self.depth_of: dict[Step, int] = {}
        self.number = {step: i for i, step in enumerate(steps)}
        self.maker: dict[Any, Step] = {v: s for s in steps for v in s.eqn.outvars}
        inputs = [v for v in facts if v not in self.maker]
        self.active = {v for v in inputs if _is_active(facts[v])}
        self.free_vars = {v for v in inputs if _is_free(facts[v])}
        self._parent: dict[Step, Step] = {}
        self._depths = dict.fromkeys(inputs, 0)
        last_effect = 0
        for step in steps:
            depth = max((self._depths[v] for v in _reads(step)), default=0)
            if step.eqn.effects:
                depth = last_effect = max(depth, last_effect) + 1
            self._place(step, depth)

    def _place(self, step: Step, depth: int) -> None:
        operands, outs = list(_reads(step)), step.eqn.outvars
        is_active = any(v in self.active for v in operands)
        if is_active:
            self.active.update(outs)
        cheap = _is_cheap(step)
        if not cheap:
            depth += 1
        elif all(v in self.free_vars for v in operands) and (
            not is_active or step.eqn.primitive.name in VIEWS
        ):
            self.free.add(step)
            self.free_vars.update(outs)
        elif is_active and outs:
            makers = [self.maker[v] for v in operands if v in self.maker]
            inside = [s for s in makers if self.depth_of.get(s) == depth]
            if inside or not self._leads(step):
                self.depth_of[step] = depth
                for other in {self._root(other) for other in inside}:
                    self._parent[other] = step
        self._depths |= dict.fromkeys(outs, depth)

    def _leads(self, step: Step) -> bool:
        """Whether a step's result is as good to keep as what it is made of."""
        if _kept(step, self.active) or _sums(step):
            return False
        (out, *_), operands = step.eqn.outvars, list(_reads(step))
        if step.eqn.primitive.name not in _KEEPING_NOTHING:
            masks = (v for v in operands if v.aval.ndim and v not in self.active)
            if any(self.maker.get(v) in self.free for v in masks):
                return False  # an island makes the mask for itself
        paid = [v for v in operands if v in self.active and v not in self.free_vars]
        total = sum(map(self.kept, paid))
        is_low = _kept_as(self.facts[out]) is not None
        return self.kept(out) < total or (is_low and self.kept(out) == total)

    def is_rounded(self, v: Any) -> bool:
        """Whether a value is low, or a sum that a low one is part of."""
        fact = self.facts[v]
        is_coarse = fact is not None and fact.coarse is not None
        return is_coarse or _is_low(v, self.facts)

    def kept(self, v: Any) -> int:
        """The bytes that it takes to keep a value for an island that reads it."""
        low = _kept_as(self.facts[v])
        return _size(v.aval, low or _held(self.facts[v]))

    def roots_of(self, steps: Sequence[Step]) -> list[Step]:
        """The steps that lead from what is held low to what `steps` read.

        Where one result of a contraction is kept instead of what was made of it by
        steps that read nothing else: a bias added, a constant factor, a split."""
        made = {v for step in steps for v in step.eqn.outvars}
        chains: dict[Any, tuple[int, dict[Step, None]]] = {}
        for v in dict.fromkeys(v for step in steps for v in _reads(step)):
            if v in made or v in self.free_vars or v not in self.active:
                continue
            if found := self._origin(v):
                origin, chain = found
                total, others = chains.get(origin, (0, {}))
                chains[origin] = total + self.kept(v), others | dict.fromkeys(chain)
        lead: dict[Step, None] = {}
        for origin, (size, chain) in chains.items():
            if self.kept(origin) <= size:
                lead |= chain
        found = {*lead, *self.makers([*lead])} - {*steps}
        return sorted(found, key=self.number.__getitem__)

    def _origin(self, v: Any) -> tuple[Any, list[Step]] | None:
        """The low value that `v` is made of, and by which steps."""
        chain: list[Step] = []
        while not _is_low(v, self.facts):
            step = self.maker.get(v)
            if step is None or not _is_cheap(step):
                return None
            paid = {u for u in _reads(step) if u not in self.free_vars} & self.active
            if len(paid) != 1:
                return None
            chain.append(step)
            (v,) = paid
        return (v, chain) if chain else None

    def settled(self) -> Iterator[Any]:
        """Sums of a contraction's result with an input that is smaller: a bias.

        Their cotangent is that of the contraction's result, which is low anyway. The
        bias' gradient is better summed up from that than from a second, wide array."""
        for step in self.number:
            if step.eqn.primitive.name not in ("add", "sub") or not step.run_again:
                continue
            if Demand.FULL not in step.wanted[0]:
                continue  # only contractions read it: its cotangent is low as it is
            (out,), operands = step.eqn.outvars, list(_reads(step))
            low = [v for v in operands if _is_low(v, self.facts)]
            rest = [v for v in operands if v not in low]
            if len(low) == len(rest) == 1 and low[0].aval.shape == out.aval.shape:
                (bias,) = rest
                fact = self.facts[bias]
                is_small = fact is not None and fact.small
                is_small = is_small or _elements(bias.aval) < _elements(out.aval)
                if bias in self.free_vars and is_small:
                    yield out

    def _root(self, step: Step) -> Step:
        root = step
        while root in self._parent:
            root = self._parent[root]
        while step is not root:  # so that the way is short the next time
            above = self._parent[step]
            self._parent[step] = root
            step = above
        return root

    def groups(self) -> dict[Step, list[Step]]:
        """The island of each step that is in one."""
        groups: dict[Step, list[Step]] = {}
        for step in self.depth_of:
            groups.setdefault(self._root(step), []).append(step)
        return {step: group for group in groups.values() for step in group}

    def makers(self, group: Sequence[Step]) -> list[Step]:
        """The free steps that make what a group reads."""
        found: set[Step] = set()
        pending = list(group)
        while pending:
            makers = {self.maker.get(v) for v in _reads(pending.pop())}
            new = (makers & self.free) - found
            found |= new
            pending += new
        return sorted(found, key=self.number.__getitem__)


def _is_low(v: Any, facts: dict[Any, Fact | None]) -> bool:
    fact = facts[v]
    return fact is not None and fact.dtype != author_dtype(v.aval)


def _held(fact: Fact | None) -> DType | None:
    return fact and fact.dtype


def _is_active(fact: Fact | None) -> bool:
    return fact is not None and fact.leaf != Leaf.CONST


def _is_free(fact: Fact | None) -> bool:
    return fact is None or fact.leaf != Leaf.NO


def _is_cheap(step: Step) -> bool:
    """Whether a step may be run twice."""
    if step.eqn.effects:
        return False
    if step.handler is not None and step.handler.may_run_twice:
        return all(_is_cheap(inner) for plan in step.inner for inner in plan.steps)
    return is_cheap(step.eqn) and step.run_again


def _sums(step: Step) -> bool:
    inner = (inner for plan in step.inner for inner in plan.steps)
    return step.eqn.primitive.name == "reduce_sum" or any(map(_sums, inner))


def _kept(step: Step, active: set[Any]) -> int:
    """About how many bytes the backward pass keeps for a step; 0 if it is linear."""
    eqn, name = step.eqn, step.eqn.primitive.name
    varying = [not isinstance(a, Literal) and a in active for a in eqn.invars]
    if not any(varying) or name in LINEAR:
        return 0
    if (name == "mul" and sum(varying) == 1) or (name == "div" and not varying[1]):
        return 0
    if not step.inner:
        facts = step.decision.outs
        pairs = zip(eqn.outvars, facts, strict=True)
        return sum(_size(v.aval, fact and fact.dtype) for v, fact in pairs)
    total = 0
    for plan in step.inner:
        inside = {v for v, varies in zip(plan.invars, varying, strict=True) if varies}
        for inner in plan.steps:
            total += _kept(inner, inside)
            if any(v in inside for v in _reads(inner)):
                inside.update(inner.eqn.outvars)
    return total


def _size(aval: Any, dtype: DType | None) -> int:
    """In bytes; a dimension that is not known yet counts as one."""
    known = (d for d in aval.shape if isinstance(d, int))
    return prod(known) * (dtype or aval.dtype).itemsize


def _elements(aval: Any) -> int:
    """A dimension that is not known yet is taken for one that is longer than one."""
    return prod(d if isinstance(d, int) else 2 for d in aval.shape)


def _reads(step: Step) -> Iterator[Any]:
    return _variables(step.eqn.invars)


def _variables(atoms: Iterable[Any]) -> Iterator[Any]:
    return (atom for atom in atoms if not isinstance(atom, Literal))
