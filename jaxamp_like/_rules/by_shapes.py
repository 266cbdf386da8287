"""A rule that tells contractions apart by the shapes of their operands."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from .base import Decision, Demand, Rule, Site


def shapes_of(avals: Sequence[Any]) -> str:
    """The shapes of operands as text: "8x16,16x4"."""
    return ",".join("x".join(map(str, aval.shape)) or "()" for aval in avals)


@dataclass(frozen=True)
class ByShapes(Rule):
    """The rule that stands beside the shapes of both operands, or another one."""

    rules: tuple[tuple[str, Rule], ...]
    otherwise: Rule

    @property
    def is_compute(self) -> bool:
        return all(rule.is_compute for rule in self._all())

    @property
    def may_compute_low(self) -> bool:
        return any(rule.may_compute_low for rule in self._all())

    def _all(self) -> list[Rule]:
        return [self.otherwise, *(rule for _, rule in self.rules)]

    def is_for(self, name: str) -> bool:
        return self.otherwise.is_for(name)

    def for_equation(self, params: dict[str, Any], avals: Sequence[Any]) -> Rule:
        rule = dict(self.rules).get(shapes_of(avals[:2]), self.otherwise)
        return rule.for_equation(params, avals)

    def demand(self, params: dict[str, Any], wanted: Demand) -> Demand:
        demand = Demand.NONE
        for rule in self._all():
            demand |= rule.demand(params, wanted)
        return demand

    def decide(self, site: Site) -> Decision:
        return self.for_equation(site.params, site.avals).decide(site)
