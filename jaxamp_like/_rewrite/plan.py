"""A plan: for every equation of a jaxpr, what binding follows and a report shows."""

import functools
from collections import Counter
from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from .._jax import Atom, Eqn, Jaxpr, Literal, Place
from .._policies.dictionary import Found
from .._rules import Decision, Demand, Fact, Leaf
from .._structural import Handler
from .islands import Schedule, island_schedule, plain_schedule, schedule

Facts = tuple[Fact | None, ...]
Scope = tuple[str, ...]


@dataclass(frozen=True, eq=False)
class Step:
    """The plan of one equation: what binding follows, and what a report shows."""

    eqn: Eqn
    scope: Scope
    found: Found
    decision: Decision
    inner: tuple["Plan", ...] = ()
    handler: Handler | None = None  # of a structural primitive
    opaque: bool = False  # carries code in the author's dtypes: bound as it stands
    casts: dict[int, Leaf] = field(default_factory=dict)  # of inputs and constants
    run_again: bool = False  # in the backward pass, if less is kept for it then
    wanted: tuple[Demand, ...] = ()  # how its results are read
    backward: bool = False  # whether it is part of a backward pass, as it was planned

    @property
    def is_compute(self) -> bool:
        return self.found.is_compute

    @functools.cached_property
    def kind(self) -> Hashable:
        """What says how it is bound, but for its variables; all else follows."""
        eqn, decision = self.eqn, self.decision
        return (
            eqn.primitive,
            tuple(eqn.params.items()),
            Place(eqn),
            decision._replace(params=tuple(decision.params.items())),
            self.inner,
            tuple(self.casts.items()),
        )

    def read_alone(self, i: int) -> Hashable:
        """What is rounded for an operand alike by all that read it so."""
        return self.eqn.invars[i], self.decision.reads[i], self.decision.alone[i]

    @property
    def recasts(self) -> list[int]:
        """Operands whose casts are made again in the backward pass, not saved."""
        return [i for i, leaf in self.casts.items() if leaf in (Leaf.ROOT, Leaf.VIEW)]


@dataclass(frozen=True, eq=False)
class Plan:
    """The plan of a jaxpr for operands of certain dtypes and marks.

    It holds the variables and equations, not the jaxpr, which keys the cache weakly."""

    invars: Sequence[Any]
    constvars: Sequence[Any]
    outvars: Sequence[Atom]
    ins: Facts
    outs: Facts
    steps: tuple[Step, ...]
    facts: dict[Any, Fact | None]  # of all variables
    lean: bool
    keys: frozenset[Any]  # keys of the policy that an equation was found under
    closed: dict[Any, Jaxpr] = field(default_factory=dict)  # the rewritten jaxprs

    @functools.cached_property
    def rounded_often(self) -> frozenset[Hashable]:
        """Operands that several steps of 8 bits would round alike, by themselves."""
        read = Counter(
            step.read_alone(i)
            for step in self.steps
            for i, how in enumerate(step.decision.alone)
            if how is not None and not isinstance(step.eqn.invars[i], Literal)
        )
        return frozenset(key for key, count in read.items() if count > 1)

    # Made when they are bound: of the plans that a loop tries, only the last one is.

    @functools.cached_property
    def plain(self) -> Schedule:
        """The steps in order."""
        if any(step.run_again for step in self.steps):
            return plain_schedule(self.steps, self.facts, self.outvars)
        return schedule(self.steps, self.outvars)

    @functools.cached_property
    def islands(self) -> Schedule:
        """The same, with regions for a derivative that is still to be taken.

        What a written out backward pass reads, its author has chosen: a region would
        only hide from others (`amp_with_state`, reports) what it reads and makes."""
        if any(step.backward for step in self.steps):
            return self.plain
        if any(step.run_again or step.inner for step in self.steps):
            return island_schedule(self.steps, self.facts, self.outvars)
        return self.plain


def steps_of(plan: Plan) -> Iterator[Step]:
    """The steps of a plan, at any depth."""
    for step in plan.steps:
        yield step
        for inner in step.inner:
            yield from steps_of(inner)
