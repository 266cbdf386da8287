"""Which results count as weights, by what they are made of.

What is made of parameters alone is a parameter: a cast of one, a slice, three of them
side by side, an average, a product with a mask, a sum with a product of factors. The
result of a lookup is none, since its indices may be data, nor is that of a contraction
which reads anything else."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from .._primitives import CONTRACTIONS, EACH_ALONE, LOOKUPS, is_contraction
from .._rules import Fact, Origin, Site
from .._rules.weights import joined
from .._structural import Facts


def with_origins(site: Site, outs: Facts) -> Facts:
    """Facts of an equation's results, knowing what they are made of."""
    facts: Sequence[Fact | None] = site.facts
    if site.primitive.name in EACH_ALONE and len(facts) == len(outs):
        origins = [fact.origin if fact else Origin.DATA for fact in facts]
    else:
        origins = [_made_of(site)] * len(outs)
    return tuple(
        fact and _fresh(fact, origin if aval.ndim else Origin.CONSTANT)
        for fact, origin, aval in zip(outs, origins, site.out_avals, strict=True)
    )


def as_number(fact: Fact | None, aval: Any) -> Fact | None:
    """The fact of a value: a single number is neither a weight nor a batch."""
    if fact is None or aval.ndim:
        return fact
    return fact._replace(origin=Origin.CONSTANT)


def _fresh(fact: Fact, origin: Origin) -> Fact:
    """The fact of a new value, which nothing is multiplied with yet."""
    if fact.origin is origin and not fact.partners:
        return fact
    return fact._replace(origin=origin, partners=frozenset())


def _made_of(site: Site) -> Origin:
    name, facts = site.primitive.name, [fact for fact in site.facts if fact]
    if not facts:
        # What is made of truth values alone is a mask. Other integers may be data.
        is_free = all(getattr(x, "dtype", None) == np.bool_ for x in site.avals)
        return Origin.CONSTANT if is_free else Origin.DATA
    if name in LOOKUPS:
        return Origin.DATA
    if name in CONTRACTIONS and is_contraction(site.params, site.avals):
        is_free = all(fact.origin >= Origin.MADE for fact in facts)
        return Origin.MADE if is_free else Origin.DATA
    voting = [fact for fact in facts if fact.origin != Origin.CONSTANT]
    # A bias or a gain does not decide: what it is added to or multiplied with does.
    large = [f for f in voting if not f.is_broadcast or f.origin == Origin.DATA]
    return joined([fact.origin for fact in large or voting])
