"""What values are multiplied with: by it a gradient is known for that of a weight.

A backward pass multiplies a cotangent with one operand of a forward contraction, and so
makes the gradient of the other one, which is looked up here. Known are contractions of
the same program that come before: the backward pass of a loop is another program."""

from typing import Any

from .._jax import Eqn, Literal
from .._primitives import CONTRACTIONS, IDENTITIES, VIEWS
from .._rules import Origin, Partner
from .cotangents import Which
from .plan import Facts


class Partners:
    """The partners of values in the contractions of a program, as they are met."""

    def __init__(self) -> None:
        self._roots: dict[Any, Any] = {}  # of values that are another, moved about
        self._known: dict[Any, Partner] = {}

    def of(self, eqn: Eqn, which: Which) -> Partner | None:
        """The partner of what an equation multiplies its one cotangent with."""
        if eqn.primitive.name not in CONTRACTIONS or which[:2].count(True) != 1:
            return None
        atom = eqn.invars[which.index(False)]
        return None if isinstance(atom, Literal) else self._known.get(self._root(atom))

    def meet(self, eqn: Eqn, facts: Facts, which: Which) -> None:
        """Takes note of an equation, of the facts and cotangents that it reads."""
        name, atoms = eqn.primitive.name, eqn.invars[:2]
        if any(isinstance(atom, Literal) for atom in atoms):
            return
        if name in VIEWS | IDENTITIES and len(atoms) == len(eqn.outvars) == 1:
            self._roots[eqn.outvars[0]] = self._root(atoms[0])
        elif name in CONTRACTIONS and not any(which):
            for i, atom in enumerate(atoms):
                other = facts[1 - i]
                origin = Origin.DATA if other is None else other.origin
                self._add(self._root(atom), Partner(origin, 1 - i))

    def _root(self, atom: Any) -> Any:
        return self._roots.get(atom, atom)

    def _add(self, root: Any, new: Partner) -> None:
        old = self._known.get(root, new)
        side = new.side if new.side == old.side else None
        self._known[root] = Partner(max(old.origin, new.origin), side)
