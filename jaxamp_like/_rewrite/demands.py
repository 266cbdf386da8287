"""How each value is read: low, in full, or not at all; known from the end backwards."""

import functools
import itertools
import operator
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from .._jax import Eqn, Jaxpr, Literal, raw, scopes, subjaxprs
from .._primitives import FIXED, RULED
from .._rules import Demand, author_dtype
from .._structural import Body, Scope, derivative_of
from .accumulators import Accumulators
from .matching import Matching
from .memo import Memo


@dataclass(eq=False)
class Demands:
    """How values are read, in the programs that a policy is asked of."""

    matching: Matching
    accumulators: Accumulators
    _known: Memo = field(default_factory=Memo)
    _by_rule: Memo = field(default_factory=Memo)
    _is_rule: bool = False  # whether a derivative rule is looked at

    def of_inputs(
        self, jaxpr: Jaxpr, scope: Scope, wanted: Sequence[Demand]
    ) -> tuple[Demand, ...]:
        """How the inputs of `jaxpr` are read, if its results are read as `wanted`."""
        known, key = self._known.of(jaxpr), (scope, tuple(wanted), self._is_rule)
        if key not in known:
            demand = self.of_variables(raw(jaxpr), scope, wanted)
            ins = raw(jaxpr).invars
            known[key] = tuple(demand.get(v, Demand.NONE) for v in ins)
        return known[key]

    def of_variables(
        self, jaxpr: Jaxpr, scope: Scope, wanted: Sequence[Demand]
    ) -> dict[Any, Demand]:
        """How each variable is read."""
        demand: dict[Any, Demand] = {}

        def read(atoms, demands):
            for atom, how in zip(atoms, demands, strict=True):
                if not isinstance(atom, Literal):
                    before = demand.get(atom, how)
                    demand[atom] = how if before is how else before | how

        read(jaxpr.outvars, wanted)
        for eqn in reversed(jaxpr.eqns):
            outs = [demand.get(v, Demand.NONE) for v in eqn.outvars]
            read(eqn.invars, self._operand_demands(eqn, scope + scopes(eqn), outs))
        return demand

    def _operand_demands(
        self, eqn: Eqn, scope: Scope, outs: Sequence[Demand]
    ) -> Sequence[Demand]:
        handler = self.matching.handler(eqn, scope)
        if handler is None:
            if eqn.primitive.name in FIXED:
                return [Demand.FULL] * len(eqn.invars)
            wanted = functools.reduce(operator.or_, outs, Demand.NONE)
            match = self.matching.of_equation(eqn, scope)
            return [match.demand(eqn.params, wanted)] * len(eqn.invars)
        return self.of_operands(eqn, handler.bodies(eqn), scope, outs)

    def of_operands(
        self, eqn: Eqn, bodies: Sequence[Body], scope: Scope, outs: Sequence[Demand]
    ) -> Sequence[Demand]:
        """How operands are read by the programs and the rule that an equation holds."""
        reads = [Demand.NONE] * len(eqn.invars)
        if len(bodies) > 1:
            outs = self.with_conditions(bodies, scope, outs)
        for body in bodies:
            inner = self.of_body(body, scope, outs)
            for i, demand in zip(body.ins, inner, strict=True):
                reads[i] |= demand
        # A derivative rule only calls functions that have rules of their own. It does
        # not differentiate them, so how those rules read operands does not count.
        if eqn.primitive.name in RULED and not self._is_rule:
            reads = self._with_rule(eqn, scope, reads)
        return reads

    def _with_rule(
        self, eqn: Eqn, scope: Scope, reads: Sequence[Demand]
    ) -> Sequence[Demand]:
        """`reads`, joined with how an author's derivative rule reads the operands.

        The rule is traced only if the function does not read all floats in full."""
        floats = [author_dtype(atom.aval) is not None for atom in eqn.invars]
        if all(Demand.FULL in how for how in itertools.compress(reads, floats)):
            return reads
        rule = tuple(x for x in eqn.params.values() if callable(x))
        (body,) = subjaxprs(eqn.params)
        by_rule = self._by_rule(
            body, (rule, scope), lambda: self._demands_of_rule(eqn, scope)
        )
        return [how | also for how, also in zip(reads, by_rule, strict=True)]

    def _demands_of_rule(self, eqn: Eqn, scope: Scope) -> Sequence[Demand]:
        # Only a JVP rule that does not ask for symbolic zeros is traced here. One that
        # asks may depend on which tangents are zero, and the author of a backward rule
        # may count its calls.
        is_one = eqn.primitive.name == "custom_jvp_call"
        is_one = is_one and not eqn.params.get("symbolic_zeros")
        rule = derivative_of(eqn) if is_one else None
        return self.of_rule(rule, len(eqn.invars), scope)

    def of_rule(self, rule: Jaxpr | None, count: int, scope: Scope) -> Sequence[Demand]:
        """How a rule reads its first `count` inputs; in full, if no rule is known."""
        if rule is None:
            return [Demand.FULL | Demand.AS_HELD] * count
        wanted, before = [Demand.FULL] * len(raw(rule).outvars), self._is_rule
        self._is_rule = True
        try:
            return self.of_inputs(rule, scope, wanted)[:count]
        finally:
            self._is_rule = before

    def of_body(
        self, body: Body, scope: Scope, outs: Sequence[Demand]
    ) -> Sequence[Demand]:
        """How the inputs of a body are read, by any iteration if it has a loop."""
        reads = self.of_inputs(body.jaxpr, scope, self.body_wanted(body, scope, outs))
        return [how & ~Demand.ACCUMULATOR for how in reads] if body.carries else reads

    def with_conditions(
        self, bodies: Sequence[Body], scope: Scope, outs: Sequence[Demand]
    ) -> Sequence[Demand]:
        """How the results of an equation are read, the condition of a loop included."""
        made = {b.ins[i]: b.outs[out] for b in bodies for out, i in b.carries}
        outs = list(outs)
        for condition in bodies if made else ():
            if condition.carries:
                continue
            reads = self.of_body(condition, scope, outs)
            for i, how in zip(condition.ins, reads, strict=True):
                if (out := made.get(i)) is not None:
                    outs[out] |= how
        return outs

    def body_wanted(
        self, body: Body, scope: Scope, outs: Sequence[Demand]
    ) -> list[Demand]:
        """How the results of a body are read: outside, or in the next iteration."""
        wanted = [Demand.FULL if i is None else outs[i] for i in body.outs]
        full = self.accumulators.must_stay_full(body, scope)
        made_by = {i: out for out, i in body.carries}
        giver = {j: i for i, heirs in body.forwarded_carries().items() for j in heirs}

        def want(i: int, how: Demand) -> bool:
            """Adds `how` to how a carry is read; returns whether that is new."""
            out = made_by[i]
            before, wanted[out] = wanted[out], wanted[out] | how
            return wanted[out] != before

        for i in made_by.keys() & full:
            want(i, Demand.ACCUMULATOR)
        while True:
            reads = self.of_inputs(body.jaxpr, scope, wanted)
            news = [i for i in made_by if want(i, reads[i])]
            if not news:
                return wanted
            while news:
                i = news.pop()
                if giver.get(i) in made_by and want(giver[i], wanted[made_by[i]]):
                    news.append(giver[i])
