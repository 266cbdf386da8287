"""Solvers: loops that go on until their numbers are good enough.

A fixed point, a line search or an ODE solve that adapts its steps compares floats to
know whether to go on. Where contractions make these floats, 16 bits may keep it from
its tolerance: two iterates that differ in the last bit of a bfloat16 differ by 2^-8. A
solver then runs to its bound or for ever, and where the backward pass runs it again, it
may take other steps than it took at first. So solvers stay as their author wrote them,
all but what a rule for a scope asks for.

They are found before anything is planned, by the flow of data:

- a `while` whose condition reads, through any number of iterations, what a contraction
  in the loop makes (or another op that the policy computes low by itself);
- a `while` that counts the steps of a solver before it: it runs that one again;
- a loop that hands its carries on from then on, by a `cond` or a `where`, as such a
  `while` with a bound is written (see `early_exit`);
- a custom derivative rule whose function holds one of these: forward, backward and
  what is run again in between then take the same steps.

A condition that is bounded by a counter as well ends in any precision. Then only
numbers that are compared make a solver, not what is chosen by size (the next token) nor
whether a number is finite (a step that is repeated with another loss scale).

Whatever stands in a solver is in one more name scope, `SOLVER`: so the mark reaches
all that it holds, derivative rules included, as `amp_stop` does."""

import functools
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from .._dtypes import is_float
from .._jax import (
    Eqn,
    Jaxpr,
    Literal,
    in_scope,
    raw,
    replace_subjaxprs,
    scan_arity,
    scopes,
    subjaxprs,
    with_eqns,
)
from .._primitives import ASKING_SIGNS, RANKING
from .._rules import Match, UseOriginalPrecision, in_solver, why_written
from .._structural import SOLVER, Body, Handler
from .early_exit import stops
from .flow import NONE, Flows, Indices, Scope, read_outside
from .memo import Memo


def find_rule(find: Callable[[Any, Scope], Match], eqn: Eqn, scope: Scope) -> Match:
    """The rule of an equation; in a solver, only rules of scopes ask for low."""
    found = find(eqn.primitive, author_scopes(scope))
    if SOLVER in scope:
        is_meant = found.by_scope or isinstance(found.rule, UseOriginalPrecision)
        return found if is_meant else replace(found, rule=in_solver)
    avals = [atom.aval for atom in eqn.invars]
    rule = found.rule.for_equation(eqn.params, avals)
    if eqn.primitive.name in ASKING_SIGNS and _is_beside_zero(eqn):
        rule = rule.beside_zero()
    may_be_low = rule.may_compute_low
    if may_be_low and why_written(eqn.params, avals, found.by_scope) is not None:
        return replace(found, rule=rule, as_written=True)
    return found if rule is found.rule else replace(found, rule=rule)


def _is_beside_zero(eqn: Eqn) -> bool:
    """Whether one of the two operands of an equation is the literal 0."""
    left, right = eqn.invars
    literal, other = (right, left) if isinstance(right, Literal) else (left, right)
    is_one = isinstance(literal, Literal) and not isinstance(other, Literal)
    return is_one and np.ndim(literal.val) == 0 and not literal.val


def author_scopes(scope: Scope) -> Scope:
    """The scopes that their author wrote."""
    if SOLVER not in scope:
        return scope
    return tuple(name for name in scope if name != SOLVER)


@dataclass(eq=False)
class Solvers:
    """Finds the solvers of programs, and remembers what it found while these live.

    Args:
        handler: that of a structural equation which is rewritten, else `None`.
        makes_low: whether an equation computes low by itself."""

    handler: Callable[[Eqn, Scope], Handler | None]
    makes_low: Callable[[Eqn, Scope], bool]
    _marked: Memo = field(default_factory=Memo)

    def mark(self, jaxpr: Jaxpr, scope: Scope = ()) -> Jaxpr:
        """`jaxpr` with its solvers in the scope `SOLVER`; itself, if it has none."""
        return jaxpr if SOLVER in scope else self._mark(jaxpr, scope, NONE)[0]

    def _mark(
        self, jaxpr: Jaxpr, scope: Scope, counts: Indices
    ) -> tuple[Jaxpr, Indices]:
        """Also which results count the steps of a solver, if the inputs `counts` do."""
        known = self._marked.of(jaxpr)
        if (scope, counts) not in known:
            found, made = self._find(jaxpr, scope, counts)
            known[scope, counts] = None if found is jaxpr else found, made  # see `Memo`
        found, made = known[scope, counts]
        return jaxpr if found is None else found, made

    def _find(
        self, jaxpr: Jaxpr, scope: Scope, counts: Indices
    ) -> tuple[Jaxpr, Indices]:
        inner = raw(jaxpr)
        counting = {inner.invars[i] for i in counts}
        eqns = []
        for eqn in inner.eqns:
            given = _places(eqn.invars, counting)
            marked, made = self._mark_eqn(eqn, scope + scopes(eqn), given)
            counting |= {eqn.outvars[i] for i in made}
            eqns.append(marked)
        return with_eqns(jaxpr, eqns), _places(inner.outvars, counting)

    def _mark_eqn(self, eqn: Eqn, scope: Scope, counts: Indices) -> tuple[Eqn, Indices]:
        bodies = self._bodies(eqn, scope)
        if self._is_solver(eqn, bodies, scope, counts):
            return in_scope(eqn, SOLVER), _exact_results(eqn)
        fed = set(counts)
        while True:
            inner = [
                self._mark(body.jaxpr, scope, _inside(body, fed)) for body in bodies
            ]
            pairs = list(zip(bodies, inner, strict=True))
            back = {b.ins[i] for b, (_, made) in pairs for o, i in b.loop if o in made}
            if back <= fed:
                break
            fed |= back
        new = {id(b.jaxpr): marked for b, (marked, _) in pairs if marked is not b.jaxpr}
        if new and eqn.primitive.name == "custom_vjp_call":
            return in_scope(eqn, SOLVER), _exact_results(eqn)
        outs = {b.outs[o] for b, (_, made) in pairs for o in made}
        if counts & read_outside(eqn, bodies):
            outs |= _exact_results(eqn)
        marked = replace_subjaxprs(eqn, new) if new else eqn
        return marked, frozenset(i for i in outs if i is not None)

    def _bodies(self, eqn: Eqn, scope: Scope) -> list[Body]:
        handler = self.handler(eqn, scope)
        return [] if handler is None else handler.bodies(eqn)

    # Which equations are solvers.

    @functools.cached_property
    def _flows(self) -> Flows:
        return Flows(self._bodies, self._is_low)

    @functools.cached_property
    def _flows_by_size(self) -> Flows:
        """Without what floats are asked that is not how large they are."""
        return Flows(self._bodies, self._is_low, _asks_no_size)

    def _is_solver(
        self, eqn: Eqn, bodies: list[Body], scope: Scope, counts: Indices
    ) -> bool:
        if eqn.primitive.name == "scan" and bodies:
            num_consts, _ = scan_arity(eqn)
            return self._stops(bodies[0], scope, range(num_consts))
        if eqn.primitive.name != "while" or not bodies:
            return False
        by_size = self._is_bounded(bodies, scope)
        flows = self._flows_by_size if by_size else self._flows
        condition = flows.through(bodies, scope)
        reruns = bool(condition.inputs & counts)
        if condition.is_low or (reruns and self._is_low(eqn, scope)):
            return True
        num_consts = eqn.params["body_nconsts"]
        return self._stops(bodies[1], scope, range(num_consts))

    def _has_low(self, jaxpr: Jaxpr, scope: Scope) -> bool:
        return any(self._is_low(eqn, scope + scopes(eqn)) for eqn in raw(jaxpr).eqns)

    def _is_low(self, eqn: Eqn, scope: Scope) -> bool:
        """Whether an equation, or one of a program that it holds, computes low."""
        if self.handler(eqn, scope) is None:
            return self.makes_low(eqn, scope)
        return any(self._has_low(sub, scope) for sub in subjaxprs(eqn.params))

    def _is_bounded(self, bodies: list[Body], scope: Scope) -> bool:
        """Whether a `while` also ends by a condition that is exact in any precision."""
        loop = bodies[1:]
        carries = {body.ins[i] for body in loop for _, i in body.loop}
        of, through = self._flows.of, self._flows.through
        parts = (of(body, scope, [atom]) for body, atom in _conjuncts(bodies))
        flows = (through(loop, scope, part) for part in parts)
        return any(flow.inputs & carries and not flow.is_low for flow in flows)

    def _stops(self, body: Body, scope: Scope, fixed: Iterable[int]) -> bool:
        """Whether a loop hands its carries on from some iteration on."""
        return stops(self._flows_by_size, body, scope, frozenset(fixed))


def _places(atoms: Sequence[Any], chosen: set[Any]) -> Indices:
    """Where in `atoms` one of the `chosen` stands."""
    return frozenset(
        i
        for i, atom in enumerate(atoms)
        if not isinstance(atom, Literal) and atom in chosen
    )


def _inside(body: Body, operands: Any) -> Indices:
    """The inputs of a body that are given by some operands of its equation."""
    return frozenset(i for i, operand in enumerate(body.ins) if operand in operands)


def _exact_results(eqn: Eqn) -> Indices:
    """Results that are no floats, and so may count steps or say that they are done."""
    dtypes = (getattr(v.aval, "dtype", None) for v in eqn.outvars)
    return frozenset(i for i, d in enumerate(dtypes) if d is None or not is_float(d))


def _asks_no_size(eqn: Eqn, outs: Indices) -> bool:
    """Whether a question about floats is not how large they are.

    Whether a number is finite or NaN (`x != x`), and which of some is the largest."""
    name = eqn.primitive.name
    if name in ("eq", "ne"):
        left, right = eqn.invars
        return left is right or any(map(_is_infinite, eqn.invars))
    return name == "is_finite" or (name in RANKING and outs <= _exact_results(eqn))


def _is_infinite(atom: Any) -> bool:
    if not isinstance(atom, Literal) or np.ndim(atom.val) != 0:
        return False
    aval: Any = atom.aval
    return is_float(aval.dtype) and np.isinf(float(atom.val))


# What a conjunction implies, it implies of any element.
_PASSING = ("reduce_or", "broadcast_in_dim", "reshape", "squeeze")


def _conjuncts(bodies: list[Body]) -> Iterator[tuple[Body, Any]]:
    """The parts of a condition of which each must hold for the loop to go on.

    With the body that each is computed in: a condition may have been computed by the
    iteration before, and carried."""
    condition, body = bodies
    carried = {condition.ins[i]: v for i, v in enumerate(raw(condition.jaxpr).invars)}
    next_of = {
        carried[body.ins[i]]: raw(body.jaxpr).outvars[out]
        for out, i in body.loop
        if body.ins[i] in carried
    }

    makers = [
        {v: eqn for eqn in raw(b.jaxpr).eqns for v in eqn.outvars} for b in bodies
    ]

    def parts(where: Body, atom: Any, negated: bool = False) -> Iterator[Any]:
        if isinstance(atom, Literal):
            return
        eqn: Any = makers[where is body].get(atom)
        name = eqn.primitive.name if eqn else ""
        if where is condition and atom in next_of and not negated:
            yield from parts(body, next_of[atom])
        elif name == "not":
            yield from parts(where, eqn.invars[0], not negated)
        elif name == ("or" if negated else "and"):
            for operand in eqn.invars:
                yield from parts(where, operand, negated)
        elif name in _PASSING and not negated:
            yield from parts(where, eqn.invars[0])
        else:
            yield where, atom

    (atom,) = raw(condition.jaxpr).outvars
    yield from parts(condition, atom)
