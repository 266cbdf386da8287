"""Products of a weight with a single row, as when text is generated for one reader.

XLA for GPUs makes such a product in a kernel that adds up as it reads the weight. It
also casts it there, if what one sum reads lies side by side; else it may write the
weight down in float32 first, though it be of 8 bits."""

from typing import Any

import jax.numpy as jnp
from jax import lax

from .._dtypes import DType, cast
from .._jax import is_explicitly_sharded
from .._primitives.contractions import dot_numbers
from .._rules import Site
from .._rules.weights import weight_side
from .axes import matmul_sizes, site_axes
from .blocks import to_rows


def rows_of_weight(site: Site) -> int | None:
    """How many rows of a weight a single row is multiplied with.

    `None` if there are more rows, axes of a batch, lengths that are not known, or axes
    of a mesh that are Explicit, over which rows would have to be laid anew."""
    numbers, weight = dot_numbers(site.params), weight_side(site)
    if numbers is None or numbers[1][0] or is_explicitly_sharded(site.avals[weight]):
        return None
    sizes = matmul_sizes(site.params, site.avals)
    if sizes is None:
        return None
    return sizes[weight] if sizes[1 - weight] == 1 else None


def product_with_row(
    site: Site, operands: Any, rows: Any, dtype: DType, parts: int = 1
) -> Any:
    """The contraction of a weight's rows with the single row of the other operand.

    Args:
        site: of the contraction.
        operands: both, of which the one that is no weight is read.
        rows: the weight as `(1, rows, summed)`, in the dtype to contract in.
        dtype: of the result.
        parts: in how many products of equal size it is made."""
    other = 1 - weight_side(site)
    row = to_rows(cast(operands[other], rows.dtype), site_axes(site)[other])
    made = lax.dot_general(
        jnp.broadcast_to(row, (parts, *row.shape[1:])),
        rows.reshape(parts, -1, rows.shape[-1]),
        _ROWS,
        preferred_element_type=dtype,
    )
    return made.reshape(site.out_avals[0].shape)


_ROWS = (((2,), (2,)), ((0,), (0,)))  # `(batch, rows, summed)` of both operands
