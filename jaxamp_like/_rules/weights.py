"""Which values are weights, and which operand of a contraction is the weight."""

from collections.abc import Iterable
from typing import Literal

from .._primitives.contractions import dot_numbers, free_axes
from .base import Fact, Origin, Site


def is_parameter(fact: Fact | None) -> bool:
    """Whether a value is made of parameters, or of what a function closes over."""
    return fact is not None and fact.origin > Origin.DATA


def joined(origins: Iterable[Origin]) -> Origin:
    """The origin of what is made of several values."""
    known = set(origins) - {Origin.CONSTANT}
    if len(known) <= 1:
        return next(iter(known), Origin.CONSTANT)
    return Origin.DATA if Origin.DATA in known else Origin.MADE


def weight_side(site: Site) -> int:
    """Which operand of a contraction is the weight: 0 or 1.

    The one that is a parameter, as `Origin` tells. Where both are or none is, the one
    that is no vector; else the right one, as in `x @ w`."""
    if site.primitive.name != "dot_general":
        return 1  # a filter, or the matrices of the groups
    origins = [
        fact.origin if fact is not None and is_parameter(fact) else Origin.DATA
        for fact in site.facts[:2]
    ]
    is_free = [bool(axes) for axes in free_axes(dot_numbers(site.params), site.avals)]
    for left, right in (origins, is_free):
        if left != right:
            return 0 if left > right else 1
    return 1


Gradient = Literal["weight", "input", "either"]


def gradient_of(site: Site) -> Gradient | None:
    """What a contraction of a backward pass makes the gradient of, if of one operand.

    It reads a cotangent and the other operand of a forward contraction. Of the two
    operands there, the weight is the one that is more surely a parameter. Where that
    contraction is not known, the operand beside a parameter counts as an input, and the
    operand beside data as a weight."""
    if site.cotangents[:2].count(True) != 1:
        return None
    fact = site.facts[site.cotangents.index(False)]
    beside = Origin.DATA if fact is None else max(fact.origin, Origin.DATA)
    if site.partners:
        of = {max(partner.origin, Origin.DATA) for partner in site.partners}
        if all(origin > beside for origin in of):
            return "weight"
        return "input" if all(origin < beside for origin in of) else "either"
    if beside in (Origin.DATA, Origin.PARAMETER):
        return "weight" if beside == Origin.DATA else "input"
    return "either"  # it may be a weight, or made by a layer that reads no data
