"""Loops that stop before they end: from some iteration on, they only hand a carry on.

    z = jnp.where(done, z, step(z))
    done = done | (error(z) < tolerance)

A loop with a bound is written so, by `cond` or by `where`, and so is one that is mapped
over a batch. A loop that hands a carry on in a single iteration is no such loop: a
recurrent network skips the steps that a mask leaves out, and training skips a step
whose gradient is too large. The value that decides must decide the same in all later
iterations, so one iteration is followed under the assumption that it has decided."""

from collections.abc import Iterable, Sequence

from .._dtypes import is_float
from .._jax import Eqn, Jaxpr, raw, scopes, variables
from .._structural import Body, Scope
from .flow import Flow
from .inlined import (
    CHOICE,
    INPUT,
    Assumption,
    InlinedProgram,
    forwards_operands,
    is_call,
)
from .reach import LOW, Reach, is_reference, of_input, of_inputs, through


class Iteration:
    """One iteration of a loop, as numbered values: the operands come first.

    Attributes:
        carries: the operands that the next iteration gets as this one makes them."""

    def __init__(self, flow: Flow, eqn: Eqn, bodies: Sequence[Body], scope: Scope):
        self.operands = eqn.invars
        self._previous = flow.of_previous_iterations(eqn, bodies, scope)
        self.values = values = InlinedProgram(flow, len(eqn.invars))
        outs = [values.run(body.jaxpr, scope, body.ins) for body in bodies]
        *self._conditions, (body, made) = zip(bodies, outs, strict=True)
        self.next_of = {body.ins[i]: made[out] for out, i in body.carries}
        self.carries = of_inputs(self.next_of)
        fixed = range(min(self.next_of, default=0))  # operands before the carries
        self.fixed = of_inputs(i for i in fixed if not is_reference(eqn.invars[i]))

    def in_previous_iterations(self, reach: Reach) -> Reach:
        """`reach`, followed back through any number of iterations before this one."""
        return through(reach, self._previous)

    def is_bounded(self) -> bool:
        """Whether a `while` also ends by a condition that is exact in any precision.

        The iteration before may have computed this condition and carried it."""
        ((_, (condition,)),) = self._conditions
        parts = [*self.values.implied(condition, True, by_some=True)]
        for n, value in [*parts]:
            if value and n in self.next_of:
                parts += self.values.implied(self.next_of[n], True, by_some=True)
        reaches = (self.in_previous_iterations(self.values.reach[n]) for n, _ in parts)
        return any(reach & self.carries and not reach & LOW for reach in reaches)

    def exits_early(self) -> bool:
        """Whether a decision by low numbers keeps carries unchanged for good."""
        return any(
            self._exits_once(one, kept) for one, kept in self._deciding_values().items()
        )

    def _deciding_values(self) -> dict[Assumption, set[int]]:
        """Which values, if known, are enough to hand carries on; and these carries."""
        found: dict[Assumption, set[int]] = {}
        for made in self.values.definitions:
            if made.op == CHOICE:
                which, *cases = made.operands
                for k, case in enumerate(cases):
                    if case in self.next_of:
                        picks = bool(k) if len(cases) == 2 else k
                        for one in self.values.sufficient(which, picks):
                            found.setdefault(one, set()).add(case)
        return found

    def _exits_once(self, decided: Assumption, kept: set[int]) -> bool:
        """Whether, once `decided`, some carry in `kept` is handed on for good."""
        reach = self.values.reach[decided[0]]
        read = reach & ~(self.fixed | LOW)
        if (
            not read
            or read & ~self.carries
            or not self.in_previous_iterations(reach) & LOW
        ):
            return False
        known = dict(self.values.implied(*decided))
        outs = self.values.substituted(known.items(), [*self.next_of.values()])
        then = dict(zip(self.next_of, outs, strict=True))
        if read & ~self._settled(then, known):
            return False
        return any(then[i] == i and self._iterates(i) for i in kept)

    def _settled(self, then: dict[int, int], known: dict[int, object]) -> Reach:
        """The carries that let the next iteration decide as this one does.

        They are the carries that are handed on, and those that are made of such carries
        alone. A carry that is made of itself may become anything: a counter, a random
        key."""
        settled, before = 0, -1
        values = self.values
        while settled != before:
            before = settled
            for i, out in then.items():
                if out in values.constants:
                    stays = known.get(i) in (None, values.constants[out])
                elif values.definitions[out].op == INPUT:
                    stays = out == i
                else:
                    stays = not values.reach[out] & ~(settled | self.fixed | LOW)
                settled |= of_input(i) * stays
        return settled

    def _iterates(self, i: int) -> bool:
        """Whether a carry is a float that, if it is changed, is made of itself."""
        out = self.next_of[i]
        if out == i or not is_float(self.operands[i].aval.dtype):
            return False
        return bool(
            self.in_previous_iterations(self.values.computed_from[out]) & of_input(i)
        )


def may_forward(flow: Flow, jaxpr: Jaxpr, scope: Scope, results: Iterable[int]) -> bool:
    """Whether a choice (`cond`, `select_n`) may make one of some `results`.

    This is a quick check: it looks only at equations that these results come from."""
    inner = raw(jaxpr)
    asked = set(variables(inner.outvars[i] for i in results))
    for eqn in reversed(inner.eqns):
        if asked.isdisjoint(eqn.outvars):
            continue
        if eqn.primitive.name in ("cond", "select_n"):
            return True
        if forwards_operands(eqn):
            asked.update(variables(eqn.invars))
            continue
        inside = scope + scopes(eqn)
        bodies = flow.bodies(eqn, inside)
        outs = {i for i, v in enumerate(eqn.outvars) if v in asked}
        if is_call(bodies) and may_forward(flow, bodies[0].jaxpr, inside, outs):
            return True
    return False
