"""Solvers: loops that go on until their numbers are good enough.

A fixed point, a line search or an ODE solve that adapts its steps compares floats to
know whether to go on. Where contractions make these floats, 16 bits may keep the loop
from its tolerance: two iterates that differ in the last bit of a bfloat16 differ by
2^-8. A solver then runs to its bound or for ever, and where the backward pass runs it
again, it may take other steps than it took at first. So solvers stay as their author
wrote them, all but what a rule for a scope asks for.

They are found before anything is planned, by the flow of data:

- a `while` whose condition reads, through any number of iterations, what a contraction
  in the loop makes (or another op that the policy computes low by itself);
- a `while` whose condition reads how many steps a solver before it took: it runs that
  solver again;
- a loop that from some iteration on only hands its carries on, by a `cond` or a
  `where`: a solver with a bound is written so (see `early_exit`);
- a `custom_vjp` function that holds one of these: its forward pass, its backward pass
  and what is run again for that then take the same steps.

A condition that also holds a bound on a counter ends its loop in any precision. Such a
loop is a solver only if the condition compares floats by size. What was chosen by size
(the next token) does not count, nor does whether a number is finite (a step that is
repeated with another loss scale).

Whatever stands in a solver is in one more name scope, `SOLVER`: so the mark reaches
all that it holds, derivative rules included, as `amp_stop` does."""

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from .._jax import (
    Eqn,
    Jaxpr,
    Literal,
    in_scope,
    raw,
    replace_subjaxprs,
    scopes,
    with_eqns,
)
from .._structural import SOLVER, Body, Handler, Scope
from .early_exit import Iteration, may_forward
from .flow import Flow, exact_results
from .memo import Memo
from .reach import LOW, of_inputs, read_outside

Indices = frozenset[int]


def without_solver_scope(scope: Scope) -> Scope:
    """`scope` without `SOLVER`: the scopes that the author wrote."""
    if SOLVER not in scope:
        return scope
    return tuple(name for name in scope if name != SOLVER)


@dataclass(eq=False)
class Solvers:
    """Finds the solvers of programs, and remembers what it found while these live.

    Args:
        handler: gives the handler of a structural equation that is rewritten, else
            `None`.
        makes_low: whether an equation may compute low."""

    handler: Callable[[Eqn, Scope], Handler | None]
    makes_low: Callable[[Eqn, Scope], bool]
    _scoped: Memo = field(default_factory=Memo)

    def with_solver_scopes(self, jaxpr: Jaxpr, scope: Scope) -> Jaxpr:
        """`jaxpr` with its solvers in the scope `SOLVER`; itself, if it has none."""
        return (
            jaxpr
            if SOLVER in scope
            else self._with_solver_scopes(jaxpr, scope, frozenset())[0]
        )

    def _with_solver_scopes(
        self, jaxpr: Jaxpr, scope: Scope, counts: Indices
    ) -> tuple[Jaxpr, Indices]:
        """As `with_solver_scopes`; also, which results count the steps of a solver.

        `counts` says which inputs do."""
        known = self._scoped.of(jaxpr)
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
            marked, made = self._with_scope(eqn, scope + scopes(eqn), given)
            counting |= {eqn.outvars[i] for i in made}
            eqns.append(marked)
        return with_eqns(jaxpr, eqns), _places(inner.outvars, counting)

    def _with_scope(
        self, eqn: Eqn, scope: Scope, counts: Indices
    ) -> tuple[Eqn, Indices]:
        bodies = self._flow.bodies(eqn, scope)
        if not bodies:
            return eqn, exact_results(eqn) if counts else frozenset()
        if self._is_solver(eqn, bodies, scope, counts):
            return in_scope(eqn, SOLVER), exact_results(eqn)
        fed = set(counts)
        while True:
            inner = [
                self._with_solver_scopes(body.jaxpr, scope, _inside(body, fed))
                for body in bodies
            ]
            pairs = list(zip(bodies, inner, strict=True))
            back = {
                b.ins[i] for b, (_, made) in pairs for o, i in b.carries if o in made
            }
            if back <= fed:
                break
            fed |= back
        new = {id(b.jaxpr): marked for b, (marked, _) in pairs if marked is not b.jaxpr}
        if new and eqn.primitive.name == "custom_vjp_call":
            return in_scope(eqn, SOLVER), exact_results(eqn)
        outs = {b.outs[o] for b, (_, made) in pairs for o in made}
        if counts and counts & read_outside(len(eqn.invars), bodies):
            outs |= exact_results(eqn)
        marked = replace_subjaxprs(eqn, new) if new else eqn
        return marked, frozenset(i for i in outs if i is not None)

    @functools.cached_property
    def _flow(self) -> Flow:
        return Flow(self.handler, self.makes_low)

    @functools.cached_property
    def _flow_by_size(self) -> Flow:
        """The same, but floats only reach what depends on how large they are."""
        return Flow(self.handler, self.makes_low, by_size=True)

    def _is_solver(
        self, eqn: Eqn, bodies: Sequence[Body], scope: Scope, counts: Indices
    ) -> bool:
        if not bodies[-1].carries:
            return False
        if eqn.primitive.name == "while":
            flow, by_size = self._flow, self._flow_by_size
            reruns = counts if counts and flow.is_low(eqn, scope) else ()
            deciding = LOW | of_inputs(reruns)
            if flow.condition(eqn, bodies, scope) & deciding:
                is_bounded = Iteration(flow, eqn, bodies, scope).is_bounded()
                if not is_bounded or by_size.condition(eqn, bodies, scope) & deciding:
                    return True
        return self._exits_early(eqn, bodies, scope)

    def _exits_early(self, eqn: Eqn, bodies: Sequence[Body], scope: Scope) -> bool:
        """Whether a loop only hands its carries on, from some iteration on."""
        flow, body = self._flow_by_size, bodies[-1]
        carries = [out for out, _ in body.carries]
        return (
            may_forward(flow, body.jaxpr, scope, carries)
            and Iteration(flow, eqn, bodies[-1:], scope).exits_early()
        )


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
