"""Deciding: a plan for every equation of a jaxpr, before anything is bound.

Each jaxpr is walked twice. The walk from its end finds which values are read by ops
that compute in low precision, directly or by way of ops that only move values. In the
forward walk the rule of each equation decides, given what its operands became. Bodies
of structural primitives are planned with the facts of their operands, so decisions flow
through jit, loops and branches; see `_structural`."""

import contextlib
import functools
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Any, NamedTuple

from jax import lax

from .._dtypes import DType
from .._errors import AmpError, warn_or_raise
from .._jax import (
    Eqn,
    Jaxpr,
    Literal,
    consts,
    describe,
    device_axes,
    is_exported_in_full,
    is_opaque_hi,
    names,
    raw,
    scopes,
    source_line,
    subjaxprs,
    to_classic,
    variables,
)
from .._policies.classes import CLASSES
from .._policies.dictionary import Lookup
from .._primitives import (
    ASKING_SIGNS,
    CONTRACTIONS,
    FIXED,
    LINEAR,
    holds_rule,
    steep_operands,
)
from .._primitives.matmul_precision import setting
from .._rules import (
    Decision,
    Demand,
    Fact,
    Match,
    Origin,
    RematSource,
    Rule,
    Site,
    author_dtype,
    held_in_full,
    summed_once,
    use_original_precision,
)
from .._rules.low_bits import LowBits
from .._structural import STRUCTURAL, Facts, Plan, Scope, Step
from .accumulators import Accumulators
from .cotangents import Cotangents, Flags
from .demands import Demands
from .facts import const_fact, upcast_early
from .hoisted_by_jax import Hoisted
from .matching import Matching, stays_as_written
from .memo import Memo
from .origins import as_number, with_origins
from .partners import Partners, without_partners
from .placement import as_asked, of_operands, remat_source_of
from .remat import is_kept_anyway
from .shared import shared
from .solvers import Solvers


class _Around(NamedTuple):
    """The equation whose bodies are planned.

    Args:
        is_backward: whether it is part of a backward pass.
        is_recomputed: whether a `jax.checkpoint` runs it again.
        device_axes: the axes of devices that it, or one around it, names.
        cotangents: which inputs of its bodies are cotangents."""

    is_backward: bool = False
    is_recomputed: bool = False
    device_axes: frozenset[Any] = frozenset()
    cotangents: Mapping[Jaxpr, Flags] = MappingProxyType({})


@dataclass(eq=False)
class Planner:
    """Plans jaxprs under one policy, and remembers the plans while the jaxprs live.

    Handlers of structural primitives ask it for the plans of their bodies, and ask
    `demands` and `accumulators` how values flow there."""

    policy: Lookup
    compute_dtype: DType
    strict: bool = False
    lean: bool | str = False  # true, or the format of 8 bits that residuals are kept in
    # Whether an input that lies on several devices is cast once, and the cast is kept;
    # if `None`, its type and the shardings in the program tell (see `placement`).
    gather_once: bool | None = None
    partly_mapped: bool = False  # whether examples of a `jax.vmap` share some inputs
    # Whether a second derivative is taken, which rules out 8 bits.
    differentiated_again: bool = False
    _plans: Memo = field(default_factory=Memo, init=False)

    def __post_init__(self) -> None:
        self.matching = Matching(self.policy, not self.differentiated_again)
        self.accumulators = Accumulators(self.matching.handler, self.matching)
        self.demands = Demands(self.matching, self.accumulators)
        # It marks the solvers of a program before that is planned; see `prepared`.
        self.solvers = Solvers(self.matching.handler, self.matching.makes_low)
        self.hoisted = Hoisted()
        self.cotangents = Cotangents()
        self._around = _Around()
        self._axes = frozenset[Any]()  # of devices, also those around the traced code

    def without_memory(self) -> "Planner":
        """A planner of the same settings that remembers nothing."""
        return replace(self)

    @property
    def may_keep_in_8_bits(self) -> bool:
        """Whether the option `lean` or a rule asks for it."""
        rules = (rule for _, rule in self.policy.items())
        is_asked = (isinstance(r, Rule) and r.saves is not None for r in rules)
        return isinstance(self.lean, str) or any(is_asked)

    @property
    def saves(self) -> LowBits | None:
        """How what is kept for the backward pass is kept in 8 bits, if it may be."""
        if not isinstance(self.lean, str) or self.differentiated_again:
            return None
        return LowBits(self.lean)

    @functools.cached_property
    def of_second_derivative(self) -> "Planner":
        """The same planner, for calls that are differentiated more than once.

        What is kept in 8 bits can't be differentiated again."""
        return replace(self, differentiated_again=True)

    @functools.cached_property
    def of_partly_mapped(self) -> "Planner":
        """The same planner, for calls where `jax.vmap` maps only some values."""
        return replace(self, partly_mapped=True)

    def prepared(self, jaxpr: Jaxpr, scope: Scope = ()) -> Jaxpr:
        """`jaxpr`, freshly traced, as it is to be planned.

        Its equations are classic ones, scopes that JAX lost are put back, and solvers
        stand in a scope of their own."""
        return self.solvers.with_solver_scopes(
            self.hoisted.put_back(to_classic(jaxpr)), scope
        )

    def input_fact(self, aval: Any, origin: Origin = Origin.DATA) -> Fact | None:
        """The fact of an input of the rewritten function."""
        author = author_dtype(aval)
        if author is None:
            return None
        return Fact(
            author, remat_source=remat_source_of(aval, self.gather_once), origin=origin
        )

    def placed(self, facts: Facts, params: dict[str, Any]) -> Facts:
        """The facts of a call's operands, given the `in_shardings` in its `params`."""
        return tuple(of_operands(facts, params, self.gather_once))

    def arithmetic_is_full(self, scope: Scope) -> bool:
        """Whether arithmetic in `scope` computes in full from what is held low.

        The rule of `add` tells, by whether it may be run again from low copies of its
        operands. An op that follows its inputs would make a low result of these."""
        return self.matching.of_primitive(lax.add_p, scope).rule.is_run_again

    def plan(
        self,
        jaxpr: Jaxpr,
        facts: Facts,
        scope: Scope = (),
        wanted: Sequence[Demand] = (),
        cotangents: Flags | None = None,
    ) -> Plan:
        """Plans `jaxpr` for inputs of which `facts` are known.

        `wanted` says how its results are read outside; in full, if not given. If
        `cotangents` is given, `jaxpr` is an author's backward rule, and `cotangents`
        says which of its inputs are cotangents."""
        around = self._around
        if not around.is_backward:
            facts = without_partners(facts)
        wanted = tuple(wanted) or (Demand.FULL,) * len(raw(jaxpr).outvars)
        given = around.cotangents.get(jaxpr, ()) if cotangents is None else cotangents
        args = (facts, scope, wanted, given, cotangents is not None)
        self._axes = around.device_axes | device_axes()
        phase = around.is_backward, around.is_recomputed
        key = (*args, setting() is None, *phase, self._axes)
        known = self._plans.of(jaxpr)
        if key not in known:
            known[key] = self._plan(jaxpr, *args)
        return known[key]

    def _plan(
        self,
        jaxpr: Jaxpr,
        facts: Facts,
        scope: Scope,
        wanted: Sequence[Demand],
        given: Flags,
        is_rule: bool,
    ) -> Plan:
        inner = raw(jaxpr)
        env: dict[Any, Fact | None] = dict(zip(inner.invars, facts, strict=True))
        values = consts(jaxpr) or [None] * len(inner.constvars)
        env |= {
            v: const_fact(v, c, remat_source_of(v.aval, self.gather_once))
            for v, c in zip(inner.constvars, values, strict=True)
        }
        env = {v: as_number(fact, v.aval) for v, fact in env.items()}
        demand = self.demands.of_variables(inner, scope, wanted)
        readers = defaultdict(list)
        for eqn, atoms in ((None, inner.outvars), *((e, e.invars) for e in inner.eqns)):
            for v in variables(atoms):
                readers[v].append(eqn)
        read_often = shared(readers)
        is_backward = is_rule or self._around.is_backward
        cotangents = self.cotangents.of(jaxpr, given, is_backward, is_rule)
        partners = Partners(env)
        steps, keys = [], set()
        for eqn, which in zip(inner.eqns, cotangents, strict=True):
            operands = tuple(map(partners.fact_of, eqn.invars))
            needed = tuple(demand.get(v, Demand.NONE) for v in eqn.outvars)
            place = scope + scopes(eqn)
            step = self._step(eqn, place, operands, needed, read_often, which)
            env |= zip(eqn.outvars, step.decision.out_facts, strict=True)
            partners.record(step, which)
            steps.append(step)
            found = {step.match.key, *step.match.also}
            keys |= found.union(*(plan.policy_keys for plan in step.inner))
        return Plan(
            invars=tuple(inner.invars),
            constvars=tuple(inner.constvars),
            outvars=tuple(inner.outvars),
            in_facts=facts,
            out_facts=tuple(map(partners.fact_of, inner.outvars)),
            steps=tuple(steps),
            facts=env,
            saves=self.saves,
            policy_keys=frozenset(keys),
        )

    def _step(
        self,
        eqn: Eqn,
        scope: Scope,
        facts: Facts,
        wanted: Sequence[Demand],
        read_often: Set[Any],
        cotangents: Flags,
    ) -> Step:
        match = self.matching.of_equation(eqn, scope)
        site = self._site(eqn, scope, facts, wanted, match, cotangents)
        handler = self.matching.handler(eqn, scope)
        # JAX remembers the trace of a derivative rule, and with it the matmul precision
        # that was set when it was first used. Later uses under `amp` would take that
        # precision for one that the author asked for. So the rule is traced by its
        # handler, without the setting.
        if handler is None and setting() and holds_rule(eqn):
            handler = STRUCTURAL.get(eqn.primitive.name)
        if not match.is_compute and self.arithmetic_is_full(scope):
            site = site._replace(facts=_shared_in_full(eqn, site, read_often))
        if handler is not None:
            with self._inside(eqn, site):
                decision, inner = handler.decide(self, eqn, site)
            return Step(
                eqn, scope, match, decision, inner, handler, backward=site.backward
            )
        rule, opaque = self._rule(eqn, scope, match)
        try:
            decision = rule.decide(site)
        except Exception as e:
            where = (
                f"`{eqn.primitive}` in scope {'/'.join(scope)!r}, {source_line(eqn)}"
            )
            what = str(e) if isinstance(e, AmpError) else f"{type(e).__name__}: {e}"
            raise AmpError(f"{what}\nWhile deciding on {where}.") from e
        decision = summed_once(site, decision)
        outs = as_asked(with_origins(site, decision.out_facts), self.gather_once)
        if not self.lean:  # a lean remat region would keep what is cast up
            outs = upcast_early(site, outs)
        decision = decision._replace(out_facts=outs)
        decision = self._with_residual_bits(eqn, site, match, decision, opaque)
        cast = {
            # What a branch copies for the backward pass is best copied low.
            i: RematSource.NONE if fact.is_copied else fact.remat_source
            for i, (fact, dtype) in enumerate(zip(facts, decision.reads, strict=True))
            if fact
            and fact.remat_source
            and fact.dtype != dtype
            and decision.recomputes_casts
        }
        return Step(
            eqn,
            scope,
            match,
            decision,
            input_casts=cast,
            opaque=opaque,
            may_recompute=bool(self.lean) or match.rule.is_run_again,
            out_demands=tuple(wanted),
            backward=site.backward,
        )

    def _with_residual_bits(
        self, eqn: Eqn, site: Site, match: Match, decision: Decision, opaque: bool
    ) -> Decision:
        """The decision, with what the equation is to keep in 8 bits.

        That is what contractions read. If a user's rule asks for its scope, it is also
        what other ops read, unless they are linear in it or have a pole or a jump."""
        name = site.primitive.name
        is_contraction = name in CONTRACTIONS
        is_ours = is_contraction and match.is_compute
        how = match.saves or (self.saves if is_ours else None)
        if how is None or opaque or site.backward or site.recomputed:
            return decision
        if name in LINEAR or match.rule.chooses_residuals:
            return decision
        how = how._replace(keeps_signs=name in ASKING_SIGNS or name == "abs")
        steep = steep_operands(eqn)
        keeps = tuple(
            how
            if fact is not None
            and dtype is not None
            and not is_kept_anyway(fact)
            and how.pays_for(aval, dtype)
            and i not in steep
            else None
            for i, (fact, dtype, aval) in enumerate(
                zip(site.facts, decision.reads, site.avals, strict=True)
            )
        )
        if not any(keeps):
            return decision
        why = f"{decision.why}; what it reads is kept in {how}"
        return decision._replace(residual_bits=keeps, why=why)

    @contextlib.contextmanager
    def _inside(self, eqn: Eqn, site: Site) -> Iterator[None]:
        """A context to plan the bodies of `eqn` in: what holds of it holds of them."""
        before = self._around, self._axes
        self._around = _Around(
            site.backward,
            site.recomputed,
            self._around.device_axes | device_axes(eqn),
            self.cotangents.inside(eqn, site.cotangents),
        )
        try:
            yield
        finally:
            self._around, self._axes = before

    def _rule(self, eqn: Eqn, scope: Scope, match: Match) -> tuple[Rule, bool]:
        """The rule to ask, and whether the equation is to be bound as it stands."""
        name = eqn.primitive.name
        opaque = name in STRUCTURAL or any(True for _ in subjaxprs(eqn.params))
        is_meant = stays_as_written(match) and (
            match.by_scope or match.key is eqn.primitive
        )
        if is_opaque_hi(eqn) and not is_meant:
            self._report_unknown(eqn, scope, "can't be opened by amp")
        if name == "call_exported" and not is_meant and is_exported_in_full(eqn):
            what = "was made by `jax.export`, and can't be opened by amp any more"
            self._report_unknown(eqn, scope, what)
        if name in FIXED:
            return use_original_precision, True
        if is_meant:
            return match.rule, opaque  # as the user has said
        if opaque and name not in CLASSES and name not in STRUCTURAL:
            self._report_unknown(eqn, scope, "holds a program that amp does not know")
            return use_original_precision, True
        if name not in CLASSES and match.rule is use_original_precision:
            if self.strict and match.key is not None and not match.by_scope:
                self._report_unknown(eqn, scope, "is in no class of amp's table")
            return match.rule, True
        return match.rule, opaque

    def _report_unknown(self, eqn: Eqn, scope: Scope, what: str) -> None:
        places = f"scope {'/'.join(scope)!r}", source_line(eqn)
        where = ", ".join(filter(None, places))
        warn_or_raise(
            f"`{describe(eqn)}` {what}, so it runs in the author's dtypes ({where}). "
            "To say that this is meant, put it under `amp_stop`, or give its primitive "
            "the rule `use_original_precision` in the policy.",
            self.strict,
        )

    def _site(
        self,
        eqn: Eqn,
        scope: Scope,
        facts: Facts,
        wanted: Any,
        match: Match,
        cotangents: Flags,
    ) -> Site:
        avals = tuple(atom.aval for atom in eqn.invars)
        told = names(eqn)
        # Code that a checkpoint runs again counts as forward code. Names alone don't
        # tell it, but an equation that reads cotangents is never such code.
        around = self._around
        again = around.is_backward and told.recomputed
        again |= around.is_recomputed and not told.backward
        again = again and not any(cotangents)
        return Site(
            primitive=eqn.primitive,
            params=eqn.params,
            scope=scope,
            compute_dtype=match.compute_dtype or self.compute_dtype,
            avals=avals,
            authors=tuple(map(author_dtype, avals)),
            facts=facts,
            out_avals=tuple(v.aval for v in eqn.outvars),
            wanted=tuple(wanted),
            by_scope=match.by_scope,
            backward=told.backward or (around.is_backward and not again),
            recomputed=again,
            cotangents=cotangents,
            device_axes=self._axes,
            partly_mapped=self.partly_mapped,
        )


def _shared_in_full(eqn: Eqn, site: Site, read_often: Set[Any]) -> Facts:
    """The facts of operands, held in full if the equation is not their only reader.

    The cotangent that the equation, or a program in it, sends back is then not rounded
    before it is added to those of the other readers."""
    return tuple(
        fact
        if isinstance(atom, Literal) or atom not in read_often
        else held_in_full(fact, author)
        for atom, fact, author in zip(eqn.invars, site.facts, site.authors, strict=True)
    )
