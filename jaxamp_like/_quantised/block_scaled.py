"""What rules for block-scaled formats have in common."""

import dataclasses
import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

from .._dtypes import DType, lowered
from .._primitives.contractions import exceeds_one, summed_axes
from .._rules import Decision, EightBits, Site
from .._rules.bilinear import bilinear
from .._rules.passes import CastPass, Pass, in_compute_dtype
from .._rules.weights import gradient_of, is_parameter, weight_side
from .axes import Axes, site_axes
from .block_dot import contraction_of_blocks, is_emulated, turned_contraction_of_blocks
from .blocks import BlockRounding
from .explicit import along_axes, why_not_along_axes
from .passes import RoundedContraction, Rounding
from .ragged import RAGGED, RaggedPass, contraction_of_groups, why_no_groups
from .rule import (
    Quantising,
    decided,
    gradient_sums,
    low_of,
    result_of,
    why_no_weight_gradient,
)
from .windows import CONVOLUTION, InWindows, Windows, site_of_product, windows_of

Side = Literal["operand", "weight", "cotangent"]
"""What an operand of a contraction is."""


@dataclass(frozen=True, repr=False)
class BlockScaled(Quantising):
    """A rule by which operands share scales in blocks along the sums.

    A derived class says how an operand is rounded, by `rounding`."""

    primitives: ClassVar = (*Quantising.primitives, RAGGED)
    size: ClassVar[int]
    """How many numbers share a scale."""

    weight_gradient: Literal["blocks", "compute"] = "blocks"
    emulate: bool = False

    def __post_init__(self) -> None:
        if self.weight_gradient not in ("blocks", "compute"):
            raise ValueError(
                "`weight_gradient` must be 'blocks' or 'compute', but got "
                f"{self.weight_gradient!r}."
            )
        if not isinstance(self.emulate, bool):
            raise TypeError(f"`emulate` must be a bool, but got {self.emulate!r}.")
        super().__post_init__()

    def rounding(self, side: Side, axes: Axes, of_weight: bool) -> BlockRounding:
        """How an operand with these axes is rounded.

        `of_weight` tells whether the contraction makes the gradient of a weight."""
        raise NotImplementedError

    def why_not(self, site: Site) -> str | None:
        name = site.primitive.name
        if (why := why_not_along_axes(site.avals, "blocks")) is not None:
            return why
        if name == CONVOLUTION:
            windows = windows_of(site)
            if isinstance(windows, str):
                return windows
            return self.why_not(site_of_product(site, windows))
        if name == RAGGED and not self.emulate:
            return (
                f"no device has a native {name} in {self.name}; `emulate=True` "
                "computes with its numbers, in float32"
            )
        if name == RAGGED and (why := why_no_groups(site)) is not None:
            return why
        why = why_no_weight_gradient(site)
        if self.weight_gradient == "compute" and why is not None:
            return why
        if not has_lengths(summed_axes(site.params, site.avals)):
            return "sums of a length that is not known can't be cut into blocks"
        return super().why_not(site)

    def roundings(self, site: Site) -> tuple[Rounding, Rounding]:
        if (product := _as_product(site)) is None:
            return self._block_roundings(site)
        site, windows = product
        lhs, rhs = self._block_roundings(site)
        return InWindows(lhs, windows, 0), InWindows(rhs, windows, 1)

    def _block_roundings(self, site: Site) -> tuple[BlockRounding, BlockRounding]:
        of_weight = gradient_of(site) == "weight"
        lhs, rhs = (
            self.rounding(self._side(site, i), axes, of_weight)
            for i, axes in enumerate(site_axes(site))
        )
        return lhs, rhs

    def _side(self, site: Site, i: int) -> Side:
        if site.is_cotangent(i):
            return "cotangent"
        is_weight = i == weight_side(site) and is_parameter(site.facts[i])
        return "weight" if is_weight else "operand"

    def gradients(self, site: Site, compute: Sequence[CastPass]) -> Sequence[Pass]:
        return [
            self._gradient(site, i) if kind == "blocks" else compute[i]
            for i, kind in enumerate(self._kinds(site))
        ]

    def _kinds(self, site: Site) -> list[Literal["blocks", "compute"]]:
        """How the gradients of both operands are made."""
        kinds: list[Literal["blocks", "compute"]] = [
            "blocks" if exceeds_one(summed) and has_lengths(summed) else "compute"
            for summed in gradient_sums(site)
        ]
        if self.weight_gradient == "compute":
            kinds[weight_side(site)] = "compute"
        return kinds

    def _gradient(self, site: Site, i: int) -> Pass:
        """The pass for the gradient of operand `i`, which reads the other one."""
        made = self.rounded(site, i, self._gradient_roundings(site, i))
        fact = site.facts[i]
        is_last_free = site.avals[i].ndim - 1 in site_axes(site)[i].free
        # The gradient of a transposed view is transposed back.
        is_turned = is_last_free != (fact is not None and fact.is_transposed)
        product = functools.partial(
            self.product, dtype=low_of(site), is_turned=is_turned
        )
        return dataclasses.replace(made, rounds_sharded=False, product=product)

    def _gradient_roundings(
        self, site: Site, i: int
    ) -> tuple[BlockRounding, BlockRounding]:
        """How the gradient of operand `i` rounds the cotangent, and what it reads."""
        of_weight = self._side(site, i) == "weight"
        side: Side = "operand" if of_weight else self._side(site, 1 - i)
        axes = site_axes(site)[1 - i]
        return (
            self.rounding("cotangent", axes, of_weight),
            self.rounding(side, axes, of_weight),
        )

    def rounding_of_cotangents(self, site: Site) -> BlockRounding | None:
        """Of the result's cotangent, as the first gradient reads it that is quantised.

        The other gradient sums over other axes, and so reads another rounding."""
        if (product := _as_product(site)) is not None:
            site, windows = product
            how = self.rounding_of_cotangents(site)
            return how and how.along(windows.axes_of_result(how.axes))
        kinds = self._kinds(site)
        if kinds == ["compute", "compute"]:
            return None
        i = kinds.index("blocks")
        if site.primitive.name == RAGGED and i == 1:
            return None  # in blocks that depend on the sizes of groups
        axes = site_axes(site)
        to = dict(axes[0].kept)
        batch = tuple(to[axis] for axis in axes[0].batch)
        # The gradient keeps the axes of its own operand, and sums over the other's.
        free, summed = (
            tuple(there for axis, there in one.kept if axis in one.free)
            for one in (axes[i], axes[1 - i])
        )
        kept = tuple((axis, n) for n, axis in enumerate((*batch, *free)))
        of_weight = i == weight_side(site)
        return self.rounding("cotangent", Axes(summed, kept, batch), of_weight)

    def quantise(self, site: Site) -> Decision:
        return along_axes(site.avals, site, self._quantised(site))

    def _quantised(self, site: Site) -> Decision:
        if (product := _as_product(site)) is not None:
            return self._of_windows(site, *product)
        # A weight is rounded along two axes, and in the compute dtype is read faster.
        reads = tuple(a and lowered(a, low_of(site)) for a in site.authors)
        made = self._of_groups if site.primitive.name == RAGGED else super().quantise
        return made(site)._replace(reads=reads)

    def _of_windows(self, site: Site, product: Site, windows: Windows) -> Decision:
        """The decision for a convolution that is made as a `dot_general`."""
        made = self._quantised(product)
        assert made.bind is not None
        dot = made.bind

        def bind(lhs, rhs):
            return windows.result(dot(*windows.operands(lhs, rhs)))

        # Numbers of a kernel that is rounded before a loop would have another shape.
        return made._replace(params=site.params, bind=bind, quantisers=())

    def _of_groups(self, site: Site) -> Decision:
        """The decision for a ragged contraction."""
        low = low_of(site)
        compute = in_compute_dtype(site, low)
        gradients = [
            RaggedPass(
                bilinear(site.primitive, site.params, moving=i),
                i,
                low,
                self._gradient_roundings(site, i),
            )
            if kind == "blocks"
            else compute[i]
            for i, kind in enumerate(self._kinds(site))
        ]
        out = result_of(site)
        bind = contraction_of_groups(
            site, self._block_roundings(site), gradients, compute, out
        )
        return decided(site, self.why(site), bind, self.eight_bits(site))

    def product(
        self, made: RoundedContraction, dtype: DType, is_turned: bool = False
    ) -> Any:
        """See `Quantising`. Of a gradient, `is_turned` says that what it is added up
        in has one of the cotangent's axes last, which JAX puts before all others."""
        if is_turned and made.is_gradient:
            return turned_contraction_of_blocks(made, dtype, self.name, self._emulates)
        return contraction_of_blocks(made, dtype, self.name, self._emulates)

    @property
    def _emulates(self) -> bool:
        return self.emulate or is_emulated()

    def eight_bits(self, site: Site) -> EightBits:
        scales = f"blocks of {self.size} x blocks of {self.size}"
        if site.primitive.name == RAGGED:
            return EightBits(scales, "the same numbers in float32 on all devices")
        elsewhere = (
            "the same numbers in float32" if self._emulates else low_of(site).name
        )
        runs = (
            "native on Blackwell GPUs; restored to 16 bits by XLA on older ones, which "
            f"saves no time; {elsewhere} on other devices"
        )
        return EightBits(scales, runs, backend=None if self._emulates else "gpu")

    def why(self, site: Site) -> str:
        low, kinds = low_of(site).name, self._kinds(site)
        text = f"computes in {self.name}, a scale for each {self.size} numbers of a sum"
        if kinds == ["compute", "compute"]:
            return f"{text}; gradients in {low}"
        if "compute" in kinds:
            which = "left" if kinds[0] == "compute" else "right"
            return f"{text}; the gradient of the {which} operand in {low}"
        return text


def _as_product(site: Site) -> tuple[Site, Windows] | None:
    """Of a convolution, the `dot_general` that it is made as, and how."""
    if site.primitive.name != CONVOLUTION:
        return None
    windows = windows_of(site)
    assert not isinstance(windows, str), windows  # see `why_not`
    return site_of_product(site, windows), windows


def has_lengths(axes: Sequence[Any]) -> bool:
    """Whether the lengths of axes are numbers, and not symbols."""
    return all(isinstance(length, int) for length in axes)
