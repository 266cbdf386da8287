"""`float8`: contractions of float8 operands, forward and backward."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import jax.numpy as jnp
from jax.typing import DTypeLike

from .._dtypes import DType, lowered
from .._errors import listing_arguments
from .._primitives.contractions import exceeds_one
from .._rules import Decision, EightBits, Rule, Site
from .._rules.bilinear import as_it_is, bilinear
from .._rules.passes import CastPass, Pass
from .._rules.weights import weight_side
from .arguments import float8_grad_dtype
from .axes import scale_onto_result, site_axes
from .delayed import ScaleRequest, contraction_by_delayed_scales
from .passes import RoundedContraction, Rounding, SavedRoundedPass
from .rule import (
    NO_HEADS,
    Quantising,
    decided,
    gradient_sums,
    low_of,
    result_of,
    why_no_weight_gradient,
)
from .scaled import SCALE_NAME, AsFloat8, rescaled
from .worth import WORTH_IT

DEFAULT_LENGTH = 1024  # that of Flax, Keras and Transformer Engine
E4M3 = jnp.dtype("float8_e4m3fn")
E5M2 = jnp.dtype("float8_e5m2")
Kind = Literal["kept", "again", "compute"]
"""How a gradient is made. "kept": of the other operand as the forward pass rounded it.
"again": of the other operand, rounded again. "compute": in the compute dtype."""
_RUNS = "native on GPUs from Ada and Hopper on; the same numbers in 16 bits elsewhere"


@dataclass(frozen=True, repr=False)
class Float8(Quantising):
    """See `float8`."""

    name: ClassVar[str] = "float8"
    description: ClassVar[str] = (
        "operands in float8_e4m3fn, cotangents in float8_e5m2, with a scale for each "
        "tensor"
    )

    grad_dtype: DType = E5M2
    weight_gradient: Literal["float8", "compute"] = "float8"
    granularity: Literal["tensor", "row"] = "tensor"
    keep: Literal["float8", "compute"] = "float8"
    power_of_two: bool = True
    delayed: bool = False
    amax_history_length: int = DEFAULT_LENGTH

    def __post_init__(self) -> None:
        grad_dtype = float8_grad_dtype(self.grad_dtype)
        object.__setattr__(self, "grad_dtype", grad_dtype)
        super().__post_init__()
        length = self.amax_history_length
        if length < 1:
            raise ValueError(
                f"`amax_history_length` must be 1 or more, but got {length}: the scale "
                "of a step follows from the maxima of that many steps before it."
            )
        if self.delayed and self.granularity == "row":
            raise ValueError(
                "A history is of a whole tensor: `delayed=True` can't be given "
                "together with `granularity='row'`. Leave out one of them."
            )
        if not self.delayed and length != DEFAULT_LENGTH:
            raise ValueError(
                f"`amax_history_length={length}` is given, but scales come from the "
                "arrays at hand, without a history. Give `delayed=True` too."
            )

    def why_not(self, site: Site) -> str | None:
        why = why_no_weight_gradient(site)
        if self.weight_gradient == "compute" and why is not None:
            return why
        if site.primitive.name != "dot_general" and any(site.cotangents):
            return "the gradient of a convolution"
        return super().why_not(site)

    def quantise(self, site: Site) -> Decision:
        return self._delayed(site) if self.delayed else super().quantise(site)

    def _delayed(self, site: Site) -> Decision:
        formats, out = self._formats(site), result_of(site)
        lhs, rhs = (
            ScaleRequest(
                _authors(site.scope),
                site.primitive.name,
                side,
                site.backward,
                site.is_cotangent(side),
                fmt,
                self.amax_history_length,
            )
            for side, fmt in enumerate(formats)
        )
        fn = bilinear(site.primitive, site.params, moving=0)
        bind = contraction_by_delayed_scales(
            fn, (lhs, rhs), self.product_dtype(out), out
        )
        left, right = (fmt.dtype.name for fmt in formats)
        why = f"computes in {left} x {right}, scaled by maxima of steps before"
        eight_bits = EightBits("tensor x tensor, delayed", _RUNS, needs_state=True)
        decision = decided(site, why, bind, eight_bits)
        # Parameters are cast before, too: all readers of a tensor see the same numbers.
        reads = tuple(a and lowered(a, low_of(site)) for a in site.authors)
        return decision._replace(reads=reads)

    def roundings(self, site: Site) -> tuple[Rounding, Rounding]:
        pairs = zip(self._formats(site), site_axes(site), strict=True)
        lhs, rhs = (fmt.along(one) for fmt, one in pairs)
        return lhs, rhs

    def product(self, made: RoundedContraction, dtype: DType) -> Any:
        lhs, rhs = made.numbers
        out = made.fn(lhs.values, rhs.values, as_it_is(dtype))
        pairs = zip((lhs.scale, rhs.scale), made.axes, strict=True)
        return rescaled(
            out, *(scale_onto_result(scale, one, out) for scale, one in pairs)
        )

    def gradients(self, site: Site, compute: Sequence[CastPass]) -> Sequence[Pass]:
        low = low_of(site)
        cotangent, formats = self._format(self.grad_dtype), self._formats(site)

        def made(i: int, kind: Kind) -> Pass:
            if kind == "compute":
                return compute[i]
            if kind == "again":
                return self.rounded(site, i, (cotangent, formats[1 - i]))
            fn = bilinear(site.primitive, site.params, moving=i)
            return SavedRoundedPass(fn, i, low, cotangent, self.product_dtype(low))

        return [made(i, kind) for i, kind in enumerate(self._kinds(site))]

    def rounding_of_cotangents(self, site: Site) -> AsFloat8 | None:
        if self._kinds(site) == ["compute", "compute"]:
            return None
        return AsFloat8(self.grad_dtype, None, self.power_of_two)

    def product_dtype(self, dtype: DType) -> DType:
        # XLA turns a float16 result of float8 operands into a float16 contraction.
        return dtype if dtype == jnp.float32 else jnp.dtype("bfloat16")

    @property
    def keeps_rounded(self) -> bool:
        return self.granularity == "tensor" and self.keep == "float8"

    @classmethod
    def with_history(cls, length: int) -> "Float8":
        return cls(delayed=True, amax_history_length=length)

    def _format(self, dtype: DType) -> AsFloat8:
        axes = () if self.granularity == "row" else None
        return AsFloat8(dtype, axes, self.power_of_two)

    def _formats(self, site: Site) -> tuple[AsFloat8, AsFloat8]:
        """The format of each operand, which for a cotangent is that of cotangents."""
        lhs, rhs = (
            self._format(self.grad_dtype if site.is_cotangent(i) else E4M3)
            for i in (0, 1)
        )
        return lhs, rhs

    def _kinds(self, site: Site) -> list[Kind]:
        """How the gradients of both operands are made."""
        if site.primitive.name != "dot_general":
            return ["compute", "compute"]
        kinds: list[Kind] = ["kept" if self.keeps_rounded else "again"] * 2
        if self.weight_gradient == "compute":
            kinds[weight_side(site)] = "compute"
        return [
            kind if exceeds_one(summed) else "compute"
            for kind, summed in zip(kinds, gradient_sums(site), strict=True)
        ]

    def eight_bits(self, site: Site) -> EightBits:
        scales = f"{self.granularity} x {self.granularity}"
        kept = SCALE_NAME if self.granularity == "tensor" else None
        return EightBits(scales, _RUNS, kept=kept)

    def why(self, site: Site) -> str:
        kinds = self._kinds(site)
        scales = f"one scale for each {self.granularity}"
        low = low_of(site).name
        lhs, rhs = (fmt.dtype.name for fmt in self._formats(site))
        text = f"computes in {lhs} x {rhs}, {scales}"
        if kinds == ["compute", "compute"]:
            return f"{text}; gradients in {low}"
        if "compute" in kinds:
            of = "weight" if kinds[weight_side(site)] == "compute" else "input"
            text += f"; {of} gradients in {low}"
        return f"{text}; cotangents in {self.grad_dtype.name}"


def _authors(scope: tuple[str, ...]) -> tuple[str, ...]:
    """A scope without the names that this library adds."""
    return tuple(n for n in scope if not n.startswith("amp_"))


@listing_arguments
def float8(
    *,
    grad_dtype: DTypeLike = "float8_e5m2",
    weight_gradient: Literal["float8", "compute"] = "float8",
    granularity: Literal["tensor", "row"] = "tensor",
    keep: Literal["float8", "compute"] = "float8",
    power_of_two: bool = True,
    delayed: bool = False,
    amax_history_length: int = DEFAULT_LENGTH,
    where: Callable[[Site], bool] | None = WORTH_IT,
    leave: tuple[str, ...] = NO_HEADS,
    parameters_only: bool = True,
) -> Rule:
    """Contractions of float8 operands: forward, and for both gradients.

    Each operand is divided by a scale that brings its largest magnitude to that of the
    format, and rounded to float8: e4m3fn forward, e5m2 for cotangents. The result is
    made in bfloat16 (float32 if it is to be float32) and multiplied by one scalar,
    the form that XLA has native kernels for on a GPU; a CPU computes the same numbers
    in bfloat16 or float32. Scales come from the arrays at hand ("current scaling"), so
    there is no state. What the backward pass keeps is float8 too.

    Quantised are `dot_general`s with any batch and contracted axes, and convolutions,
    of which the gradients are made in the compute dtype. Left to the compute dtype are
    heads and embeddings, contractions of which no operand is a parameter (attention's
    scores), those for which `where` doesn't hold, ragged ones, and products that sum
    nothing; `explain` says why of each. What the author gave a precision by hand stays
    as written, except under the key of a scope. Under such a key, ops that are no
    contractions get what the policy says of them otherwise.

    A tensor of zeros stays one. NaN stays NaN, and inf becomes NaN: a loss scaler sees
    both. Second derivatives through what is kept need `keep="compute"`. Within
    `jax.vmap(amp(f))`, each example has scales of its own, and `where` sees its shapes;
    outside, in `amp(jax.vmap(f))`, all of the batch is one tensor.

    Args:
        grad_dtype: the format of cotangents. "float8_e4m3fn" is more accurate, with
            2^18 of range against 2^32.
        weight_gradient: "compute" makes it of operands in the compute dtype. A gradient
            that is taken inside of `amp` is made so, too, unless it is known to be of
            an input.
        granularity: "row" gives each row of the left operand, and column of the right,
            a scale, in all three contractions; operands are then kept in the compute
            dtype, and quantised again in the backward pass.
        keep: what operands are kept as for the backward pass.
        power_of_two: whether scales are rounded up to powers of two, so that
            multiplying by them rounds nothing. Else they are used as computed.
        delayed: whether scales follow from the largest magnitudes of the steps before
            ("delayed scaling"), not from the arrays at hand. Those are a state, which
            `amp_with_state` takes and returns; `amp` has none, and raises.
        amax_history_length: how many steps are remembered, if `delayed`.
        where: tells by a bool whether to quantise a contraction (a `Site`); `None`
            always does.
        leave: regular expressions of names of scopes, all inside of which is left to
            the compute dtype. By default heads and embeddings are, by names that they
            commonly have. The default looks at the innermost scope only, since a
            classifier may be a whole network.
        parameters_only: whether a contraction is left to the compute dtype if no
            operand of it is a parameter (by the `argnums` of `amp`), made of parameters
            alone, or closed over.
    Returns:
        A rule to put in a policy.
    Raises:
        TypeError, ValueError: an argument is none of those that it may be.
        AmpError: when a function is traced, if `where` raises or returns no bool.

    >>> from jax import lax
    >>> from jaxamp_like import default_amp_policy
    >>> policy = default_amp_policy | {lax.dot_general_p: float8()}

    Formats as Micikevicius et al., "FP8 Formats for Deep Learning", arXiv:2209.05433;
    current scaling as "tensorwise" in torchao."""
    return Float8(
        where,
        leave,
        parameters_only,
        float8_grad_dtype(grad_dtype),
        weight_gradient,
        granularity,
        keep,
        power_of_two,
        delayed,
        amax_history_length,
    )
