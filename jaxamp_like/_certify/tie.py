"""Ties what was compiled to what was decided.

XLA keeps the names of equations, but not always: the name of what a contraction was
fused with may win, loops are unrolled, and equal operations become one. So operations
are tied by the first of several keys under which both programs have one left, the
strictest key first. Contractions that share an operand may become a larger one, which
is told by its FLOPs."""

from collections.abc import Callable, Hashable, Iterable
from itertools import chain, combinations
from typing import NamedTuple

from .operations import Operation
from .places import source_of


class Tied(NamedTuple):
    """Operations of two programs that belong together.

    Args:
        pairs: decided operations, each with the compiled ones that run it.
        gone: decided operations that nothing was compiled for.
        others: compiled operations that belong to no decided one."""

    pairs: list[tuple[Operation, list[Operation]]]
    gone: list[Operation]
    others: list[Operation]


def tie(decided: Iterable[Operation], compiled: Iterable[Operation]) -> Tied:
    """Ties the operations of the compiled program to those of the decided one."""
    # A multiplication may be a contraction, and may be a part of one or its scaling.
    found = _Found([one for one in decided if not one.is_only_multiplied])
    compiled = list(compiled)
    after = [one for one in compiled if not one.is_only_multiplied]
    for key in _SURE:
        after = [one for one in after if not found.by_key(key, one)]
    after = [one for one in after if not found.merged(one)]
    for key in _LIKELY:
        after = [one for one in after if not found.by_key(key, one)]
    for one in compiled:
        if one.is_only_multiplied:
            found.by_key(_by_name, one)
    after = [one for one in after if not found.by_elimination(one)]
    after = [one for one in after if not found.again(one)]
    return Tied(list(found.pairs.items()), found.left, after)


class _Found:
    """What has been tied so far, and the decided operations that are left."""

    def __init__(self, decided: list[Operation]):
        self.left = decided
        self.pairs: dict[Operation, list[Operation]] = {}

    def by_key(self, key: "Key", one: Operation) -> bool:
        """Ties a compiled operation to one that is left and has the same key."""
        own = key(one)
        alike = [] if own is None else [c for c in self.left if key(c) == own]
        return self._tied(_closest(alike, one), one) if alike else False

    def merged(self, one: Operation) -> bool:
        """Ties a contraction to those whose FLOPs add up to its own.

        One of them has its name or its line."""
        alike = [c for c in self.left if c.flops and c.times == one.times][:_MOST]
        subsets = chain.from_iterable(combinations(alike, n) for n in (2, 3, 4))
        if not one.flops or any(c.work == one.work and _is_near(c, one) for c in alike):
            return False
        for subset in subsets:
            if sum(c.flops for c in subset) == one.flops:
                if any(_is_near(c, one) for c in subset):
                    return all(self._tied(c, one) for c in subset)
        return False

    def by_elimination(self, one: Operation) -> bool:
        """Ties a contraction without a name, if only one can be meant."""
        is_conv = "conv" in one.opcode.lower()
        alike = [
            c
            for c in self.left
            if c.kind == one.kind == "contraction"
            and ("conv" in c.opcode.lower()) == is_conv
        ]
        is_meant = len(alike) == 1 and not one.op_name
        return is_meant and self._tied(alike[0], one)

    def again(self, one: Operation) -> bool:
        """Ties what runs a second time, and the parts of a library's routine."""
        for first in self.pairs:
            is_part = first.kind == "kernel" and one.kind == "contraction"
            same = first.op_name == one.op_name or (is_part and _is_near(first, one))
            if one.op_name and same and (first.kind == one.kind or is_part):
                self.pairs[first].append(one)
                return True
        return False

    def _tied(self, decided: Operation, one: Operation) -> bool:
        self.left.remove(decided)
        self.pairs[decided] = [one]
        return True


_MOST = 24  # contractions among which those that became one are looked for


def _is_near(decided: Operation, one: Operation) -> bool:
    names = decided.op_name, _parent(decided), source_of(decided.node)
    return any(
        a == b != ""
        for a, b in zip(
            names, (one.op_name, _parent(one), source_of(one.node)), strict=True
        )
    )


def _closest(candidates: list[Operation], one: Operation) -> Operation:
    """The candidate that reads and makes the same numbers, or else the first."""
    alike = [c for c in candidates if c.signature == one.signature]
    return (alike or candidates)[0]


Key = Callable[[Operation], Hashable]


def _parent(one: Operation) -> str:
    return one.op_name.rpartition("/")[0]


def _by_name(one: Operation) -> Hashable:
    return (one.kind, one.op_name) if one.op_name else None


_SURE: tuple[Key, ...] = (
    lambda one: (
        (one.kind, one.op_name, source_of(one.node), one.flops, one.elements, one.times)
        if one.op_name
        else None
    ),
    lambda one: (one.kind, one.op_name, one.work) if one.op_name else None,
)
_LIKELY: tuple[Key, ...] = (
    _by_name,
    lambda one: (one.kind, _parent(one), one.work) if one.op_name else None,
    lambda one: (one.kind, source_of(one.node), one.work) if one.flops else None,
    lambda one: (one.kind, one.work) if one.flops else None,
    lambda one: (one.opcode, one.elements) if one.kind == "collective" else None,
    lambda one: (one.kind, one.opcode) if one.kind == "kernel" else None,
)
