"""`int4`: weights as integers of 4 bits in groups that share a scale, for inference."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from math import prod
from typing import Any, ClassVar, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from .._dtypes import cast
from .._errors import listing_arguments, warn_or_raise
from .._jax import new_primitive, raw, trace
from .._primitives.contractions import summed_axes
from .._recording import is_recorded
from .._rules import Decision, EightBits, Rule, Site
from .._rules.bilinear import as_it_is, bilinear
from .._rules.constant import no_derivative, no_series
from .._rules.passes import CastPass, Pass
from .._rules.weights import weight_side
from .axes import Axes, site_axes
from .block_scaled import has_lengths
from .blocks import from_rows, to_rows
from .explicit import along_axes, why_not_along_axes
from .one_row import product_with_row, rows_of_weight
from .rule import NO_HEADS, Quantising, low_of, result_of
from .stored import rounded, stored

SIZES = (32, 64, 128)
"""How many numbers a group may have. A scale has 16 bits: in smaller groups, scales
would take more than a ninth of all bytes."""

_FLOAT32, _UINT8 = jnp.dtype("float32"), jnp.dtype("uint8")
_LARGEST = 15  # of the 16 codes of a number
_MIDDLE = 8  # the code of 0 where groups have no zero point
_LEAST = np.float32(2.0**-126)  # of a scale: XLA takes smaller numbers for zeros


@partial(
    jax.tree_util.register_dataclass,
    data_fields=["codes", "scales", "zero_points"],
    meta_fields=["shape", "axes", "size"],
)
@dataclass(frozen=True)
class Groups:
    """`x ≈ (codes - zero_points) * scales`, in the layout `(batch, rows, summed)`.

    A row holds what one sum reads, so that a GPU that has a single row to multiply
    with reads the codes, and nothing else, in the kernel that adds up.

    Args:
        codes: from 0 to 15, two to a byte, the first in the lower half; rows are padded
            to whole groups.
        scales: one bfloat16 for each group, `(batch, rows, groups)`; it may be
            negative.
        zero_points: the code of 0 of each group, two to a byte; `None` is 8 everywhere.
        shape: that of the array that was rounded.
        axes: the axes of that array.
        size: of a group."""

    codes: Any
    scales: Any
    zero_points: Any
    shape: tuple[int, ...]
    axes: Axes
    size: int

    def restored(self) -> Any:
        """The numbers that they stand for, in the shape of the array, in float32."""
        return from_rows(self.restored_rows(), self.shape, self.axes)

    def restored_rows(self) -> Any:
        """The same as `(batch, rows, summed)`.

        Each number is exact: a code has 4 bits, and a scale 8."""
        codes = _unpacked(stored(self.codes, "two int4 numbers to a byte"))
        scales = stored(self.scales, "scales of int4 numbers")
        groups = codes.reshape(*scales.shape, self.size).astype(_FLOAT32)
        if self.zero_points is None:
            groups = groups - _MIDDLE
        else:
            zeros = _unpacked(stored(self.zero_points, "zero points of int4 numbers"))
            zeros = zeros[..., : scales.shape[-1]]
            groups = groups - zeros.astype(_FLOAT32)[..., None]
        rows = groups * scales.astype(_FLOAT32)[..., None]
        batch, number, count, size = rows.shape  # in full: one may be 0, or a symbol
        rows = rows.reshape(batch, number, count * size)
        length = prod(self.shape[axis] for axis in self.axes.summed)
        return rows[..., :length]


class AsInt4(NamedTuple):
    """How a weight is rounded to groups of integers of 4 bits.

    Args:
        axes: those of the weight; groups lie along the ones that are summed over.
        size: how many numbers share a scale.
        zero_point: whether a group has a code of its own for 0, so that the 16 codes
            cover from its least to its largest number. Else they lie evenly about 0."""

    axes: Axes
    size: int
    zero_point: bool

    def along(self, axes: Axes) -> "AsInt4":
        return self._replace(axes=axes)

    def batched(self, ndim: int) -> "AsInt4":
        del ndim
        return self._replace(axes=self.axes.batched())

    def __call__(self, x: Any) -> Groups:
        rows = to_rows(x, self.axes).astype(_FLOAT32)
        batch, number, length = rows.shape
        groups = -(-length // self.size)
        rows = jnp.pad(rows, [(0, 0), (0, 0), (0, groups * self.size - length)])
        rows = rows.reshape(batch, number, groups, self.size)
        fitted = _FITTED.bind(rows, zero_point=self.zero_point)
        codes = fitted[..., : self.size].reshape(batch, number, groups * self.size)
        scales, zeros = fitted[..., self.size], fitted[..., self.size + 1]
        return Groups(
            _packed(codes),
            scales.astype(jnp.bfloat16),
            _packed(zeros) if self.zero_point else None,
            x.shape,
            self.axes,
            self.size,
        )


def _fit(groups: Any, *, zero_point: bool) -> Any:
    """The codes of each group, and then its scale and its zero point, in float32.

    Of the shares of a group's range that its 16 numbers may reach over, the one is
    taken that has the least sum of squared errors."""
    # A group with an inf or a NaN becomes NaN: codes hold none, so its scale is.
    is_finite = jnp.isfinite(groups).all(axis=-1)
    groups = jnp.where(is_finite[..., None], groups, 0)
    ends = groups.min(axis=-1), groups.max(axis=-1)
    scaled = partial(_with_zero_point if zero_point else _about_zero, *ends)
    first, *shares = _SHARES if zero_point else _SHARES_ABOUT_ZERO

    def tried(best: Any, share: Any) -> tuple[Any, None]:
        new = scaled(share)
        new = (*new, _error(groups, *new))
        is_better = new[-1] < best[-1]
        pairs = zip(new, best, strict=True)
        return tuple(jnp.where(is_better, *pair) for pair in pairs), None

    best = scaled(first)
    best = (*best, _error(groups, *best))
    (scales, zeros, _), _ = lax.scan(tried, best, np.array(shares))
    codes = _codes(groups, scales, zeros)
    scales = jnp.where(is_finite, scales, jnp.nan)
    return jnp.concatenate([codes, scales[..., None], zeros[..., None]], axis=-1)


# On weights that are distributed normally, the best shares of nearly all groups are
# among these. Without a zero point, numbers reach from -8 to 7 scales. The largest
# magnitude is at -8, and a share above 1 makes room at the other end.
_SHARES = np.arange(32, 19, -1, dtype=np.float32) / np.float32(32)
_SHARES_ABOUT_ZERO = np.arange(36, 19, -1, dtype=np.float32) / np.float32(32)


def _about_zero(low: Any, high: Any, share: Any) -> tuple[Any, Any]:
    """Scales and zero points where 0 has the same code in all groups.

    A scale is negative if the largest magnitude is that of a positive number."""
    extreme = jnp.where(-low >= high, low, high)
    scales = _as_stored(extreme * (share * np.float32(-1 / _MIDDLE)))
    return scales, lax.full_like(scales, _MIDDLE)


def _with_zero_point(low: Any, high: Any, share: Any) -> tuple[Any, Any]:
    """Scales and zero points where codes reach from the least to the largest number."""
    # 0 is within the range, so that it has a code and stays 0.
    low, high = lax.min(low, _FLOAT32.type(0)), lax.max(high, _FLOAT32.type(0))
    # A product with a constant: XLA makes one of a quotient by a constant as well.
    scales = _as_stored((high - low) * (share * np.float32(1 / _LARGEST)))
    return scales, _clamped(_rounded(-(low * share) / scales))


def _as_stored(scales: Any) -> Any:
    """Scales as bfloat16 has them, none of which is 0."""
    scales = lax.reduce_precision(scales, 8, 7)
    return jnp.where(jnp.abs(scales) < _LEAST, _LEAST, scales)


def _codes(groups: Any, scales: Any, zeros: Any) -> Any:
    return _clamped(_rounded(groups / scales[..., None]) + zeros[..., None])


def _rounded(x: Any) -> Any:
    return lax.round(x, lax.RoundingMethod.TO_NEAREST_EVEN)


def _clamped(x: Any) -> Any:
    return lax.clamp(_FLOAT32.type(0), x, _FLOAT32.type(_LARGEST))


def _error(groups: Any, scales: Any, zeros: Any) -> Any:
    """The sum of squared errors of each group.

    It is the same in whatever it is compiled together with, and so are the scales that
    it chooses: products stay apart from sums, and terms have an order."""
    codes = _codes(groups, scales, zeros)
    errors = (codes - zeros[..., None]) * scales[..., None] - groups
    terms = lax.optimization_barrier(errors * errors)
    while (size := terms.shape[-1]) > 1:
        terms = terms[..., : size // 2] + terms[..., size // 2 :]
    return terms[..., 0]


def _aval(groups: Any, *, zero_point: bool) -> Any:
    made = trace(partial(_fit, zero_point=zero_point), [groups])
    return raw(made).outvars[0].aval


_FITTED = new_primitive(
    "amp_int4_groups",
    compute=_fit,
    aval=_aval,
    jvp=no_derivative,
    transpose=no_derivative,
    series=no_series,
)
"""`_fit`, as one equation: reports are to show what it makes, and not its search."""


def _packed(codes: Any) -> Any:
    """Codes in bytes, two each, along the last axis, which is padded if it is odd."""
    codes = codes.astype(_UINT8)
    length = codes.shape[-1]
    codes = jnp.pad(codes, [(0, 0)] * (codes.ndim - 1) + [(0, length % 2)])
    pairs = codes.reshape(*codes.shape[:-1], -(-length // 2), 2)
    return pairs[..., 0] | (pairs[..., 1] << _UINT8.type(4))


def _unpacked(packed: Any) -> Any:
    # Two shifts side by side would be a concatenation, which XLA gives its own kernel.
    shifts = lax.iota(_UINT8, 2) * _UINT8.type(4)
    pairs = (packed[..., None] >> shifts) & _UINT8.type(_LARGEST)
    return pairs.reshape(*packed.shape[:-1], 2 * packed.shape[-1])


@dataclass(frozen=True, repr=False)
class Int4(Quantising):
    """See `int4`."""

    name: ClassVar[str] = "int4"
    bits: ClassVar[int] = 4
    description: ClassVar[str] = "weights as integers of 4 bits in groups"

    where: Callable[[Site], bool] | None = None
    group_size: int = 32
    zero_point: bool = False

    def __post_init__(self) -> None:
        is_size = isinstance(self.group_size, int) and self.group_size in SIZES
        if not is_size:
            raise ValueError(
                f"`group_size` must be one of {', '.join(map(str, SIZES))}, but got "
                f"{self.group_size!r}. A weight of which a sum is no multiple of it is "
                "padded."
            )
        if not isinstance(self.zero_point, bool):
            raise TypeError(
                f"`zero_point` must be a bool, but got {self.zero_point!r}: the code "
                "of 0 follows from each group."
            )
        super().__post_init__()

    def why_not(self, site: Site) -> str | None:
        if site.backward:
            return "int4 rounds too coarsely for a gradient"
        if (why := super().why_not(site)) is not None:
            return why
        if not has_lengths(summed_axes(site.params, site.avals)):
            return "sums of a length that is not known can't be cut into groups"
        return why_not_along_axes([site.avals[weight_side(site)]], "groups")

    def quantise(self, site: Site) -> Decision:
        # What is not rounded may lie anywhere.
        return along_axes([site.avals[weight_side(site)]], site, super().quantise(site))

    def roundings(self, site: Site) -> list[AsInt4 | None]:
        """How the weight is rounded; the other operand is not."""
        weight = weight_side(site)
        return [
            AsInt4(axes, self.group_size, self.zero_point) if i == weight else None
            for i, axes in enumerate(site_axes(site))
        ]

    def forward(self, site: Site) -> Callable[..., Any]:
        fn = bilinear(site.primitive, site.params, moving=0)
        low, out, weight = low_of(site), result_of(site), weight_side(site)
        own, parts = site_axes(site)[weight], _parts(site)

        def of_weight(lhs: Any, rhs: Any, *numbers: Any) -> Any:
            operands = [lhs, rhs]
            operands[weight] = rounded(numbers[weight].restored(), operands[weight])
            return fn(*(cast(x, low) for x in operands), as_it_is(out))

        def of_weight_in_parts(lhs: Any, rhs: Any, *numbers: Any) -> Any:
            whole = to_rows((lhs, rhs)[weight], own)
            rows = cast(rounded(numbers[weight].restored_rows(), whole), low)
            return product_with_row(site, (lhs, rhs), rows, out, parts)

        return of_weight if parts == 1 else of_weight_in_parts

    def gradients(self, site: Site, compute: Sequence[CastPass]) -> Sequence[Pass]:
        weight, scope = weight_side(site), "/".join(site.scope)
        passes = list[Pass](compute)
        passes[weight] = _OfTrainedWeight(**vars(compute[weight]), scope=scope)
        return passes

    def eight_bits(self, site: Site) -> EightBits:
        return EightBits(
            f"group of {self.group_size}", f"in {low_of(site).name} everywhere"
        )

    def why(self, site: Site) -> str:
        low = low_of(site).name
        zero = " and a zero point" if self.zero_point else ""
        return (
            f"reads weights in int4, a scale{zero} for each {self.group_size} numbers "
            f"of a sum, and {low}; gradients in {low}"
        )


@dataclass(frozen=True, eq=False)
class _OfTrainedWeight(CastPass):
    """The gradient of a weight that is rounded to 4 bits, which tells that it is taken.

    Frozen weights have none: below what is trained, `int4` is as it should be."""

    scope: str = ""

    def residuals(
        self, operands: Sequence[Any], numbers: Sequence[Any]
    ) -> Sequence[Any]:
        if not is_recorded():
            where = f" (in scope {self.scope!r})" if self.scope else ""
            warn_or_raise(f"`int4`{where} {_TRAINED}", strict=False, once=_TRAINED)
        return super().residuals(operands, numbers)


_TRAINED = (
    "rounds a weight to 4 bits that a derivative is taken by. The rule is for "
    "inference: the loss is then that of the rounded weights, and gradients pass "
    "straight through the rounding, easily 10 % off. Train with "
    "`amp_policy='mixed_bfloat16'`, or 'float8_from_mixed_bfloat16' "
    "('nvfp4_from_mixed_bfloat16' on Blackwell GPUs), and give the policy with `int4` "
    "to `convert` afterwards. Weights that are frozen may be in int4."
)

_MOST_PRODUCTS = 10_000_000
"""A product with a single row that has more multiplications than this, XLA for GPUs
makes by a kernel for matrices. That kernel reads the weight multiplied out, in 16 bits,
which another one has to write. For a smaller product, one kernel reads the codes, and
adds up."""
_MOST_PARTS = 64


def _parts(site: Site) -> int:
    """In how many products of equal size a product with a single row is made.

    It is one if the product is small enough, has more rows or axes of a batch, or can't
    be divided."""
    if (number := rows_of_weight(site)) is None:
        return 1
    summed = prod(summed_axes(site.params, site.avals))
    few_enough = (
        parts
        for parts in range(1, _MOST_PARTS + 1)
        if number % parts == 0 and number // parts * summed < _MOST_PRODUCTS
    )
    return next(few_enough, 1)


@listing_arguments
def int4(
    *,
    group_size: int = 32,
    zero_point: bool = False,
    where: Callable[[Site], bool] | None = None,
    leave: tuple[str, ...] = NO_HEADS,
    parameters_only: bool = True,
) -> Rule:
    """Contractions of weights that are rounded to 4 bits by groups; for inference.

    The weight alone is rounded. Each `group_size` neighbours along a sum share a
    bfloat16 scale, and 16 numbers are multiples of it. Scales are chosen for the least
    sum of squared errors in their group, among some that clip its largest numbers and
    some that don't. The weight is multiplied out where it is read, and contracted in
    the compute dtype.

    It saves time where little is read but weights, as when text is generated one token
    at a time, and if `convert` has stored them: as bytes that hold two numbers each,
    with their scales 0.14 of float32's bytes. `amp` alone rounds the float32 weights at
    each call, to the same numbers.

    Gradients are those of the contraction in the compute dtype, straight through the
    rounding; a gradient by a rounded weight itself, as in training, is warned of. What
    is quantised, and what is not, is as for `int8(weight_only=True)`. An inf or a NaN
    makes all of its group NaN; groups of zeros stay zeros.

    Args:
        group_size: how many numbers share a scale: 32, 64 or 128. Larger groups take
            fewer bytes, 0.13 of float32's, and err more. A sum whose length is no
            multiple is padded.
        zero_point: whether a group has a number of its own that stands for 0, so that
            its 16 numbers reach from its least to its largest one. It is for weights
            that are not evenly distributed about 0, and takes half a byte for a group.
        where: a predicate of contractions to quantise; without it, of all sizes.
        leave: as for `float8`.
        parameters_only: as for `float8`.
    Returns:
        A rule to put in a policy.
    Raises:
        TypeError, ValueError: an argument is none of those that it may be.
        AmpError: when a function is traced, if `where` raises or returns no bool.

    >>> import jax
    >>> from jaxamp_like import convert
    >>> from jaxamp_like.presets import quantised
    >>> w, x = jax.numpy.ones((256, 64)), jax.numpy.ones((1, 256))
    >>> low = convert(lambda w, x: x @ w, w, x, amp_policy=quantised(int4()))
    >>> [part.dtype.name for part in low.params], low.summary.share
    (['uint8', 'bfloat16'], 0.140625)

    Groups and zero points as in Frantar et al., "GPTQ", arXiv:2210.17323, whose
    rounding by second derivatives is not done here; clipping by a search as in Lin et
    al., "AWQ", arXiv:2306.00978."""
    return Int4(where, leave, parameters_only, group_size, zero_point)
