"""Ties what was compiled to what was decided.

XLA keeps the names of equations, but not always: the name of what a contraction was
fused with may win, loops are unrolled, and equal operations become one. So operations
are tied by the first of several keys under which both programs have one left, the
strictest key first. Contractions that share an operand may become a larger one, which
is told by its FLOPs."""

from collections import defaultdict
from collections.abc import (
    Callable,
    Container,
    Hashable,
    Iterable,
    Iterator,
    Mapping,
    Sequence,
)
from dataclasses import replace
from itertools import chain, combinations
from typing import NamedTuple

from .operations import Operation, equation_of
from .places import named
from .repeated import can_repeat, repeated


class Tied(NamedTuple):
    """Operations of two programs that belong together.

    Args:
        pairs: decided operations, each with the compiled ones that run it.
        gone: decided operations that nothing was compiled for.
        others: compiled operations that belong to no decided one.
        repeated: compiled operations that only repeat what another one computes."""

    pairs: list[tuple[Operation, list[Operation]]]
    gone: list[Operation]
    others: list[Operation]
    repeated: frozenset[Operation]


def tie(decided: Iterable[Operation], compiled: Iterable[Operation]) -> Tied:
    """Ties the operations of the compiled program to those of the decided one."""
    # A compiled multiplication may be a contraction, a part of one, or its scaling: it
    # is tied late, and by its name alone. Decided multiplications are left out.
    decided = [one for one in decided if not one.is_only_multiplied]
    compiled = list(compiled)
    tied = _tied(decided, compiled, {}, {})
    if _is_one_to_one(tied):
        return tied
    return _tied(decided, compiled, repeated(decided), repeated(compiled))


Repeated = Mapping[Operation, Operation]
"""Operations that compute what another one has computed already, with that one."""


def _tied(
    decided: list[Operation],
    compiled: list[Operation],
    written_again: Repeated,
    run_again: Repeated,
) -> Tied:
    found = _Found(decided)
    products, repetitions, after = [], [], []
    for one in compiled:
        if one.is_only_multiplied:
            products.append(one)
        else:
            (repetitions if one in run_again else after).append(one)
    for key in _SURE:
        after = found.by_key(key, after)
    repetitions = found.by_value(repetitions, run_again, written_again)
    after = found.by_merging(after)
    likely = _LIKELY
    if repetitions:  # what is computed twice is sought among what was written twice
        several = {*written_again, *written_again.values()}
        several |= {*run_again, *run_again.values()}
        likely = (*(_together_with(key, several) for key in _LIKELY), *_LIKELY)
    for key in likely:
        after = found.by_key(key, after)
        repetitions = found.by_value(repetitions, run_again, written_again)
    found.by_key(_by_name, products)
    after = found.by_elimination(after)
    repetitions = found.by_value(repetitions, run_again, written_again)
    for key in _SURE:
        repetitions = found.by_key(key, repetitions)
    unknown = found.by_first_run(repetitions, run_again)
    others = found.again([*after, *unknown])
    found.sums_of_sums()
    again = frozenset(repetitions).difference(unknown)
    return Tied(list(found.pairs.items()), list(found.left), others, again)


def _is_one_to_one(tied: Tied) -> bool:
    """Whether each contraction and quantisation runs once, under its own name."""
    pairs = [(one, runs) for one, runs in tied.pairs if can_repeat(one)]
    return not any(map(can_repeat, (*tied.gone, *tied.others))) and all(
        [one.op_name] == [run.op_name for run in runs] for one, runs in pairs
    )


class _Found:
    """What has been tied so far, and the decided operations that are left."""

    def __init__(self, decided: Iterable[Operation]):
        self.left = dict.fromkeys(decided)
        self.pairs: dict[Operation, list[Operation]] = {}
        self.run_by: dict[Operation, Operation] = {}  # the decided one of a compiled

    def by_key(self, key: "Key", compiled: list[Operation]) -> list[Operation]:
        """Ties operations to those that have the same key; returns the others."""
        waiting: dict[Hashable, list[Operation]] = defaultdict(list)
        for one in self.left:
            waiting[key(one)].append(one)
        others = []
        for one in compiled:
            own = key(one)
            if own is None or not waiting[own]:
                others.append(one)
                continue
            closest = _closest(waiting[own], one)
            waiting[own].remove(closest)
            self._tie(closest, one)
        return others

    def by_merging(self, compiled: list[Operation]) -> list[Operation]:
        """Ties what became one, if fewer contractions are compiled than decided.

        Returns:
            The others."""
        others = [one for one in compiled if not self.concatenated(one)]
        for reads_one in (True, False):  # an array in common, or unknown ones
            wanted = sum(one.kind == "contraction" for one in self.left)
            if sum(one.kind == "contraction" for one in others) < wanted:
                others = [one for one in others if not self.merged(one, reads_one)]
        return others

    def concatenated(self, one: Operation) -> bool:
        """Ties a collective to those whose arrays it sends side by side.

        XLA gives it no name. They stand one after the other."""
        if one.kind != "collective" or one.op_name:
            return False
        alike = [c for c in self.left if c.opcode == one.opcode]
        for start in range(len(alike)):
            for stop in range(start + 2, len(alike) + 1):
                some = alike[start:stop]
                if sum(c.elements for c in some) == one.elements:
                    for each in some:
                        self._tie(each, one)
                    return True
        return False

    def merged(self, one: Operation, reads_one: bool) -> bool:
        """Ties a contraction to those whose FLOPs add up to its own.

        At most four are tried together. One of them shares its name, scopes or line,
        and the others stand near that one. Block-scaled contractions stay apart: XLA
        calls a library for each.

        Args:
            one: compiled.
            reads_one: whether they have to be of one pass and read the same array."""
        if one.is_block_scaled:
            return False
        candidates = (c for c in self.left if c.flops and not c.is_block_scaled)
        alike = [c for c in candidates if c.times == one.times]
        nears = [i for i, c in enumerate(alike) if _is_near(c, one)]
        if any(alike[i].flops == one.flops for i in nears):
            return False
        for near in nears if reads_one else nears[:1]:
            for subset in _subsets(alike, near):
                has_flops = sum(c.flops for c in subset) == one.flops
                if has_flops and (not reads_one or _read_one_array(subset)):
                    for each in subset:
                        self._tie(each, one)
                    return True
        return False

    def sums_of_sums(self) -> None:
        """Ties a sum that is left to what became of the sum of its results.

        XLA makes one sum of both, over the axes of both."""
        inner = {one.node: one for one in self.left if one.kind == "reduction"}
        pairs = {}
        for one, runs in self.pairs.items():
            outer = one
            while outer.summed in inner:
                first = inner.pop(outer.summed)
                del self.left[first]
                pairs[first] = runs
                outer = replace(
                    outer,
                    holds=first.holds,
                    reads=first.reads,
                    stored=first.stored,
                    operands=first.operands,
                )
            pairs[outer] = runs
        self.pairs = pairs

    def by_elimination(self, compiled: list[Operation]) -> list[Operation]:
        """Ties contractions without a name of JAX's if as many are left.

        Returns:
            The others."""
        tied: set[Operation] = set()
        for kinds in ((True,), (False,), (True, False)):
            nameless, alike = (
                [c for c in some if c.kind == "contraction" and _is_conv(c) in kinds]
                for some in (
                    [c for c in compiled if not _is_named(c) and c not in tied],
                    self.left,
                )
            )
            if len(nameless) == len(alike):
                self._tie_all(alike, nameless)
                tied.update(nameless)
        return [one for one in compiled if one not in tied]

    def _tie_all(self, alike: list[Operation], compiled: list[Operation]) -> None:
        """Ties as many operations to each other, the surest first."""
        waiting = [*compiled]
        for may_be in (_makes_as_many, _has_numbers_of, lambda *_: True):
            others = []
            for one in waiting:
                left = (c for c in alike if c in self.left and may_be(c, one))
                if closest := next(left, None):
                    self._tie(closest, one)
                else:
                    others.append(one)
            waiting = others

    def again(self, compiled: list[Operation]) -> list[Operation]:
        """Ties what runs a second time, and contractions in a kernel that XLA expanded.

        Returns:
            The others."""
        named: dict[Hashable, list[Operation]] = defaultdict(list)
        for one in self.pairs:
            named[_by_name(one)].append(one)
        routines = [one for one in self.pairs if one.kind == "kernel"]
        routines += [one for one in self.left if one.kind == "kernel"]
        others = []
        for one in compiled:
            alike = named.get(_by_name(one), []) if one.op_name else []
            here = [each for each in alike if each.source == one.source]
            original = _closest(here or alike, one) if alike else None
            if original is None and one.kind == "contraction":
                original = next((r for r in routines if _is_near(r, one)), None)
            if original is None:
                others.append(one)
            else:
                self.left.pop(original, None)
                self.pairs.setdefault(original, []).append(one)
        return others

    def by_value(
        self, compiled: list[Operation], firsts: Repeated, written_again: Repeated
    ) -> list[Operation]:
        """Ties repetitions to decided operations that compute the same.

        Returns:
            The others."""
        others = []
        for one in compiled:
            first = self.run_by.get(firsts[one])
            value = written_again.get(first, first) if first else None
            same = [c for c in self.left if value in (c, written_again.get(c))]
            if value is None or not same:
                others.append(one)
                continue
            named = [c for c in same if c.op_name == one.op_name]
            self._tie(_closest(named or same, one), one)
        return others

    def by_first_run(
        self, compiled: list[Operation], firsts: Repeated
    ) -> list[Operation]:
        """Ties each repetition that was not written twice to what its first run is.

        Returns:
            The others."""
        others = []
        for one in compiled:
            if decided := self.run_by.get(firsts[one]):
                self.pairs[decided].append(one)
            else:
                others.append(one)
        return others

    def _tie(self, decided: Operation, one: Operation) -> None:
        del self.left[decided]
        self.pairs[decided] = [one]
        self.run_by.setdefault(one, decided)


_AROUND = 6  # contractions on either side among which those that became one are sought


def _is_named(one: Operation) -> bool:
    """Whether JAX has named it: XLA's own names tell of no function, as `jit(f)`."""
    return "(" in one.op_name


def _is_conv(one: Operation) -> bool:
    return "conv" in one.opcode.lower()


def _is_near(decided: Operation, one: Operation) -> bool:
    """Whether two operations have a name, its scopes or a line in common."""
    return (
        decided.op_name == one.op_name != ""
        or _parent(decided) == one.op_name != ""
        or _parent(decided) == _parent(one) != ""
        or decided.source == one.source != ""
    )


def _subsets(alike: list[Operation], near: int) -> Iterator[tuple[Operation, ...]]:
    """Two to four operations of which one is at `near`, and the others close to it."""
    around = alike[max(near - _AROUND, 0) : near + _AROUND + 1]
    for subset in chain.from_iterable(combinations(around, n) for n in (2, 3, 4)):
        if alike[near] in subset:
            yield subset


def _read_one_array(contractions: Sequence[Operation]) -> bool:
    """Whether contractions are of one pass and have an operand in common."""
    common = frozenset.intersection(*(one.sources for one in contractions))
    passes = {named(one.op_name).is_transposed for one in contractions}
    return bool(common) and len(passes) == 1


def _closest(candidates: list[Operation], one: Operation) -> Operation:
    """The candidate that reads and makes the same numbers, or else the first."""
    alike = (c for c in candidates if _has_numbers_of(c, one))
    return next(alike, candidates[0])


def _has_numbers_of(one: Operation, other: Operation) -> bool:
    """Whether two operations read and make the same numbers."""
    return one.signature == other.signature


def _makes_as_many(one: Operation, other: Operation) -> bool:
    """Whether two operations read and make the same numbers, and as many."""
    return _has_numbers_of(one, other) and one.results == other.results


Key = Callable[[Operation], Hashable]


def _together_with(key: Key, some: Container[Operation]) -> Key:
    """A key that also says whether an operation is among some."""

    def both(one: Operation) -> Hashable:
        own = key(one)
        return None if own is None else (own, one in some)

    return both


def _parent(one: Operation) -> str:
    return one.op_name.rpartition("/")[0]


def _by_name(one: Operation) -> Hashable:
    return (one.kind, equation_of(one.node) or one.op_name) if one.op_name else None


def _opcode_of_sum(one: Operation) -> str:
    """`reduce` or `reduce-window`, for which XLA has names of its own."""
    return one.opcode if one.kind == "reduction" else ""


def _by_all(one: Operation) -> Hashable:
    if not one.op_name:
        return None
    size = one.tiled_flops, one.elements, one.times
    return (one.kind, one.op_name, one.source, *size)


_SURE: tuple[Key, ...] = (
    # Both gradients of an equation differ in what they make alone.
    lambda one: (_by_all(one), one.results) if one.op_name and one.flops else None,
    _by_all,
    lambda one: (one.kind, one.op_name, one.work) if one.op_name else None,
)
_LIKELY: tuple[Key, ...] = (
    _by_name,
    lambda one: (
        (one.kind, _opcode_of_sum(one), _parent(one), one.work) if one.op_name else None
    ),
    lambda one: (one.kind, one.source, one.work) if one.flops else None,
    # Partitioned, a contraction has fewer FLOPs; transposed, it has another name.
    lambda one: (
        (one.kind, _parent(one), one.source, _is_conv(one))
        if one.flops and _parent(one)
        else None
    ),
    lambda one: (one.kind, one.work, one.results) if one.flops else None,
    lambda one: (one.kind, one.work) if one.flops else None,
    lambda one: (one.kind, _parent(one), _is_conv(one)) if one.flops else None,
    lambda one: (one.kind, one.source, _is_conv(one)) if one.flops else None,
    lambda one: (one.opcode, one.elements) if one.kind == "collective" else None,
    lambda one: (one.kind, one.opcode) if one.kind == "kernel" else None,
)
