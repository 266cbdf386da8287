"""Which inputs of a program reach which of its results.

Sets of inputs are bits of an integer, so that what is done once for every equation
costs next to nothing however many carries a loop has."""

from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple


class Reach(NamedTuple):
    """The inputs that reach a value; `bent` are those by way of an op that bends.

    That is one which is not linear."""

    inputs: int = 0
    bent: int = 0

    def bend(self) -> "Reach":
        return Reach(self.inputs, self.inputs)


def of_input(i: int) -> Reach:
    return Reach(1 << i)


def union(reaches: Iterable[Reach]) -> Reach:
    inputs = bent = 0
    for reach in reaches:
        inputs |= reach.inputs
        bent |= reach.bent
    return Reach(inputs, bent)


def through(body: Reach, operands: Sequence[Reach]) -> Reach:
    """What reaches the result of a body that `body` reaches inside."""
    return union(
        operands[i].bend() if body.bent >> i & 1 else operands[i]
        for i in members(body.inputs)
    )


def around(
    results: Sequence[Reach], loop: Sequence[tuple[int, int]]
) -> Sequence[Reach]:
    """What reaches the results of a body after any number of its loop's iterations.

    `loop` are the results that become inputs, `(out, in)`. By Kleene's algorithm."""
    inputs, bent = [r.inputs for r in results], [r.bent for r in results]
    for out, i in loop:
        carry, via, via_bent = 1 << i, inputs[out], bent[out]
        if not via_bent and via in (0, carry):
            continue  # a carry that is made of no other, nor of an input
        if via_bent & carry:
            via_bent = via
        pairs = zip(inputs, bent, strict=True)
        bent = [
            b | (via if b & carry else via_bent) if reach & carry else b
            for reach, b in pairs
        ]
        inputs = [reach | via if reach & carry else reach for reach in inputs]
    return list(map(Reach, inputs, bent))


def members(inputs: int) -> Iterator[int]:
    """The inputs of a set, in order."""
    while inputs:
        lowest = inputs & -inputs
        yield lowest.bit_length() - 1
        inputs ^= lowest
