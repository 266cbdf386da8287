"""Which rule each equation gets, and which equations are walked into."""

from dataclasses import dataclass, field
from typing import Any

from .._jax import Eqn
from .._policies.dictionary import Lookup
from .._primitives import CONTRACTIONS, is_contraction
from .._rules import Match, UseOriginalPrecision
from .._structural import STRUCTURAL, Handler, Scope
from .solvers import find_rule


@dataclass(eq=False)
class Matching:
    """The policy, asked for each primitive and scope once."""

    policy: Lookup
    _found: dict[Any, Match] = field(default_factory=dict)

    def find(self, primitive: Any, scope: Scope) -> Match:
        """What the policy says of a primitive in a scope."""
        key = (primitive, scope)
        if key not in self._found:
            self._found[key] = self.policy.find(primitive, scope)
        return self._found[key]

    def found(self, eqn: Eqn, scope: Scope) -> Match:
        """What the policy says of an equation."""
        return find_rule(self.find, eqn, scope)

    def handler(self, eqn: Eqn, scope: Scope) -> Handler | None:
        """How a structural equation is walked into; `None` if it is not."""
        handler = STRUCTURAL.get(eqn.primitive.name)
        if handler is None or stops(self.found(eqn, scope)):
            return None
        return handler

    def makes_low(self, eqn: Eqn, scope: Scope) -> bool:
        """Whether an equation may compute low, here or where its author said so."""
        if eqn.primitive.name in CONTRACTIONS:
            return is_contraction(eqn.params, [a.aval.shape for a in eqn.invars])
        return self.found(eqn, scope).rule.may_compute_low


def stops(found: Match) -> bool:
    """Whether a structural primitive is left as written, with all that is inside."""
    return found.key is not None and isinstance(found.rule, UseOriginalPrecision)
