"""`int8`: contractions of int8 operands, with gradients in the compute dtype."""

from collections.abc import Callable
from dataclasses import dataclass
from math import prod
from typing import Any, ClassVar, NamedTuple

import jax.numpy as jnp
import numpy as np
from jax import lax

from .._dtypes import DType, cast
from .._errors import listing_arguments
from .._jax import is_explicitly_sharded
from .._magnitudes import largest_magnitude
from .._primitives.contractions import dot_numbers, summed_axes
from .._rules import EightBits, Rule, Site
from .._rules.bilinear import as_it_is, bilinear
from .._rules.weights import weight_side
from .arguments import number
from .axes import Axes, scale_onto_result, site_axes
from .blocks import to_rows
from .migration import migrated, pairs_of
from .one_row import product_with_row, rows_of_weight
from .passes import RoundedContraction
from .rule import NO_HEADS, Quantising, low_of, result_of
from .stored import stored
from .worth import WORTH_IT

LARGEST = 127  # as many below zero as above
MOST_TERMS = (2**31 - 1) // LARGEST**2  # of a sum that int32 holds in any case
_LEAST = 2.0**-119  # the least maximum, so that its multiplier is finite
_INT8, _INT32, _FLOAT32 = map(jnp.dtype, ("int8", "int32", "float32"))


class Integers(NamedTuple):
    """`x ≈ values / multiplier`, with a multiplier for each row."""

    values: Any
    multiplier: Any  # float32; NaN of a row with an inf or NaN in it

    def restored(self) -> Any:
        """The numbers that they stand for, in float32."""
        return self.values.astype(_FLOAT32) / self.multiplier


class AsInt8(NamedTuple):
    """How an array is rounded to integers, by multipliers of its rows.

    A multiplier follows from the magnitudes in its row, or from `largest`: what is
    larger then saturates.

    Args:
        axes: along which rows extend.
        epsilon: is added to each maximum.
        largest: the largest magnitude, if it is known.
        is_weight: whether the multiplier may be stored.
        order: of the axes, in which integers are stored; `None` is as they are."""

    axes: tuple[int, ...]
    epsilon: float
    largest: float | None = None
    is_weight: bool = False
    order: tuple[int, ...] | None = None

    @property
    def dtype(self) -> DType:
        return _INT8

    def along(self, axes: Axes) -> "AsInt8":
        return self.with_axes(axes.summed)

    def with_axes(self, axes: tuple[int, ...]) -> "AsInt8":
        return self._replace(axes=axes, order=None)

    def batched(self, ndim: int) -> "AsInt8":
        del ndim
        axes, order = self.axes, self.order
        return self._replace(
            axes=tuple(axis + 1 for axis in axes),
            order=None if order is None else (0, *(axis + 1 for axis in order)),
        )

    def __call__(self, x: Any) -> Integers:
        return self.by_maxima(x, self.maxima(x))

    def maxima(self, x: Any) -> Any:
        return largest_magnitude(x, self.axes, keepdims=True).astype(_FLOAT32)

    def by_maxima(self, x: Any, maxima: Any) -> Integers:
        """`x` as int8, by the largest magnitudes of its rows.

        Integers hold no NaN, so the multiplier of a row with an inf or NaN is NaN. XLA
        would rewrite a division by this quotient, and give other bits than a division
        by a stored number. A barrier prevents it for weights, which may be stored."""
        x = x.astype(_FLOAT32)
        is_finite = lax.is_finite(maxima)
        top = maxima if self.largest is None else lax.full_like(maxima, self.largest)
        top = lax.max(top + self.epsilon, lax.full_like(top, _LEAST))
        multiplier = LARGEST / lax.select(is_finite, top, lax.full_like(top, LARGEST))
        if self.is_weight:
            multiplier = lax.optimization_barrier(multiplier)
        values = lax.round(x * multiplier, lax.RoundingMethod.TO_NEAREST_EVEN)
        # NaN as an integer may be anything.
        values = lax.select(lax.is_finite(values), values, lax.full_like(values, 0))
        bound = np.float32(LARGEST)
        values = lax.clamp(-bound, values, bound).astype(jnp.int8)
        if self.order is not None:
            there = stored(values.transpose(self.order), "int8 numbers")
            values = there.transpose(np.argsort(self.order))
        nan = lax.full_like(multiplier, jnp.nan)
        return Integers(values, lax.select(is_finite, multiplier, nan))


@dataclass(frozen=True, repr=False)
class Int8(Quantising):
    """See `int8`."""

    name: ClassVar[str] = "int8"
    integers: ClassVar = (jnp.dtype("int8"), _INT32)

    weight_only: bool = False
    activation_max: float | None = None
    migration: float | None = None
    epsilon: float = 1e-7

    def __post_init__(self) -> None:
        number(self.epsilon, "epsilon", 0)
        if self.activation_max is not None:
            number(self.activation_max, "activation_max", 0, is_open=True)
        if self.migration is not None and number(self.migration, "migration", 0) > 1:
            raise ValueError(
                f"`migration` must be from 0 to 1, but got {self.migration!r}."
            )
        super().__post_init__()
        for name in ("activation_max", "migration"):
            if self.weight_only and getattr(self, name) is not None:
                raise ValueError(
                    f"`{name}` says how activations are rounded, which `weight_only` "
                    "does not do. Give one of the two."
                )

    def why_not(self, site: Site) -> str | None:
        if site.backward:
            return "int8 rounds too coarsely for a gradient"
        return super().why_not(site) or self._why_not_summed(site)

    def _why_not_summed(self, site: Site) -> str | None:
        """Why its sums are not made in int32, if they might overflow there."""
        if self.weight_only:
            return None
        terms = summed_axes(site.params, site.avals)
        if not all(isinstance(d, int) for d in terms):
            return "sums of a length that is not known may leave the range of int32"
        if (length := prod(terms)) <= MOST_TERMS:
            return None
        return (
            f"sums of {length} terms, more than {MOST_TERMS}, may leave int32's range"
        )

    def roundings(self, site: Site) -> tuple[AsInt8, AsInt8]:
        axes = site_axes(site)
        weight = weight_side(site)
        lhs, rhs = (
            AsInt8(
                axes[i].summed,
                self.epsilon,
                None if i == weight else self.activation_max,
                is_weight=i == weight,
                order=_in_rows(site) if self.weight_only and i == weight else None,
            )
            for i in (0, 1)
        )
        return lhs, rhs

    def quantisers(self, site: Site) -> list[AsInt8 | None]:
        migrates, weight = self._migrates(site), weight_side(site)
        return [
            None if migrates or (self.weight_only and i != weight) else how
            for i, how in enumerate(self.roundings(site))
        ]

    def _migrates(self, site: Site) -> bool:
        return self.migration is not None and pairs_of(site.params) is not None

    def product(self, made: RoundedContraction, dtype: DType) -> Any:
        sums = made.fn(*(x.values for x in made.numbers), as_it_is(_INT32))
        left, right = (
            scale_onto_result(x.multiplier, one, sums)
            for x, one in zip(made.numbers, made.axes, strict=True)
        )
        # To float32 first: of integers as such, a GPU has no convolution.
        return cast(sums.astype(_FLOAT32) / (right * left), dtype)

    def forward(self, site: Site) -> Callable[..., Any]:
        forward, weight = super().forward(site), weight_side(site)

        def of_migrated(lhs, rhs, *_):
            moved = migrated((lhs, rhs), site.params, weight, self.migration)
            pairs = zip(self.roundings(site), moved, strict=True)
            return forward(lhs, rhs, *(how(x) for how, x in pairs))

        if self.weight_only:
            return self._of_weights(site, weight)
        return of_migrated if self._migrates(site) else forward

    def _of_weights(self, site: Site, weight: int) -> Callable[..., Any]:
        fn = bilinear(site.primitive, site.params, moving=0)
        low, out, axes = low_of(site), result_of(site), site_axes(site)

        own = axes[weight]

        def of_weights(lhs, rhs, *numbers):
            operands = [cast(lhs, low), cast(rhs, low)]
            operands[weight] = numbers[weight].values.astype(low)
            return scaled(fn(*operands, as_it_is(_FLOAT32)), numbers)

        def with_row(lhs, rhs, *numbers):
            rows = to_rows(numbers[weight].values, own).astype(low)
            return scaled(product_with_row(site, (lhs, rhs), rows, _FLOAT32), numbers)

        def scaled(sums, numbers):
            multiplier = numbers[weight].multiplier
            return cast(sums / scale_onto_result(multiplier, own, sums), out)

        return of_weights if rows_of_weight(site) is None else with_row

    def eight_bits(self, site: Site) -> EightBits:
        if self.weight_only:
            return EightBits("output", f"in {low_of(site).name} everywhere")
        scales = "row x output" if self.activation_max is None else "tensor x output"
        runs = "native on GPUs, TPUs and CPUs; in 16 bits where there is one row"
        return EightBits(scales, runs)

    def why(self, site: Site) -> str:
        low = low_of(site).name
        if self.weight_only:
            text = f"reads weights in int8, one scale for each output, and {low}"
        else:
            inputs = (
                "one scale for each row"
                if self.activation_max is None
                else f"inputs up to {self.activation_max:g}"
            )
            text = f"computes in int8, {inputs} and output"
        if self.migration is not None:
            has_pairs = pairs_of(site.params) is not None
            text += ", scales migrated" if has_pairs else ", no migration in groups"
        return f"{text}; gradients in {low}"


def _in_rows(site: Site) -> tuple[int, ...] | None:
    """The order of a weight's axes in which what one sum reads lies side by side.

    A product with a single row is best made so. `None` if a mesh has laid them out."""
    weight = weight_side(site)
    if dot_numbers(site.params) is None or is_explicitly_sharded(site.avals[weight]):
        return None
    axes = site_axes(site)[weight]
    return *axes.batch, *axes.free, *axes.summed


@listing_arguments
def int8(
    *,
    weight_only: bool = False,
    activation_max: float | None = None,
    migration: float | None = None,
    epsilon: float = 1e-7,
    where: Callable[[Site], bool] | None = WORTH_IT,
    leave: tuple[str, ...] = NO_HEADS,
    parameters_only: bool = True,
) -> Rule:
    """Contractions of int8 operands, added up as integers; for inference, mostly.

    Each row of an operand (all that one sum reads) is multiplied by the number that
    brings its largest magnitude to 127, and rounded. So a weight has a scale for each
    output, and activations have one for each row (for a convolution, each example),
    taken from the values at hand. The sums are exact integers; they are scaled in
    float32 and returned in the compute dtype. GPUs and CPUs have instructions for
    contractions of int8. Sums of more than 133144 terms could overflow, and are made in
    the compute dtype.

    Gradients are those of the contraction in the compute dtype, straight through the
    rounding. Contractions of a backward pass stay in the compute dtype.

    What is quantised, and what is not, is as for `float8`. NaN and inf make all results
    of their row NaN; rows of zeros stay zeros.

    Args:
        weight_only: round the weight alone, and contract in the compute dtype. There is
            less to read where weights are stored in int8 and there are few rows.
        activation_max: the largest magnitude of activations, if it is known; larger
            ones saturate. Else each row's own is taken.
        migration: how much of the activations' range the weights take over, from 0
            (nothing) to 1, for each channel that is summed over; 0.5 evens them out. It
            is for activations of which a few channels are much larger than others.
        epsilon: is added to each maximum, as Keras does. Rows not much larger than
            this lose their precision, and much smaller ones become 0.
        where: as for `float8`. Unless weights are stored in int8, they are read in full
            to be rounded.
        leave: as for `float8`.
        parameters_only: as for `float8`.
    Returns:
        A rule to put in a policy.
    Raises:
        TypeError, ValueError: an argument is none of those that it may be.
        AmpError: when a function is traced, if `where` raises or returns no bool.

    >>> from jax import lax
    >>> from jaxamp_like import default_amp_policy
    >>> policy = default_amp_policy | {lax.dot_general_p: int8(migration=0.5)}

    Scales as Keras' `AbsMaxQuantizer`; migration as Xiao et al., "SmoothQuant",
    arXiv:2211.10438; straight-through gradients after Bengio et al.,
    arXiv:1308.3432."""
    return Int8(
        where, leave, parameters_only, weight_only, activation_max, migration, epsilon
    )
