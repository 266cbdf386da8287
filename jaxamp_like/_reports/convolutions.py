"""How many multiply-adds a convolution makes, as XLA counts them.

The transpose of a strided convolution reads an operand with holes (`lhs_dilation`), and
operands may be padded. Holes and padding take part in no product. So for each axis this
counts the pairs of an output position and a position in the window at which there is a
number of the operand."""

import functools
from math import gcd, prod
from typing import Any

import numpy as np


def multiply_adds(params: dict[str, Any], lhs: Any, rhs: Any, out: Any) -> int:
    """The multiply-adds of a `conv_general_dilated` of operands of these shapes.

    A symbolic dimension (jax.export) has no number, and counts as 1."""
    numbers = params["dimension_numbers"]
    batch, features, *lhs_axes = (_number(lhs[i]) for i in numbers.lhs_spec)
    out_features, _, *window = (_number(rhs[i]) for i in numbers.rhs_spec)
    _, _, *positions = (_number(out[i]) for i in numbers.out_spec)
    pairs = (
        _pairs(*axis)
        for axis in zip(
            lhs_axes,
            window,
            positions,
            params["window_strides"],
            (_number(low) for low, _ in params["padding"]),
            params["lhs_dilation"],
            params["rhs_dilation"],
            strict=True,
        )
    )
    groups = params["feature_group_count"] * params["batch_group_count"]
    return batch * features * out_features * prod(pairs) // groups


def _number(dimension: Any) -> int:
    return int(dimension) if isinstance(dimension, int | np.integer) else 1


@functools.lru_cache(maxsize=1024)
def _pairs(
    size: int,
    window: int,
    positions: int,
    stride: int,
    padding: int,
    dilation: int,
    window_dilation: int,
) -> int:
    """At how many pairs of positions there is a number of the operand, for one axis.

    At output position `i`, element `k` of the window stands at `i * stride + start[k]`
    of the operand, which has numbers at the multiples of `dilation` below
    `size * dilation`."""
    if not size:
        return 0
    start = np.arange(window, dtype=np.int64) * window_dilation - padding
    common = gcd(stride, dilation)
    period = dilation // common
    # The residue of those `i` for which `i * stride + start` is such a multiple.
    residue = (-start // common) * pow(stride // common, -1, period) % period
    first = np.maximum(0, -(start // stride))
    last = np.minimum(positions - 1, ((size - 1) * dilation - start) // stride)
    counts = (last - residue) // period - (first - 1 - residue) // period
    meets = (start % common == 0) & (last >= first)
    return int(np.sum(counts, where=meets))
