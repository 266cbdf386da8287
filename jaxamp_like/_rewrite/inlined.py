"""Programs with their calls and branches inlined: values, each by a number.

Equal numbers mean equal values: see `value_numbers`. What is known of some values, such
as that a loop has come to its end, is so known of all that follow from them."""

from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np

from .._jax import Eqn, Jaxpr, Literal, raw, scopes
from .._primitives import IDENTITIES, PLACING
from .._structural import Body, Scope
from .flow import Flow
from .reach import LOW, Reach, of_input, union
from .value_numbers import operation_of, value_of

CHOICE, INPUT = "choice", "input"

# What hands its operands on, to other devices or without a derivative too.
_HANDING_ON = IDENTITIES.union(PLACING, ("mesh_cast", "stop_gradient"))

# What is known of a truth value is known of it in another shape or type.
_PASSING = frozenset("broadcast_in_dim convert_element_type reshape squeeze".split())

_REDUCTIONS = ("reduce_and", "reduce_or")
_LOGICAL = _PASSING.union(_REDUCTIONS, ("and", "not", "or"))

Known = tuple[int, Any]
"""A value by its number, and the truth value (or the index of a case) that it is."""


class Made(NamedTuple):
    """How a value is made.

    Attributes:
        by: the name of a primitive, or one of those above.
        of: the numbers of its operands; of a choice, of what chooses and of the cases.
        how: what tells it from other values that are made so of the same.
        is_low: whether it is computed low.
        ends: whether it is to count as made of nothing."""

    by: str
    of: tuple[int, ...] = ()
    how: Any = None
    is_low: bool = False
    ends: bool = False


class Inlined:
    """The values of programs whose calls and branches are inlined.

    The first ones are inputs. Of a `cond` both branches are here, and what comes out is
    a choice among their results, as that of a `select_n` is. Loops stay what they are:
    operations.

    Attributes:
        made: how each value is made, after those that it is made of.
        reach: the inputs that reach it.
        fresh: those that reach it where it is no input as it came in.
        constants: the truth values that are known, and the indices of cases."""

    def __init__(self, flow: Flow, num_inputs: int):
        self.made: list[Made] = []
        self.reach: list[Reach] = []
        self.fresh: list[Reach] = []
        self.constants: dict[int, Any] = {}
        self._flow = flow
        self._numbers: dict[Made, int] = {}
        for i in range(num_inputs):
            self.of(Made(INPUT, how=i))

    def of(self, made: Made) -> int:
        """The number of what is made so."""
        known = self._known(made)
        if known is not None:
            return known
        number = self._numbers.setdefault(made, len(self.made))
        if number == len(self.made):
            self.made.append(made)
            reach, fresh = self._reaches(made)
            self.reach.append(reach)
            self.fresh.append(fresh)
        return number

    def constant(self, value: Any) -> int:
        """The number of a truth value, or of the index of a case."""
        number = self.of(Made("constant", how=value))
        self.constants[number] = value
        return number

    def run(self, jaxpr: Jaxpr, scope: Scope, args: Sequence[int]) -> list[int]:
        """Adds what a program makes of some values; returns its results."""
        inner = raw(jaxpr)
        numbers = dict(zip(inner.invars, args, strict=True))
        numbers |= {v: self.of(Made("closed over", how=v)) for v in inner.constvars}

        def read(atom: Any) -> int:
            return self._literal(atom) if isinstance(atom, Literal) else numbers[atom]

        for eqn in inner.eqns:
            ins = tuple(map(read, eqn.invars))
            outs = self._results(eqn, scope + scopes(eqn), ins)
            numbers |= zip(eqn.outvars, outs, strict=True)
        return [read(atom) for atom in inner.outvars]

    def given(self, known: Iterable[Known], outs: Sequence[int]) -> list[int]:
        """What becomes of some values where others are known."""
        new = {n: self.constant(value) for n, value in known}
        for n in self._made_of(outs):
            if n not in new:
                made = self.made[n]
                of = tuple(new[k] for k in made.of)
                new[n] = n if of == made.of else self.of(made._replace(of=of))
        return [new[n] for n in outs]

    def implied(self, n: int, value: Any, by_some: bool = False) -> Iterator[Known]:
        """All that is known if a value is.

        What is reduced is known of all elements, or else `by_some` of them."""
        yield n, value
        made = self.made[n]
        of_all = "reduce_and" if value else "reduce_or"
        reductions = _REDUCTIONS if by_some else (of_all,)
        if made.by == "not":
            yield from self.implied(made.of[0], not value, by_some)
        elif made.by in _PASSING or made.by in reductions:
            yield from self.implied(made.of[0], value, by_some)
        elif made.by == ("and" if value else "or"):
            for operand in made.of:
                yield from self.implied(operand, value, by_some)

    def enough(self, n: int, value: Any) -> Iterator[Known]:
        """What is enough by itself for a value to be known."""
        made = self.made[n]
        if made.by == "not":
            yield from self.enough(made.of[0], not value)
        elif made.by in _PASSING:
            yield from self.enough(made.of[0], value)
        elif made.by == ("or" if value else "and"):
            for operand in made.of:
                yield from self.enough(operand, value)
        else:
            yield n, value

    def _made_of(self, outs: Iterable[int]) -> list[int]:
        """The numbers of what some values are made of, in order, and theirs."""
        found: set[int] = set()
        pending = [*outs]
        while pending:
            n = pending.pop()
            if n not in found:
                found.add(n)
                pending += self.made[n].of
        return sorted(found)

    def _reaches(self, made: Made) -> tuple[Reach, Reach]:
        """What reaches a value, and what does where it is no input as it came in."""
        if made.by == INPUT:
            return of_input(made.how), 0
        if made.ends:
            return 0, 0
        reach = union([self.reach[n] for n in made.of]) | LOW * made.is_low
        if made.by == CHOICE:
            return reach, union([self.fresh[n] for n in made.of[1:]])
        return reach, reach

    def _known(self, made: Made) -> int | None:
        """The number of what is known already, since some of the operands are."""
        if made.by == CHOICE:
            which, *cases = made.of
            if which in self.constants and int(self.constants[which]) < len(cases):
                return cases[int(self.constants[which])]
            return None
        if made.by not in _LOGICAL or self.constants.keys().isdisjoint(made.of):
            return None
        known = [self.constants.get(n) for n in made.of]
        if made.by == "not":
            return self.constant(not known[0])
        if made.by not in ("and", "or"):
            return made.of[0]
        decides = made.by == "or"
        if decides in known:
            return self.constant(decides)
        return None if None in known else self.constant(not decides)

    def _literal(self, atom: Literal) -> int:
        value = np.asarray(atom.val)
        if value.dtype == bool and value.ndim == 0:
            return self.constant(bool(value))
        return self.of(Made("literal", how=value_of(atom)))

    def _body(self, body: Body, scope: Scope, ins: Sequence[int]) -> list[int]:
        """What the results of an equation are that holds one program or branches."""
        made = self.run(body.jaxpr, scope, [ins[i] for i in body.ins])
        outs = dict(zip(body.outs, made, strict=True))
        return [outs[i] for i in range(len(outs))]

    def _results(self, eqn: Eqn, scope: Scope, ins: tuple[int, ...]) -> list[int]:
        name = eqn.primitive.name
        if hands_on(eqn):
            return list(ins)
        if name == "select_n":
            return [self._choice(ins)]
        bodies = self._flow.bodies(eqn, scope)
        if bodies and name == "cond":
            made = (self._body(body, scope, ins) for body in bodies)
            cases = zip(*made, strict=True)
            return [self._choice((ins[0], *case)) for case in cases]
        if is_call(bodies):
            return self._body(bodies[0], scope, ins)
        how = operation_of(eqn) or ("new", len(self.made))
        is_low = self._flow.is_low(eqn, scope)
        return [
            self.of(Made(name, ins, (how, i), is_low, self._flow.ends_at(eqn, i)))
            for i in range(len(eqn.outvars))
        ]

    def _choice(self, ins: tuple[int, ...]) -> int:
        return ins[1] if len({*ins[1:]}) == 1 else self.of(Made(CHOICE, ins))


def hands_on(eqn: Eqn) -> bool:
    """Whether the results of an equation are its operands."""
    if eqn.primitive.name != "convert_element_type":
        return eqn.primitive.name in _HANDING_ON
    before: Any = eqn.invars[0].aval
    return before.dtype == eqn.params["new_dtype"]  # it is weakly typed, or no more


def is_call(bodies: Sequence[Body]) -> bool:
    """Whether these are the bodies of what runs one program once."""
    return len(bodies) == 1 and not bodies[0].loop
