"""Structural primitives: those that hold programs. One row of `STRUCTURAL` for each.

A row says how values flow between an equation and its bodies, how it is decided (its
bodies are planned with the facts of its operands), and how it is bound again. Where it
can, binding copies the equation's parameters and replaces only the jaxprs, so that
names, donation, shardings, unrolling, remat policies and whatever a later JAX adds
survive."""

import functools
from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

from .._dtypes import DType
from .._jax import Atom, Eqn, EqnContext, Jaxpr, Literal, raw, variables
from .._primitives import PART_VIEWS
from .._rules import Decision, Demand, Fact, Match, RematSource, Site, author_dtype
from .._rules.low_bits import LowBits
from .remat_mode import RematMode

Facts = tuple[Fact | None, ...]
Scope = tuple[str, ...]

HoistedWeights = dict[tuple[Any, ...], Any]
"""Weights that were rounded before a loop, by the path to their reader."""

REMAT = ("checkpoint", "remat2")

SOLVER = "amp_solver"
"""The scope around a loop that must take the steps that it takes as written."""


class Body(NamedTuple):
    """One program that an equation holds, and how values flow through it."""

    jaxpr: Jaxpr
    ins: Sequence[int]  # for each input, which operand of the equation it is
    outs: Sequence[int | None]  # for each result, which of the equation's; `None` if it
    # is the condition of a loop
    carries: Sequence[tuple[int, int]] = ()  # results that become inputs, `(out, in)`
    is_repeated: bool = False  # by a loop, even if it changes nothing but references

    def forwarded_carries(self) -> dict[int, list[int]]:
        """For each input that is handed on unchanged, which inputs it is next.

        In a chain of such carries, as in a history of values, what is learned of one
        can be told to all at once, without going through the body again for each."""
        jaxpr = raw(self.jaxpr)
        place = {v: i for i, v in enumerate(jaxpr.invars)}
        heirs: dict[int, list[int]] = {}
        for out, i in self.carries:
            atom = jaxpr.outvars[out]
            if not isinstance(atom, Literal) and atom in place:
                heirs.setdefault(place[atom], []).append(i)
        return heirs


class Handler(NamedTuple):
    """How a structural primitive is read, decided and bound.

    Args:
        bodies: gives the programs of an equation.
        decide: is called by a `Planner`, of `_rewrite`.
        bind: is called by a `Binder`, of `_rewrite`; `ProgramBinder` is what it needs
            of one.
        is_call: whether it runs its one program once, operands in and results out.
        may_recompute: whether the backward pass may run it again, if it may run all
            that the program holds again.
        passes_hoisted_weights: whether its program may read weights that were rounded
            before a loop around it.
        is_closed: whether its program is a jaxpr of its own, which `Binder.close`
            rewrites."""

    bodies: Callable[[Eqn], list[Body]]
    decide: "Callable[[Planner, Eqn, Site], tuple[Decision, tuple[Plan, ...]]]"
    bind: "Callable[[ProgramBinder, Step, list[Any]], Sequence[Any]]"
    is_call: bool = False
    may_recompute: bool = False
    passes_hoisted_weights: bool = False
    is_closed: bool = False


@dataclass(frozen=True, eq=False)
class Step:
    """The plan of one equation: what binding follows, and what a report shows."""

    eqn: Eqn
    scope: Scope
    match: Match
    decision: Decision
    inner: tuple["Plan", ...] = ()
    handler: Handler | None = None  # of a structural primitive
    opaque: bool = False  # carries code in the author's dtypes: bound as it stands
    # For each operand that is cast, by its number: how cheaply it can be had again.
    input_casts: dict[int, RematSource] = field(default_factory=dict)
    may_recompute: bool = False  # whether it may be run again, to keep less
    out_demands: tuple[Demand, ...] = ()  # how its results are read
    backward: bool = False  # whether it is part of a backward pass, as it was planned

    @property
    def is_compute(self) -> bool:
        return self.match.is_compute

    @property
    def out_dtypes(self) -> tuple[DType | None, ...]:
        """The dtypes in which its results are held; `None` for what is no float."""
        return dtypes_of(self.decision.out_facts)

    @property
    def is_part_of_copy(self) -> bool:
        """Whether it shows a part of what the backward pass has to copy whole."""
        is_copied = any(fact and fact.is_copied for fact in self.decision.out_facts)
        return is_copied and self.eqn.primitive.name in PART_VIEWS

    @property
    def variables_read(self) -> list[Any]:
        """The variables that it reads, once for each operand."""
        return variables(self.eqn.invars)

    @functools.cached_property
    def dedup_key(self) -> Hashable:
        """What determines how the step is bound, apart from its variables."""
        eqn, decision = self.eqn, self.decision
        return (
            eqn.primitive,
            tuple(eqn.params.items()),
            EqnContext(eqn),
            decision._replace(params=tuple(decision.params.items())),
            self.inner,
            tuple(self.input_casts.items()),
        )

    def quantised_operand_key(self, i: int) -> Hashable:
        """A key of an operand, which is equal for steps that round it alike."""
        return self.eqn.invars[i], self.decision.reads[i], self.decision.quantisers[i]

    @property
    def recomputed_casts(self) -> list[int]:
        """Operands whose casts are made again in the backward pass, not saved."""
        return [
            i
            for i, source in self.input_casts.items()
            if source in (RematSource.INPUT, RematSource.VIEW)
        ]


@dataclass(frozen=True, eq=False)
class Plan:
    """The plan of a jaxpr for operands of certain dtypes and precision states.

    It does not hold the jaxpr: plans are values of a cache whose keys are jaxprs, and
    would keep them alive."""

    invars: Sequence[Any]
    constvars: Sequence[Any]
    outvars: Sequence[Atom]
    in_facts: Facts
    out_facts: Facts
    steps: tuple[Step, ...]
    facts: dict[Any, Fact | None]  # of all variables
    saves: LowBits | None  # how operands and results of contractions are kept
    policy_keys: frozenset[Any]  # keys of the policy that an equation was found under
    # The rewritten jaxprs, by the dtypes of results, remat mode and matmul precision.
    closed_jaxprs: dict[Any, Jaxpr] = field(default_factory=dict)

    @functools.cached_property
    def makers(self) -> dict[Any, Step]:
        """The step that makes each variable."""
        return {v: step for step in self.steps for v in step.eqn.outvars}

    @functools.cached_property
    def shared_quantised(self) -> frozenset[Hashable]:
        """Operands that several quantised contractions round alike, by their keys."""
        read = Counter(
            step.quantised_operand_key(i)
            for step in self.steps
            for i, how in enumerate(step.decision.quantisers)
            if how is not None and not isinstance(step.eqn.invars[i], Literal)
        )
        return frozenset(key for key, count in read.items() if count > 1)


NO_PLAN = Plan((), (), (), (), (), (), {}, None, frozenset())


def steps_of(plan: Plan) -> Iterator[Step]:
    """The steps of a plan, at any depth."""
    for step in plan.steps:
        yield from steps_in(step)


def steps_in(step: Step) -> Iterator[Step]:
    """A step and those of the programs that it holds, at any depth."""
    yield step
    for plan in step.inner:
        yield from steps_of(plan)


class Demands(Protocol):
    """How values are read by what comes after them; see `_rewrite/demands.py`."""

    def of_body(
        self, body: Body, scope: Scope, outs: Sequence[Demand]
    ) -> Sequence[Demand]: ...

    def of_operands(
        self, eqn: Eqn, bodies: Sequence[Body], scope: Scope, outs: Sequence[Demand]
    ) -> Sequence[Demand]: ...

    def with_conditions(
        self, bodies: Sequence[Body], scope: Scope, outs: Sequence[Demand]
    ) -> Sequence[Demand]: ...

    def body_wanted(
        self, body: Body, scope: Scope, outs: Sequence[Demand]
    ) -> list[Demand]: ...


class Accumulators(Protocol):
    """Which carries of loops are sums; see `_rewrite/accumulators.py`."""

    def must_stay_full(self, body: Body, scope: Scope) -> set[int]: ...


class Planner(Protocol):
    """What plans the programs that an equation holds; see `_rewrite/planner.py`."""

    @property
    def lean(self) -> bool | str: ...

    @property
    def demands(self) -> Demands: ...

    @property
    def accumulators(self) -> Accumulators: ...

    def plan(
        self,
        jaxpr: Jaxpr,
        facts: Facts,
        scope: Scope = (),
        wanted: Sequence[Demand] = (),
    ) -> Plan: ...

    def placed(self, facts: Facts, params: dict[str, Any]) -> Facts: ...

    def arithmetic_is_full(self, scope: Scope) -> bool: ...


class ProgramBinder(Protocol):
    """What binds plans on values; see `_rewrite/bind.py`."""

    @property
    def remat_mode(self) -> RematMode: ...

    def in_mode(self, mode: RematMode) -> "ProgramBinder": ...

    def run(
        self,
        plan: Plan,
        consts: Sequence[Any],
        args: Sequence[Any],
        hoisted_casts: dict[tuple[Any, DType], Any] | None = None,
        hoisted_weights: HoistedWeights | None = None,
    ) -> list[Any]: ...

    def close(
        self,
        plan: Plan,
        jaxpr: Jaxpr,
        dtypes: tuple[DType | None, ...],
        hoisted_weights: HoistedWeights | None = None,
    ) -> Jaxpr: ...

    def plan_traced(
        self, jaxpr: Jaxpr, facts: Facts, scope: Scope, wanted: Sequence[Demand]
    ) -> tuple[Jaxpr, Plan]: ...

    def rewrite(
        self,
        jaxpr: Jaxpr,
        values: Sequence[Any],
        facts: Facts,
        scope: Scope,
        wanted: Sequence[Demand],
        cotangents: tuple[bool, ...] | None = None,
    ) -> tuple[list[Any], Facts]: ...

    def demands_of_rule(
        self, rule: Jaxpr | None, count: int, scope: Scope
    ) -> Sequence[Demand]: ...

    def inputs_in_8_bits(self, step: Step) -> Mapping[Any, LowBits]: ...

    def low_copies(
        self,
        variables: Iterable[Any],
        dtypes: Iterable[DType | None],
        bits: Mapping[Any, LowBits] = ...,
    ) -> list[Any]: ...

    def hoisted_weights_in(self, step: Step) -> HoistedWeights: ...

    def hoist_weights(
        self, step: Step, fixed: dict[Any, Any], slices: dict[Any, Any]
    ) -> tuple[HoistedWeights, HoistedWeights]: ...


def decision_of(
    site: Site, reads: Iterable[Any], outs: Iterable[Any], why: str
) -> Decision:
    return Decision(tuple(reads), site.params, tuple(outs), why)


def dtypes_of(facts: Sequence[Fact | None]) -> tuple[DType | None, ...]:
    return tuple(fact and fact.dtype for fact in facts)


def as_body_inputs(
    facts: Sequence[Fact | None],
    source: RematSource = RematSource.INPUT,
    sharded: RematSource | None = None,
) -> Facts:
    """Facts of operands as inputs of a body, where a view is no longer known as one.

    An operand on several devices is a plain input there, a `source`, unless `sharded`
    says otherwise, as for a `jit`. A loop reads slices of it, and to keep a low copy of
    each would be to keep a copy of the whole."""
    inside = {
        RematSource.INPUT: source,
        RematSource.SHARDED: source if sharded is None else sharded,
        RematSource.CONSTANT: RematSource.CONSTANT,
        RematSource.RECOMPUTED: RematSource.RECOMPUTED,
    }
    return tuple(
        fact
        and fact._replace(remat_source=inside.get(fact.remat_source, RematSource.NONE))
        for fact in facts
    )


def as_results(facts: Sequence[Fact | None]) -> Facts:
    return tuple(
        fact and fact._replace(remat_source=RematSource.NONE) for fact in facts
    )


def author_facts(jaxpr: Jaxpr) -> Facts:
    authors = (author_dtype(v.aval) for v in raw(jaxpr).invars)
    return tuple(dtype and Fact(dtype) for dtype in authors)
