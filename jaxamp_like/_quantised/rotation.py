"""Blocks times a random Hadamard matrix, which spreads what is large in them.

The matrix is orthogonal: where both operands of a contraction are multiplied by it
along the sum, their product stays as it was."""

from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import lax

from .._jax import new_primitive
from .._rules.constant import no_derivative, no_series

Signs = tuple[int, ...]
"""The signs of the rows of a Hadamard matrix, which make it a random one."""


def rotated(blocks: Any, axis: int, signs: Signs) -> Any:
    """Blocks along an axis, multiplied by the matrix; in the dtype that they are in."""
    return _ROTATION.bind(blocks, axis=axis, signs=signs, back=False)


def rotated_back(blocks: Any, axis: int, signs: Signs) -> Any:
    """Blocks as they were before they were rotated."""
    return _ROTATION.bind(blocks, axis=axis, signs=signs, back=True)


def _run(blocks: Any, *, axis: int, signs: Signs, back: bool) -> Any:
    matrix = np.asarray(signs, np.float32)[:, None] * _hadamard(len(signs))
    numbers = (((axis,), (1 if back else 0,)), ((), ()))
    # In bfloat16, too, the matrix is exact, and sums are made in float32.
    made = lax.dot_general(
        blocks,
        jnp.asarray(matrix, blocks.dtype),
        numbers,
        precision=lax.Precision.HIGHEST,
        preferred_element_type=blocks.dtype,
    )
    return jnp.moveaxis(made, -1, axis)


def _hadamard(size: int) -> Any:
    """Sylvester's matrix of a size that is a power of two, orthogonal and symmetric."""
    made = np.ones((1, 1), np.float32)
    while len(made) < size:
        made = np.block([[made, made], [made, -made]])
    return made / np.float32(size**0.5)


def _batch(args: Any, dims: Any, *, axis: int, signs: Signs, back: bool) -> Any:
    blocks = jnp.moveaxis(args[0], dims[0], 0)
    return _ROTATION.bind(blocks, axis=axis + 1, signs=signs, back=back), 0


_ROTATION = new_primitive(
    "amp_rotation",
    compute=_run,
    aval=lambda blocks, **_: blocks,
    jvp=no_derivative,
    transpose=no_derivative,
    batch=_batch,
    series=no_series,
)
"""A primitive, so that no report counts it among the contractions of a program."""
