"""Which inputs of a program reach which of its results: one engine, forwards.

An analysis says what reaches the results of an equation that holds no program. Calls,
branches and loops of any number of iterations are gone through here, by what the rows
of `STRUCTURAL` say of how values flow.

Sets of inputs are bits of an integer, so that what is done once for every equation
costs next to nothing however many carries a loop has."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from .._jax import Eqn, Jaxpr, Literal, is_array_aval, raw, scopes
from .._structural import Body, Handler, Scope
from .memo import Memo

Reach = int

LOW: Reach = 1
"""A bit beside those of inputs: set if something on the way may be computed low."""


def of_input(i: int) -> Reach:
    return 2 << i


def of_inputs(places: Iterable[int]) -> Reach:
    return union(map(of_input, places))


def union(reaches: Iterable[Reach]) -> Reach:
    found = 0
    for reach in reaches:
        found |= reach
    return found


def through(body: Reach, operands: Sequence[Reach]) -> Reach:
    """What reaches a result of a body, given what reaches each of its inputs.

    Args:
        body: which inputs of the body reach the result inside of it.
        operands: what reaches each of these inputs from outside."""
    found = body & LOW
    for i, reach in enumerate(operands):
        if body & 2 << i:
            found |= reach
    return found


@dataclass(eq=False)
class ReachAnalysis(ABC):
    """What reaches what in programs, remembered while these live.

    Args:
        handler: gives the handler of an equation whose programs are gone through, else
            `None`."""

    handler: Callable[[Eqn, Scope], Handler | None]
    _known: Memo = field(default_factory=Memo, kw_only=True)

    reads_scopes = True
    """Whether the answers depend on the scopes of equations."""

    follows_control = False
    """Whether control counts: what picks a branch or ends a loop reaches the results,
    and what is written to a reference reaches what is read from it."""

    @abstractmethod
    def of_leaf(
        self, eqn: Eqn, scope: Scope, operands: Sequence[Reach]
    ) -> Sequence[Reach]:
        """What reaches the results of an equation that holds no program."""

    def bodies(self, eqn: Eqn, scope: Scope) -> Sequence[Body]:
        """The programs of an equation that are gone through."""
        handler = self.handler(eqn, scope)
        return handler.bodies(eqn) if handler is not None else ()

    def of_results(self, jaxpr: Jaxpr, scope: Scope) -> Sequence[Reach]:
        """For each result, what reaches it.

        If the analysis follows control, the references that a program with effects may
        write to come after the results, in the state in which it leaves them."""
        known = self._known.of(jaxpr)
        if scope not in known:
            known[scope] = self._find(raw(jaxpr), scope)
        return known[scope]

    def _find(self, jaxpr: Any, scope: Scope) -> tuple[Reach, ...]:
        env = {v: of_input(i) for i, v in enumerate(jaxpr.invars)}

        def read(atoms: Iterable[Any]) -> list[Reach]:
            return [0 if isinstance(x, Literal) else env.get(x, 0) for x in atoms]

        for eqn in jaxpr.eqns:
            inside = scope + scopes(eqn) if self.reads_scopes else scope
            operands = read(eqn.invars)
            outs = self.of_equation(eqn, inside, operands)
            env |= zip(eqn.outvars, outs, strict=False)  # references come after these
            if left := outs[len(eqn.outvars) :]:
                references = [eqn.invars[i] for i in self._references(eqn)]
                env |= zip(references, left, strict=True)
        left = [jaxpr.invars[i] for i in self._references(jaxpr)]
        return tuple(read([*jaxpr.outvars, *left]))

    def of_equation(
        self, eqn: Eqn, scope: Scope, operands: Sequence[Reach]
    ) -> Sequence[Reach]:
        """What reaches each result of an equation, if `operands` reach its operands.

        References among the operands come after the results, as in `of_results`."""
        bodies = self.bodies(eqn, scope)
        references = self._references(eqn) if self.follows_control else []
        if not bodies:
            outs = self.of_leaf(eqn, scope, operands)
            if references:
                outs = [*outs, *[union([*outs, *operands])] * len(references)]
            return outs
        now = self.of_operands(eqn, bodies, scope, operands)
        first = self.control(bodies, scope, now) if self.follows_control else 0
        found = [first] * len(eqn.outvars) + [first | now[i] for i in references]
        place = {i: len(eqn.outvars) + k for k, i in enumerate(references)}
        for body in bodies:
            given = [now[i] for i in body.ins]
            left = [place[body.ins[i]] for i in self._references(raw(body.jaxpr))]
            results = self.of_results(body.jaxpr, scope)
            for out, reach in zip([*body.outs, *left], results, strict=True):
                if out is not None:
                    found[out] |= through(reach, given)
        states = self._one_state(eqn, references, found[len(eqn.outvars) :])
        return [*found[: len(eqn.outvars)], *states]

    def of_operands(
        self, eqn: Eqn, bodies: Sequence[Body], scope: Scope, operands: Sequence[Reach]
    ) -> list[Reach]:
        """What reaches the operands of an equation, whichever iteration reads them."""
        now = list(operands)
        for body in bodies:
            if loop := self._loop(body):
                made = self.fixed_point(body, scope)
                given = [operands[i] for i in body.ins]
                for out, i in loop:
                    now[body.ins[i]] |= through(made[out], given)
        places = self._references(eqn)
        states = self._one_state(eqn, places, [now[i] for i in places])
        for i, reach in zip(places, states, strict=True):
            now[i] = reach
        return now

    def _one_state(
        self, eqn: Eqn, places: Sequence[int], reaches: Sequence[Reach]
    ) -> list[Reach]:
        """What reaches the references at some `places` among the operands.

        If the condition of a `while` reads a reference that its body writes, JAX passes
        it twice, as a constant of each. Both operands have one state."""
        states: dict[Any, Reach] = {}
        for i, reach in zip(places, reaches, strict=True):
            states[eqn.invars[i]] = states.get(eqn.invars[i], 0) | reach
        return [states[eqn.invars[i]] for i in places]

    def of_previous_iterations(
        self, eqn: Eqn, bodies: Sequence[Body], scope: Scope
    ) -> Sequence[Reach]:
        """What reaches each operand by any number of iterations before."""
        inputs = [of_input(i) for i in range(len(eqn.invars))]
        return self.of_operands(eqn, bodies, scope, inputs)

    def fixed_point(self, body: Body, scope: Scope) -> Sequence[Reach]:
        """As `of_results`, after any number of iterations: by Kleene's algorithm."""
        loop = self._loop(body)
        known = self._known.of(body.jaxpr)
        if (scope, loop) not in known:
            found = self.of_results(body.jaxpr, scope)
            for out, i in loop:
                carry, via = of_input(i), found[out]
                if via not in (0, carry):  # else no other input reaches the carry
                    found = [reach | via if reach & carry else reach for reach in found]
            known[scope, loop] = found
        return known[scope, loop]

    def control(
        self, bodies: Sequence[Body], scope: Scope, now: Sequence[Reach]
    ) -> Reach:
        """What reaches the index of a branch, or the condition of a loop."""
        found = union(now[i] for i in read_outside(len(now), bodies))
        for body in bodies:
            if None in body.outs:
                (condition, *_) = self.of_results(body.jaxpr, scope)
                found |= through(condition, [now[i] for i in body.ins])
        return found

    def _loop(self, body: Body) -> tuple[tuple[int, int], ...]:
        """The results that become inputs, `(out, in)`."""
        left = enumerate(self._references(raw(body.jaxpr)), len(body.outs))
        return (*body.carries, *left) if body.is_repeated else ()

    def _references(self, holder: Any) -> list[int]:
        """The inputs of a program, or of an equation, that it may write to."""
        if not self.follows_control or not holder.effects:
            return []
        return [i for i, v in enumerate(holder.invars) if is_reference(v)]


def is_reference(atom: Any) -> bool:
    return not isinstance(atom, Literal) and not is_array_aval(atom.aval)


def read_outside(count: int, bodies: Sequence[Body]) -> frozenset[int]:
    """Those of `count` operands that an equation itself reads: what picks a branch."""
    handed_in = {i for body in bodies for i in body.ins}
    return frozenset(range(count)) - handed_in
