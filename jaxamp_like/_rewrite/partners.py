"""What values are multiplied with: by it a gradient is known for that of a weight.

A backward pass multiplies a cotangent with one operand of a forward contraction, and so
makes the gradient of the other one. That other one is the partner in the fact of the
first, which hands it on from the program of a forward pass to that of its backward
pass, where these are the bodies of two loops."""

from typing import Any

from .._jax import Literal
from .._primitives import CONTRACTIONS, IDENTITIES, VIEWS
from .._rules import Fact, Origin, Partner
from .cotangents import Which
from .plan import Facts, Step


class Partners:
    """Takes down the partners of values in the facts of a program, as they are met."""

    def __init__(self, facts: dict[Any, Fact | None]) -> None:
        self._facts = facts
        self._alike: dict[Any, list[Any]] = {}  # a value, and its views

    def meet(self, step: Step, which: Which) -> None:
        """Takes note of a step, after the facts of its results.

        `which` says which of its operands are cotangents."""
        eqn = step.eqn
        name, atoms = eqn.primitive.name, eqn.invars[:2]
        if step.handler is not None:
            for body, plan in zip(step.handler.bodies(eqn), step.inner, strict=False):
                for i, var in zip(body.ins, plan.invars, strict=True):
                    self._hand_on(plan.facts[var], eqn.invars[i])
        elif any(isinstance(atom, Literal) for atom in atoms):
            return
        elif name in VIEWS | IDENTITIES and len(atoms) == len(eqn.outvars) == 1:
            (var,), (view,) = atoms, eqn.outvars
            alike = self._alike_to(var)
            alike.append(view)
            self._alike[view] = alike
            self._hand_on(self._facts[var], view)
        elif name in CONTRACTIONS and not any(which):
            facts = [self._facts[var] for var in atoms]
            for i, var in enumerate(atoms):
                other = facts[1 - i]
                origin = Origin.DATA if other is None else other.origin
                self._add(var, Partner(origin, 1 - i))

    def _alike_to(self, var: Any) -> list[Any]:
        return self._alike.setdefault(var, [var])

    def _hand_on(self, source: Fact | None, atom: Any) -> None:
        if source is not None and source.partner is not None:
            if not isinstance(atom, Literal):
                self._add(atom, source.partner)

    def _add(self, var: Any, new: Partner) -> None:
        for view in self._alike_to(var):
            if (fact := self._facts[view]) is not None:
                old = fact.partner or new
                side = new.side if new.side == old.side else None
                partner = Partner(max(old.origin, new.origin), side)
                self._facts[view] = fact._replace(partner=partner)


def without_partners(facts: Facts) -> Facts:
    """Facts for a program of a forward pass, which is the same wherever it is called,
    whatever its operands have been multiplied with before."""
    return tuple(
        fact._replace(partner=None) if fact and fact.partner else fact for fact in facts
    )
