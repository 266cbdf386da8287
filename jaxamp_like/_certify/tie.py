"""Ties what was compiled to what was decided.

XLA keeps the names of equations, but not always: the name of what a contraction was
fused with may win, loops are unrolled, and equal operations become one. So operations
are tied by the first of several keys under which both programs have one left, the
strictest key first. Contractions that share an operand may become a larger one, which
is told by its FLOPs."""

from collections import defaultdict
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
    before, after = list(decided), list(compiled)
    found: dict[Operation, list[Operation]] = {}
    for key in _KEYS:
        waiting = _grouped(before, key)
        left = []
        for one in after:
            candidates = waiting.get(key(one), [])
            if candidates and key(one) is not None:
                first = _closest(candidates, one)
                candidates.remove(first)
                before.remove(first)
                found[first] = [one]
            else:
                left.append(one)
        after = left
    after = [one for one in after if not _ties_merged(found, before, one)]
    after = _duplicates(found, after)
    return Tied(list(found.items()), before, after)


def _ties_merged(
    found: dict[Operation, list[Operation]], left: list[Operation], one: Operation
) -> bool:
    """Ties a contraction to those of one line whose FLOPs add up to its own, if any."""
    line = source_of(one.node)
    alike = [c for c in left if c.flops and source_of(c.node) == line]
    subsets = chain.from_iterable(combinations(alike[:_MOST], n) for n in (2, 3))
    merged = next((s for s in subsets if sum(c.work for c in s) == one.work), ())
    for each in merged:
        left.remove(each)
        found[each] = [one]
    return bool(merged)


_MOST = 32  # contractions of a line among which those that became one are looked for


def _duplicates(
    found: dict[Operation, list[Operation]], left: list[Operation]
) -> list[Operation]:
    """Adds what runs a second time to its first; returns the others."""
    first = {(one.kind, one.op_name): one for one in reversed(found) if one.op_name}
    others = []
    for one in left:
        original = first.get((one.kind, one.op_name))
        if original is None:
            others.append(one)
        else:
            found[original].append(one)
    return others


def _closest(candidates: list[Operation], one: Operation) -> Operation:
    """The candidate that reads and makes the same numbers, or else the first."""
    alike = [c for c in candidates if c.signature == one.signature]
    return (alike or candidates)[0]


Key = Callable[[Operation], Hashable]


def _grouped(
    operations: Iterable[Operation], key: Key
) -> dict[Hashable, list[Operation]]:
    groups: dict[Hashable, list[Operation]] = defaultdict(list)
    for one in operations:
        groups[key(one)].append(one)
    return groups


def _parent(one: Operation) -> str:
    return one.op_name.rpartition("/")[0]


_KEYS: tuple[Key, ...] = (
    lambda one: (one.kind, one.op_name, one.flops, one.times) if one.op_name else None,
    lambda one: (one.kind, one.op_name, one.work) if one.op_name else None,
    lambda one: (one.kind, one.op_name) if one.op_name else None,
    lambda one: (one.kind, _parent(one), one.work) if one.op_name else None,
    lambda one: (one.kind, source_of(one.node), one.work) if one.flops else None,
    lambda one: (one.kind, one.work) if one.flops else None,
    lambda one: (one.kind, one.reads) if one.flops and not one.op_name else None,
)
