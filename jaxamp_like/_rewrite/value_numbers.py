"""A program with its calls and branches inlined: a list of values, by number.

What is made by the same operation of the same values has one number, after Alpern,
Wegman, Zadeck, "Detecting equality of variables in programs" (1988). Of a `cond` both
branches are in the list, and what comes out is a choice among their results, as that of
a `select_n` is. Loops stay what they are: operations."""

from collections.abc import Hashable, Iterable, Sequence
from typing import Any, NamedTuple

import numpy as np

from .._jax import Eqn, Jaxpr, Literal, has_effect, raw, scopes
from .._primitives import IDENTITIES, PLACING
from .flow import Flows, Scope

CHOICE, CONSTANT, INPUT, LITERAL = "choice", "constant", "input", "literal"

# What hands its operands on, to other devices or without a derivative too.
_HANDING_ON = IDENTITIES.union(PLACING, ("mesh_cast", "stop_gradient"))


class Made(NamedTuple):
    """How a value is made.

    Attributes:
        by: the name of a primitive, or one of those above.
        of: the numbers of its operands; of a choice, of what chooses and of the cases.
        is_low: whether it is computed low.
        ends: whether it is to count as made of nothing.
        value: that of a literal, or which of the inputs this is."""

    by: str
    of: tuple[int, ...] = ()
    is_low: bool = False
    ends: bool = False
    value: Any = None


class Inlined:
    """A program as a list of values, each after those that it is made of.

    Attributes:
        made: how each value is made.
        outs: the numbers of the results."""

    def __init__(self, flows: Flows, jaxpr: Jaxpr, scope: Scope):
        self.made: list[Made] = []
        self._flows = flows
        self._known: dict[Hashable, int] = {}
        places = range(len(raw(jaxpr).invars))
        ins = [self._number((INPUT, i), Made(INPUT, value=i)) for i in places]
        self.outs = self._run(jaxpr, scope, ins)

    def slice(self, outs: Iterable[int]) -> list[int]:
        """The numbers of what some values are made of, in order, and theirs."""
        found: set[int] = set()
        pending = [*outs]
        while pending:
            n = pending.pop()
            if n not in found:
                found.add(n)
                pending += self.made[n].of
        return sorted(found)

    def _number(self, key: Hashable, made: Made) -> int:
        number = self._known.setdefault(key, len(self.made))
        if number == len(self.made):
            self.made.append(made)
        return number

    def _run(self, jaxpr: Jaxpr, scope: Scope, args: Sequence[int]) -> list[int]:
        """Adds what a program makes of some values; returns its results."""
        inner = raw(jaxpr)
        numbers = dict(zip(inner.invars, args, strict=True))
        for v in inner.constvars:
            numbers[v] = self._number((CONSTANT, v), Made(CONSTANT))

        def read(atom: Any) -> int:
            return self._literal(atom) if isinstance(atom, Literal) else numbers[atom]

        for eqn in inner.eqns:
            ins = tuple(map(read, eqn.invars))
            outs = self._results(eqn, scope + scopes(eqn), ins)
            numbers |= zip(eqn.outvars, outs, strict=True)
        return [read(atom) for atom in inner.outvars]

    def _literal(self, atom: Literal) -> int:
        value = np.asarray(atom.val)
        key = (LITERAL, value.dtype.name, value.shape, value.tobytes())
        is_truth = value.dtype == bool and value.ndim == 0
        return self._number(key, Made(LITERAL, value=bool(value) if is_truth else None))

    def _results(self, eqn: Eqn, scope: Scope, ins: tuple[int, ...]) -> list[int]:
        name = eqn.primitive.name
        if hands_on(eqn):
            return list(ins)
        if name == "select_n":
            return [self._choice(*ins)]
        bodies = self._flows.bodies(eqn, scope)
        inner = [
            self._run(body.jaxpr, scope, [ins[i] for i in body.ins])
            for body in bodies
            if name == "cond" or is_call(bodies)
        ]
        if name == "cond" and inner:
            return [self._choice(ins[0], *cases) for cases in zip(*inner, strict=True)]
        if inner:
            outs = dict(zip(bodies[0].outs, inner[0], strict=True))
            return [outs[i] for i in range(len(eqn.outvars))]
        return self._operation(eqn, scope, ins)

    def _choice(self, *ins: int) -> int:
        if len({*ins[1:]}) == 1:
            return ins[1]
        return self._number((CHOICE, ins), Made(CHOICE, ins))

    def _operation(self, eqn: Eqn, scope: Scope, ins: tuple[int, ...]) -> list[int]:
        name, is_low = eqn.primitive.name, self._flows.is_low(eqn, scope)
        key: Any = (name, is_low, *eqn.params.items(), *ins)
        try:
            hash(key)
        except TypeError:  # a parameter that can't be compared with others
            key = None
        if key is None or has_effect(eqn):
            key = ("new", len(self.made))
        return [
            self._number(
                (key, i),
                Made(name, ins, is_low, self._flows.ends_at(eqn, frozenset([i]))),
            )
            for i in range(len(eqn.outvars))
        ]


def hands_on(eqn: Eqn) -> bool:
    """Whether the results of an equation are its operands."""
    if eqn.primitive.name != "convert_element_type":
        return eqn.primitive.name in _HANDING_ON
    before: Any = eqn.invars[0].aval
    return before.dtype == eqn.params["new_dtype"]  # it is weakly typed, or no more


def is_call(bodies: Sequence[Any]) -> bool:
    """Whether these are the bodies of what runs one program once."""
    return len(bodies) == 1 and not bodies[0].loop
