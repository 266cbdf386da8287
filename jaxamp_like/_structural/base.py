"""Structural primitives: those that hold programs. One row of `STRUCTURAL` for each.

A row says how values flow between an equation and its bodies, how it is decided (its
bodies are planned with the facts of its operands), and how it is bound again. Binding
copies the equation's parameters and replaces only the jaxprs, so that names, donation,
shardings, unrolling, remat policies and whatever a later JAX adds survive."""

from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

from .._dtypes import DType
from .._jax import (
    Eqn,
    Jaxpr,
    Literal,
    raw,
)
from .._rules import (
    Decision,
    Fact,
    Leaf,
    Site,
    author_dtype,
)

Facts = tuple[Fact | None, ...]


REMAT = ("checkpoint", "remat2")

SOLVER = "amp_solver"
"""The scope around a loop that must take the steps that it takes as written."""


class Body(NamedTuple):
    """One program that an equation holds, and how values flow through it."""

    jaxpr: Jaxpr
    ins: Sequence[int]  # for each input, the operand of the equation
    outs: Sequence[int | None]  # for each result, the result of the equation
    loop: Sequence[tuple[int, int]] = ()  # results that become inputs, `(out, in)`

    def handed_on(self) -> dict[int, list[int]]:
        """For inputs that the next iteration gets as they are: as which of its inputs.

        Where each carry takes over from the one before, as in a history of values, what
        is known of one is soon known of all: not by one more iteration for each."""
        jaxpr = raw(self.jaxpr)
        place = {v: i for i, v in enumerate(jaxpr.invars)}
        heirs: dict[int, list[int]] = {}
        for out, i in self.loop:
            atom = jaxpr.outvars[out]
            if not isinstance(atom, Literal) and atom in place:
                heirs.setdefault(place[atom], []).append(i)
        return heirs


class Handler(NamedTuple):
    """How a structural primitive is read, decided and bound.

    `decide` is asked by a `Planner`, `bind` by a `Frame`, both of `_rewrite`. A call
    runs its one program once, operands in and results out; one that `may_run_twice` is
    run again in the backward pass if all that it holds may be. One that `hands_on` lets
    its program read weights that were rounded before a loop around it."""

    bodies: Callable[[Eqn], list[Body]]
    decide: Callable[[Any, Eqn, Site], tuple[Decision, tuple[Any, ...]]]
    bind: Callable[[Any, Any, list[Any]], Sequence[Any]]
    is_call: bool = False
    may_run_twice: bool = False
    is_loop: bool = False
    hands_on: bool = False


def decision_of(
    site: Site, reads: Iterable[Any], outs: Iterable[Any], why: str
) -> Decision:
    return Decision(tuple(reads), site.params, tuple(outs), why)


def now(facts: Sequence[Fact | None]) -> tuple[DType | None, ...]:
    return tuple(fact and fact.dtype for fact in facts)


def inside(
    facts: Sequence[Fact | None],
    leaf: Leaf = Leaf.ROOT,
    sharded: Leaf | None = None,
) -> Facts:
    """Facts of operands as a body's inputs; a view outside is no view inside.

    What is `sharded` outside is so inside of calls alone, unless it is said: a loop has
    parts of it, and keeping a low copy of each would be a copy of the whole."""
    inside = {
        Leaf.ROOT: leaf,
        Leaf.SHARDED: leaf if sharded is None else sharded,
        Leaf.CONST: Leaf.CONST,
        Leaf.RERUN: Leaf.RERUN,
    }
    return tuple(
        fact and fact._replace(leaf=inside.get(fact.leaf, Leaf.NO)) for fact in facts
    )


def outside(facts: Sequence[Fact | None]) -> Facts:
    return tuple(fact and fact._replace(leaf=Leaf.NO) for fact in facts)


def author_facts(jaxpr: Jaxpr) -> Facts:
    authors = (author_dtype(v.aval) for v in raw(jaxpr).invars)
    return tuple(dtype and Fact(dtype) for dtype in authors)
