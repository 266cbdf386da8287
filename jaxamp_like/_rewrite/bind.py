"""Binding: emits the equations of a plan, each in the precision that was decided."""

import functools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from jax import lax

from .._dtypes import DType, bits, cast, cast_all, has_range
from .._jax import (
    Atom,
    Jaxpr,
    Literal,
    as_array,
    consts,
    eqn_context,
    reemit,
    trace,
)
from .._primitives import BROADCASTING, PLACING, is_cheap, is_statistic
from .._primitives.matmul_precision import (
    setting,
    settled_bind,
    with_setting,
    without_setting,
)
from .._rules import Demand, RematSource, author_dtype, kept_or_made
from .._structural import Facts, Plan, Scope, Step
from .._structural.base import dtypes_of
from .._structural.kept import keep
from .casts import (
    cast_of,
    moved_with_full_gradient,
    residual_add,
    round_cotangent,
    rounded_for_all_readers,
    with_full_gradient,
)
from .deduplication import Deduplicated
from .hoisting import HoistedWeights, inside, of_loop
from .keeps import Keeps
from .planner import Planner
from .recompute import bind_region, casts_again, recast
from .record import marked
from .remat import Region, as_region
from .schedules import schedule_of
from .views import Views, bind_again, recast_roots


class Frame:
    """The values of one jaxpr while it is bound again.

    A value is held in the dtype that it was made in; casts are made where it is read.
    Casts of computed values are shared by their readers. An input of the function (a
    parameter, mostly) is live in the backward pass anyway: its cast is made afresh for
    every reader, inside a `jax.checkpoint` together with the op that reads it, so that
    no low copy is kept for the backward pass, and gradients add up in the author's
    dtype."""

    def __init__(self, planner: Planner, env: dict[Any, Any], keeps: Keeps = Keeps.ALL):
        self.planner = planner
        self.env = env
        self.keeps = keeps
        self.casts: dict[tuple[Any, DType], Any] = {}
        self.views = Views()
        self.deduplicated = Deduplicated()
        self.ahead: dict[tuple[Any, DType], Any] = {}  # casts made before a loop
        self.rounded: HoistedWeights = {}  # weights rounded before a loop
        self.rounded_often: frozenset[Any] = frozenset()  # see `Plan`
        self.rounded_here: dict[Any, Any] = {}  # once for all that read it so
        self.cotangents: Mapping[Any, int | None] = {}  # see `Schedule`
        self.shared: frozenset[Any] = frozenset()  # see `Schedule`
        # A frame for other values, which holds on to nothing of this one.
        self.over = functools.partial(Frame, planner)

    def run(
        self,
        plan: Plan,
        consts: Sequence[Any],
        args: Sequence[Any],
        ahead: dict[tuple[Any, DType], Any] | None = None,
        rounded: HoistedWeights | None = None,
    ) -> list[Any]:
        """Binds a whole plan in a frame of its own; results in the dtypes they have.

        `ahead` are casts of inputs that were made before a loop, and `rounded` weights
        that were rounded there."""
        env = dict(zip(plan.constvars, consts, strict=True))
        # A derivative rule may be handed numbers of Python, which are no arrays.
        env |= zip(plan.invars, map(as_array, args), strict=True)
        frame = self.over(env, self.keeps)
        frame.ahead, frame.rounded = ahead or {}, rounded or {}
        schedule = schedule_of(plan, self.is_lean)
        units, unit_drops, cotangents, frame.shared = schedule
        frame.rounded_often = plan.shared_quantised
        if self.keeps != Keeps.LEAN:  # in a loop there are few sums to compute again
            cotangents = {v: i for v, i in cotangents.items() if i is None}
        frame.cotangents = cotangents
        for unit, drops in zip(units, unit_drops, strict=True):
            if self.keeps == Keeps.MARKED:
                unit = as_region(unit)
            if isinstance(unit, Region):
                frame.env |= zip(unit.outs, bind_region(frame, unit), strict=True)
            else:
                outs = frame._marked(unit, frame.bind(unit))
                frame.env |= zip(unit.eqn.outvars, outs, strict=True)
            for v in drops:
                if v not in frame.views.kept:
                    del frame.env[v]
            if drops:
                here = frame.rounded_here.items()
                frame.rounded_here = {k: x for k, x in here if k[0] not in drops}
        outs = (frame.read(atom, None) for atom in plan.outvars)
        return list(map(as_array, outs))

    def close(
        self,
        plan: Plan,
        jaxpr: Jaxpr,
        dtypes: tuple[DType | None, ...],
        rounded: HoistedWeights | None = None,
    ) -> Jaxpr:
        """The rewritten jaxpr of a plan, with results in `dtypes`.

        It is made once, since JAX finds compiled code by the identity of inner jaxprs.
        Only with `rounded` it is made each time: these values become its constants."""
        if rounded:
            return self._closed(Call(plan, jaxpr, dtypes, self.keeps), rounded)
        first = Call(plan, jaxpr, dtypes, self.keeps)
        calls: dict[Any, Call] = {}  # those inside of it too, at any depth
        todo = [first]
        while todo:
            call = todo.pop()
            if call.key not in call.plan.closed_jaxprs and call.place not in calls:
                calls[call.place] = call
                todo += call.inside()
        # Inner programs come first, since a trace in a trace takes many Python frames.
        for call in reversed(calls.values()):
            if call.key not in call.plan.closed_jaxprs:
                call.plan.closed_jaxprs[call.key] = self._closed(call)
        return plan.closed_jaxprs[first.key]

    def _closed(self, call: "Call", rounded: HoistedWeights | None = None) -> Jaxpr:
        plan, values, frame = call.plan, consts(call.jaxpr), self.over({}, call.keeps)

        def rewritten(*args):
            outs = frame.run(plan, values, args, rounded=rounded)
            return cast_all(outs, call.dtypes)

        return trace(rewritten, _avals_of(plan))

    def rounded_in(self, step: Step) -> HoistedWeights:
        """The weights that a step's program reads and that a loop has rounded."""
        return inside(self.rounded, step)

    def of_loop(
        self, step: Step, fixed: dict[Any, Any], slices: dict[Any, Any]
    ) -> tuple[HoistedWeights, HoistedWeights]:
        """See `hoisting.of_loop`."""
        return of_loop(self, step, fixed, slices)

    @property
    def is_lean(self) -> bool:
        return self.keeps.is_lean

    def in_loop(self) -> "Frame":
        """A frame for the bodies of a loop."""
        return self.over({}, self.keeps.in_loop)

    def under_policy(self) -> "Frame":
        """A frame for code in a `jax.checkpoint` with a policy of what is kept."""
        return self.over({}, self.keeps.under_policy)

    def in_rule(self) -> "Frame":
        """A frame for derivative rules, whose authors chose what to keep."""
        return self.over({}, self.keeps.in_rule)

    def run_again(self) -> "Frame":
        """A frame for code that the backward pass runs again as a whole."""
        return self.over({}, Keeps.NOTHING)

    recast_roots = staticmethod(recast_roots)

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
        jaxpr, plan = self.planned(jaxpr, facts, scope, wanted, cotangents)
        return self.run(plan, consts(jaxpr), values), plan.out_facts

    def read_by(self, rule: Jaxpr | None, count: int, scope: Scope) -> Sequence[Demand]:
        """See `Demands.of_rule`."""
        return self.planner.demands.of_rule(rule, count, scope)

    def planned(
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
        if atom in self.shared and bits(held) < bits(author):
            return with_full_gradient(self.in_full(atom), self._in(atom, held))
        return self._in(atom, held)

    def in_full(self, var: Any) -> Any:
        """The value of `var` in the author's dtype, in which cotangents add up."""
        author = author_dtype(var.aval)
        return self.env[var] if author is None else self._in(var, author)

    def copies(
        self, variables: Iterable[Any], dtypes: Iterable[DType | None]
    ) -> list[Any]:
        """Low copies for the backward pass; `None` where no dtype is given."""
        pairs = zip(variables, dtypes, strict=True)
        return [None if dtype is None else self._in(v, dtype) for v, dtype in pairs]

    def rounded_for_all(self, var: Any) -> DType | None:
        """The dtype of a low value that is read more than once, else `None`."""
        author = author_dtype(var.aval)
        if author is None or var not in self.shared:
            return None
        dtype = self.env[var].dtype
        return dtype if bits(dtype) < bits(author) else None

    def _in(self, var: Any, dtype: DType) -> Any:
        """The value of `var` in `dtype`: one array for all that read it so."""
        value = self.env[var]
        if value.dtype == dtype:
            return value
        if (var, dtype) not in self.casts:
            self.casts[var, dtype] = cast_of(var, value, dtype)
        return self.casts[var, dtype]

    def bind(self, step: Step) -> list[Any]:
        with marked(step):
            return self._bind(step)

    def _bind(self, step: Step) -> list[Any]:
        eqn, decision = step.eqn, step.decision
        # The casts of operands belong to the op that reads them.
        with eqn_context(eqn):
            if step.opaque or step.handler is not None:
                pairs = zip(eqn.invars, decision.reads, strict=True)
                operands = [self.read(atom, dtype) for atom, dtype in pairs]
            elif again := casts_again(self, step):
                return recast(self, step, again)
            else:
                return self.apply(step)
        if step.handler is not None:
            outs = step.handler.bind(self, step, operands)
        else:
            outs = reemit(with_setting(eqn, self.planner.strict), operands)
        return _as_decided(step, outs)

    def _marked(self, step: Step, outs: list[Any]) -> list[Any]:
        """The results of a step, marked to be kept where they would be made again."""
        is_leaf = step.handler is None
        is_kept = self.keeps == Keeps.MARKED and is_leaf and is_cheap(step.eqn)
        return list(map(keep, outs)) if is_kept else outs

    def apply(self, step: Step, given: dict[int, Any] | None = None) -> list[Any]:
        """Casts the operands, but those that are `given`, and binds the primitive."""
        eqn, decision, given = step.eqn, step.decision, given or {}
        operands = [
            given[i] if i in given else self.operand(step, i)
            for i in range(len(eqn.invars))
        ]
        self.views.remember(step)
        low = step.match.compute_dtype or self.planner.compute_dtype
        rounded = [self.cotangents[v] for v in eqn.outvars if v in self.cotangents]
        branch = next(iter(rounded), None)
        if decision.bind is not None:
            outs = decision.bind(*operands, **self._rounded_alone(step, operands))
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
        if self.keeps == Keeps.STATISTICS and is_statistic(eqn):
            outs = list(map(kept_or_made, outs))
        if step.is_compute:
            outs = list(
                map(rounded_for_all_readers, outs, (v.aval for v in eqn.outvars))
            )
        if rounded and branch is None:
            # A looked up value has readers of all kinds. Their cotangents' sum is
            # rounded only to a dtype with its range.
            is_sum = eqn.primitive.name == "gather"
            if not is_sum or has_range(low, outs[0].dtype):
                outs = [round_cotangent(x, low) for x in outs]
        return _as_decided(step, outs)

    def _rounded_alone(self, step: Step, operands: Sequence[Any]) -> dict[str, Any]:
        """Operands that are rounded for several readers, as a rule's `bind` takes them.

        Readers are the iterations of a loop, or steps of this program."""
        pairs = enumerate(zip(step.decision.quantisers, operands, strict=False))
        alone = tuple(self._alone(step, i, how, x) for i, (how, x) in pairs)
        return {"alone": alone} if any(x is not None for x in alone) else {}

    def _alone(
        self, step: Step, i: int, how: Callable[[Any], Any] | None, operand: Any
    ) -> Any:
        if (step, i) in self.rounded:
            return self.rounded[step, i]
        key = step.quantised_operand_key(i)
        if how is None or key not in self.rounded_often:
            return None
        if key not in self.rounded_here:
            self.rounded_here[key] = how(operand)
        return self.rounded_here[key]

    def operand(self, step: Step, i: int) -> Any:
        atom, dtype = step.eqn.invars[i], step.decision.reads[i]
        if isinstance(atom, Literal) or dtype is None or self.env[atom].dtype == dtype:
            return self.read(atom, dtype)
        value = self.env[atom]
        if step.input_casts.get(i) == RematSource.CONSTANT:
            return self._cast_ahead(atom, dtype)
        is_sharded = step.input_casts.get(i) == RematSource.SHARDED
        if step.is_compute and (is_sharded or self.is_ahead(atom, dtype)):
            return self._attached(atom, dtype)
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

    def _attached(self, atom: Any, dtype: DType) -> Any:
        """A cast that was made for all readers, whose gradients still add up in full.

        On their way back to the devices on which the input lies, gradients are low."""
        low = self._cast_ahead(atom, dtype)
        roots, chain = self.views.origins([atom])
        if len(roots) > 1 or not any(s.eqn.primitive.name in PLACING for s in chain):
            return with_full_gradient(self.env[atom], low)

        def move(t: Any) -> Any:
            env = dict.fromkeys(roots, t)
            for view in chain:
                (operand,), outs = view.eqn.invars, view.eqn.outvars
                env |= zip(outs, bind_again(view, [env[operand]]), strict=True)
            return env[atom]

        return moved_with_full_gradient(self.env[roots[0]], low, move)

    def is_ahead(self, atom: Atom, dtype: DType | None) -> bool:
        """Whether the cast of the input that `atom` shows was made before the loop."""
        return any(
            (root, dtype) in self.ahead for root in self.views.origins([atom])[0]
        )

    def _cast_ahead(self, atom: Any, dtype: DType) -> Any:
        """The cast of `atom` or, if that is a view, the view of a cast.

        So a table is cast once, and not in every shape that it is read in. An input
        whose cast was made before a loop is not cast again."""
        if author_dtype(atom.aval) is None:
            return self.read(atom, None)
        if isinstance(atom, Literal):
            return self.read(atom, dtype)
        if (atom, dtype) in self.ahead:
            return self.ahead[atom, dtype]
        if (atom, dtype) not in self.casts:
            view = self.views.makers.get(atom)
            if view is None:
                self.casts[atom, dtype] = cast(self.env[atom], dtype)
            else:
                operands = [self._cast_ahead(x, dtype) for x in view.eqn.invars]
                lows = bind_again(view, operands)
                for v, x in zip(view.eqn.outvars, lows, strict=True):
                    self.casts[v, dtype] = cast(x, dtype)
        return self.casts[atom, dtype]


class Call(NamedTuple):
    """A program to be closed: its plan, the dtypes of its results, what it keeps."""

    plan: Plan
    jaxpr: Jaxpr
    dtypes: tuple[DType | None, ...]
    keeps: Keeps

    @property
    def key(self) -> Any:
        return self.dtypes, self.keeps, setting()

    @property
    def place(self) -> Any:
        return id(self.plan), self.key

    def inside(self) -> Iterator["Call"]:
        """The programs that are closed where this one is bound."""
        units = schedule_of(self.plan, self.keeps.is_lean).units
        for unit in map(as_region, units) if self.keeps == Keeps.MARKED else units:
            is_region = isinstance(unit, Region)
            both = (Keeps.NOTHING, Keeps.STATISTICS) if is_region else (self.keeps,)
            for step in unit.steps if is_region else (unit,):
                if step.handler is not None and step.handler.is_closed:
                    (inner,), dtypes = step.inner, dtypes_of(step.decision.out_facts)
                    for keeps in both:
                        yield Call(inner, step.eqn.params["jaxpr"], dtypes, keeps)


def _as_decided(step: Step, outs: Sequence[Any]) -> list[Any]:
    """The results of a step, in the dtypes that they are held in."""
    facts = zip(outs, step.decision.out_facts, step.eqn.outvars, strict=True)
    return [x if fact is None else cast_of(v, x, fact.dtype) for x, fact, v in facts]


def _avals_of(plan: Plan) -> list[Any]:
    """The inputs of a plan, in the dtypes that they come in."""
    return [
        v.aval if fact is None else _with_dtype(v.aval, fact.dtype)
        for v, fact in zip(plan.invars, plan.in_facts, strict=True)
    ]


def _with_dtype(aval: Any, dtype: DType) -> Any:
    return aval if aval.dtype == dtype else aval.update(dtype=dtype, weak_type=False)
