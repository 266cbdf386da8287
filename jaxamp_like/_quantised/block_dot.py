"""The contraction of numbers in blocks, as a primitive.

JAX has `jax.nn.scaled_matmul` for it, which compiles for CUDA alone and has no rule for
`vmap` of one operand. Here other platforms contract the operands as they were before
they were rounded, or the numbers that the blocks stand for. The primitive also tells
reports which format it computes in, which the dtypes of its operands do not."""

from collections.abc import Sequence
from contextlib import AbstractContextManager
from contextvars import ContextVar
from math import prod
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from .._dtypes import DType, bits, cast
from .._jax import new_primitive, result_aval
from .._rules.constant import no_derivative, no_series
from .._within import within
from .blocks import restored_rows, to_rows
from .passes import RoundedContraction

_ROWS = (((2,), (2,)), ((0,), (0,)))  # (batch, rows, summed) of both operands

_emulated: ContextVar[bool] = ContextVar("emulated", default=False)


def emulated() -> AbstractContextManager[None]:
    """What is traced within computes with the numbers of the blocks on all platforms.

    So a policy is measured as the machine runs it that it is meant for."""
    return within(_emulated, True)


def is_emulated() -> bool:
    return _emulated.get()


def contraction_of_blocks(
    made: RoundedContraction, dtype: DType, format: str, emulate: bool
) -> Any:
    """A `dot_general` of operands in blocks.

    Args:
        made: the contraction; before they were rounded, at least one of its operands
            was in the compute dtype.
        dtype: that of the result.
        format: the name of the format, for reports.
        emulate: whether platforms without a native contraction compute with the
            numbers that the blocks stand for. Else they do with the operands as they
            were."""
    both = list(zip(made.operands, made.numbers, made.axes, strict=True))
    # In an author's derivative rule, one may come as it is, in float32.
    low = min((x.dtype for x in made.operands), key=bits)
    rows = [to_rows(cast(x, low), one) for x, _, one in both]
    blocks = [part for _, x, _ in both for part in (x.values, x.scales)]
    scales = [x.tensor_scale for _, x, _ in both if x.tensor_scale is not None]
    more = [prod(scales[1:], start=scales[0])] if scales else []
    out = BLOCK_DOT.bind(
        *rows,
        *blocks,
        *more,
        dtype=dtype,
        format=format,
        emulate=emulate,
        dimension_numbers=_ROWS,
    )
    (lhs, _, left), (rhs, _, right) = both
    # From the last to the first, one at a time: see `to_rows`.
    for place, x, some in (
        (2, rhs, right.free),
        (1, lhs, left.free),
        (0, lhs, left.batch),
    ):
        lengths = [x.shape[axis] for axis in some]
        out = out.reshape(*out.shape[:place], *lengths, *out.shape[place + 1 :])
    return out


def turned_contraction_of_blocks(
    made: RoundedContraction, dtype: DType, format: str, emulate: bool
) -> Any:
    """The same, made as a contraction of the right operand with the left one.

    XLA swaps the operands of a `dot_general` where a transpose follows, and so leaves
    the transpose out. It does not for blocks: where one follows here, the two
    transposes cancel out."""
    lhs, rhs = made.axes
    operands, numbers, axes = (
        x[::-1] for x in (made.operands, made.numbers, made.axes)
    )
    swapped = made._replace(operands=operands, numbers=numbers, axes=axes)
    out = contraction_of_blocks(swapped, dtype, format, emulate)
    batch, right = len(lhs.batch), len(rhs.free)
    order = [*range(out.ndim)]
    first, last = order[batch : batch + right], order[batch + right :]
    return out.transpose(*order[:batch], *last, *first)


def _run(
    lhs: Any, rhs: Any, *blocks: Any, dtype: DType, emulate: bool, **_: Any
) -> Any:
    """The contraction on platforms that have no native one."""
    if not emulate:
        return lax.dot_general(lhs, rhs, _ROWS, preferred_element_type=dtype)
    left, left_scales, right, right_scales, *more = blocks
    made = lax.dot_general(
        restored_rows(left, left_scales),
        restored_rows(right, right_scales),
        _ROWS,
        precision=lax.Precision.HIGHEST,
        preferred_element_type=jnp.dtype("float32"),
    )
    return _times(made, more).astype(dtype)


def _run_on_cuda(lhs: Any, rhs: Any, *blocks: Any, dtype: DType, **_: Any) -> Any:
    del lhs, rhs
    left, left_scales, right, right_scales, *more = blocks
    # What is still to be multiplied by a scale leaves the range of float16.
    product = jnp.dtype("bfloat16" if dtype.itemsize <= 2 else "float32")
    made = jax.nn.scaled_matmul(
        left, right, left_scales, right_scales, preferred_element_type=product
    )
    return _times(made, more).astype(dtype)


def _times(made: Any, scales: Sequence[Any]) -> Any:
    """`made`, multiplied in float32 by the scale of both tensors, if they have one."""
    return made.astype(scales[0].dtype) * scales[0] if scales else made


def _aval(*avals: Any, **params: Any) -> Any:
    return result_aval(lambda *xs: _run(*xs, **params), avals)


def _batch(args: Any, dims: Any, **params: Any) -> Any:
    """Examples of both operands become a batch; of one operand alone, rows of it."""
    size = next(x.shape[d] for x, d in zip(args, dims, strict=True) if d is not None)
    sides = (0, 2, 3), (1, 4, 5)
    mapped = [any(dims[i] is not None for i in side) for side in sides]
    to = 0 if all(mapped) else 1
    out_axis = 0 if all(mapped) else 1 + mapped.index(True)
    many = [
        _repeated(x, size) if d is None else jnp.moveaxis(x, d, 0)
        for x, d in zip(args, dims, strict=True)
    ]
    length = many[mapped.index(True)].shape[1 + to]  # of one example
    for side, is_mapped in zip(sides, mapped, strict=True):
        for i in side:
            many[i] = _merged(many[i], to) if is_mapped else args[i]
    for i in range(6, len(args)):  # the scale of both tensors
        shape = list(many[i].shape)
        shape[1 + out_axis] = length
        many[i] = _merged(jnp.broadcast_to(many[i], shape), out_axis)
    made = BLOCK_DOT.bind(*many, **params)
    shape = list(made.shape)
    shape[out_axis : out_axis + 1] = [size, length]
    return made.reshape(shape), out_axis


def _repeated(x: Any, size: int) -> Any:
    return jnp.broadcast_to(x, (size, *x.shape))


def _merged(x: Any, axis: int) -> Any:
    """Examples along the first axis, as more of the axis that comes at `axis` then."""
    x = jnp.moveaxis(x, 0, axis)
    shape = list(x.shape)
    shape[axis : axis + 2] = [shape[axis] * shape[axis + 1]]
    return x.reshape(shape)


BLOCK_DOT = new_primitive(
    "amp_block_scaled_dot",
    compute=_run,
    aval=_aval,
    jvp=no_derivative,
    transpose=no_derivative,
    batch=_batch,
    series=no_series,
    on={"cuda": _run_on_cuda},
    needs_devices=True,
)
"""`(lhs, rhs, values, scales, values, scales[, scale])` to `(batch, rows, rows)`.

The first two are in the compute dtype; the last multiplies the result."""
