"""What rules that quantise have in common: for which contractions they do, and why not.

Where one doesn't, the contraction gets the default rule, `contract`."""

import functools
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from typing import Any, ClassVar, NamedTuple

import jax
import numpy as np

from .._dtypes import DType, bits, cast, lowered
from .._errors import AmpError
from .._jax import is_pending_sum
from .._primitives import CONTRACTIONS, is_contraction
from .._primitives.contractions import Shape, dot_numbers, free_axes
from .._rules import (
    Decision,
    Demand,
    EightBits,
    Origin,
    Precision,
    Rule,
    Site,
    compute_in_full,
    contract,
    out_facts_of,
    use_original_precision,
    why_as_written,
)
from .._rules.bilinear import bilinear
from .._rules.computing import asks_for_wider_result
from .._rules.conditions import evaluate_predicate, name_of
from .._rules.constant import constant
from .._rules.passes import CastPass, Pass, in_compute_dtype
from .._rules.weights import gradient_of, is_parameter, weight_side
from .arguments import as_patterns, predicate_or_none
from .axes import matmul_sizes, site_axes
from .blocks import BlockRounding
from .gathered import ForEachPass
from .passes import (
    RoundedContraction,
    Rounding,
    RoundingPass,
    SavedRoundedPass,
    rounded_contraction,
)
from .worth import WORTH_IT

NO_PARAMETER = "no operand is a parameter"
NOT_OF_PARAMETERS = f"{NO_PARAMETER}, or made of parameters alone"
HEAD_OR_EMBEDDING = "is a head or an embedding"

NO_HEADS = (
    r"(?!multi_)(\w+_)?head",
    r"(\w+_)?(logits?|classifier|readout|unembed(ding)?)",
    r"(\w+_)?embed(s|der|ding|dings)?(_\w+)?",
    "wte|wpe",
)
"""Names of layers in which rounding to 8 bits costs more than it saves.

Of the innermost scope around a contraction: what stands in a module that is called
`classifier` or `embedder` may be a whole network."""


@dataclass(frozen=True, repr=False)
class Quantising(Rule):
    """A rule for contractions, which leaves all else to other rules.

    A format of numbers derives from it, and says how both operands are rounded, what is
    made of them, and how each gradient is. What else there is to know of a format
    stands here too, for reports, costs and names of policies."""

    where: Callable[[Site], bool] | None = WORTH_IT
    leave: tuple[str, ...] = NO_HEADS
    parameters_only: bool = True

    primitives: ClassVar[tuple[str, ...]] = ("dot_general", "conv_general_dilated")
    """The contractions that it may quantise."""
    name: ClassVar[str]
    """The name that users know, also that of the function that makes its rules."""
    bits: ClassVar[int] = 8
    """How many a number that is contracted has, without its share of a scale."""
    integers: ClassVar[tuple[DType, ...]] = ()
    """The dtypes of integers that stand for rounded numbers, and for sums of them."""
    description: ClassVar[str] = ""
    """What its numbers are, told to a user who gave a dtype instead of the format."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "where", predicate_or_none(self.where))
        object.__setattr__(self, "leave", as_patterns(self.leave))
        super().__post_init__()

    @property
    def is_compute(self) -> bool:
        return True

    def __repr__(self) -> str:
        """The call that makes it."""
        given = [
            f"{f.name}={_shown(getattr(self, f.name))}"
            for f in fields(self)
            if getattr(self, f.name) != f.default
        ]
        return f"{self.name}({', '.join(given)})"

    def is_for(self, name: str) -> bool:
        return name in CONTRACTIONS

    def for_equation(self, params: dict[str, Any], avals: Sequence[Any]) -> Rule:
        is_dot = dot_numbers(params) is not None
        if not is_dot and not hasattr(params.get("dimension_numbers"), "rhs_spec"):
            return self  # of another primitive: see `decide`
        return self if is_contraction(params, avals) else compute_in_full

    def demand(self, params: dict[str, Any], wanted: Demand) -> Demand:
        return Demand.LOW

    def decide(self, site: Site) -> Decision:
        if site.primitive is None:
            raise AmpError(
                f"`{self!r}` makes several operations of one, and can't be called as a "
                "casting callback. Put it into a policy."
            )
        if not self.is_for(site.primitive.name):
            raise AmpError(
                f"`{self!r}` is a rule for contractions, and `{site.primitive}` is "
                "none. Use it under the keys `jax.lax.dot_general_p` and "
                "`jax.lax.conv_general_dilated_p`, under the name of a scope, or by "
                "`quantised(rule)`, which is a whole policy."
            )
        if why := why_as_written(site):
            return use_original_precision.decide(site)._replace(why=why)
        if (why_not := self.why_not(site)) is not None:
            decision = contract.decide(site)
            return decision._replace(why=f"{decision.why}: {why_not}")
        return self.quantise(site)

    def quantise(self, site: Site) -> Decision:
        """The decision for a contraction that is quantised."""
        compute = in_compute_dtype(site, low_of(site))
        quantisers = self.quantisers(site)
        gradients = self.gradients(site, compute)
        bind = rounded_contraction(self.forward(site), gradients, compute, quantisers)
        # The gradient of one operand reads the other one.
        passes = list(reversed(gradients))
        only = tuple(isinstance(one, SavedRoundedPass) for one in passes)
        backward = [
            one.roundings[1].along(axes.of_gradient)
            if isinstance(one, RoundingPass)
            else None
            for one, axes in zip(passes, site_axes(site), strict=True)
        ]
        decision = decided(
            site, self.why(site), bind, self.eight_bits(site), quantisers, backward
        )
        return decision._replace(is_only_rounded=only)

    # What a format says of a contraction that is quantised.

    def roundings(self, site: Site) -> Sequence[Rounding | None]:
        """How each operand is rounded; `None` if it is only read in low precision."""
        raise NotImplementedError

    def quantisers(self, site: Site) -> Sequence[Rounding | None]:
        """The same of each operand that is rounded without a look at the other."""
        return self.roundings(site)

    def product(self, made: RoundedContraction, dtype: DType) -> Any:
        """What a contraction makes of its rounded operands.

        It is in `dtype`, which is what `product_dtype` has."""
        raise NotImplementedError

    def forward(self, site: Site) -> Callable[..., Any]:
        """A function of both operands and of both as quantised: the result."""
        fn = bilinear(site.primitive, site.params, moving=0)
        axes, out = site_axes(site), result_of(site)

        def forward(lhs, rhs, *numbers):
            made = RoundedContraction(fn, (lhs, rhs), numbers, axes)
            return cast(self.product(made, self.product_dtype(out)), out)

        return forward

    def gradients(self, site: Site, compute: Sequence[CastPass]) -> Sequence[Pass]:
        """How each gradient is made; the passes `compute` only cast operands."""
        return compute

    def rounded(
        self, site: Site, i: int, both: tuple[Rounding, Rounding]
    ) -> RoundingPass:
        """The pass for the gradient of operand `i`, which rounds what it reads."""
        fn, low = bilinear(site.primitive, site.params, moving=i), low_of(site)
        product = functools.partial(self.product, dtype=self.product_dtype(low))
        return RoundingPass(fn, i, low, both, product)

    def rounding_of_cotangents(self, site: Site) -> Rounding | None:
        """How the result's cotangent is rounded, where gradients read it rounded.

        It is `None` where gradients are made in the compute dtype."""
        return None

    def product_dtype(self, dtype: DType) -> DType:
        """The dtype to compute a product in, if it is to be returned in `dtype`."""
        return dtype

    def why(self, site: Site) -> str:
        raise NotImplementedError

    def eight_bits(self, site: Site) -> EightBits:
        raise NotImplementedError

    @property
    def keeps_rounded(self) -> bool:
        """Whether operands are kept for the backward pass as they were rounded."""
        return False

    @property
    def chooses_residuals(self) -> bool:
        return self.keeps_rounded

    @classmethod
    def with_history(cls, length: int) -> "Quantising | None":
        """The rule whose scales follow from `length` steps before, if there is one."""
        return None

    def why_not(self, site: Site) -> str | None:
        """Why a contraction is not quantised, if it is not."""
        name = site.primitive.name
        if name not in self.primitives:
            return f"there are no 8-bit kernels of {name}"
        if not is_contraction(site.params, site.avals):
            return "a product that sums nothing"
        if any(a is None or a.itemsize == 8 for a in site.authors[:2]):
            return "its operands are no floats of 32 bits or less"
        if site.params.get("batch_group_count", 1) != 1:
            return "a convolution that sums over examples"
        if any(map(is_pending_sum, (*site.avals, *site.out_avals))):
            return "what is still to be summed over devices takes no scale"
        if (left := _excluded_name(site.scope, self.leave)) is not None:
            return f"{left!r} {HEAD_OR_EMBEDDING}"
        if self.parameters_only and not _is_of_parameter(site):
            numbers = dot_numbers(site.params)
            is_batch = numbers is not None and bool(numbers[1][0])
            if is_batch or not self._is_wanted(site):
                return f"{NO_PARAMETER}, as of attention's scores"
            return NOT_OF_PARAMETERS
        if not self._is_wanted(site):
            lengths = matmul_sizes(site.params, site.avals)
            size = "it" if lengths is None else " x ".join(map(str, lengths))
            return f"{size} {unmet(self.where)}"
        return None

    def _is_wanted(self, site: Site) -> bool:
        who = f"`{self.name}(where=...)`"
        return self.where is None or evaluate_predicate(self.where, site, who)


def unmet(where: Any) -> str:
    """What is said of a contraction for which the condition `where` does not hold."""
    return f"does not meet `where={name_of(where)}`"


def _is_of_parameter(site: Site) -> bool:
    """Whether an operand is a parameter, or the result may be the gradient of one.

    Neither operand of a weight's gradient is a parameter, but the partners of what
    stands beside the cotangent tell what the gradient is of. Where none is known, a
    contraction of a backward pass counts, unless it is a batch of products, as
    attention's are."""
    if any(map(is_parameter, site.facts[:2])):
        return True
    if site.partners:
        return all(partner.origin > Origin.DATA for partner in site.partners)
    numbers = dot_numbers(site.params)
    return site.backward and (numbers is None or not numbers[1][0])


# Places in a list, and the names that Equinox gives to its own layers.
_NO_LAYER = re.compile(r"\d+|eqx\..*")


@functools.lru_cache(maxsize=4096)
def _excluded_name(scope: tuple[str, ...], leave: tuple[str, ...]) -> str | None:
    """The name in `scope` that is to be left alone, if there is one."""
    layers = [name for name in scope if not _NO_LAYER.fullmatch(name)]
    for name in scope:
        plain = name.partition(".")[0]  # a method of a Flax module
        # Flax calls layers by their classes and a number, and a whole model by its own.
        is_model = plain[:1].isupper() and not re.search(r"_\d+$", plain)
        is_layer = name is layers[-1] and not is_model if layers else False
        patterns = (one for one in leave if is_layer or one not in NO_HEADS)
        if any(re.fullmatch(one, plain.lower()) for one in patterns):
            return name
    return None


def gradient_sums(site: Site) -> tuple[Shape, Shape]:
    """The lengths that the gradients of a `dot_general`'s operands sum over.

    They are those of the free axes of the other operand."""
    lhs, rhs = free_axes(dot_numbers(site.params), site.avals)
    return rhs, lhs


def why_no_weight_gradient(site: Site) -> str | None:
    """Why a contraction is left where the gradients of weights are to be."""
    of = gradient_of(site)
    if of not in ("weight", "either"):
        return None
    perhaps = "perhaps " * (of == "either")
    return f"{perhaps}a weight gradient, by the option `weight_gradient`"


def low_of(site: Site) -> DType:
    """The compute dtype for what is not quantised, in no more bits than written."""
    authors = [a for a in site.authors[:2] if a is not None]
    return lowered(max(authors, key=bits), site.compute_dtype)


def result_of(site: Site) -> DType:
    """The dtype of the result, which is wider where the author asked for it."""
    author: Any = site.out_authors[0]
    return author if asks_for_wider_result(site) else lowered(author, low_of(site))


def reads_of(site: Site) -> tuple[DType | None, ...]:
    """The dtypes that operands are cast to first; `None` for a parameter as it came.

    Other inputs of the function are cast as later activations are: else the first
    iteration of a loop would be rounded unlike the others. What came from other devices
    was sent in the compute dtype."""
    low, weight = low_of(site), weight_side(site)
    fact = site.facts[weight]
    is_read = is_parameter(fact) and fact is not None and bool(fact.remat_source)
    return tuple(
        None if author is None or (is_read and i == weight) else lowered(author, low)
        for i, author in enumerate(site.authors)
    )


class Prequantise(NamedTuple):
    """Rounds a value before its readers, which have derivatives of their own.

    Args:
        how: its rounding.
        for_gradient: how the gradient of the other operand rounds it again, if it
            does."""

    how: Any
    for_gradient: Any = None

    def __call__(self, x: Any) -> Any:
        return jax.tree.map(constant, _made(constant(x), self.how))

    def for_each_pass(self, x: Any) -> Any:
        """See `Quantiser`. Gradients of other formats than blocks round by themselves.

        What is made here and nobody reads, XLA leaves out."""
        if self.for_gradient is None or not isinstance(self.how, BlockRounding):
            return self(x)
        return ForEachPass(self(x), Prequantise(self.for_gradient)(x))


@functools.partial(jax.jit, static_argnums=1)
def _made(x: Any, how: Rounding) -> Any:
    return how(x)


def decided(
    site: Site,
    why: str,
    bind: Callable[..., Any],
    eight_bits: EightBits,
    roundings: Sequence[Rounding | None] = (None, None),
    for_gradients: Sequence[Rounding | None] = (None, None),
) -> Decision:
    """The decision for a contraction that `bind` makes, with its quantisers."""
    outs = out_facts_of(site, result_of(site), Precision.LOW)
    return Decision(
        reads_of(site),
        site.params,
        outs,
        why,
        bind,
        recomputes_casts=False,
        eight_bits=eight_bits,
        quantisers=tuple(
            None if how is None else Prequantise(how, again)
            for how, again in zip(roundings, for_gradients, strict=True)
        ),
    )


def _shown(value: Any) -> str:
    return repr(value.name if isinstance(value, np.dtype) else value)
