"""The rule of a contraction that a policy made by measurement has not measured."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import jax.numpy as jnp

from .base import Decision, Demand, Rule, Site
from .computing import use_compute_precision, use_precision
from .contracting import Contract
from .storing import compute_in_full

NOT_MEASURED = "`calibrate` has not measured it"

_IN_FULL = Contract(use_precision("float32"), compute_in_full)


@dataclass(frozen=True)
class Unmeasured(Rule):
    """As written, whatever the policy says of what it has measured.

    Its reason says so where `amp` would lower the contraction if all it knew was that
    it is one.

    Args:
        rule: what the policy says."""

    rule: Rule = field(repr=False)

    @property
    def may_compute_low(self) -> bool:
        return self.rule.may_compute_low  # so that the author's own voice is heard

    def is_for(self, name: str) -> bool:
        return self.rule.is_for(name)

    def demand(self, params: dict[str, Any], wanted: Demand) -> Demand:
        return Demand.FULL

    def for_equation(self, params: dict[str, Any], avals: Sequence[Any]) -> Rule:
        return self

    def decide(self, site: Site) -> Decision:
        decision = _IN_FULL.decide(site)
        as_low = site._replace(compute_dtype=jnp.dtype(jnp.bfloat16), by_scope=False)
        rule = Contract(use_compute_precision, compute_in_full)
        if rule.decide(as_low).reads == site.authors:
            return decision
        return decision._replace(why=f"{NOT_MEASURED}; {decision.why}")
