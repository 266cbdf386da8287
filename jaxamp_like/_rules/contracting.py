"""The rule for what may be a contraction, and may be a multiplication."""

from dataclasses import dataclass
from typing import Any

from .._dtypes import bits
from .._primitives.contractions import has_contracting_gradients, is_contraction
from .base import Decision, Demand, Rule, Site
from .computing import use_compute_precision
from .passes import contraction_by_pass, pass_of
from .storing import ComputeInFull, compute_in_full


@dataclass(frozen=True)
class Contract(Rule):
    """One rule for contractions, another for products that are none.

    The gradients of a product may be contractions, as those of `einsum("i,j->ij")`. If
    the product is computed in full, they follow the rule for contractions."""

    contraction: Rule
    product: Rule

    @property
    def is_compute(self) -> bool:
        return self.contraction.is_compute

    def for_equation(self, params: dict[str, Any], avals: Any) -> Rule:
        shapes = [aval.shape for aval in avals]
        if is_contraction(params, shapes):
            return self.contraction
        if self.product != compute_in_full:
            return self.product
        has_low = has_contracting_gradients(params, shapes)
        return Outer(self.contraction) if has_low else self.product

    def demand(self, params: dict[str, Any], wanted: Demand) -> Demand:
        return self.contraction.demand(params, wanted)

    def decide(self, site: Site) -> Decision:
        return self.for_equation(site.params, site.avals).decide(site)


@dataclass(frozen=True)
class Outer(ComputeInFull):
    """Computes in full; its gradients, which are contractions, follow their rule."""

    contraction: Rule

    def decide(self, site: Site) -> Decision:
        decision = super().decide(site)
        reads = self.contraction.decide(site).reads
        if reads == site.authors or None in site.authors:
            return decision
        full, low = max(site.authors, key=bits), min(reads, key=bits)  # type: ignore
        backward = pass_of(site, low)
        out: Any = site.out_authors[0]
        bind = contraction_by_pass(pass_of(site, full), [backward, backward], out)
        return decision._replace(
            bind=bind, why=f"{decision.why}, and its gradients in {low.name}"
        )


contract = Contract(use_compute_precision, compute_in_full)
"""Contractions in the compute dtype; a product that sums nothing, and an inner product,
as `mul` and `reduce_sum` are: see `_primitives.contractions`."""
