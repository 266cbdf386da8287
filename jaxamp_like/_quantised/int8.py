"""`int8`: contractions of int8 operands, with gradients in the compute dtype."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import jax.numpy as jnp

from .._dtypes import cast
from .._primitives.contractions import summed_axes
from .._rules import Decision, EightBits, Rule, Site
from .._rules.weights import weight_side
from .alone import AsInt8
from .axes import Axes, axes_at, onto_result
from .bilinear import as_it_is, bilinear
from .integers import MOST_TERMS
from .migration import migrated, pairs_of
from .passes import Pass, with_passes
from .rule import NO_HEADS, Quantising, decided, low_of, result_of
from .said import number
from .worth import WORTH_IT

_INT32, _FLOAT32 = jnp.dtype("int32"), jnp.dtype("float32")


@dataclass(frozen=True, repr=False)
class Int8(Quantising):
    """See `int8`."""

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
        """Why its sums are not those of integers: they might leave int32."""
        if self.weight_only:
            return None
        terms = summed_axes(site.params, [aval.shape for aval in site.avals])
        if not all(isinstance(d, int) for d in terms):
            return "sums of a length that is not known may leave the range of int32"
        if (length := prod(terms)) <= MOST_TERMS:
            return None
        return (
            f"sums of {length} terms, more than {MOST_TERMS}, may leave int32's range"
        )

    def quantise(self, site: Site) -> Decision:
        low = low_of(site)
        gradients = [
            Pass(bilinear(site.primitive, site.params, moving=i), "compute", low)
            for i in (0, 1)
        ]
        axes = axes_at(site)
        weight = weight_side(site)
        both = self.roundings(site)
        migrates = self.migration is not None and pairs_of(site.params) is not None
        alone: list[AsInt8 | None] = [
            None if migrates or (self.weight_only and i != weight) else both[i]
            for i in (0, 1)
        ]
        if self.weight_only:
            forward = self._weight_only(site, axes)
        elif migrates:
            forward = self._migrated(site, axes, both)
        else:
            forward = _integers(site, axes)
        bind = with_passes(forward, gradients, alone)
        return decided(site, self._why(site), bind, self._eight_bits(site), alone)

    def roundings(self, site: Site) -> tuple[AsInt8, AsInt8]:
        axes = axes_at(site)
        weight = weight_side(site)
        lhs, rhs = (
            AsInt8(
                axes[i].summed,
                self.epsilon,
                None if i == weight else self.activation_max,
                is_weight=i == weight,
            )
            for i in (0, 1)
        )
        return lhs, rhs

    def rounding_of_cotangents(self, site: Site) -> None:
        return None

    def _migrated(
        self, site: Site, axes: Sequence[Axes], roundings: Sequence[AsInt8]
    ) -> Callable[..., Any]:
        contract, weight = _integers(site, axes), weight_side(site)

        def forward(lhs, rhs, *_):
            moved = migrated((lhs, rhs), site.params, weight, self.migration)
            left, right = (how(x) for how, x in zip(roundings, moved, strict=True))
            return contract(lhs, rhs, left, right)

        return forward

    def _weight_only(self, site: Site, axes: Sequence[Axes]) -> Callable[..., Any]:
        fn = bilinear(site.primitive, site.params, moving=0)
        low, out, weight = low_of(site), result_of(site), weight_side(site)

        def forward(lhs, rhs, *alone):
            made = alone[weight]
            values = [cast(lhs, low), cast(rhs, low)]
            values[weight] = made.values.astype(low)
            sums = fn(values[0], values[1], as_it_is(_FLOAT32))
            multiplier = onto_result(made.multiplier, axes[weight], sums)
            return cast(sums / multiplier, out)

        return forward

    def _eight_bits(self, site: Site) -> EightBits:
        if self.weight_only:
            return EightBits("output", f"in {low_of(site).name} everywhere")
        scales = "row x output" if self.activation_max is None else "tensor x output"
        runs = "native on GPUs, TPUs and CPUs; in 16 bits where there is one row"
        return EightBits(scales, runs)

    def _why(self, site: Site) -> str:
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


def _integers(site: Site, axes: Sequence[Axes]) -> Callable[..., Any]:
    """The contraction of operands that are integers, which adds up integers."""
    fn, out = bilinear(site.primitive, site.params, moving=0), result_of(site)

    def forward(lhs, rhs, *alone):
        del lhs, rhs
        sums = fn(alone[0].values, alone[1].values, as_it_is(_INT32))
        left, right = (
            onto_result(x.multiplier, one, sums)
            for x, one in zip(alone, axes, strict=True)
        )
        # To float32 first: of integers as such, a GPU has no convolution.
        return cast(sums.astype(_FLOAT32) / (right * left), out)

    return forward


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

    Each row of an operand, all that one sum reads, is multiplied by what brings its
    largest magnitude to 127, and rounded: for a weight that is a scale for each output,
    for activations one for each row (for a convolution, each example), taken from the
    values at hand. The sums are exact integers; they are scaled in float32 and returned
    in the compute dtype. GPUs and CPUs have such instructions. Sums of more than
    133144 terms could overflow, and are made in the compute dtype.

    Gradients are those of the contraction in the compute dtype, straight through the
    rounding. Contractions of a backward pass stay in the compute dtype.

    What is quantised, and what is not, is as for `float8`. NaN and inf make all results
    of their row NaN; rows of zeros stay zeros.

    Args:
        weight_only: round the weight alone, and contract in the compute dtype: less to
            read, where weights are stored so and there are few rows.
        activation_max: the largest magnitude of activations, if it is known; larger
            ones saturate. Else each row's own is taken.
        migration: how much of the activations' range the weights take over, from 0
            (nothing) to 1, channel by channel of what is summed over; 0.5 evens them
            out. For activations of which a few channels are much larger than others.
        epsilon: is added to each maximum, as Keras does. Rows not much larger than
            this lose their precision.
        where: as for `float8`; without weights at rest in int8, there is as much to
            read before.
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
        where,
        leave,
        parameters_only,
        weight_only,
        activation_max,
        migration,
        epsilon,
    )
