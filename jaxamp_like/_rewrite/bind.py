"""Binding: emits the equations of a plan, each in the precision that was decided."""

import functools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from math import inf
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np
from jax import lax

from .._dtypes import DType, bits, cast, cast_all, has_range
from .._jax import Atom, Jaxpr, Literal, as_array, consts, eqn_context, rebind, trace
from .._primitives import BROADCASTING, PLACING, REDUCTIONS, is_cheap, is_statistic
from .._primitives.matmul_precision import (
    setting,
    settled_bind,
    with_setting,
    without_setting,
)
from .._rules import Demand, RematSource, author_dtype, saved, saved_on_tpus
from .._rules.bilinear import in_dtype
from .._rules.low_bits import LowBits, copy_of
from .._structural import NO_PLAN, Facts, Plan, Scope, Step
from .._structural.remat_mode import RematMode
from .._structural.saved import mark_saved
from .._structural.views import Views, rebind_view
from .casts import (
    cast_of,
    moved_with_full_gradient,
    residual_add,
    round_cotangent,
    rounded_for_all_readers,
    with_full_gradient,
)
from .deduplication import Deduplicated
from .gathering import Gathering
from .gathers import Gathers, gathers_of
from .hoisting import HoistedWeights, entries_under, hoist_weights
from .planner import Planner
from .recompute import (
    bind_recomputing_casts,
    bind_region,
    operands_in_8_bits,
    recomputed_casts,
)
from .record import in_step_scope
from .remat import (
    Region,
    Schedule,
    as_region,
    is_centred,
    is_contraction_result,
    is_kept_anyway,
    reading_of,
    schedule_of,
)


class Binder:
    """The values of one jaxpr while it is bound again.

    A value is held in the dtype that it was made in; casts are made where it is read.
    Casts of computed values are shared by their readers. An input of the function (a
    parameter, mostly) is live in the backward pass anyway: its cast is made afresh for
    every reader, inside a `jax.checkpoint` together with the op that reads it, so that
    no low copy is kept for the backward pass, and gradients add up in the author's
    dtype. It is made once if the input lies on several devices, or before a loop."""

    def __init__(
        self,
        planner: Planner,
        env: dict[Any, Any],
        remat_mode: RematMode = RematMode.SAVE_ALL,
    ):
        self.planner = planner
        self.plan = (
            NO_PLAN  # of the program that is bound, unless that is a part of one
        )
        self.schedule = Schedule()
        self.env = env
        self.remat_mode = remat_mode
        self.casts: dict[tuple[Any, DType], Any] = {}
        self.views = Views()
        self.deduplicated = Deduplicated()
        # Casts made before a loop.
        self.hoisted_casts: dict[tuple[Any, DType], Any] = {}
        self.hoisted_weights: HoistedWeights = {}  # weights rounded before a loop
        self.quantised_operands: dict[Any, Any] = {}  # one for readers that round alike
        self.gathering = Gathering(Gathers())  # of rounded numbers
        self.copies: dict[Any, Any] = {}  # in 8 bits, one for readers that round alike
        self.read_again: dict[Any, Any] = {}  # inputs, one for all readers
        # Makes a binder. It is no method, so that a function which keeps it does not
        # keep the values of this binder alive.
        self.with_env = functools.partial(Binder, planner)

    def run(
        self,
        plan: Plan,
        consts: Sequence[Any],
        args: Sequence[Any],
        hoisted_casts: dict[tuple[Any, DType], Any] | None = None,
        hoisted_weights: HoistedWeights | None = None,
    ) -> list[Any]:
        """Binds a whole plan in a binder of its own; results in the dtypes they have.

        `hoisted_casts` are casts of inputs that were made before a loop, and
        `hoisted_weights` weights that were rounded there."""
        env = dict(zip(plan.constvars, consts, strict=True))
        # A derivative rule may be handed numbers of Python, which are no arrays.
        env |= zip(plan.invars, map(as_array, args), strict=True)
        binder = self.with_env(env, self.remat_mode)
        binder.hoisted_casts = hoisted_casts or {}
        binder.hoisted_weights = hoisted_weights or {}
        schedule = schedule_of(plan, self.remat_mode.has_regions)
        is_loop = not self.remat_mode.is_straight_line
        binder.plan = plan
        binder.schedule = schedule.in_loop() if is_loop else schedule
        binder.gathering = Gathering(gathers_of(plan))
        for unit, drops in zip(schedule.units, schedule.last_reads, strict=True):
            if self.remat_mode == RematMode.REGIONS_UNDER_POLICY:
                unit = as_region(unit)
            if isinstance(unit, Region):
                binder.env |= zip(unit.outs, bind_region(binder, unit), strict=True)
            else:
                outs = binder._mark_saved(unit, binder.bind(unit))
                binder.env |= zip(unit.eqn.outvars, outs, strict=True)
            for v in drops:
                if v not in binder.views.kept:
                    del binder.env[v]
            if drops:
                here = binder.quantised_operands.items()
                binder.quantised_operands = {k: x for k, x in here if k[0] not in drops}
        outs = (binder.read(atom, None) for atom in plan.outvars)
        return list(map(as_array, outs))

    def close(
        self,
        plan: Plan,
        jaxpr: Jaxpr,
        dtypes: tuple[DType | None, ...],
        hoisted_weights: HoistedWeights | None = None,
    ) -> Jaxpr:
        """The rewritten jaxpr of a plan, with results in `dtypes`.

        It is made once, since JAX finds compiled code by the identity of inner jaxprs.
        With `hoisted_weights`, which become its constants, it is made each time."""
        first = InnerProgram(plan, jaxpr, dtypes, self.remat_mode)
        if hoisted_weights:
            return self._closed(first, hoisted_weights)
        calls: dict[Any, InnerProgram] = {}  # and the programs in it, at any depth
        todo = [first]
        while todo:
            call = todo.pop()
            if call.key not in call.plan.closed_jaxprs and call.cache_key not in calls:
                calls[call.cache_key] = call
                todo += call.inner_programs()
        # Inner programs come first, since a trace in a trace takes many Python frames.
        for call in reversed(calls.values()):
            if call.key not in call.plan.closed_jaxprs:
                call.plan.closed_jaxprs[call.key] = self._closed(call)
        return plan.closed_jaxprs[first.key]

    def _closed(
        self, call: "InnerProgram", hoisted_weights: HoistedWeights | None = None
    ) -> Jaxpr:
        plan, values = call.plan, consts(call.jaxpr)
        binder = self.with_env({}, call.remat_mode)

        def rewritten(*args):
            outs = binder.run(plan, values, args, hoisted_weights=hoisted_weights)
            return cast_all(outs, call.dtypes)

        return trace(rewritten, _avals_of(plan))

    def hoisted_weights_in(self, step: Step) -> HoistedWeights:
        """The weights that a step's program reads and that a loop has rounded."""
        return entries_under(self.hoisted_weights, step)

    def hoist_weights(
        self, step: Step, fixed: dict[Any, Any], slices: dict[Any, Any]
    ) -> tuple[HoistedWeights, HoistedWeights]:
        """See `hoisting.hoist_weights`."""
        return hoist_weights(self, step, fixed, slices)

    def in_mode(self, mode: RematMode) -> "Binder":
        """A binder for code of which the backward pass keeps something else."""
        return self.with_env({}, mode)

    def rewrite(
        self,
        jaxpr: Jaxpr,
        values: Sequence[Any],
        facts: Facts,
        scope: Scope,
        wanted: Sequence[Demand],
        cotangents: tuple[bool, ...] | None = None,
    ) -> tuple[list[Any], Facts]:
        """Plans a freshly traced program and binds it on `values`.

        For code that only exists once JAX asks for it: derivative rules. `wanted` says
        how its results are read, and `cotangents` which inputs of a backward rule are
        such. Returns the results and what is known of them."""
        jaxpr, plan = self.plan_traced(jaxpr, facts, scope, wanted, cotangents)
        return self.run(plan, consts(jaxpr), values), plan.out_facts

    def demands_of_rule(
        self, rule: Jaxpr | None, count: int, scope: Scope
    ) -> Sequence[Demand]:
        """See `Demands.of_rule`."""
        return self.planner.demands.of_rule(rule, count, scope)

    def plan_traced(
        self,
        jaxpr: Jaxpr,
        facts: Facts,
        scope: Scope,
        wanted: Sequence[Demand],
        cotangents: tuple[bool, ...] | None = None,
    ) -> tuple[Jaxpr, Plan]:
        """A freshly traced program with the scopes that planning reads; its plan."""
        with without_setting():
            jaxpr = self.planner.prepared(jaxpr, scope)
        return jaxpr, self.planner.plan(jaxpr, facts, scope, wanted, cotangents)

    def read(self, atom: Any, dtype: DType | None) -> Any:
        """The value of `atom`, cast to `dtype` if that is given and differs."""
        if isinstance(atom, Literal):
            aval: Any = atom.aval
            same = dtype is None or aval.dtype == dtype
            return atom.val if same else np.asarray(atom.val).astype(dtype)
        value, author = self.env[atom], author_dtype(atom.aval)
        if author is None:
            return value
        held: DType = value.dtype if dtype is None else dtype
        if atom in self.schedule.shared and bits(held) < bits(author):
            return with_full_gradient(self.in_full(atom), self._in_dtype(atom, held))
        return self._in_dtype(atom, held)

    def in_full(self, var: Any) -> Any:
        """The value of `var` in the author's dtype, in which cotangents add up."""
        author = author_dtype(var.aval)
        return self.env[var] if author is None else self._in_dtype(var, author)

    def low_copies(
        self,
        variables: Iterable[Any],
        dtypes: Iterable[DType | None],
        bits: Mapping[Any, LowBits] = MappingProxyType({}),
    ) -> list[Any]:
        """Low copies for the backward pass; `None` where no dtype is given.

        Those of variables in `bits` are in 8 bits."""

        def copy(v: Any, dtype: DType | None) -> Any:
            if v in bits:
                return self.copy_in_8_bits(v, dtype, bits[v])
            return None if dtype is None else self._in_dtype(v, dtype)

        return list(map(copy, variables, dtypes))

    @property
    def merges_reads(self) -> bool:
        """Whether inputs may turn out to be split when the program is lowered."""
        return self.remat_mode.is_straight_line and self.planner.gather_once is None

    def inputs_in_8_bits(self, step: Step) -> dict[Any, LowBits]:
        """Which inputs of a `jax.checkpoint` of the author's are kept in 8 bits.

        With a user's rule these are all inputs, else the results of contractions. Where
        a pole or a jump would magnify the rounding of a value, it is left out."""
        saves, facts = self.plan.saves, self.plan.facts
        how = step.match.saves or (saves and saves._replace(format="int8"))
        if how is None or not self.remat_mode.has_regions:
            return {}
        found: dict[Any, LowBits] = {}
        for atom, dtype in zip(step.eqn.invars, step.decision.reads, strict=True):
            if isinstance(atom, Literal) or dtype is None:
                continue
            is_ours = step.match.saves is not None or (
                is_contraction_result(atom, self.plan.makers)
                and not is_centred(atom, {atom: [step]}, {step: 0})
            )
            is_kept = is_kept_anyway(facts[atom]) or atom in self.schedule.kept_whole
            if is_ours and not is_kept and how.pays_for(atom.aval, dtype):
                reading = reading_of([atom], [step])
                if not reading.is_steep:
                    found[atom] = reading.fitting(how, atom.aval.shape[-1])
        return found

    def copy_in_8_bits(self, var: Any, dtype: DType | None, how: LowBits) -> Any:
        """A copy of `var`, as it is read in `dtype`: one for all that read it so."""
        value = self.env[var] if dtype is None else self._in_dtype(var, dtype)
        key = var, value.dtype, how
        if key not in self.copies:
            self.copies[key] = copy_of(value, how)
        return self.copies[key]

    def shared_low_dtype(self, var: Any) -> DType | None:
        """The dtype of a low value that is read more than once, else `None`."""
        author = author_dtype(var.aval)
        if author is None or var not in self.schedule.shared:
            return None
        dtype = self.env[var].dtype
        return dtype if bits(dtype) < bits(author) else None

    def _in_dtype(self, var: Any, dtype: DType) -> Any:
        """The value of `var` in `dtype`: one array for all that read it so."""
        value = self.env[var]
        if value.dtype == dtype:
            return value
        if (var, dtype) not in self.casts:
            self.casts[var, dtype] = cast_of(var, value, dtype)
        return self.casts[var, dtype]

    def bind(self, step: Step) -> list[Any]:
        """Binds a step, as it was decided."""
        with in_step_scope(self.gathering.gathers.told.get(step, step)):
            return self._bind(step)

    def _bind(self, step: Step) -> list[Any]:
        eqn, decision = step.eqn, step.decision
        # The casts of operands belong to the op that reads them.
        with eqn_context(eqn):
            if step.handler is None and not step.opaque:
                return self._bind_leaf(step)
            pairs = zip(eqn.invars, decision.reads, strict=True)
            operands = [self.read(atom, dtype) for atom, dtype in pairs]
        if step.handler is not None:
            self.gathering.hand_on(self, step)
            outs = step.handler.bind(self, step, operands)
        else:
            outs = rebind(with_setting(eqn, self.planner.strict), operands)
        return _as_decided(step, outs)

    def _bind_leaf(self, step: Step) -> list[Any]:
        again, bits = recomputed_casts(self, step), operands_in_8_bits(self, step)
        if again or bits:
            return bind_recomputing_casts(self, step, again, bits)
        return self.apply(step)

    def _mark_saved(self, step: Step, outs: list[Any]) -> list[Any]:
        """The results of a step, marked for `save_marked` if that is to keep them.

        That policy runs cheap steps again unless their results are marked. Those that
        stand in no region are cheaper to keep."""
        is_cheap_leaf = step.handler is None and is_cheap(step.eqn)
        is_marked = self.remat_mode == RematMode.REGIONS_UNDER_POLICY and is_cheap_leaf
        return list(map(mark_saved, outs)) if is_marked else outs

    def apply(self, step: Step, given: dict[int, Any] | None = None) -> list[Any]:
        """Casts the operands, but those that are `given`, and binds the primitive."""
        eqn, decision, given = step.eqn, step.decision, given or {}
        low = step.match.compute_dtype or self.planner.compute_dtype
        if (outs := self.gathering.bind(self, step, low)) is not None:
            return outs
        operands = [
            given[i] if i in given else self.operand(step, i)
            for i in range(len(eqn.invars))
        ]
        self.views.remember(step)
        cotangents = self.schedule.rounded_cotangents
        rounded_cotangents = [cotangents[v] for v in eqn.outvars if v in cotangents]
        branch = next(iter(rounded_cotangents), None)
        if decision.bind is not None:
            quantised = self._quantised_operands(step, operands)
            operands, gathers = self.gathering.before_gathers(step, operands)
            outs = decision.bind(*operands, **quantised, **gathers)
        elif branch is not None:
            outs = residual_add(operands[1 - branch], operands[branch], low)
        else:
            is_low = any(
                read is not None and read != v.aval.dtype
                for read, v in zip(decision.reads, eqn.invars, strict=True)
            )
            bind = settled_bind(eqn.primitive, decision.params, is_low)
            outs = bind(*operands)
        outs = outs if isinstance(outs, tuple | list) else [outs]
        if self.remat_mode == RematMode.SAVE_STATISTICS and is_statistic(eqn):
            outs = list(map(saved_on_tpus, outs))
        is_reduction = eqn.primitive.name in REDUCTIONS
        if self.remat_mode == RematMode.SAVE_REDUCTIONS and is_reduction:
            outs = list(map(saved, outs))
        if step.is_compute:
            avals = [v.aval for v in eqn.outvars]
            outs = list(map(rounded_for_all_readers, outs, avals))
        if rounded_cotangents and branch is None:
            # A value that is looked up has readers of all kinds: the sum of their
            # cotangents is rounded only to a dtype that has the range of the value's.
            is_lookup = eqn.primitive.name == "gather"
            if not is_lookup or has_range(low, outs[0].dtype):
                outs = [round_cotangent(x, low) for x in outs]
        return _as_decided(step, outs)

    def _quantised_operands(
        self, step: Step, operands: Sequence[Any]
    ) -> dict[str, Any]:
        """Operands that are rounded for several readers, as a rule's `bind` takes them.

        Readers are the iterations of a loop, or steps of this program."""
        self.gathering.hand_on(self, step)
        pairs = enumerate(operands[: len(step.decision.quantisers)])
        quantised = tuple(self._quantised_operand(step, i, x) for i, x in pairs)
        return {"quantised": quantised} if any(x is not None for x in quantised) else {}

    def _quantised_operand(self, step: Step, i: int, operand: Any) -> Any:
        if (step, i) in self.hoisted_weights:
            return self.hoisted_weights[step, i]
        how, key = step.decision.quantisers[i], step.quantised_operand_key(i)
        if how is None or key not in self.plan.shared_quantised:
            return None
        if key not in self.quantised_operands:
            self.quantised_operands[key] = how(operand)
        return self.quantised_operands[key]

    def operand(self, step: Step, i: int) -> Any:
        """An operand in the dtype in which its step reads it."""
        atom, dtype = step.eqn.invars[i], step.decision.reads[i]
        if isinstance(atom, Literal) or dtype is None or self.env[atom].dtype == dtype:
            return self.read(atom, dtype)
        value = self.env[atom]
        if step.input_casts.get(i) == RematSource.CONSTANT:
            return self._cast_through_views(atom, dtype)
        is_sharded = step.input_casts.get(i) == RematSource.SHARDED
        if step.is_compute and (is_sharded or self.is_hoisted_cast(atom, dtype)):
            return self._cast_with_full_gradient(atom, dtype)
        shape = step.eqn.outvars[0].aval.shape
        fans_out = step.eqn.primitive.name in BROADCASTING and value.shape != shape
        if fans_out and bits(dtype) < bits(value.dtype):
            # Broadcast first: the transpose of a broadcast is a sum, which must not add
            # up in low precision.
            axes = range(len(shape) - value.ndim, len(shape))
            return cast(lax.broadcast_in_dim(value, shape, axes), dtype)
        # An input is cast for each reader, so that its gradient adds up in full.
        is_input = i in step.input_casts
        return cast(value, dtype) if is_input else self.read(atom, dtype)

    def _cast_with_full_gradient(self, atom: Any, dtype: DType) -> Any:
        """A cast that was made for all readers, whose gradients still add up in full.

        On their way back to the devices on which the input lies, gradients are low."""
        low = self._cast_through_views(atom, dtype)
        roots, chain = self.views.inputs_of([atom])
        if len(roots) > 1 or not any(s.eqn.primitive.name in PLACING for s in chain):
            return with_full_gradient(self.env[atom], low)

        def move(t: Any) -> Any:
            env = dict.fromkeys(roots, t)
            for view in chain:
                (operand,), outs = view.eqn.invars, view.eqn.outvars
                env |= zip(outs, rebind_view(view, [env[operand]]), strict=True)
            return env[atom]

        return moved_with_full_gradient(self.env[roots[0]], low, move)

    def is_hoisted_cast(self, atom: Atom, dtype: DType | None) -> bool:
        """Whether the cast of the input that `atom` shows was made before the loop."""
        if not self.hoisted_casts:
            return False
        roots, _ = self.views.inputs_of([atom], most=inf)
        return any((root, dtype) in self.hoisted_casts for root in roots)

    def _cast_through_views(self, atom: Any, dtype: DType) -> Any:
        """The cast of `atom` or, if that is a view, the view of a cast.

        So a table is cast once, and not in every shape that it is read in. An input
        whose cast was made before a loop is not cast again."""

        def is_to_be_cast(x: Any) -> bool:
            is_known = (x, dtype) in self.hoisted_casts or (x, dtype) in self.casts
            return author_dtype(x.aval) is not None and not is_known

        def in_low(x: Any) -> Any:
            if author_dtype(x.aval) is None:  # such as an index of a slice
                return self.read(x, None)
            if isinstance(x, Literal):
                return self.read(x, dtype)
            hoisted = self.hoisted_casts.get((x, dtype))
            return self.casts[x, dtype] if hoisted is None else hoisted

        roots, chain = self.views.inputs_of(
            [atom], lambda view: all(map(is_to_be_cast, view.eqn.outvars)), inf
        )
        for root in filter(is_to_be_cast, roots):
            self.casts[root, dtype] = cast(self.env[root], dtype)
        for view in chain:
            lows = rebind_view(view, list(map(in_low, view.eqn.invars)))
            for v, low in zip(view.eqn.outvars, lows, strict=True):
                self.casts[v, dtype] = cast(low, dtype)
        return in_low(atom)


class InnerProgram(NamedTuple):
    """A program to be closed: its plan, the dtypes of its results, its remat mode."""

    plan: Plan
    jaxpr: Jaxpr
    dtypes: tuple[DType | None, ...]
    remat_mode: RematMode

    @property
    def key(self) -> Any:
        return self.dtypes, self.remat_mode, setting()

    @property
    def cache_key(self) -> Any:
        return id(self.plan), self.key

    def inner_programs(self) -> Iterator["InnerProgram"]:
        """The programs that are closed where this one is bound."""
        for unit in schedule_of(self.plan, self.remat_mode.has_regions).units:
            if self.remat_mode == RematMode.REGIONS_UNDER_POLICY:
                unit = as_region(unit)
            if isinstance(unit, Region):
                steps, modes = unit.steps, (RematMode.RECOMPUTED, unit.recomputed_mode)
            else:
                steps, modes = (unit,), (self.remat_mode,)
            for step in steps:
                if step.handler is not None and step.handler.is_closed:
                    (inner,), jaxpr = step.inner, step.eqn.params["jaxpr"]
                    dtypes = step.out_dtypes
                    for mode in modes:
                        yield InnerProgram(inner, jaxpr, dtypes, mode)


def _as_decided(step: Step, outs: Sequence[Any]) -> list[Any]:
    """The results of a step, in the dtypes that they are held in."""
    facts = zip(outs, step.decision.out_facts, step.eqn.outvars, strict=True)
    return [x if fact is None else cast_of(v, x, fact.dtype) for x, fact, v in facts]


def _avals_of(plan: Plan) -> list[Any]:
    """The inputs of a plan, in the dtypes that they come in."""
    return [
        v.aval
        if fact is None or fact.dtype == v.aval.dtype
        else in_dtype(v.aval, fact.dtype)
        for v, fact in zip(plan.invars, plan.in_facts, strict=True)
    ]
