"""A precision for each of the three contractions of training.

A contraction (`dot_general`, `ragged_dot_general`, `conv_general_dilated`) is made
three times: forward, for the gradient of its input and for that of its weight;
`use_precision_by_pass` says how each is made."""

from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

from jax.typing import DTypeLike

from .._dtypes import DType, as_float_dtype, bits
from .._errors import listing_arguments
from .._primitives import CONTRACTIONS
from . import (
    Decision,
    Demand,
    Precision,
    Rule,
    Site,
    UsePrecision,
    out_facts_of,
    use_original_precision,
    why_as_written,
)
from .passes import CastPass, cast_pass, contraction_by_casts
from .user_rules import as_bool
from .weights import Gradient, gradient_of, weight_side


class PassPrecision(NamedTuple):
    """How one of the three contractions is made; see `wide`."""

    dtype: DType | None = None  # that the operands are read in; None: compute dtype
    wide: bool = False  # whether the result is never rounded to `dtype`

    @property
    def is_low(self) -> bool:
        return self.dtype is None or bits(self.dtype) < 32


_COMPUTE = PassPrecision()
_SIDES = ("lhs", "rhs")


def wide(dtype: DTypeLike | None = None) -> PassPrecision:
    """Reads low operands, but never rounds the result to their dtype.

    It is a choice for `use_precision_by_pass`. The hardware adds up in float32 anyway,
    and the result is kept so.

    Args:
        dtype: the dtype in which the operands are read, by default the compute dtype.
    Returns:
        A choice for one of the passes.
    Raises:
        TypeError: `dtype` is no floating dtype.
        ValueError: `dtype` is float64 and x64 is not enabled.

    >>> wide("bfloat16")
    PassPrecision(dtype=dtype(bfloat16), wide=True)
    """
    return _choice(dtype, "dtype")._replace(wide=True)


@dataclass(frozen=True)
class UsePrecisionByPass(Rule):
    """A precision for each of the three contractions; see `use_precision_by_pass`."""

    forward: PassPrecision = _COMPUTE
    input_gradient: PassPrecision = _COMPUTE
    weight_gradient: PassPrecision = _COMPUTE
    weight: Literal["lhs", "rhs"] | None = None

    def __post_init__(self) -> None:
        for name in ("forward", "input_gradient", "weight_gradient"):
            object.__setattr__(self, name, _choice(getattr(self, name), name))
        super().__post_init__()

    @property
    def is_compute(self) -> bool:
        return self.forward.is_low

    @property
    def chooses_residuals(self) -> bool:
        gradients = (self.input_gradient, self.weight_gradient)
        return not all(choice.is_low for choice in gradients)

    def demand(self, params: dict[str, Any], wanted: Demand) -> Demand:
        if not self.forward.is_low:
            return Demand.FULL
        gradients = (self.input_gradient, self.weight_gradient)
        if not all(choice.is_low for choice in gradients):
            return Demand.LOW | Demand.FULL
        wide = any(choice.wide for choice in gradients)
        return Demand.LOW | Demand.WIDE if wide else Demand.LOW

    def decide(self, site: Site) -> Decision:
        name = site.primitive and site.primitive.name
        if name in CONTRACTIONS and (of := self._gradient_of(site)) is not None:
            return self._backward(site, of)
        alike = self.forward == self.input_gradient == self.weight_gradient
        is_other = name not in CONTRACTIONS or None in site.authors[:2]
        if is_other or (alike and not self.forward.wide):
            return UsePrecision(self.forward.dtype).decide(site)
        original = use_original_precision.decide(site)
        if why := why_as_written(site):
            return original._replace(why=why)
        author: Any = site.out_authors[0]
        forward = _pass(site, 0, self.forward, author)
        full = forward.reads == site.authors[:2]
        out = author if full or forward.wide else forward.low
        gradients = [_pass(site, i, self._gradient(site, i), out) for i in (0, 1)]
        if all(made.reads == site.authors[:2] for made in (forward, *gradients)):
            return original._replace(why="the author's dtype is no wider")
        reads = [_bound_in(site, i, forward, gradients) for i in (0, 1)]
        return Decision(
            (*reads, *site.authors[2:]),
            site.params,
            out_facts_of(site, out, Precision.FULL if full else Precision.LOW),
            self._why(site),
            contraction_by_casts(forward, gradients, out),
        )

    def _gradient_of(self, site: Site) -> Gradient | None:
        """What a contraction of a backward pass makes the gradient of.

        The author wrote that contraction, as in a `custom_vjp` rule, or JAX made it for
        a gradient that is taken inside of `amp`."""
        sides = {partner.side for partner in site.partners}
        of = gradient_of(site)
        if of is None or self.weight is None or len(sides) != 1:
            return of
        return "weight" if sides == {_SIDES.index(self.weight)} else "input"

    def _backward(self, site: Site, of: Gradient) -> Decision:
        """Decides by the choice for gradient `of`, for its own derivatives too."""
        weight, input = self.weight_gradient, self.input_gradient
        either = _more_exact(weight, input, site.compute_dtype)
        choice = {"weight": weight, "input": input, "either": either}[of]
        rule = UsePrecisionByPass(choice, choice, choice, self.weight)
        decision = rule.decide(site._replace(cotangents=()))
        what = "weight or input" if of == "either" else of
        return decision._replace(why=f"{decision.why}: {what} gradient")

    def _gradient(self, site: Site, i: int) -> PassPrecision:
        """How the gradient of operand `i` is made."""
        known = self.weight
        side = weight_side(site) if known is None else _SIDES.index(known)
        return self.weight_gradient if i == side else self.input_gradient

    def _why(self, site: Site) -> str:
        def show(choice):
            name = (choice.dtype or site.compute_dtype).name
            return name + " (wide)" * choice.wide

        if self.forward == self.input_gradient == self.weight_gradient:
            return f"computes in {show(self.forward)}"
        return (
            f"computes in {show(self.forward)}, input gradients in "
            f"{show(self.input_gradient)}, weight gradients in "
            f"{show(self.weight_gradient)}"
        )


@listing_arguments
def use_precision_by_pass(
    *,
    forward: DTypeLike | PassPrecision | None = None,
    input_gradient: DTypeLike | PassPrecision | None = None,
    weight_gradient: DTypeLike | PassPrecision | None = None,
    weight: Literal["lhs", "rhs"] | None = None,
) -> Rule:
    """Computes each of the three contractions of training in a precision of its own.

    Each choice is a dtype, `None` for the compute dtype, or `wide(dtype)`: operands in
    that dtype, but a result that keeps the author's dtype (forward) or that of what it
    is the gradient of. No pass uses more bits than the author wrote. Gradients have the
    dtypes of what they are gradients of, so a wide gradient is worth its while for
    parameters, which are read as they are, and for values that are made in full. An
    operand that any pass needs in more bits than `forward` is kept for the backward
    pass as it is. Casts of parameters are never kept.

    The choices hold under every transformation of JAX: reverse mode of any order,
    `vmap`, `jit`, `scan`, `remat`, and forward mode too. In forward mode, the tangent
    that comes from an operand is computed in the precision of that operand's gradient.
    Gradients taken inside of `amp`, and those in a `custom_vjp` rule, are known by the
    cotangents that they read; where it can't be known whether one is of a weight, the
    more exact choice holds.

    The weight of a `dot_general` is the operand that is a parameter, by the `argnums`
    of `amp`, or made of parameters alone. Where both are or none is, it is the one that
    is no vector, else the right one. If `weight` is given, it decides instead.
    Convolutions and ragged contractions have their weight on the right.

    A contraction that the author gave a precision by hand is left as written, except
    under the key of a scope. Under such a key, ops that are no contractions run in the
    dtype of `forward`.

    Args:
        forward: for the contraction itself.
        input_gradient: for the gradient of the operand that is no weight.
        weight_gradient: for the gradient of the weight.
        weight: which operand is the weight, "lhs" or "rhs", if that is known.
    Returns:
        A rule to put in a policy.
    Raises:
        TypeError: a choice is neither a floating dtype nor made by `wide`.
        ValueError: `weight` is no side, or a dtype is float64 without x64.

    Weight gradients with float32 results, from low operands:

    >>> from jax import lax
    >>> from jaxamp_like import default_amp_policy
    >>> rule = use_precision_by_pass(weight_gradient=wide())
    >>> policy = default_amp_policy | {lax.dot_general_p: rule}
    """
    return UsePrecisionByPass(
        _choice(forward, "forward"),
        _choice(input_gradient, "input_gradient"),
        _choice(weight_gradient, "weight_gradient"),
        weight,
    )


def _choice(value: Any, argument: str) -> PassPrecision:
    if isinstance(value, tuple):  # one that is made, or a pair from a saved policy
        made = PassPrecision(*value)
        is_wide = as_bool(made.wide, "wide")
        return _choice(made.dtype, argument)._replace(wide=is_wide)
    if value is wide:
        raise TypeError(f"`{argument}` is `wide`, which is called: write `wide()`.")
    return PassPrecision(None if value is None else as_float_dtype(value, argument))


def _more_exact(a: PassPrecision, b: PassPrecision, low: DType) -> PassPrecision:
    """The choice that serves for both, where it is not known which one holds."""
    dtype = max(a.dtype or low, b.dtype or low, key=bits)
    return PassPrecision(dtype, a.wide or b.wide)


def _pass(site: Site, moving: int, choice: PassPrecision, wide: DType) -> CastPass:
    dtype = choice.dtype or site.compute_dtype
    return cast_pass(site, moving, dtype, wide if choice.wide else None)


def _bound_in(
    site: Site, i: int, forward: CastPass, gradients: list[CastPass]
) -> DType | None:
    """The dtype that operand `i` is cast to before it is bound; `None` for no cast.

    It is not cast where a gradient reads it, or its own gradient is made, in more bits
    than the forward pass: a gradient has the dtype of what was bound. An input of the
    function is then cast inside, where the backward pass makes the cast again."""
    low = forward.reads[i]

    def is_more(dtype):
        return dtype != low and bits(dtype) >= bits(low)

    more = any(is_more(made.reads[i]) for made in gradients)
    as_is = more or gradients[i].wide or low == site.authors[i]
    return None if as_is else low
