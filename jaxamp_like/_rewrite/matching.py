"""Which rule each equation gets, and which equations are walked into."""

from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from .._jax import Eqn, Literal
from .._policies.dictionary import Lookup
from .._primitives import ASKING_SIGNS, CONTRACTIONS, is_contraction
from .._rules import Match, UseOriginalPrecision, in_solver, why_written
from .._structural import SOLVER, STRUCTURAL, Handler, Scope
from .solvers import without_solver_scope


@dataclass(eq=False)
class Matching:
    """Asks the policy once for each primitive and scope, and remembers the answer."""

    policy: Lookup
    keeps_in_8_bits: bool = True  # whether rules that ask for it are followed
    _found: dict[Any, Match] = field(default_factory=dict)

    def of_primitive(self, primitive: Any, scope: Scope) -> Match:
        """What the policy says of a primitive in a scope."""
        key = (primitive, scope)
        if key not in self._found:
            found = self.policy.find(primitive, scope)
            saves = found.saves if self.keeps_in_8_bits else None
            self._found[key] = replace(found, saves=saves)
        return self._found[key]

    def of_equation(self, eqn: Eqn, scope: Scope) -> Match:
        """What the policy says of an equation.

        In a solver, only a key that is a scope can ask for low precision."""
        match = self.of_primitive(eqn.primitive, without_solver_scope(scope))
        if SOLVER in scope:
            is_meant = match.by_scope or isinstance(match.rule, UseOriginalPrecision)
            return match if is_meant else replace(match, rule=in_solver)
        avals = [atom.aval for atom in eqn.invars]
        rule = match.rule.for_equation(eqn.params, avals)
        if eqn.primitive.name in ASKING_SIGNS and _is_beside_zero(eqn):
            rule = rule.beside_zero()
        may_be_low = rule.may_compute_low
        if may_be_low and why_written(eqn.params, avals, match.by_scope) is not None:
            return replace(match, rule=rule, as_written=True)
        return match if rule is match.rule else replace(match, rule=rule)

    def handler(self, eqn: Eqn, scope: Scope) -> Handler | None:
        """How a structural equation is walked into; `None` if it is not."""
        handler = STRUCTURAL.get(eqn.primitive.name)
        if handler is None or stays_as_written(self.of_equation(eqn, scope)):
            return None
        return handler

    def makes_low(self, eqn: Eqn, scope: Scope) -> bool:
        """Whether an equation may compute low, as any contraction is taken to."""
        if eqn.primitive.name in CONTRACTIONS:
            return is_contraction(eqn.params, [a.aval for a in eqn.invars])
        return self.of_equation(eqn, scope).rule.may_compute_low


def stays_as_written(match: Match) -> bool:
    """Whether an equation is left as written, with all that it holds.

    A user's policy or `amp_stop` says so."""
    return match.key is not None and isinstance(match.rule, UseOriginalPrecision)


def _is_beside_zero(eqn: Eqn) -> bool:
    """Whether one of the two operands of an equation is the literal 0."""
    left, right = eqn.invars
    literal, other = (right, left) if isinstance(right, Literal) else (left, right)
    is_one = isinstance(literal, Literal) and not isinstance(other, Literal)
    return is_one and np.ndim(literal.val) == 0 and not literal.val
