"""What each candidate rounds at a contraction: operands, results and cotangents."""

from collections.abc import Sequence
from typing import NamedTuple

from .._dtypes import DType
from .._quantised.rule import low_of, result_of
from .._rules import Site
from .._rules.weights import is_parameter, weight_side
from .candidates import Candidate
from .rounding import UNROUNDED, RoundingSteps


class ContractionRoundings(NamedTuple):
    """What is rounded at a contraction, and to what.

    Args:
        reads: the operands, for the forward pass.
        residuals: the same operands, for the backward pass.
        gradients: the gradients of the operands, in the same order.
        result: the result.
        cotangent: the cotangent of the result."""

    reads: tuple[RoundingSteps, ...]
    residuals: tuple[RoundingSteps, ...]
    gradients: tuple[RoundingSteps, ...]
    result: RoundingSteps
    cotangent: RoundingSteps


def contraction_roundings(
    candidate: Candidate, site: Site, read_low: Sequence[bool], makes_low: bool
) -> ContractionRoundings:
    """What a candidate rounds at a contraction that `amp` would lower.

    `read_low` says which operands it would then read low, and `makes_low` whether its
    result would be low."""
    low = RoundingSteps((candidate.compute,))
    read = tuple(low if is_low else UNROUNDED for is_low in read_low)
    made = low if makes_low else UNROUNDED
    if candidate.rule is None or not candidate.quantises(site):
        return ContractionRoundings(read, read, read, made, made)
    rule, site = candidate.rule, candidate.site_under(site)
    reads = tuple(
        RoundingSteps(() if _is_weight(site, i) else read[i].dtypes, eight, rule.name)
        for i, eight in enumerate(rule.roundings(site))
    )
    out = rule.product_dtype(result_of(site))
    result = made if not makes_low else RoundingSteps(_both(out, candidate.compute))
    eight = rule.rounding_of_cotangents(site)
    if eight is None:
        return ContractionRoundings(reads, read, read, result, made)
    gradient = _both(rule.product_dtype(low_of(site)), candidate.compute)
    gradients = tuple(
        RoundingSteps(gradient) if one.dtypes else UNROUNDED for one in read
    )
    cotangent = RoundingSteps(made.dtypes, eight, rule.name)
    return ContractionRoundings(reads, reads, gradients, result, cotangent)


def _is_weight(site: Site, i: int) -> bool:
    """Whether an operand is a parameter, which is not cast before it is quantised."""
    return i == weight_side(site) and is_parameter(site.facts[i])


def _both(product: DType, low: DType) -> tuple[DType, ...]:
    return tuple(dict.fromkeys((product, low)))
