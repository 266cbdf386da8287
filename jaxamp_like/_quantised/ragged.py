"""Ragged contractions in blocks, computed with the numbers that the blocks stand for.

A ragged contraction multiplies the rows of each group with a matrix of its own. There
is no native one in blocks; this is what it would compute, in float32.

The gradient of the matrices sums over the rows of each group. Blocks along these rows
begin anew with each group: else a group's gradient would depend on its neighbours."""

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax.numpy as jnp
from jax import lax

from .._dtypes import DType, cast
from .._jax import is_jet_tracer
from .._primitives.contractions import dot_numbers
from .._rules import Site
from .._rules.bilinear import bilinear, by_casts
from .._rules.constant import constant, no_series
from .._rules.passes import CastPass, Pass, straight_through, with_passes
from .axes import operand_axes
from .blocks import BlockRounding
from .linear import transposable
from .passes import transposed_of

RAGGED = "ragged_dot_general"


def why_no_groups(site: Site) -> str | None:
    """Why a ragged contraction is none of those that are made here, if it is not."""
    numbers = site.params["ragged_dot_dimension_numbers"]
    (ragged,), batch = numbers.lhs_ragged_dimensions, dot_numbers(site.params)[1][0]
    if ragged in batch:
        return "groups of products of a batch"
    if site.avals[2].ndim != 1 or site.params.get("group_offset") is not None:
        return "groups of other sizes for each product of a batch, or some groups alone"
    return None


def contraction_of_groups(
    site: Site,
    roundings: Sequence[BlockRounding],
    gradients: Sequence[Pass],
    compute: Sequence[CastPass],
    out: DType,
) -> Callable[..., Any]:
    """A function of both operands and of the sizes of groups: the result in `out`.

    Args:
        site: the contraction.
        roundings: of both operands.
        gradients: how those of both operands are made.
        compute: the same in the compute dtype, where the contraction is transposed.
        out: the dtype of the result."""
    fn = bilinear(site.primitive, site.params, moving=0)

    def forward(lhs, rhs, sizes):
        both = constant(lhs), constant(rhs)
        return cast(fn(*both, functools.partial(_product, roundings), sizes), out)

    made = with_passes(transposable(forward, compute, rest=1), gradients)

    def bind(*operands):
        if any(map(is_jet_tracer, operands)):
            no_series()
        return made(*map(jnp.asarray, operands))

    return bind


@dataclass(frozen=True, eq=False)
class RaggedPass(Pass):
    """A ragged contraction that rounds its operands to blocks.

    Args:
        roundings: of the moving operand, and of the other."""

    roundings: tuple[BlockRounding, BlockRounding]

    def __call__(self, moving: Any, *others: Any) -> Any:
        other, sizes = others
        return cast(self.fn(moving, other, self._hook, sizes), self.low)

    def _hook(self, primitive: Any, params: Any, operands: Any, moving: int) -> Any:
        lhs, rhs, sizes = operands
        roundings = self.roundings if moving == 0 else self.roundings[::-1]
        both = constant(lhs), constant(rhs)
        return _product(roundings, primitive, params, (*both, sizes), moving)

    def transposed(self, moving: Any, *others: Any) -> Callable[..., Any]:
        fn = transposed_of(self, [moving, *others])
        return straight_through(replace(self, fn=fn))


def _product(
    roundings: Sequence[BlockRounding],
    primitive: Any,
    params: Any,
    operands: Any,
    moving: int,
) -> Any:
    """The contraction of the numbers that both operands are rounded to, in float32."""
    lhs, rhs, sizes = operands
    axes = operand_axes(params, (lhs.ndim, rhs.ndim))
    numbers = params["ragged_dot_dimension_numbers"]
    (ragged,) = numbers.lhs_ragged_dimensions
    contracted = dot_numbers(params)[0]
    restored = []
    if ragged not in contracted[0]:  # a block lies in a row
        lhs = _only_groups(lhs, ragged, sizes)
    for how, x, one, summed in zip(
        roundings, (lhs, rhs), axes, contracted, strict=True
    ):
        if ragged in contracted[0]:
            along = summed[contracted[0].index(ragged)]
            restored.append(_rounded_in_groups(how.along(one), x, along, sizes))
        else:
            restored.append(how.along(one)(x).restored())
    float32 = jnp.dtype("float32")
    exact = params | {"precision": lax.Precision.HIGHEST}
    hook = by_casts((float32, float32), float32, is_low=False)
    return hook(primitive, exact, (*restored, sizes), moving)


def _only_groups(x: Any, axis: int, sizes: Any) -> Any:
    """`x` with zeros in rows that are in no group, which no scale is to follow from."""
    row = lax.broadcasted_iota(jnp.int32, x.shape, axis)
    used = jnp.sum(sizes, dtype=jnp.int32)
    return lax.select(row < used, x, lax.full_like(x, 0))


def _rounded_in_groups(how: BlockRounding, x: Any, axis: int, sizes: Any) -> Any:
    """The numbers that `x` is rounded to, in blocks along `axis` of which none has rows
    of two groups. Rows after the last group are zeros."""
    rows, groups = x.shape[axis], sizes.shape[0]
    if rows == 0 or groups == 0:
        return jnp.zeros(x.shape, "float32")
    padded = how.size * (rows // how.size + groups)  # the most that it may take
    sizes = sizes.astype(jnp.int32)
    ends = jnp.cumsum(sizes, dtype=jnp.int32)
    starts = ends - sizes
    blocks = -(-sizes // how.size)
    first = how.size * (jnp.cumsum(blocks, dtype=jnp.int32) - blocks)
    row = jnp.arange(rows, dtype=jnp.int32)
    group = jnp.searchsorted(ends, row, side="right")
    at = row + (first - starts)[jnp.minimum(group, groups - 1)]
    at = jnp.where(group < groups, at, padded)  # out of range: left out
    x = jnp.moveaxis(x, axis, 0)
    laid_out = jnp.zeros((padded, *x.shape[1:]), x.dtype).at[at].set(x, mode="drop")
    numbers = how(jnp.moveaxis(laid_out, 0, axis)).restored()
    numbers = jnp.moveaxis(numbers, axis, 0)
    back = numbers.at[at].get(mode="fill", fill_value=0)
    return jnp.moveaxis(back, 0, axis)
