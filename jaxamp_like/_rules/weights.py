"""Which operand of a contraction is the weight."""

from collections.abc import Callable

from .._primitives.contractions import dot_numbers, free_axes
from .base import Shown, Site


def weight_side(site: Site) -> int:
    """Which operand of a contraction is the weight: 0 or 1.

    The one that shows an input, or what the function closes over. In a first layer both
    do: then it is the one of an argument that holds many arrays, as parameters do and
    data seldom; without a symbolic batch; or that is no vector; else the right one, as
    in `x @ w`. Where both sum over their last axis, as an Equinox layer under `vmap`
    does, the order tells nothing: then it is the larger."""
    if site.primitive.name != "dot_general":
        return 1  # a filter, or the matrices of the groups
    numbers = dot_numbers(site.params)
    (contracted, _), shapes = numbers, [aval.shape for aval in site.avals[:2]]
    free = free_axes(numbers, shapes)
    shown = [fact.shown if fact else Shown.NONE for fact in site.facts[:2]]
    for holds in (
        lambda i: shown[i] > shown[1 - i],
        lambda i: all(isinstance(d, int) for d in shapes[i]),
        lambda i: bool(free[i]),
    ):
        if (side := _only(holds)) is not None:
            return side
    is_last = all(tuple(contracted[i]) == (len(shapes[i]) - 1,) for i in (0, 1))
    if is_last and all(isinstance(d, int) for shape in shapes for d in shape):
        return int(site.avals[1].size >= site.avals[0].size)
    return 1


def _only(holds: Callable[[int], bool]) -> int | None:
    sides = [i for i in (0, 1) if holds(i)]
    return sides[0] if len(sides) == 1 else None
