"""What a contraction is: which axes of its operands are summed over, which are free.

A contraction makes each number of its result from many of its operands' numbers, and
reads each of these many times: that is what matrix units and 16 bits are for. Two kinds
of `dot_general` are none. One that sums over a single term (`einsum("i,j->ij")`, or a
product over an axis of length 1) is a multiplication. One without free axes (`vdot`,
`einsum("bi,bi->b")`) is a multiplication and a sum: an inner product, mostly a norm. It
reads every number once, so that 16 bits save no time, and its result spans a range that
float16 has not: squares vanish below 2e-4 and overflow above 256."""

from collections.abc import Iterable, Sequence
from math import prod
from typing import Any

Shape = tuple[Any, ...]


def is_contraction(params: dict[str, Any], avals: Sequence[Any]) -> bool:
    """Whether a `dot_general`, convolution or the like is one, by its parameters."""
    if not exceeds_one(summed_axes(params, avals)):
        return False
    free = free_axes_of(params, avals)
    return free is None or any(map(exceeds_one, free))


def has_contracting_gradients(params: dict[str, Any], avals: Sequence[Any]) -> bool:
    """Whether the gradients of both operands of a `dot_general` are contractions.

    Each sums over the free axes of the other operand."""
    free = free_axes_of(params, avals)
    return free is not None and all(map(exceeds_one, free))


def summed_axes(params: dict[str, Any], avals: Sequence[Any]) -> Shape:
    """The lengths of the axes over which each number of the result is a sum."""
    if (numbers := dot_numbers(params)) is not None:
        (axes, _), _ = numbers
        return at(avals[0].shape, axes)
    _out, *summed = params["dimension_numbers"].rhs_spec
    return at(avals[1].shape, summed)


def dot_numbers(params: dict[str, Any]) -> Any:
    """`((lhs, rhs) contracted, (lhs, rhs) batch)` of a `dot_general`, else `None`."""
    ragged = params.get("ragged_dot_dimension_numbers")
    numbers = getattr(ragged, "dot_dimension_numbers", params.get("dimension_numbers"))
    is_dot = type(numbers) is tuple and len(numbers) == 2  # no named tuple
    return numbers if is_dot else None


def free_axes_of(
    params: dict[str, Any], avals: Sequence[Any]
) -> tuple[Shape, Shape] | None:
    """The `free_axes` of a `dot_general`; `None` of any other contraction."""
    numbers = dot_numbers(params)
    is_ragged = "ragged_dot_dimension_numbers" in params
    return None if numbers is None or is_ragged else free_axes(numbers, avals)


def free_axes(numbers: Any, avals: Sequence[Any]) -> tuple[Shape, Shape]:
    """The lengths of the axes of both operands that come up in the result once each.

    The gradient of one operand sums over those of the other."""
    contracted, batch = numbers
    lhs, rhs = (rest(avals[i].shape, (*contracted[i], *batch[i])) for i in (0, 1))
    return lhs, rhs


def at(shape: Shape, axes: Iterable[int]) -> Shape:
    return tuple(shape[axis] for axis in axes)


def rest(shape: Shape, axes: Iterable[int]) -> Shape:
    return tuple(d for axis, d in enumerate(shape) if axis not in tuple(axes))


def exceeds_one(axes: Shape) -> bool:
    """Whether there is more than one number along `axes`; a symbolic axis is long."""
    return not all(isinstance(d, int) for d in axes) or prod(axes) > 1
