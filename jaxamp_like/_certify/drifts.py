"""Says how a compiled operation differs from the one that was decided."""

from collections.abc import Iterator, Sequence
from dataclasses import replace

from .._hlo.graph import CalledComputation, Node
from .._hlo.numbers import NONE, Numbers, bits_needed, of_dtype, union
from .._hlo.text import is_float
from .operations import Operation

DROPPED = "cast dropped"
ADDED = "cast added"
REDUCED_LOW = "rounded result"
WIDE = "sent wide"
KEPT_WIDE = "kept wide"
WRITTEN_WIDE = "written wide"
DUPLICATED = "duplicated"
EMULATED = "emulated"
EXCESS = "excess precision"
UNREAD = "constants unread"
UNDECIDED = "undecided"
GONE = "gone"

MEANINGS = {
    DROPPED: "XLA computes with more precise operands than was decided",
    ADDED: "XLA rounds operands that were to be read as they are",
    REDUCED_LOW: "XLA adds up or returns in fewer bits than was decided",
    WIDE: "more bytes are sent than the numbers need",
    KEPT_WIDE: "more bytes are kept for the backward pass than was decided",
    WRITTEN_WIDE: "more bytes are written to memory than was decided",
    DUPLICATED: "XLA runs it more often than it was written",
    EMULATED: "operands have the numbers that were decided, but are stored wider",
    EXCESS: "XLA adds up more precise numbers than was decided: it left out a rounding",
    UNREAD: "an operand is a constant that XLA computed ahead, of unknown numbers",
    UNDECIDED: "no equation is known that it was made for",
    GONE: "there is no such operation: it is unused, constant, merged, or written out",
}
"""What is found in a compiled program, and what it means."""

SUMS = frozenset({"all-reduce", "reduce-scatter"})
"""Collectives that add up: they compute, rather than send what is there."""

NOT_DRIFTS = frozenset({EMULATED, EXCESS, UNREAD, GONE})
"""What is reported, but does not make a certificate fail."""


def found(one: Operation, runs: Sequence[Operation]) -> Iterator[str]:
    """The drifts of an operation.

    Args:
        one: as it was decided.
        runs: what was compiled for it."""
    runs = list(_united(runs))
    for run in runs:
        yield from _of_reading(one, run)
        # A collective that only moves data does not round; its readers do.
        computes = one.kind != "collective" or run.opcode in SUMS
        if computes and (_makes_low(one, run) or adds_low(one, run)):
            yield REDUCED_LOW
        if one.kind == "contraction" and _is_emulated(one, run):
            yield EMULATED
        if one.kind == "collective":
            yield from of_sending(run, _stored(one.stored[0]))
    if one.kind in ("contraction", "quantisation") and _is_run_again(one, runs):
        yield DUPLICATED


def _united(runs: Sequence[Operation]) -> Iterator[Operation]:
    """The runs, where those in different branches of a conditional count as one.

    XLA may move an operation into branches, of which one is chosen."""
    branches: dict[Node | Operation, list[tuple[Operation, CalledComputation]]] = {}
    for run in runs:
        branch = _branch_around(run.node)
        choice = run if branch.caller is None else branch.caller
        branches.setdefault(choice, []).append((run, branch))
    for some in branches.values():
        ours = [run for run, _ in some]
        if len(some) < 2 or len({branch for _, branch in some}) < len(some):
            yield from ours
            continue
        reads = tuple(map(union, zip(*(run.reads for run in ours), strict=False)))
        makes = union(run.makes for run in ours)
        yield replace(ours[0], reads=reads, makes=makes, operands=())


def _branch_around(node: Node) -> CalledComputation:
    """The branch of a conditional that an instruction is in, or else the program."""
    body = node.body
    while body.caller is not None and body.caller.one.opcode != "conditional":
        body = body.caller.body
    return body


def together(one: Operation, others: Sequence[Operation]) -> Operation:
    """An operation, as if it read what others read as well that became one with it."""
    holds, reads = one.holds, one.reads
    for other in others:
        ways = [
            tuple(union(pair) for pair in zip(holds, other.holds[::step], strict=False))
            for step in (1, -1)
        ]
        step = 1 if _size(ways[0]) <= _size(ways[1]) else -1
        holds = ways[0] if step == 1 else ways[1]
        pairs = zip(reads, other.reads[::step], strict=False)
        reads = tuple(union(pair) for pair in pairs)
    return replace(one, holds=holds, reads=reads)


def _size(sets: Sequence[Numbers]) -> int:
    return sum(each.exponent + each.mantissa for each in sets)


def _makes_low(one: Operation, run: Operation) -> bool:
    """Whether the result of a run has fewer bits than was decided and is needed."""
    # Only TPUs round the result of a sum where they add up.
    is_strict = one.kind == "reduction" and run.platform != "tpu"
    if is_strict and not one.makes.are_in(run.makes):
        return True
    return bool(run.makes.name) and not one.needed.are_in(run.left)


def adds_low(one: Operation, run: Operation) -> bool:
    """Whether a run adds up numbers that have fewer bits than was decided."""
    return bool(run.adds_in.name) and not one.adds_in.are_in(run.adds_in)


def _of_reading(one: Operation, run: Operation) -> Iterator[str]:
    """Whether operands are rounded less or more. XLA may exchange the operands."""
    told = list(_of_operands(one, run))
    if told:
        crossed = replace(run, reads=run.reads[::-1], operands=run.operands[::-1])
        told = min(told, list(_of_operands(one, crossed)), key=len)
    yield from told


def _of_operands(one: Operation, run: Operation) -> Iterator[str]:
    if not all(map(Numbers.are_in, run.reads, one.holds)):
        if all(map(Numbers.are_in, run.surely, one.holds)):
            yield UNREAD
        else:
            # A sum of what was not rounded is nearer to the sum of the exact numbers.
            # CPUs have no collectives of 16 bits.
            is_emulated = one.kind == "collective" and run.platform == "cpu"
            is_nearer = one.kind == "reduction" or is_emulated
            yield EXCESS if is_nearer else DROPPED
    # What only moves data may be rounded before as well as after.
    is_move = one.kind == "collective" and run.opcode not in SUMS
    if is_move and all(map(one.makes.are_in, run.reads)):
        return
    # Of a constant, nothing but its literal is known.
    if not all(
        b.are_in(a) or not a.name for a, b in zip(run.reads, one.reads, strict=False)
    ):
        yield ADDED


def _is_emulated(one: Operation, run: Operation) -> bool:
    """Whether operands are stored wider than was decided and their numbers need."""
    if run.arithmetic or sorted(run.stored) == sorted(one.stored):
        return False
    return any(
        read.are_in(stored) and read != stored and read.name
        for read, stored in zip(run.reads, map(_stored, run.stored), strict=True)
    )


def of_sending(run: Operation, decided: Numbers) -> Iterator[str]:
    """Whether a collective sends more bits than its numbers need, or its readers read.

    Sums over devices need the bits that were decided. CPUs have no collectives of 16
    bits.

    Args:
        run: as it was compiled.
        decided: the numbers that were to be added up; `NONE` if they are not known."""
    sent = _stored(run.stored[0])
    needed = run.makes if run.makes.are_in(run.reads[0]) else run.reads[0]
    if run.opcode in SUMS:
        needed = decided if decided.name else union([run.makes, *run.reads])
    is_less = needed.are_in(sent) and bits_needed(needed) < bits_needed(sent)
    if needed.name and is_less:
        yield EMULATED if run.platform == "cpu" else WIDE


def _is_run_again(one: Operation, runs: Sequence[Operation]) -> bool:
    """Whether it is known that something runs more often than it was written."""
    count = sum(run.times for run in runs)
    return (
        one.is_counted
        and count > one.times
        and sum(run.work for run in runs) > one.work
    )


def _stored(dtype: str) -> Numbers:
    """The numbers of a floating dtype; `NONE` for other dtypes."""
    return of_dtype(dtype) if is_float(dtype) else NONE
