"""The rule for primitives that are contractions, or only multiply, by their axes."""

from dataclasses import dataclass
from typing import Any

from .._dtypes import bits
from .._primitives.contractions import has_contracting_gradients, is_contraction
from .base import Decision, Demand, Rule, Site
from .computing import use_compute_precision
from .passes import cast_pass, contraction_by_casts
from .storing import ComputeInFull


@dataclass(frozen=True)
class Contract(Rule):
    """One rule for contractions, another for products that are none."""

    contraction: Rule
    product: Rule

    @property
    def is_compute(self) -> bool:
        return self.contraction.is_compute

    def for_equation(self, params: dict[str, Any], avals: Any) -> Rule:
        return self.contraction if is_contraction(params, avals) else self.product

    def demand(self, params: dict[str, Any], wanted: Demand) -> Demand:
        return self.contraction.demand(params, wanted)

    def decide(self, site: Site) -> Decision:
        return self.for_equation(site.params, site.avals).decide(site)


@dataclass(frozen=True)
class MultiplyInFull(ComputeInFull):
    """Computes a product in full, and its gradients low where they are contractions.

    Those of `einsum("i,j->ij")` are. JAX makes them by transposing the product, so that
    they would otherwise have its dtype."""

    def decide(self, site: Site) -> Decision:
        decision = super().decide(site)
        if not has_contracting_gradients(site.params, site.avals):
            return decision
        reads = use_compute_precision.decide(site).reads
        if reads == site.authors or None in site.authors:
            return decision
        full = max((d for d in site.authors if d is not None), key=bits)
        low = min((d for d in reads if d is not None), key=bits)
        gradients = [cast_pass(site, i, low) for i in (0, 1)]
        out: Any = site.out_authors[0]
        bind = contraction_by_casts(cast_pass(site, 0, full), gradients, out)
        why = f"{decision.why}, and its gradients in {low.name}"
        return decision._replace(bind=bind, why=why)


contract = Contract(use_compute_precision, MultiplyInFull())
"""Computes contractions in the compute dtype. A product that sums nothing and an inner
product are computed in full: see `_primitives.contractions`."""
