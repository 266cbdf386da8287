"""Losses that a policy rounds, since it has a low output dtype."""

from collections.abc import Callable
from typing import Any

import jax

from .._dtypes import DType, bits, is_float
from .._errors import place_of, warn_or_raise


def warn_of_rounded_losses(
    outs: Any, dtype: DType, fn: Callable[..., Any], strict: bool
) -> Any:
    """`outs`, whose scalars report, when differentiated, that `dtype` rounds them.

    Logits may be wanted in 16 bits, for the next function reads them so. But a loss is
    compared with other losses, and training does not show that its digits are lost."""

    def leaf(x: Any) -> Any:
        is_scalar = isinstance(x, jax.Array) and x.shape == () and is_float(x.dtype)
        is_rounded = is_scalar and bits(dtype) < min(bits(x.dtype), 32)
        return _telling(_report(dtype, fn), strict)(x) if is_rounded else x

    return jax.tree.map(leaf, outs)


def _report(dtype: DType, fn: Callable[..., Any]) -> str:
    return (
        f"The loss that is differentiated is rounded to {dtype.name}, the "
        f"`output_dtype` of `amp_policy` ({dtype.name!r} as the name of a policy means "
        "everything in this dtype): its gradients are those of the loss as computed, "
        "but its value has 3 digits at most. 'mixed_float16' and 'mixed_bfloat16' "
        "leave results in the dtypes that their author gave them. This is of "
        f"{place_of(fn)}."
    )


def _telling(report: str, strict: bool) -> Callable[[Any], Any]:
    """An identity function that gives `report` when it is differentiated."""

    @jax.custom_jvp
    def loss(x: Any) -> Any:
        return x

    @loss.defjvp
    def _(primals: Any, tangents: Any) -> Any:
        warn_or_raise(report, strict)
        return primals[0], tangents[0]

    return loss
