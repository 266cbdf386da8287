"""Which inputs of a program reach which of its results.

Sets of inputs are bits of an integer, so that what is done once for every equation
costs next to nothing however many carries a loop has."""

from collections.abc import Iterable, Sequence

Reach = int


def union(reaches: Iterable[Reach]) -> Reach:
    found = 0
    for reach in reaches:
        found |= reach
    return found


def through(body: Reach, operands: Sequence[Reach]) -> Reach:
    """What reaches the result of a body that `body` reaches inside."""
    return union(reach for i, reach in enumerate(operands) if body >> i & 1)


def around(
    results: Sequence[Reach], loop: Sequence[tuple[int, int]]
) -> Sequence[Reach]:
    """What reaches the results of a body after any number of its loop's iterations.

    `loop` are the results that become inputs, `(out, in)`. By Kleene's algorithm."""
    found = list(results)
    for out, i in loop:
        carry, via = 1 << i, found[out]
        if via not in (0, carry):  # else it is made of no other carry, nor of an input
            found = [reach | via if reach & carry else reach for reach in found]
    return found
