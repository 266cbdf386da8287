"""What some results of an equation are made of: a slice of the program, backwards.

A slice grows: a carry that is found to be needed asks for the result that becomes it in
the next iteration, and only what that one is made of is looked at then. So every
equation is looked at once, however long the way is that numbers take from carry to
carry. After Weiser, "Program Slicing", ICSE 1981."""

import heapq
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from .._jax import Eqn, Jaxpr, Literal, is_array_aval, raw, scopes
from .._structural import Body
from .memo import Memo

Scope = tuple[str, ...]
Indices = frozenset[int]
NONE: Indices = frozenset()


class Flow(NamedTuple):
    """What some values are made of: inputs, and whether anything low on the way."""

    inputs: Indices = NONE
    is_low: bool = False


NOTHING = Flow()


@dataclass(eq=False)
class Flows:
    """How data flow through equations, and what is remembered of it.

    Args:
        bodies: the programs of a structural equation that is rewritten.
        is_low: whether an equation that is none computes low.
        ends_at: whether some results of an equation are to count as made of nothing."""

    bodies: Callable[[Eqn, Scope], Sequence[Body]]
    is_low: Callable[[Eqn, Scope], bool]
    ends_at: Callable[[Eqn, Indices], bool] = lambda eqn, outs: False
    _indices: Memo = field(default_factory=Memo)
    _known: Memo = field(default_factory=Memo)

    def through(
        self,
        bodies: Sequence[Body],
        scope: Scope,
        start: Flow = NOTHING,
        outs: Iterable[int] = NONE,
    ) -> Flow:
        """What the results `outs` of an equation are made of, and what controls them.

        Through any number of iterations, if its bodies are those of a loop. `start` is
        what else is asked for."""
        around = _Around(self, bodies, scope)
        around.ask(start.inputs, outs)
        return Flow(frozenset(around.inputs), start.is_low or around.is_low)

    def of(self, body: Body, scope: Scope, atoms: Iterable[Any]) -> Flow:
        """What variables of a body are made of: operands of its equation."""
        part = _Slice(self, body.jaxpr, scope)
        part.ask(atoms)
        return Flow(frozenset(body.ins[i] for i in part.grow()), part.is_low)

    def index(self, jaxpr: Jaxpr) -> "_Index":
        return self._indices(jaxpr, (), lambda: _Index.of(raw(jaxpr)))

    def call(
        self, bodies: Sequence[Body], scope: Scope, inputs: Indices, outs: Indices
    ) -> Flow:
        """As `through`, remembered: one function is called in many places."""
        if len(bodies) != 1:
            return self.through(bodies, scope, Flow(inputs), outs)
        (body,) = bodies
        key = (scope, tuple(body.ins), tuple(body.loop), inputs, outs)
        known = self._known.of(body.jaxpr)
        if key not in known:
            known[key] = self.through(bodies, scope, Flow(inputs), outs)
        return known[key]


Place = tuple[int, int]  # an equation, and which of its operands or results


class _Index(NamedTuple):
    """Where the variables of a program are made, and references used."""

    makers: dict[Any, Place]
    inputs: dict[Any, int]
    uses: dict[Any, list[Place]]  # of references alone

    @staticmethod
    def of(jaxpr: Any) -> "_Index":
        makers: dict[Any, Place] = {}
        uses: dict[Any, list[Place]] = {}
        for k, eqn in enumerate(jaxpr.eqns):
            makers |= {v: (k, i) for i, v in enumerate(eqn.outvars)}
            for i, v in enumerate(eqn.invars):
                if not isinstance(v, Literal) and is_ref(v):
                    uses.setdefault(v, []).append((k, i))
        return _Index(makers, {v: i for i, v in enumerate(jaxpr.invars)}, uses)


class _Around:
    """What some results of an equation are made of, by way of its bodies."""

    def __init__(self, flows: Flows, bodies: Sequence[Body], scope: Scope):
        self.inputs: set[int] = set()
        self.bodies = [(b, _Slice(flows, b.jaxpr, scope)) for b in bodies]
        self.made: _Asked = {}  # by result: what it is in the bodies
        self.read: _Asked = {}  # by operand: what is needed with it
        for body, part in self.bodies:
            inner = raw(body.jaxpr)
            for out, v in zip(body.outs, inner.outvars, strict=True):
                if out is None:
                    part.ask([v])
                else:
                    self.made.setdefault(out, []).append((part, v))
            # What an iteration makes of a carry is read by the next one, and what is
            # written to a reference after the last.
            for out, i in body.loop:
                pair = part, inner.outvars[out]
                self.read.setdefault(body.ins[i], []).append(pair)
            for i, v in zip(body.ins, inner.invars, strict=True):
                if is_ref(v):
                    self.read.setdefault(i, []).append((part, v))

    @property
    def is_low(self) -> bool:
        return any(part.is_low for _, part in self.bodies)

    def ask(self, inputs: Iterable[int], outs: Iterable[int]) -> list[int]:
        """Has results looked at, and operands that are read in any case.

        Returns operands that were not known to be read before."""
        for part, v in (pair for i in outs for pair in self.made.get(i, ())):
            part.ask([v])
        fresh: list[int] = []
        found = set(inputs)
        while True:
            found -= self.inputs
            self.inputs |= found
            fresh += found
            for part, v in (pair for i in found for pair in self.read.get(i, ())):
                part.ask([v])
            found = {body.ins[i] for body, part in self.bodies for i in part.grow()}
            if not found:
                return fresh


class _Slice:
    """The equations of a program that some of its variables are made by."""

    def __init__(self, flows: Flows, jaxpr: Jaxpr, scope: Scope):
        self.flows, self.scope = flows, scope
        self.eqns = raw(jaxpr).eqns
        self.index = flows.index(jaxpr)
        self.is_low = False
        self.live: set[Any] = set()
        self.live_until: dict[Any, int] = {}  # references: the equations before
        self.found: list[int] = []  # inputs that nobody has been told of
        self.asked: dict[int, tuple[set[int], set[int]]] = {}  # operands, results
        self.first: dict[int, tuple[Indices, Indices]] = {}  # asked at first
        self.around: dict[int, _Around] = {}
        self.pending: list[int] = []  # a heap of equations, the last one first

    def ask(self, atoms: Iterable[Any], before: int | None = None) -> None:
        """Has what `atoms` are at the equation `before`, or at the end, looked at."""
        for v in variables(atoms):
            if is_ref(v):
                self._ask_writers(v, len(self.eqns) if before is None else before)
            if v in self.live:
                continue
            self.live.add(v)
            if v in self.index.makers:
                k, i = self.index.makers[v]
                self._asked(k)[1].add(i)
            elif v in self.index.inputs:
                self.found.append(self.index.inputs[v])

    def _ask_writers(self, ref: Any, before: int) -> None:
        since = self.live_until.get(ref, 0)
        for k, i in self.index.uses.get(ref, ()):
            if since <= k < before:
                self._asked(k)[0].add(i)
        self.live_until[ref] = max(since, before)

    def _asked(self, k: int) -> tuple[set[int], set[int]]:
        if k not in self.asked:
            self.asked[k] = set(), set()
            heapq.heappush(self.pending, -k)
        return self.asked[k]

    def grow(self) -> list[int]:
        """The inputs that are found now, and were not before."""
        while self.pending:
            k = -heapq.heappop(self.pending)
            inputs, outs = map(frozenset, self.asked.pop(k))
            if not self.flows.ends_at(self.eqns[k], outs):
                self._look_at(k, inputs, outs)
        found, self.found = self.found, []
        return found

    def _look_at(self, k: int, inputs: Indices, outs: Indices) -> None:
        eqn = self.eqns[k]
        scope = self.scope + scopes(eqn)
        bodies = self.flows.bodies(eqn, scope)
        if not bodies:
            self.is_low |= self.flows.is_low(eqn, scope)
            self.ask(eqn.invars, k)
            return
        if k not in self.first:
            self.first[k] = inputs, outs
            flow = self.flows.call(
                bodies, scope, inputs | read_outside(eqn, bodies), outs
            )
            self.is_low |= flow.is_low
            self.ask((eqn.invars[i] for i in flow.inputs), k)
            return
        if k not in self.around:
            self.around[k] = _Around(self.flows, bodies, scope)
            before, made = self.first[k]
            self.around[k].ask(before | read_outside(eqn, bodies), made)
        around = self.around[k]
        self.ask((eqn.invars[i] for i in around.ask(inputs, outs)), k)
        self.is_low |= around.is_low


_Asked = dict[int, list[tuple[_Slice, Any]]]


def variables(atoms: Iterable[Any]) -> Iterator[Any]:
    return (atom for atom in atoms if not isinstance(atom, Literal))


def is_ref(atom: Any) -> bool:
    return not is_array_aval(atom.aval)


def read_outside(eqn: Eqn, bodies: Sequence[Body]) -> Indices:
    """The operands that the equation itself reads: what picks a branch."""
    handed_in = {i for body in bodies for i in body.ins}
    return frozenset(range(len(eqn.invars))) - handed_in
