"""`mxfp8`: contractions of float8 operands, of which each 32 numbers share a scale."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar, Literal

import jax.numpy as jnp
from jax.typing import DTypeLike

from .._dtypes import DType
from .._errors import listing_arguments
from .._rules import Rule, Site
from .arguments import float8_grad_dtype
from .axes import Axes
from .block_scaled import BlockScaled, Side
from .blocks import PowerOfTwoBlocks
from .rule import NO_HEADS
from .worth import WORTH_IT

E4M3 = jnp.dtype("float8_e4m3fn")


@dataclass(frozen=True, repr=False)
class Mxfp8(BlockScaled):
    """See `mxfp8`."""

    name: ClassVar[str] = "mxfp8"
    size: ClassVar[int] = 32
    description: ClassVar[str] = "float8 with a power of two for each 32 numbers"

    grad_dtype: DType = E4M3
    scale_rounding: Literal["up", "down"] = "up"

    def __post_init__(self) -> None:
        grad_dtype = float8_grad_dtype(self.grad_dtype)
        object.__setattr__(self, "grad_dtype", grad_dtype)
        if self.scale_rounding not in ("up", "down"):
            raise ValueError(
                "`scale_rounding` must be 'up' or 'down', but got "
                f"{self.scale_rounding!r}."
            )
        super().__post_init__()

    def rounding(self, side: Side, axes: Axes, of_weight: bool) -> PowerOfTwoBlocks:
        del of_weight
        dtype = self.grad_dtype if side == "cotangent" else E4M3
        return PowerOfTwoBlocks(dtype, axes, self.scale_rounding == "up", self.size)


@listing_arguments
def mxfp8(
    *,
    grad_dtype: DTypeLike = "float8_e4m3fn",
    scale_rounding: Literal["up", "down"] = "up",
    weight_gradient: Literal["blocks", "compute"] = "blocks",
    emulate: bool = False,
    where: Callable[[Site], bool] | None = WORTH_IT,
    leave: tuple[str, ...] = NO_HEADS,
    parameters_only: bool = True,
) -> Rule:
    """Contractions of MXFP8 operands, forward and for both gradients.

    Along the axes that a contraction sums over, each block of 32 numbers is divided by
    a power of two and rounded to float8_e4m3fn, cotangents too. A block's scale follows
    from its own largest number, so that an outlier costs the precision of its block
    and of nothing else, and there is no state. Blackwell GPUs contract such operands
    natively, at twice the speed of bfloat16. The three contractions of a layer sum over
    different axes, so that each operand is rounded twice, once along each; what the
    backward pass keeps is in the compute dtype.

    Quantised are `dot_general`s with any batch and contracted axes; a sum whose length
    is no multiple of 32 is padded with zeros, which changes nothing. So are
    convolutions whose windows don't overlap and that pad nothing. Other convolutions,
    ragged products (unless `emulate` is set), and what `float8` leaves to the compute
    dtype too, are left to it.
    On devices without native kernels the contraction is made in the compute dtype (on
    older GPUs, of the rounded numbers, as XLA restores them).

    A block with an inf or a NaN is NaN as a whole: a loss scaler sees both. float32
    numbers below 2^-126 count as zeros.

    Args:
        grad_dtype: the format of cotangents. "float8_e5m2" has more range within a
            block, and half the precision.
        scale_rounding: "up" makes a scale so large that no number of its block is too
            large for the format. "down" is the rule of the standard: scales are half as
            large for some blocks, whose largest numbers saturate.
        weight_gradient: "compute" makes it of operands in the compute dtype.
        emulate: whether devices other than NVIDIA's GPUs compute with the rounded
            numbers, in float32, and all devices do in ragged products: slow, and for
            studies and tests.
        where: as for `float8`.
        leave: as for `float8`.
        parameters_only: as for `float8`.
    Returns:
        A rule to put in a policy.
    Raises:
        TypeError, ValueError: an argument is none of those that it may be.
        AmpError: when a function is traced, if `where` raises or returns no bool.

    >>> from jaxamp_like import amp
    >>> from jaxamp_like.presets import quantised
    >>> from jaxamp_like.rules import mxfp8
    >>> mixed = amp(lambda w, x: x @ w, amp_policy=quantised(mxfp8()))

    The format is that of "OCP Microscaling Formats (MX) Specification" 1.0; scales that
    are rounded up, and e4m3fn for cotangents, as Mishra et al., "Recipes for
    Pre-training LLMs with MXFP8", arXiv:2506.08027."""
    return Mxfp8(
        where,
        leave,
        parameters_only,
        weight_gradient,
        emulate,
        float8_grad_dtype(grad_dtype),
        scale_rounding,
    )
