"""Migration: a part of the range of activations is moved into the weights.

A few channels of the activations may be much larger than the others, which then get few
bits by a scale that all channels share. If each channel is divided by a number, and the
weights of that channel are multiplied by it, the product stays as it is."""

from typing import Any

import jax.numpy as jnp

from .._primitives.contractions import dot_numbers
from .axes import Axes, scale_onto_result
from .scaled import largest_of, round_up_to_power_of_two


def pairs_of(params: dict[str, Any]) -> tuple[tuple[int, int], ...] | None:
    """Pairs of axes, left and right, of the channels that are summed over.

    It is `None` for a convolution in groups, whose channels are not the same."""
    if (numbers := dot_numbers(params)) is not None:
        (lhs, rhs), _ = numbers
        return tuple(zip(lhs, rhs, strict=True))
    if params["feature_group_count"] != 1:
        return None
    lhs, rhs, _ = params["dimension_numbers"]
    return ((lhs[1], rhs[1]),)


def migrated(
    operands: Any, params: dict[str, Any], weight: int, strength: float | None
) -> tuple[Any, Any]:
    """Operands with the same product, of which the weight has taken over range."""
    pairs = pairs_of(params)
    assert pairs is not None and strength is not None
    lhs, rhs = operands
    by_lhs = Axes(_others(lhs, [i for i, _ in pairs]), pairs)
    left = scale_onto_result(largest_of(lhs, by_lhs.summed), by_lhs, rhs)
    right = largest_of(rhs, _others(rhs, [i for _, i in pairs]))
    inputs, weights = (left, right) if weight == 1 else (right, left)
    known = jnp.isfinite(inputs * weights) & (inputs * weights > 0)
    ratio = jnp.where(known, inputs, 1) ** strength / jnp.where(known, weights, 1) ** (
        1 - strength
    )
    # A power of two, so that it rounds nothing.
    factor = round_up_to_power_of_two(jnp.clip(ratio, 2.0**-60, 2.0**60))
    factor = factor if weight == 1 else 1 / factor
    by_rhs = Axes(_others(rhs, [i for _, i in pairs]), tuple((j, i) for i, j in pairs))
    lhs, rhs = lhs.astype(factor.dtype), rhs.astype(factor.dtype)
    return lhs / scale_onto_result(factor, by_rhs, lhs), rhs * factor


def _others(x: Any, axes: list[int]) -> tuple[int, ...]:
    return tuple(axis for axis in range(x.ndim) if axis not in axes)
