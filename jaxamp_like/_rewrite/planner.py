"""Deciding: a plan for every equation of a jaxpr, before anything is bound.

Two passes over each jaxpr. Backward: which values does an op that computes low read,
directly or through ops that follow their inputs? Forward: the rule of each equation
decides, knowing what its operands have become. Bodies of structural primitives are
planned with the facts of their operands, so decisions flow through jit, loops and
branches; see `_structural`."""

import functools
import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np

from .._dtypes import DType
from .._errors import AmpError, warn_or_raise
from .._jax import (
    Atom,
    Eqn,
    Jaxpr,
    Literal,
    consts,
    is_tracer,
    names,
    raw,
    scopes,
    source_line,
    subjaxprs,
)
from .._policies.classes import CLASSES
from .._policies.dictionary import Found, Lookup
from .._primitives import CONTRACTIONS, FIXED, LINEAR
from .._primitives.contractions import is_contraction
from .._rules import (
    Decision,
    Demand,
    Fact,
    Leaf,
    Mark,
    Rule,
    Site,
    UseOriginalPrecision,
    author_dtype,
    is_full,
    use_original_precision,
)
from .._structural import STRUCTURAL, Body, Handler
from .islands import Schedule, island_schedule, schedule
from .reach import Reach, around, members, of_input, through, union
from .solvers import Solvers, find_rule

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

    @property
    def is_compute(self) -> bool:
        return self.found.is_compute

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

    # Made when they are bound: of the plans that a loop tries, only the last one is.

    @functools.cached_property
    def plain(self) -> Schedule:
        """The steps in order."""
        return schedule(self.steps, self.outvars)

    @functools.cached_property
    def islands(self) -> Schedule:
        """The same, with regions."""
        if any(step.run_again or step.inner for step in self.steps):
            return island_schedule(self.steps, self.facts, self.outvars)
        return self.plain


@dataclass(eq=False)
class Planner:
    """Plans jaxprs under one policy, and remembers the plans while the jaxprs live.

    Remembering is not only for speed: JAX finds compiled code by the identity of inner
    jaxprs, so a jitted function must be rewritten to the same jaxpr every time."""

    policy: Lookup
    compute_dtype: DType
    strict: bool = False
    lean: bool = False
    _plans: Any = field(default_factory=WeakKeyDictionary)
    _demands: Any = field(default_factory=WeakKeyDictionary)
    _uncrossed: Any = field(default_factory=WeakKeyDictionary)
    _found: dict[Any, Found] = field(default_factory=dict)

    def afresh(self) -> "Planner":
        """A planner of the same settings that remembers nothing."""
        return Planner(self.policy, self.compute_dtype, self.strict, self.lean)

    def plan(
        self,
        jaxpr: Jaxpr,
        facts: Facts,
        scope: Scope = (),
        wanted: Sequence[Demand] = (),
    ) -> Plan:
        """Plans `jaxpr` for inputs of which `facts` are known.

        `wanted` says how its results are read outside; in full, if not given."""
        wanted = tuple(wanted) or (Demand.FULL,) * len(raw(jaxpr).outvars)
        key = (facts, scope, wanted)
        return _remember(self._plans, jaxpr, key, lambda: self._plan(jaxpr, *key))

    def _plan(
        self, jaxpr: Jaxpr, facts: Facts, scope: Scope, wanted: Sequence[Demand]
    ) -> Plan:
        inner = raw(jaxpr)
        env: dict[Any, Fact | None] = dict(zip(inner.invars, facts, strict=True))
        values = consts(jaxpr) or [None] * len(inner.constvars)
        env |= {
            v: _const_fact(v, c) for v, c in zip(inner.constvars, values, strict=True)
        }
        demand = self._demand(inner, scope, wanted)
        steps, keys = [], set()
        for eqn in inner.eqns:
            operands = tuple(_fact(env, atom) for atom in eqn.invars)
            needed = tuple(demand.get(v, Demand.NONE) for v in eqn.outvars)
            step = self._step(eqn, scope + scopes(eqn), operands, needed)
            env |= zip(eqn.outvars, step.decision.outs, strict=True)
            steps.append(step)
            found = {step.found.key, *step.found.also}
            keys |= found.union(*(plan.keys for plan in step.inner))
        return Plan(
            invars=tuple(inner.invars),
            constvars=tuple(inner.constvars),
            outvars=tuple(inner.outvars),
            ins=facts,
            outs=tuple(_fact(env, atom) for atom in inner.outvars),
            steps=tuple(steps),
            facts=env,
            lean=self.lean,
            keys=frozenset(keys),
        )

    def _step(
        self, eqn: Eqn, scope: Scope, facts: Facts, wanted: Sequence[Demand]
    ) -> Step:
        found = self._find(eqn, scope)
        site = self._site(eqn, scope, facts, wanted, found)
        handler = STRUCTURAL.get(eqn.primitive.name)
        if handler is not None and not _stops(found):
            decision, inner = handler.decide(self, eqn, site)
            return Step(eqn, scope, found, decision, inner, handler)
        rule, opaque = self._rule(eqn, scope, found)
        try:
            decision = rule.decide(site)
        except Exception as e:
            where = (
                f"`{eqn.primitive}` in scope {'/'.join(scope)!r}, {source_line(eqn)}"
            )
            what = str(e) if isinstance(e, AmpError) else f"{type(e).__name__}: {e}"
            raise AmpError(f"{what}\nWhile deciding on {where}.") from e
        if not self.lean:  # lean islands are better handed what is low
            decision = decision._replace(outs=_upcast_early(site, decision.outs))
        cast = {
            i: fact.leaf
            for i, (fact, dtype) in enumerate(zip(facts, decision.reads, strict=True))
            if fact and fact.leaf and fact.dtype != dtype and decision.recasts
        }
        return Step(
            eqn,
            scope,
            found,
            decision,
            casts=cast,
            opaque=opaque,
            run_again=self.lean or found.rule.is_run_again,
            wanted=tuple(wanted),
        )

    def _rule(self, eqn: Eqn, scope: Scope, found: Found) -> tuple[Rule, bool]:
        """The rule to ask, and whether the equation is to be bound as it stands."""
        name = eqn.primitive.name
        opaque = name in STRUCTURAL or any(True for _ in subjaxprs(eqn.params))
        if name in FIXED:
            return use_original_precision, True
        if _stops(found) and (found.by_scope or found.key is eqn.primitive):
            return found.rule, opaque  # the user has said that this is meant
        if opaque and name not in CLASSES and name not in STRUCTURAL:
            self._report_unknown(eqn, scope, "holds a program that amp does not know")
            return use_original_precision, True
        if name not in CLASSES and found.rule is use_original_precision:
            if self.strict and found.key is not None and not found.by_scope:
                self._report_unknown(eqn, scope, "is in no class of amp's table")
            return found.rule, True
        return found.rule, opaque

    def _report_unknown(self, eqn: Eqn, scope: Scope, what: str) -> None:
        where = f"scope {'/'.join(scope)!r}, {source_line(eqn)}"
        warn_or_raise(
            f"`{eqn.primitive}` {what}, so it runs in the author's dtypes ({where}). "
            "To say that this is meant, put it under `amp_stop`, or give its primitive "
            "the rule `use_original_precision` in the policy.",
            self.strict,
        )

    def _site(
        self, eqn: Eqn, scope: Scope, facts: Facts, wanted: Any, found: Found
    ) -> Site:
        avals = tuple(atom.aval for atom in eqn.invars)
        return Site(
            primitive=eqn.primitive,
            params=eqn.params,
            scope=scope,
            compute_dtype=found.compute_dtype or self.compute_dtype,
            avals=avals,
            authors=tuple(map(author_dtype, avals)),
            facts=facts,
            out_avals=tuple(v.aval for v in eqn.outvars),
            wanted=tuple(wanted),
            by_scope=found.by_scope,
            backward=names(eqn).backward,
        )

    def find(self, primitive: Any, scope: Scope) -> Found:
        """What the policy says of a primitive in a scope."""
        key = (primitive, scope)
        if key not in self._found:
            self._found[key] = self.policy.find(primitive, scope)
        return self._found[key]

    def _find(self, eqn: Eqn, scope: Scope) -> Found:
        return find_rule(self.find, eqn, scope)

    @functools.cached_property
    def solvers(self) -> Solvers:
        """What finds solvers; a program is to be marked by it before it is planned."""
        return Solvers(self._handler, self._makes_low)

    def _handler(self, eqn: Eqn, scope: Scope) -> Handler | None:
        handler = STRUCTURAL.get(eqn.primitive.name)
        if handler is None or _stops(self._find(eqn, scope)):
            return None
        return handler

    def _makes_low(self, eqn: Eqn, scope: Scope) -> bool:
        """Whether an equation may compute low, here or where its author said so."""
        if eqn.primitive.name in CONTRACTIONS:
            return is_contraction(eqn.params, [a.aval.shape for a in eqn.invars])
        return self._find(eqn, scope).rule.may_compute_low

    def demands(
        self, jaxpr: Jaxpr, scope: Scope, wanted: Sequence[Demand]
    ) -> tuple[Demand, ...]:
        """How the inputs of `jaxpr` are read, if its results are read as `wanted`."""

        def find():
            demand = self._demand(raw(jaxpr), scope, wanted)
            return tuple(demand.get(v, Demand.NONE) for v in raw(jaxpr).invars)

        return _remember(self._demands, jaxpr, (scope, tuple(wanted)), find)

    def _demand(
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
        found = self._find(eqn, scope)
        handler = STRUCTURAL.get(eqn.primitive.name)
        if handler is None or _stops(found):
            if eqn.primitive.name in FIXED:
                return [Demand.FULL] * len(eqn.invars)
            wanted = functools.reduce(operator.or_, outs, Demand.NONE)
            return [found.demand(eqn.params, wanted)] * len(eqn.invars)
        reads = [Demand.NONE] * len(eqn.invars)
        for body in handler.bodies(eqn):
            inner = self.body_demands(body, scope, outs)
            for i, demand in zip(body.ins, inner, strict=True):
                reads[i] |= demand
        return reads

    def body_demands(
        self, body: Body, scope: Scope, outs: Sequence[Demand]
    ) -> Sequence[Demand]:
        """How the inputs of a body are read, by way of its loop if it has one."""
        reads = self.demands(body.jaxpr, scope, self.body_wanted(body, scope, outs))
        return [how & ~Demand.CARRY for how in reads] if body.loop else reads

    def body_wanted(
        self, body: Body, scope: Scope, outs: Sequence[Demand]
    ) -> list[Demand]:
        """How the results of a body are read: outside, or in the next iteration."""
        wanted = [Demand.FULL if i is None else outs[i] for i in body.outs]
        full = self.must_stay_full(body, scope)
        made_by = {i: out for out, i in body.loop}
        giver = {j: i for i, heirs in body.handed_on().items() for j in heirs}

        def want(i: int, how: Demand) -> bool:
            """Adds to how a carry is read; whether that is news."""
            out = made_by[i]
            before, wanted[out] = wanted[out], wanted[out] | how
            return wanted[out] != before

        for i in made_by.keys() & full:
            want(i, Demand.CARRY)
        while True:
            reads = self.demands(body.jaxpr, scope, wanted)
            news = [i for i in made_by if want(i, reads[i])]
            if not news:
                return wanted
            while news:
                i = news.pop()
                if giver.get(i) in made_by and want(giver[i], wanted[made_by[i]]):
                    news.append(giver[i])

    def uncrossed(self, jaxpr: Jaxpr, scope: Scope) -> tuple[Reach, ...]:
        """For each result, the inputs that reach it without crossing a compute op."""
        return _remember(
            self._uncrossed,
            jaxpr,
            scope,
            lambda: self._find_uncrossed(raw(jaxpr), scope),
        )

    def _find_uncrossed(self, jaxpr: Jaxpr, scope: Scope) -> tuple[Reach, ...]:
        env = {v: of_input(i) for i, v in enumerate(jaxpr.invars)}

        def read(atoms):
            known = (Reach() if isinstance(x, Literal) else env.get(x) for x in atoms)
            return [reach or Reach() for reach in known]

        for eqn in jaxpr.eqns:
            inner_scope = scope + scopes(eqn)
            found = self._find(eqn, inner_scope)
            handler = STRUCTURAL.get(eqn.primitive.name)
            if handler is not None and not _stops(found):
                operands = read(eqn.invars)
                for body in handler.bodies(eqn):
                    given = [operands[i] for i in body.ins]
                    inner = self._around(body, inner_scope)
                    for out, reach in zip(body.outs, inner, strict=True):
                        if out is not None:
                            v = eqn.outvars[out]
                            env[v] = union((env.get(v, Reach()), through(reach, given)))
            elif not found.is_compute:
                reach = union(read(eqn.invars))
                is_linear = eqn.primitive.name in LINEAR
                reach = reach if is_linear else reach.bend()
                env |= dict.fromkeys(eqn.outvars, reach)
        return tuple(read(jaxpr.outvars))

    def _around(self, body: Body, scope: Scope) -> Sequence[Reach]:
        """As `uncrossed`, for any number of iterations of the body's loop."""
        loop = tuple(body.loop)
        return _remember(
            self._uncrossed,
            body.jaxpr,
            (scope, loop),
            lambda: around(self.uncrossed(body.jaxpr, scope), loop),
        )

    def must_stay_full(self, body: Body, scope: Scope) -> set[int]:
        """The carries (by input) that some path takes round the loop uncrossed."""
        reach = self._around(body, scope)
        return {i for out, i in body.loop if reach[out].inputs >> i & 1}

    def only_added_to(self, jaxpr: Jaxpr, scope: Scope) -> set[int]:
        """The inputs that reach no result but through linear or compute ops."""
        bent = union(self.uncrossed(jaxpr, scope)).bent
        return set(range(len(raw(jaxpr).invars))) - set(members(bent))


def _upcast_early(site: Site, outs: Facts) -> Facts:
    """A result that is only read in full is cast up once, not by every reader."""
    return tuple(
        fact._replace(dtype=author)
        if fact and is_full(demand) and Demand.AS_HELD not in demand
        else fact
        for fact, author, demand in zip(
            outs, site.out_authors, site.wanted, strict=True
        )
    )


def _stops(found: Found) -> bool:
    """Whether a structural primitive is left as written, with all that is inside."""
    return found.key is not None and isinstance(found.rule, UseOriginalPrecision)


def _remember(cache: Any, jaxpr: Jaxpr, key: Any, make: Callable[[], Any]) -> Any:
    entries = cache.setdefault(jaxpr, {})
    if key not in entries:
        entries[key] = make()
    return entries[key]


def _fact(env: dict[Any, Fact | None], atom: Atom) -> Fact | None:
    if not isinstance(atom, Literal):
        return env[atom]
    dtype = author_dtype(atom.aval)
    if dtype is None:
        return None
    values = frozenset([_plain(float(atom.val))])
    return Fact(dtype, leaf=Leaf.CONST, values=values)


def _plain(value: float) -> float:
    # NaN is unequal to itself, which no cache key may be; it survives as inf does.
    return np.inf if np.isnan(value) else value


def _const_fact(var: Any, const: Any) -> Fact | None:
    dtype = author_dtype(var.aval)
    if dtype is None:
        return None
    # Other constants are values of an outer transformation: closed-over parameters.
    is_constant = const is not None and not is_tracer(const)
    leaf = Leaf.CONST if is_constant else Leaf.ROOT
    values = _const_values(const, dtype)
    return Fact(dtype, leaf=leaf, values=values, sampled=var.aval.ndim > 0)


_SMALL_CONST = 4096  # elements that are looked at; a mask or an epsilon is no larger


def _const_values(const: Any, dtype: DType) -> frozenset[float] | None:
    """The values of a small constant; of an array the largest, which may overflow."""
    if const is None or is_tracer(const) or const.size > _SMALL_CONST:
        return None
    if not getattr(const, "is_fully_addressable", True) or const.size == 0:
        return None
    values = np.asarray(const).astype(np.float64)
    if values.ndim == 0:
        return frozenset([_plain(float(values))])
    finite = values[np.isfinite(values)]
    largest = float(np.max(np.abs(finite), initial=0.0))
    # Within the range of every dtype: the array is no constant to worry about.
    return frozenset([largest]) if largest > 1e4 else None


def input_fact(aval: Any, dtype: DType | None = None) -> Fact | None:
    """The fact of an input of the rewritten function."""
    author = author_dtype(aval)
    if author is None:
        return None
    if dtype is not None and dtype != author:
        return Fact(dtype, Mark.LOW)
    return Fact(author, leaf=Leaf.ROOT)
