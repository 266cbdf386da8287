"""Says how a compiled operation differs from the one that was decided."""

from collections.abc import Iterator, Sequence
from dataclasses import replace

from .._hlo.numbers import Numbers, of_dtype
from .operations import Operation

DROPPED = "cast dropped"
ADDED = "cast added"
REDUCED_LOW = "rounded result"
WIDE = "sent wide"
DUPLICATED = "duplicated"
EMULATED = "emulated"
UNDECIDED = "undecided"
GONE = "gone"

MEANINGS = {
    DROPPED: "XLA computes with more precise operands than was decided",
    ADDED: "XLA rounds operands that were to be read as they are",
    REDUCED_LOW: "XLA adds up or returns in fewer bits than was decided",
    WIDE: "more bytes are sent than the numbers need",
    DUPLICATED: "XLA runs it more often than it was written",
    EMULATED: "operands have the numbers that were decided, but are stored wider",
    UNDECIDED: "no equation is known that it was made for",
    GONE: "nothing was compiled for it: it is unused, constant, or merged with another",
}
"""What is found in a compiled program, and what it means."""

SUMS = frozenset({"all-reduce", "reduce-scatter"})
"""Collectives that add up: they compute, rather than send what is there."""

NOT_DRIFTS = frozenset({EMULATED, UNDECIDED, GONE})
"""What leaves the numbers and the bytes as they were decided."""


def found(one: Operation, runs: Sequence[Operation]) -> Iterator[str]:
    """The drifts of an operation.

    Args:
        one: as it was decided.
        runs: what was compiled for it."""
    for run in runs:
        if one.kind not in ("reduction", "quantisation"):
            yield from _of_reading(one, run)
        # What is sent as it is can only be rounded by those that read it.
        computes = one.kind != "collective" or run.opcode in SUMS
        if computes and run.makes.name and not one.makes.are_in(run.makes):
            yield REDUCED_LOW
        if one.kind == "contraction" and _is_emulated(run):
            yield EMULATED
        if one.kind == "collective":
            yield from of_sending(run)
    if one.kind in ("contraction", "quantisation") and _is_run_again(one, runs):
        yield DUPLICATED


def _of_reading(one: Operation, run: Operation) -> Iterator[str]:
    """Whether operands are rounded less or more. XLA may exchange the operands."""
    crossed = replace(run, reads=run.reads[::-1])
    yield from min((list(_of_operands(one, each)) for each in (run, crossed)), key=len)


def _of_operands(one: Operation, run: Operation) -> Iterator[str]:
    if any(not b.are_in(a) for a, b in zip(one.holds, run.reads, strict=False)):
        yield DROPPED
    if any(not a.are_in(b) for a, b in zip(one.reads, run.reads, strict=False)):
        yield ADDED


def _is_emulated(run: Operation) -> bool:
    """Whether 16-bit numbers are stored in 32, so that the slower kernel runs."""
    if run.arithmetic:
        return False
    names = [_name(dtype) for dtype in run.stored]
    return any(
        read.are_in(stored) and read != stored and read.name
        for read, stored in zip(run.reads, names, strict=True)
    )


def of_sending(run: Operation) -> Iterator[str]:
    """Whether a collective sends more bits than its numbers need, or its readers read.

    CPUs have no collectives of 16 bits."""
    if run.opcode in SUMS:
        return
    for read, stored in zip(run.reads, run.stored, strict=True):
        sent = _name(stored)
        needed = run.makes if run.makes.are_in(read) else read
        if needed.name and needed.are_in(sent) and needed != sent:
            yield EMULATED if run.platform == "cpu" else WIDE


def _is_run_again(one: Operation, runs: Sequence[Operation]) -> bool:
    count = sum(run.times for run in runs)
    return count > one.times and sum(run.work for run in runs) > one.work


_BY_NAME = {
    of_dtype(dtype).name: of_dtype(dtype) for dtype in ("f64", "f32", "f16", "bf16")
}


def _name(dtype: str) -> Numbers:
    return _BY_NAME.get(dtype, Numbers(0, 0, dtype))
