"""Binding: emits the equations of a plan, each in the precision that was decided."""

import enum
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from .._dtypes import DType, bits, cast, cast_all, cast_as
from .._jax import (
    Atom,
    Jaxpr,
    Literal,
    consts,
    eqn_context,
    raw,
    reemit,
    trace,
    without_scopes,
)
from .._primitives import KEEPING_INPUTS, LINEAR, is_cheap
from .._primitives.matmul_precision import (
    setting,
    settled_bind,
    with_setting,
    without_setting,
)
from .._rules import Demand, Leaf, author_dtype, keeping_low
from .._structural.kept import keep
from .islands import Region, as_island
from .plan import Facts, Plan, Scope, Step
from .planner import Planner
from .record import marked

# Ops that broadcast size-1 axes of their operands by themselves.
_BROADCASTING = frozenset("add sub mul div max min pow atan2 rem".split())


class Keeps(enum.Enum):
    """What the backward pass of code keeps; see `islands`."""

    ALL = enum.auto()
    LEAN = enum.auto()
    LEAN_IN_LOOP = enum.auto()
    MARKED = enum.auto()  # lean, in a loop, under the policy `save_marked`
    NOTHING = enum.auto()  # all of it is run again


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
        self.views: dict[Any, Step] = {}  # views of inputs, by the step that made them
        self.kept: set[Any] = set()  # variables that views are made of
        self.ahead: dict[tuple[Any, DType], Any] = {}  # casts made before a loop
        self.settled: frozenset[Any] = frozenset()  # see `Schedule`

    def run(
        self,
        plan: Plan,
        consts: Sequence[Any],
        args: Sequence[Any],
        ahead: dict[tuple[Any, DType], Any] | None = None,
    ) -> list[Any]:
        """Binds a whole plan in a frame of its own; results in the dtypes they have.

        `ahead` are casts of inputs that were made before a loop."""
        env = dict(zip(plan.constvars, consts, strict=True))
        env |= zip(plan.invars, args, strict=True)
        frame = Frame(self.planner, env, self.keeps)
        frame.ahead = ahead or {}
        units, unit_drops, frame.settled = plan.islands if self.is_lean else plan.plain
        for unit, drops in zip(units, unit_drops, strict=True):
            if self.keeps == Keeps.MARKED:
                unit = as_island(unit)
            if isinstance(unit, Region):
                frame.env |= zip(unit.outs, frame._bind_region(unit), strict=True)
            else:
                outs = frame._marked(unit, frame.bind(unit))
                frame.env |= zip(unit.eqn.outvars, outs, strict=True)
            for v in drops:
                if v not in frame.kept:
                    del frame.env[v]
        outs = (frame.read(atom, None) for atom in plan.outvars)
        return [x if hasattr(x, "dtype") else jnp.asarray(x) for x in outs]

    def close(
        self, plan: Plan, jaxpr: Jaxpr, dtypes: tuple[DType | None, ...]
    ) -> Jaxpr:
        """The rewritten jaxpr of a plan, with results in `dtypes`.

        Made once: JAX finds compiled code by the identity of inner jaxprs."""
        key = (dtypes, self.keeps, setting())
        if key not in plan.closed:

            def rewritten(*args):
                return cast_all(self.run(plan, consts(jaxpr), args), dtypes)

            avals: list[Any] = [
                v.aval if fact is None else _with_dtype(v.aval, fact.dtype)
                for v, fact in zip(plan.invars, plan.ins, strict=True)
            ]
            plan.closed[key] = trace(rewritten, avals)
        return plan.closed[key]

    @property
    def is_lean(self) -> bool:
        return self.keeps in (Keeps.LEAN, Keeps.LEAN_IN_LOOP, Keeps.MARKED)

    def in_loop(self) -> "Frame":
        """A frame for the bodies of a loop."""
        is_lean = self.keeps == Keeps.LEAN
        return Frame(self.planner, {}, Keeps.LEAN_IN_LOOP if is_lean else self.keeps)

    def under_policy(self) -> "Frame":
        """A frame for code in a `jax.checkpoint` with a policy of what is kept."""
        return Frame(self.planner, {}, Keeps.MARKED if self.is_lean else self.keeps)

    def in_rule(self) -> "Frame":
        """A frame for derivative rules, whose authors chose what to keep."""
        is_run_again = self.keeps == Keeps.NOTHING
        return Frame(self.planner, {}, self.keeps if is_run_again else Keeps.ALL)

    def run_again(self) -> "Frame":
        """A frame for code that the backward pass runs again as a whole."""
        return Frame(self.planner, {}, Keeps.NOTHING)

    def rewrite(
        self,
        fn: Callable[..., Any],
        avals: Sequence[Any],
        values: Sequence[Any],
        facts: Facts,
        scope: Scope,
        wanted: Sequence[Demand],
    ) -> list[Any]:
        """Traces `fn` on the author's `avals`, plans it and binds it on `values`.

        For code that only exists once JAX asks for it: derivative rules. `wanted` is
        for the leading results; the others are not read low."""
        with without_setting():
            jaxpr = self.planner.solvers.mark(trace(fn, avals), scope)
        rest = (Demand.NONE,) * (len(raw(jaxpr).outvars) - len(wanted))
        plan = self.planner.plan(jaxpr, facts, scope, (*wanted, *rest))
        return self.run(plan, consts(jaxpr), values)

    def read(self, atom: Any, dtype: DType | None) -> Any:
        """The value of `atom`, cast to `dtype` if that is given and another."""
        if isinstance(atom, Literal):
            aval: Any = atom.aval
            same = dtype is None or aval.dtype == dtype
            return atom.val if same else np.asarray(atom.val).astype(dtype)
        value = self.env[atom]
        if dtype is None or value.dtype == dtype:
            return value
        if (atom, dtype) not in self.casts:
            self.casts[atom, dtype] = _cast_of(atom, value, dtype)
        return self.casts[atom, dtype]

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
            elif again := self._cast_again(step):
                return self._recast(step, again)
            else:
                return self._apply(step)
        if step.handler is not None:
            outs = step.handler.bind(self, step, operands)
        else:
            outs = reemit(with_setting(eqn, self.planner.strict), operands)
        return _as_decided(step, outs)

    def _bind_region(self, region: Region) -> list[Any]:
        """Binds steps so that only what goes into them is kept for the backward pass.

        Inside a loop there is nothing that XLA could merge the second run with."""
        first = region.steps[0]
        values = [self.env[v] for v in region.ins]
        # What is run again must not hold on to this frame, nor to its other values.
        planner, settled = self.planner, self.settled

        def island(*values):
            env = dict(zip(region.ins, values, strict=True))
            frame = Frame(planner, env, Keeps.NOTHING)
            frame.settled = settled
            for step in region.steps:
                frame.env |= zip(step.eqn.outvars, frame.bind(step), strict=True)
            outs = []
            for v, dtype in region.outs.items():
                with eqn_context(makers[v].eqn):
                    outs.append(frame.read(v, dtype))
            return outs

        makers = {v: step for step in region.steps for v in step.eqn.outvars}
        prevent_cse = self.keeps == Keeps.LEAN
        kept = list(region.ins.values())
        if any(kept):
            mark = keep if self.keeps == Keeps.MARKED else None
            run = keeping_low(island, island, kept, prevent_cse, mark)
        else:
            run = jax.checkpoint(island, prevent_cse=prevent_cse)
        with eqn_context(without_scopes(first.eqn)):
            outs = run(*values)
        return list(map(keep, outs)) if self.keeps == Keeps.MARKED else outs

    def _marked(self, step: Step, outs: list[Any]) -> list[Any]:
        """The results of a step, kept although they could be made again."""
        is_leaf = step.handler is None
        is_kept = self.keeps == Keeps.MARKED and is_leaf and is_cheap(step.eqn)
        return list(map(keep, outs)) if is_kept else outs

    def _apply(self, step: Step, given: dict[int, Any] | None = None) -> list[Any]:
        """Casts the operands, but those that are `given`, and binds the primitive."""
        eqn, decision, given = step.eqn, step.decision, given or {}
        operands = [
            given[i] if i in given else self._operand(step, i)
            for i in range(len(eqn.invars))
        ]
        self._remember_views(step)
        if decision.bind is not None:
            outs = decision.bind(*operands)
        else:
            is_low = any(
                read is not None and read != v.aval.dtype
                for read, v in zip(decision.reads, eqn.invars, strict=True)
            )
            bind = settled_bind(eqn.primitive, decision.params, is_low)
            outs = bind(*operands)
        outs = outs if isinstance(outs, tuple | list) else [outs]
        if self.settled.intersection(eqn.outvars):
            low = step.found.compute_dtype or self.planner.compute_dtype
            outs = [_settle(x, low) for x in outs]
        return _as_decided(step, outs)

    def _operand(self, step: Step, i: int) -> Any:
        atom, dtype = step.eqn.invars[i], step.decision.reads[i]
        value = self.read(atom, None)
        if isinstance(atom, Literal) or dtype is None or value.dtype == dtype:
            return self.read(atom, dtype)
        if step.casts.get(i) == Leaf.CONST:
            return self._cast_ahead(atom, dtype)
        if step.is_compute and self._is_ahead(atom, dtype):
            return _attach(value, self._cast_ahead(atom, dtype))
        shape = step.eqn.outvars[0].aval.shape
        fans_out = step.eqn.primitive.name in _BROADCASTING and value.shape != shape
        if fans_out and bits(dtype) < bits(value.dtype):
            # Broadcast first: the transpose of a broadcast is a sum, which must not add
            # up in low precision.
            axes = range(len(shape) - value.ndim, len(shape))
            return cast(lax.broadcast_in_dim(value, shape, axes), dtype)
        # An input is cast for each reader, so that its gradient adds up in full.
        return cast(value, dtype) if i in step.casts else self.read(atom, dtype)

    def recast_roots(self, plan: Plan) -> list[tuple[Any, DType]]:
        """The inputs that contractions of a plan read cast, with the dtypes.

        Of an input that is sliced at places which are only known when it is read, the
        slices."""
        frame = Frame(self.planner, {})
        casts: dict[tuple[Any, DType], None] = {}
        for step in plan.steps:
            frame._remember_views(step)
            for i in step.recasts if step.is_compute else ():
                dtype = step.decision.reads[i]
                if dtype is None:  # the rule's own `bind` casts it
                    continue
                for root in frame._origins([step.eqn.invars[i]], _is_fixed)[0]:
                    if author_dtype(root.aval) is not None:
                        casts[root, dtype] = None
        return list(casts)

    def _remember_views(self, step: Step) -> None:
        if any(fact and fact.leaf for fact in step.decision.outs):
            self.views |= dict.fromkeys(step.eqn.outvars, step)
            invars = step.eqn.invars
            self.kept |= {atom for atom in invars if not isinstance(atom, Literal)}

    def _is_ahead(self, atom: Atom, dtype: DType | None) -> bool:
        """Whether the cast of the input that `atom` shows was made before the loop."""
        return any((root, dtype) in self.ahead for root in self._origins([atom])[0])

    def _cast_ahead(self, atom: Any, dtype: DType) -> Any:
        """Casts a constant, or what a view is made of and then makes the view.

        So that a table is cast once, not in every shape that it is read in. The same
        for an input whose cast was made before a loop."""
        if author_dtype(atom.aval) is None:
            return self.read(atom, None)
        if isinstance(atom, Literal):
            return self.read(atom, dtype)
        if (atom, dtype) in self.ahead:
            return self.ahead[atom, dtype]
        if (atom, dtype) not in self.casts:
            view = self.views.get(atom)
            if view is None:
                self.casts[atom, dtype] = cast(self.env[atom], dtype)
            else:
                operands = [self._cast_ahead(x, dtype) for x in view.eqn.invars]
                low = view.eqn.primitive.bind(*operands, **view.eqn.params)
                lows = low if isinstance(low, tuple | list) else [low]
                for v, x in zip(view.eqn.outvars, lows, strict=True):
                    self.casts[v, dtype] = cast(x, dtype)
        return self.casts[atom, dtype]

    def _cast_again(self, step: Step) -> list[int]:
        """Operands whose casts the backward pass makes again, and would keep otherwise.

        A cast of an input can be had again, and what a cast up shows is held low."""
        reads, invars = step.decision.reads, step.eqn.invars
        if self.keeps == Keeps.NOTHING:
            return []
        if step.is_compute:
            would_keep = any(
                not self._is_ahead(invars[i], reads[i]) for i in step.recasts
            )
        else:
            would_keep = step.eqn.primitive.name not in LINEAR
        return [*step.recasts, *self._widened(step)] if would_keep else []

    def _widened(self, step: Step) -> list[int]:
        """Operands that are held low, and would be kept cast up."""
        if step.eqn.primitive.name not in KEEPING_INPUTS:
            return []
        pairs = zip(step.eqn.invars, step.decision.reads, strict=True)
        return [
            i
            for i, (atom, dtype) in enumerate(pairs)
            if not isinstance(atom, Literal)
            and dtype is not None
            and bits(self.env[atom].dtype) < bits(dtype)
        ]

    def _recast(self, step: Step, again: list[int]) -> list[Any]:
        """Binds so that casts of the operands `again` are made again, not kept.

        Without `prevent_cse`: inside a loop there is nothing to merge, and outside XLA
        may weigh a second cast against a copy that is kept."""
        given = {
            i: self._operand(step, i)
            for i in range(len(step.eqn.invars))
            if i not in again
        }
        roots, chain = self._origins([step.eqn.invars[i] for i in again])
        static = {
            i: x for i, x in given.items() if isinstance(step.eqn.invars[i], Literal)
        }
        arrays = {i: x for i, x in given.items() if i not in static}

        def op(values, arrays):
            frame = Frame(self.planner, dict(zip(roots, values, strict=True)))
            for view in chain:
                # The scopes are those of the op that all of this is made for.
                with eqn_context(without_scopes(view.eqn)):
                    frame.env |= zip(view.eqn.outvars, frame._apply(view), strict=True)
            return frame._apply(step, static | arrays)

        values = [self.env[root] for root in roots]
        return jax.checkpoint(op, prevent_cse=False)(values, arrays)

    def _origins(
        self, atoms: Sequence[Atom], follow: Callable[[Step], bool] = lambda view: True
    ) -> tuple[list[Any], list[Step]]:
        """The inputs that `atoms` are views of, and the steps that lead to them.

        Views that are not to be followed count as inputs."""
        roots: dict[Any, None] = {}
        chain: dict[Step, None] = {}

        def visit(atom):
            if isinstance(atom, Literal):
                return
            view = self.views.get(atom)
            if view is None or not follow(view):
                roots[atom] = None
            elif view not in chain:
                for operand in view.eqn.invars:
                    visit(operand)
                chain[view] = None

        for atom in atoms:
            visit(atom)
        return list(roots), list(chain)


def _is_fixed(view: Step) -> bool:
    """Whether a view shows the same part of its operand whenever it is made."""
    return view.eqn.primitive.name != "dynamic_slice"


@jax.custom_jvp
def _attach(full: Any, low: Any) -> Any:
    """The value `low`, differentiated as a cast of `full`.

    One cast serves many readers, and still the gradient adds up in full."""
    del full
    return low


@_attach.defjvp
def _(primals, tangents):
    return primals[1], cast(tangents[0], primals[1].dtype)


@functools.partial(jax.custom_jvp, nondiff_argnums=(1,))
def _settle(x: Any, low: DType) -> Any:
    """`x`; its cotangent is rounded to `low` once, before it goes anywhere.

    XLA would leave out a cast down that is cast up again, and store what is wide."""
    del low
    return x


@_settle.defjvp
def _(low, primals, tangents):
    (x,), (t,) = primals, tangents
    return x, cast(lax.optimization_barrier(cast(t, low)), t.dtype)


def _as_decided(step: Step, outs: Sequence[Any]) -> list[Any]:
    """The results of a step, in the dtypes that they are held in."""
    facts = zip(outs, step.decision.outs, step.eqn.outvars, strict=True)
    return [x if fact is None else _cast_of(v, x, fact.dtype) for x, fact, v in facts]


def _cast_of(var: Any, value: Any, dtype: DType) -> Any:
    """A cast of the value of `var`: to the author's dtype, as weakly typed as that."""
    if value.dtype == dtype:
        return value
    is_authors = dtype == var.aval.dtype
    return cast_as(value, var.aval) if is_authors else cast(value, dtype)


def _with_dtype(aval: Any, dtype: DType) -> Any:
    return aval if aval.dtype == dtype else aval.update(dtype=dtype, weak_type=False)
