"""What values are multiplied with, which tells the gradients of weights from others.

A backward pass multiplies a cotangent with one operand of a forward contraction, and so
makes the gradient of the other operand. The fact of each operand names the other as a
partner. Facts take partners along from a forward pass to its backward pass, also where
these are the bodies of two loops."""

from typing import Any

from .._jax import Atom, Literal
from .._primitives import CONTRACTIONS, IDENTITIES, VIEWS
from .._rules import Fact, Origin, Partner, sizes_of
from .._structural import Facts, Step
from .cotangents import Flags
from .facts import fact_of


class Partners:
    """Notes the partners of values in the facts of a program, step by step.

    The partners of a view are noted in the fact of the value that it shows."""

    def __init__(self, facts: dict[Any, Fact | None]) -> None:
        self._facts = facts
        self._viewed: dict[Any, Any] = {}  # by views

    def fact_of(self, atom: Atom) -> Fact | None:
        """What is known of a value, its partners so far included."""
        fact = fact_of(self._facts, atom)
        if fact is None or isinstance(atom, Literal) or atom not in self._viewed:
            return fact
        shown = self._facts[self._viewed[atom]]
        return fact._replace(partners=shown.partners if shown else frozenset())

    def record(self, step: Step, which: Flags) -> None:
        """Takes note of a step, after the facts of its results.

        `which` says which of its operands are cotangents."""
        eqn = step.eqn
        name, atoms = eqn.primitive.name, eqn.invars[:2]
        if step.handler is not None:
            for body, plan in zip(step.handler.bodies(eqn), step.inner, strict=False):
                for i, var in zip(body.ins, plan.invars, strict=True):
                    inside = plan.facts[var]
                    if inside is not None:
                        self._add(eqn.invars[i], inside.partners)
        elif name in VIEWS | IDENTITIES and len(eqn.invars) == len(eqn.outvars):
            for atom, var in zip(eqn.invars, eqn.outvars, strict=True):
                if not isinstance(atom, Literal):
                    self._viewed[var] = self._viewed.get(atom, atom)
        elif any(isinstance(atom, Literal) for atom in atoms):
            return
        elif name in CONTRACTIONS and not any(which):
            facts = [self._facts[var] for var in atoms]
            for i, var in enumerate(atoms):
                other = facts[1 - i]
                origin = Origin.DATA if other is None else other.origin
                sizes = sizes_of(atoms[1 - i].aval)
                self._add(var, frozenset([Partner(origin, 1 - i, sizes)]))

    def _add(self, atom: Atom, new: frozenset[Partner]) -> None:
        if isinstance(atom, Literal):
            return
        var = self._viewed.get(atom, atom)
        if (fact := self._facts[var]) is not None:
            self._facts[var] = fact._replace(partners=fact.partners | new)


def without_partners(facts: Facts) -> Facts:
    """Facts without partners, for a program of a forward pass.

    Its plan is then the same wherever it is called, whatever its operands have been
    multiplied with before."""
    return tuple(
        fact._replace(partners=frozenset()) if fact and fact.partners else fact
        for fact in facts
    )
