"""The memory of a call: what its arguments hold, what it keeps, what XLA needs."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Annotated, Literal

from .columns import Column
from .records import Program
from .units import human_bytes

ArgumentKind = Literal["parameters", "optimizer state", "loss scale", ""]
"""What arrays among the arguments are for; "" where that is not known."""

KINDS: tuple[ArgumentKind, ...] = ("parameters", "optimizer state", "loss scale")

MOST_ARGUMENTS = 8
"""Arguments of unknown kind that get a row each; others share one."""

MOST_NAMES = 3


@dataclass(frozen=True, slots=True)
class ArgumentRecord:
    """The arrays of one kind in one argument.

    Args:
        name: of the argument.
        kind: "parameters", "optimizer state", "loss scale", or "" if it is not known.
        num_bytes: their size."""

    name: str
    kind: ArgumentKind
    num_bytes: int


@dataclass(frozen=True, slots=True)
class MemoryRecord:
    """A row of the table of memory.

    Args:
        what: it is needed for.
        written: bytes in the function as its author wrote it; `None`: not known.
        now: bytes in the function that runs; `None`: not known."""

    what: Annotated[str, Column("memory of", terminal=True)]
    written: int | None
    now: int | None

    @property
    def bytes_written(self) -> Annotated[str, Column("as written", terminal=True)]:
        """The bytes as written, with a unit."""
        return _shown(self.written)

    @property
    def bytes_now(self) -> Annotated[str, Column("now", terminal=True)]:
        """The bytes now, with a unit."""
        return _shown(self.now)


def _shown(num_bytes: int | None) -> str:
    return "not known" if num_bytes is None else human_bytes(num_bytes)


def memory(
    arguments: Sequence[ArgumentRecord], written: Program, now: Program
) -> Iterator[MemoryRecord]:
    """The rows of the table of memory.

    Gradients and what is saved for the backward pass have rows if there is a backward
    pass. The compiler holds both in temporaries, or returns them."""
    for what, num_bytes in _of_arguments(arguments):
        yield MemoryRecord(what, num_bytes, num_bytes)
    if now.gradients is not None:
        made = written.gradient_bytes, now.gradient_bytes
        kept = written.totals.saved_bytes, now.totals.saved_bytes
        yield MemoryRecord("gradients", *made)
        yield MemoryRecord("saved for backward", *kept)
    before, after = written.compiled, now.compiled
    if before is None or after is None:
        yield MemoryRecord("temporaries", None, None)
        return
    yield MemoryRecord("results", before.results, after.results)
    yield MemoryRecord("temporaries", before.temporaries, after.temporaries)
    yield MemoryRecord("in all", before.total, after.total)


def _of_arguments(arguments: Sequence[ArgumentRecord]) -> Iterator[tuple[str, int]]:
    for kind in KINDS:
        mine = [one for one in arguments if one.kind == kind]
        if mine:
            names = [one.name for one in mine[:MOST_NAMES]]
            more = f" and {len(mine) - MOST_NAMES} more" * (len(mine) > MOST_NAMES)
            yield f"{kind}: {', '.join(names)}{more}", _total(mine)
    others = [one for one in arguments if not one.kind]
    if len(others) <= MOST_ARGUMENTS:
        shown = others
    else:
        largest = sorted(others, key=lambda one: -one.num_bytes)[: MOST_ARGUMENTS - 1]
        shown = [one for one in others if one in largest]
    for one in shown:
        yield f"argument: {one.name}", one.num_bytes
    rest = [one for one in others if one not in shown]
    if rest:
        yield f"{len(rest)} other arguments", _total(rest)


def _total(arguments: Sequence[ArgumentRecord]) -> int:
    return sum(one.num_bytes for one in arguments)
