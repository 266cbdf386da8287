"""Rules for contractions that `calibrate` has not measured, which run as written."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import jax.numpy as jnp

from .._primitives.contractions import is_contraction
from .base import Decision, DelegatingRule, Demand, Rule, Site
from .by_shapes import pattern_of, shapes_of
from .computing import use_compute_precision, use_precision
from .contracting import Contract
from .storing import compute_in_full

NOT_MEASURED = "`calibrate` has not measured it"

_IN_FULL = Contract(use_precision("float32"), compute_in_full)


def as_measured(rule: Rule) -> Rule:
    """`rule`, but in full for products that sum nothing: none of them is measured."""
    is_contract = isinstance(rule, Contract)
    return replace(rule, product=compute_in_full) if is_contract else rule


@dataclass(frozen=True)
class Unmeasured(Rule):
    """Runs a contraction as written, since it was not measured.

    The reason in reports says so where `amp` would otherwise have lowered it.

    Args:
        rule: what the policy says of the contractions that it has measured.
        shapes: the shapes of its operands, if others were measured in its scope."""

    rule: Rule = field(repr=False)
    shapes: str = ""

    @property
    def may_compute_low(self) -> bool:
        return self.rule.may_compute_low  # so that `why_written` is asked

    def is_for(self, name: str) -> bool:
        return self.rule.is_for(name)

    def decide(self, site: Site) -> Decision:
        decision = _IN_FULL.decide(site)
        as_low = site._replace(compute_dtype=jnp.dtype(jnp.bfloat16), by_scope=False)
        rule = Contract(use_compute_precision, compute_in_full)
        if rule.decide(as_low).reads == site.authors:
            return decision
        return decision._replace(why=f"{NOT_MEASURED}; {decision.why}")


@dataclass(frozen=True)
class OfMeasuredShapes(DelegatingRule):
    """A rule for contractions whose shapes were measured; others run as written.

    Args:
        rule: what the policy says.
        patterns: the shapes of both operands, as `ByShapes` has them."""

    rule: Rule
    patterns: tuple[str, ...]

    @property
    def parts(self) -> tuple[Rule, ...]:
        return (self.rule,)

    def demand(self, params: dict[str, Any], wanted: Demand) -> Demand:
        return super().demand(params, wanted) | Demand.FULL

    def for_equation(self, params: dict[str, Any], avals: Sequence[Any]) -> Rule:
        is_known = pattern_of(self.patterns, params, avals) is not None
        if is_known or not is_contraction(params, avals):
            return self.rule.for_equation(params, avals)
        return Unmeasured(self.rule, shapes_of(params, avals))
