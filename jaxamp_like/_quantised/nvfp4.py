"""`nvfp4`: contractions of float4 operands, of which each 16 numbers share a scale."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar, Literal

from .._errors import listing_arguments
from .._rules import Rule, Site
from .axes import Axes
from .block_scaled import BlockScaled, Side
from .blocks import TensorScaledBlocks
from .rule import NO_HEADS
from .worth import WORTH_IT

# Drawn once, by coins: any signs do, but for regular ones.
_SIGNS = (1, 1, -1, 1, -1, -1, -1, 1, 1, -1, -1, -1, -1, 1, -1, 1)


@dataclass(frozen=True, repr=False)
class Nvfp4(BlockScaled):
    """See `nvfp4`."""

    name: ClassVar[str] = "nvfp4"
    bits: ClassVar[int] = 4
    size: ClassVar[int] = 16
    description: ClassVar[str] = (
        "float4 with a float8 scale for each 16 numbers, and a float32 for each tensor"
    )

    square_weights: bool = True
    rotate: bool = True
    stochastic: bool = True
    seed: int = 0

    def __post_init__(self) -> None:
        for name in ("square_weights", "rotate", "stochastic"):
            if not isinstance(value := getattr(self, name), bool):
                raise TypeError(f"`{name}` must be a bool, but got {value!r}.")
        if not isinstance(self.seed, int) or isinstance(self.seed, bool):
            raise TypeError(
                f"`seed` must be a Python integer, but got {self.seed!r}. It is not a "
                "key: the numbers themselves are hashed with it."
            )
        super().__post_init__()

    def rounding(self, side: Side, axes: Axes, of_weight: bool) -> TensorScaledBlocks:
        return TensorScaledBlocks(
            axes,
            is_square=side == "weight" and self.square_weights,
            signs=_SIGNS if of_weight and self.rotate else None,
            seed=self.seed if side == "cotangent" and self.stochastic else None,
            size=self.size,
        )


@listing_arguments
def nvfp4(
    *,
    square_weights: bool = True,
    rotate: bool = True,
    stochastic: bool = True,
    seed: int = 0,
    weight_gradient: Literal["blocks", "compute"] = "blocks",
    emulate: bool = False,
    where: Callable[[Site], bool] | None = WORTH_IT,
    leave: tuple[str, ...] = NO_HEADS,
    parameters_only: bool = True,
) -> Rule:
    """Contractions of NVFP4 operands, forward and for both gradients.

    Along the axes that a contraction sums over, each block of 16 numbers is divided by
    a float8_e4m3fn scale and a float32 that the whole array shares, and rounded to
    float4_e2m1fn: to 0, 0.5, 1, 1.5, 2, 3, 4 or 6, of either sign. Blackwell GPUs
    contract such operands natively, at up to four times the speed of bfloat16. Four
    bits train only with care, and the defaults are those of the recipe that trained
    large models so: see the arguments. That recipe also keeps some 15 % of the layers
    in bfloat16, mostly the last ones; a `PolicyMap` or `leave` does that.

    What is quantised, what other devices do, and what becomes of inf and NaN, is as for
    `mxfp8`.

    Args:
        square_weights: whether a weight has one scale for each 16 x 16 numbers, so that
            the forward pass and the gradient of inputs read the same numbers.
        rotate: whether both operands of a weight's gradient are multiplied by a random
            Hadamard matrix along the sum, in blocks of 16. It spreads outliers, and
            leaves the product as it was.
        stochastic: whether cotangents are rounded up or down by chances that keep their
            mean, rather than to the nearest number, which would lose what is small.
        seed: what chances depend on, beside a number and its place. They are a hash of
            these, so that there is no key to hand in, and results are the same in each
            run and on any number of devices over which `jit` divides an array. In
            `shard_map` places are counted on each device, in `vmap` in each example.
        weight_gradient: as for `mxfp8`.
        emulate: as for `mxfp8`.
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
    >>> from jaxamp_like.rules import nvfp4
    >>> mixed = amp(lambda w, x: x @ w, amp_policy=quantised(nvfp4()))

    Format and recipe as NVIDIA, "Pretraining Large Language Models with NVFP4",
    arXiv:2509.25149."""
    return Nvfp4(
        where,
        leave,
        parameters_only,
        weight_gradient,
        emulate,
        square_weights,
        rotate,
        stochastic,
        seed,
    )
