"""Programs with their calls and branches inlined, as a list of numbered values.

Equal numbers mean equal values: see `value_numbers`. If some values are known, such as
whether a loop is done, all values that follow from them are known, too."""

from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np

from .._jax import Eqn, Jaxpr, Literal, evaluate, raw, scopes
from .._primitives import IDENTITIES, PLACING
from .._structural import Body, Scope
from .flow import Flow
from .reach import LOW, Reach, of_input, union
from .value_numbers import operation_of, value_of

CHOICE, INPUT = "choice", "input"

# Primitives that return their operands, also on other devices or without derivative.
_FORWARDING = IDENTITIES.union(PLACING, ("mesh_cast", "stop_gradient"))

# Primitives that give a truth value another shape or type: either tells the other.
_RESHAPING = frozenset("broadcast_in_dim convert_element_type reshape squeeze".split())

_REDUCTIONS = ("reduce_and", "reduce_or")
_LOGICAL = _RESHAPING.union(_REDUCTIONS, ("and", "not", "or"))

Assumption = tuple[int, Any]
"""A value by its number, and the truth value (or the index of a case) that it is."""


class Definition(NamedTuple):
    """How a value is made.

    Attributes:
        op: the name of a primitive, or what else it is, such as `CHOICE` or `INPUT`.
        operands: their numbers; for a choice, those of the index and of the cases.
        key: parameters that tell apart operations of the same primitive and operands.
        is_low: whether it is computed low.
        cuts_flow: whether no input counts as reaching it; see `Flow.cuts_flow_at`."""

    op: str
    operands: tuple[int, ...] = ()
    key: Any = None
    is_low: bool = False
    cuts_flow: bool = False


class InlinedProgram:
    """The values of programs whose calls and branches are inlined.

    The first ones are inputs. All branches of a `cond` are here, and each of its
    results is a choice among theirs, as the result of a `select_n` is. A loop stays one
    operation.

    Attributes:
        definitions: how each value is made, after those that it is made of.
        reach: the inputs that reach it.
        computed_from: the inputs that reach it through an op other than a choice.
        constants: the truth values that are known, and the indices of cases."""

    def __init__(self, flow: Flow, num_inputs: int):
        self.definitions: list[Definition] = []
        self.reach: list[Reach] = []
        self.computed_from: list[Reach] = []
        self.constants: dict[int, Any] = {}
        self._flow = flow
        self._numbers: dict[Definition, int] = {}
        for i in range(num_inputs):
            self.number_of(Definition(INPUT, key=i))

    def number_of(self, made: Definition) -> int:
        """The number of what is made so."""
        known = self._folded(made)
        if known is not None:
            return known
        number = self._numbers.setdefault(made, len(self.definitions))
        if number == len(self.definitions):
            self.definitions.append(made)
            reach, fresh = self._reaches(made)
            self.reach.append(reach)
            self.computed_from.append(fresh)
        return number

    def constant(self, value: Any) -> int:
        """The number of a truth value, or of the index of a case."""
        number = self.number_of(Definition("constant", key=value))
        self.constants[number] = value
        return number

    def run(self, jaxpr: Jaxpr, scope: Scope, args: Sequence[int]) -> list[int]:
        """Adds what a program makes of some values; returns its results."""

        def number(eqn: Eqn, ins: list[int]) -> Sequence[int]:
            return self._results(eqn, scope + scopes(eqn), tuple(ins))

        constants = [
            self.number_of(Definition("closed over", key=v))
            for v in raw(jaxpr).constvars
        ]
        return evaluate(jaxpr, args, number, constants, self._literal)

    def substituted(
        self, known: Iterable[Assumption], outs: Sequence[int]
    ) -> list[int]:
        """The numbers that `outs` have where other values are known."""
        new = {n: self.constant(value) for n, value in known}
        for n in self._ancestors(outs):
            if n not in new:
                made = self.definitions[n]
                operands = tuple(new[k] for k in made.operands)
                is_same = operands == made.operands
                new[n] = (
                    n if is_same else self.number_of(made._replace(operands=operands))
                )
        return [new[n] for n in outs]

    def implied(
        self, n: int, value: Any, by_some: bool = False
    ) -> Iterator[Assumption]:
        """What is known of values if value `n` is `value`.

        What a reduction tells holds for all elements of its operand or, with `by_some`,
        perhaps only for some."""
        yield n, value
        made = self.definitions[n]
        of_all = "reduce_and" if value else "reduce_or"
        reductions = _REDUCTIONS if by_some else (of_all,)
        if made.op == "not":
            yield from self.implied(made.operands[0], not value, by_some)
        elif made.op in _RESHAPING or made.op in reductions:
            yield from self.implied(made.operands[0], value, by_some)
        elif made.op == ("and" if value else "or"):
            for operand in made.operands:
                yield from self.implied(operand, value, by_some)

    def sufficient(self, n: int, value: Any) -> Iterator[Assumption]:
        """Known values, each of which is enough for value `n` to be `value`."""
        made = self.definitions[n]
        if made.op == "not":
            yield from self.sufficient(made.operands[0], not value)
        elif made.op in _RESHAPING:
            yield from self.sufficient(made.operands[0], value)
        elif made.op == ("or" if value else "and"):
            for operand in made.operands:
                yield from self.sufficient(operand, value)
        else:
            yield n, value

    def _ancestors(self, outs: Iterable[int]) -> list[int]:
        """The numbers of `outs` and of all that they are made of, in order."""
        found: set[int] = set()
        pending = [*outs]
        while pending:
            n = pending.pop()
            if n not in found:
                found.add(n)
                pending += self.definitions[n].operands
        return sorted(found)

    def _reaches(self, made: Definition) -> tuple[Reach, Reach]:
        """The `reach` and the `computed_from` of a value; see the class."""
        if made.op == INPUT:
            return of_input(made.key), 0
        if made.cuts_flow:
            return 0, 0
        reach = union([self.reach[n] for n in made.operands]) | LOW * made.is_low
        if made.op == CHOICE:
            return reach, union([self.computed_from[n] for n in made.operands[1:]])
        return reach, reach

    def _folded(self, made: Definition) -> int | None:
        """What a choice or a logical operation comes to, if its operands settle it."""
        if made.op == CHOICE:
            which, *cases = made.operands
            if which in self.constants and int(self.constants[which]) < len(cases):
                return cases[int(self.constants[which])]
            return None
        if made.op not in _LOGICAL or self.constants.keys().isdisjoint(made.operands):
            return None
        known = [self.constants.get(n) for n in made.operands]
        if made.op == "not":
            return self.constant(not known[0])
        if made.op not in ("and", "or"):
            return made.operands[0]
        decides = made.op == "or"
        if any(x is decides for x in known):  # the index of a branch may be 1
            return self.constant(decides)
        return None if None in known else self.constant(not decides)

    def _literal(self, atom: Literal) -> int:
        value = np.asarray(atom.val)
        if value.dtype == bool and value.ndim == 0:
            return self.constant(bool(value))
        return self.number_of(Definition("literal", key=value_of(atom)))

    def _body(self, body: Body, scope: Scope, ins: Sequence[int]) -> list[int]:
        """The results of an equation that runs `body`, as a call or a `cond` may."""
        made = self.run(body.jaxpr, scope, [ins[i] for i in body.ins])
        outs = dict(zip(body.outs, made, strict=True))
        return [outs[i] for i in range(len(outs))]

    def _results(self, eqn: Eqn, scope: Scope, ins: tuple[int, ...]) -> list[int]:
        name = eqn.primitive.name
        if forwards_operands(eqn):
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
        how = operation_of(eqn) or ("new", len(self.definitions))
        is_low = self._flow.is_low(eqn, scope)
        return [
            self.number_of(
                Definition(name, ins, (how, i), is_low, self._flow.cuts_flow_at(eqn, i))
            )
            for i in range(len(eqn.outvars))
        ]

    def _choice(self, ins: tuple[int, ...]) -> int:
        return (
            ins[1] if len({*ins[1:]}) == 1 else self.number_of(Definition(CHOICE, ins))
        )


def forwards_operands(eqn: Eqn) -> bool:
    """Whether the results of an equation are its operands."""
    if eqn.primitive.name != "convert_element_type":
        return eqn.primitive.name in _FORWARDING
    before: Any = eqn.invars[0].aval
    return before.dtype == eqn.params["new_dtype"]  # only its weak type may change


def is_call(bodies: Sequence[Body]) -> bool:
    """Whether these are the bodies of what runs one program once."""
    return len(bodies) == 1 and not bodies[0].is_repeated
