"""The rule for what may be a contraction, and may be a multiplication."""

from dataclasses import dataclass
from typing import Any

from .._primitives.contractions import is_contraction
from .base import Decision, Demand, Rule, Site
from .computing import use_compute_precision
from .storing import compute_in_full


@dataclass(frozen=True)
class Contract(Rule):
    """One rule for contractions, another for products that are none."""

    contraction: Rule
    product: Rule

    @property
    def is_compute(self) -> bool:
        return self.contraction.is_compute

    def for_equation(self, params: dict[str, Any], avals: Any) -> Rule:
        shapes = [aval.shape for aval in avals]
        return self.contraction if is_contraction(params, shapes) else self.product

    def demand(self, params: dict[str, Any], wanted: Demand) -> Demand:
        return self.contraction.demand(params, wanted)

    def decide(self, site: Site) -> Decision:
        return self.for_equation(site.params, site.avals).decide(site)


contract = Contract(use_compute_precision, compute_in_full)
"""Contractions in the compute dtype; a product that sums nothing, and an inner product,
as `mul` and `reduce_sum` are: see `_primitives.contractions`."""
