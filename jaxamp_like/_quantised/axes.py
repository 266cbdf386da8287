"""Which axes of a contraction's operands are summed over, and where the others go.

A scale that is the same along the axes that are summed over can be taken out of the
sum, and multiplies the result."""

from collections.abc import Sequence
from math import prod
from typing import Any, NamedTuple

import jax.numpy as jnp

from .._jax import sharded_like
from .._primitives.contractions import at, dot_numbers, rest
from .._rules import Site


class Axes(NamedTuple):
    """The axes of one operand.

    Args:
        summed: those that the contraction sums over.
        kept: the others, with the axis of the result that each becomes.
        batch: those of the kept axes that both operands have, in the same order."""

    summed: tuple[int, ...]
    kept: tuple[tuple[int, int], ...]
    batch: tuple[int, ...] = ()

    @property
    def free(self) -> tuple[int, ...]:
        """The kept axes that this operand alone has."""
        return tuple(axis for axis, _ in self.kept if axis not in self.batch)

    @property
    def groups(self) -> tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]:
        """The batch axes, the free ones and the summed ones."""
        return self.batch, self.free, self.summed

    @property
    def of_gradient(self) -> "Axes":
        """The axes as the contraction has them that makes the other operand's gradient.

        It sums over those that this operand alone has, and keeps those summed now."""
        kept = (*self.batch, *sorted(self.summed))
        places = tuple((axis, to) for to, axis in enumerate(kept))
        return Axes(tuple(sorted(self.free)), places, self.batch)

    def batched(self) -> "Axes":
        """The axes of a batch of such operands, which lies along a first axis."""
        summed, batch = ([axis + 1 for axis in some] for some in (self[0], self[2]))
        kept = [(axis + 1, to + 1) for axis, to in self.kept]
        return Axes(tuple(summed), ((0, 0), *kept), (0, *batch))


def operand_axes(params: dict[str, Any], ndims: tuple[int, int]) -> tuple[Axes, Axes]:
    """The axes of both operands of a `dot_general`, ragged or not, or a convolution.

    The groups of the right operand of a ragged one count as a batch there."""
    if (numbers := dot_numbers(params)) is None:
        return _axes_of_convolution(params["dimension_numbers"])
    if "ragged_dot_dimension_numbers" in params:
        return _axes_of_groups(params["ragged_dot_dimension_numbers"], ndims)
    contracted, batch = numbers
    free = [rest(tuple(range(ndims[i])), (*contracted[i], *batch[i])) for i in range(2)]
    starts = (len(batch[0]), len(batch[0]) + len(free[0]))
    lhs, rhs = (
        Axes(
            tuple(contracted[i]),
            (
                *((axis, to) for to, axis in enumerate(batch[i])),
                *((axis, starts[i] + to) for to, axis in enumerate(free[i])),
            ),
            tuple(batch[i]),
        )
        for i in range(2)
    )
    return lhs, rhs


def site_axes(site: Site) -> tuple[Axes, Axes]:
    """The axes of both operands of the contraction at hand."""
    return operand_axes(site.params, (site.avals[0].ndim, site.avals[1].ndim))


def _axes_of_groups(numbers: Any, ndims: tuple[int, int]) -> tuple[Axes, Axes]:
    groups = (), tuple(numbers.rhs_group_dimensions)
    contracted, batch = numbers.dot_dimension_numbers
    # A result that has a matrix for each group has them along its first axis.
    to = int(numbers.lhs_ragged_dimensions[0] in contracted[0])
    batched = [(axis, to + n) for n, axis in enumerate(batch[0])]
    to += len(batched)
    both = []
    for i in range(2):
        others = (*contracted[i], *batch[i], *groups[i])
        free = rest(tuple(range(ndims[i])), others)
        there = [
            (axis, place) for axis, (_, place) in zip(batch[i], batched, strict=True)
        ]
        kept = (*there, *((axis, to + n) for n, axis in enumerate(free)))
        both.append(Axes(tuple(contracted[i]), kept, (*groups[i], *batch[i])))
        to += len(free)
    lhs, rhs = both
    return lhs, rhs


def _axes_of_convolution(numbers: Any) -> tuple[Axes, Axes]:
    """The axes of examples and of output features are kept; all others are summed."""
    (example, *inside), (feature, *filters), out = numbers
    return (
        Axes(tuple(sorted(inside)), ((example, out[0]),)),
        Axes(tuple(sorted(filters)), ((feature, out[1]),)),
    )


def scale_onto_result(scale: Any, axes: Axes, result: Any) -> Any:
    """Scales of an operand's rows, in the shape and sharding to multiply a result."""
    if scale.ndim == 0:
        return scale
    kept = sorted(axes.kept, key=lambda pair: pair[1])
    order = [axis for axis, _ in kept]
    shape = [1] * result.ndim
    for axis, to in kept:
        shape[to] = scale.shape[axis]
    scale = jnp.transpose(scale, [*order, *axes.summed]).reshape(shape)
    return sharded_like(scale, result)


def matmul_sizes(
    params: dict[str, Any], avals: Sequence[Any]
) -> tuple[int, int, int] | None:
    """Rows, columns and summed length of the matrix product that a contraction is.

    For a batch of products, they are those of one; `None` if a length is symbolic. The
    rows of a convolution are all places of all examples."""
    lhs, rhs = (aval.shape for aval in avals[:2])
    if (numbers := dot_numbers(params)) is not None:
        contracted, batch = numbers
        ragged = params.get("ragged_dot_dimension_numbers")
        groups = getattr(ragged, "rhs_group_dimensions", ())
        lengths = (
            rest(lhs, (*contracted[0], *batch[0])),
            rest(rhs, (*contracted[1], *batch[1], *groups)),
            at(lhs, contracted[0]),
        )
    else:
        (example, _, *places), (feature, *filters), _ = params["dimension_numbers"]
        lengths = (at(lhs, (example, *places)), at(rhs, [feature]), at(rhs, filters))
    if not all(isinstance(d, int) for length in lengths for d in length):
        return None
    rows, columns, summed = map(prod, lengths)
    return rows, columns, summed
