"""Weights that are rounded before the loop that reads them.

A rule that quantises rounds a weight by itself, whatever it is contracted with. Where
all iterations of a loop read the same weight, it is rounded once, before the loop; the
slices of a stack of weights, of which each iteration reads one, all together. If
gradients read the weight in blocks along another axis, that is done here too, and the
loop of the backward pass reads no weight in full. What is not made here is rounded
where it is read, to the same numbers."""

from collections.abc import Mapping
from typing import Any

import jax

from .._jax import Literal, eqn_context, scan_arity, variables
from .._primitives import VIEWS
from .._rules import Fact
from .._structural import HoistedWeights, Plan, Step
from .record import in_step_scope
from .step_binder import StepBinder

Path = tuple[Any, ...]
"""The way to a rounded operand: the steps that it lies in, outermost first, the step
that reads it, and its place among the operands of that one.

After the step of a loop comes a bool: whether each iteration reads another slice."""

# Views that repeat numbers are left out: a rounded copy would be larger.
_MOVES = VIEWS - {"broadcast_in_dim", "tile"}


def entries_under(made: HoistedWeights, first: Any) -> HoistedWeights:
    """The entries whose paths begin with `first`, by the rest of each path."""
    return {path[1:]: x for path, x in made.items() if path[0] is first}


def hoist_weights(
    binder: StepBinder, step: Step, fixed: Mapping[Any, Any], slices: Mapping[Any, Any]
) -> tuple[HoistedWeights, HoistedWeights]:
    """Weights that the last body of a loop reads, rounded: fixed ones, and slices.

    Args:
        binder: what the loop is bound by, with what was rounded before a loop around
            it.
        step: the step of the loop.
        fixed: the values of inputs of the body that are the same in all iterations.
        slices: for inputs of the body that differ between iterations, their stacks."""
    made = entries_under(binder.hoisted_weights, step)
    made |= _hoist_from_loop(binder, step.inner[-1], fixed, slices, made)
    return entries_under(made, False), entries_under(made, True)


def _hoist_from_loop(
    binder: StepBinder,
    plan: Plan,
    fixed: Mapping[Any, Any],
    slices: Mapping[Any, Any],
    done: HoistedWeights,
) -> HoistedWeights:
    made = _hoist_from_program(binder, plan, fixed, entries_under(done, False))
    found = {(False, *path): x for path, x in made.items()}
    slices = {v: x for v, x in slices.items() if _is_parameter(plan.facts[v])}
    if not slices:
        return found
    known = entries_under(done, False) | entries_under(done, True) | made
    paths: list[Path] = []

    def one(values: list[Any]) -> list[Any]:
        values_of = {**fixed, **dict(zip(slices, values, strict=True))}
        made = _hoist_from_program(binder, plan, values_of, known)
        paths[:] = made
        return list(made.values())

    stacks = jax.vmap(one)(list(slices.values()))
    return found | {(True, *p): x for p, x in zip(paths, stacks, strict=True)}


def _is_parameter(fact: Fact | None) -> bool:
    return fact is not None and bool(fact.remat_source)


def _hoist_from_program(
    binder: StepBinder, plan: Plan, known: Mapping[Any, Any], done: HoistedWeights
) -> HoistedWeights:
    """Rounds what a program reads of inputs that are `known`, unless it is `done`."""
    values = _Values(binder, plan, known)
    made: HoistedWeights = {}
    once: dict[Any, Any] = {}
    for step in plan.steps:
        for i, how in enumerate(step.decision.quantisers):
            atom = step.eqn.invars[i]
            if how is None or (step, i) in done or not values.has(atom):
                continue
            if (atom, how) not in once:
                with in_step_scope(step), eqn_context(step.eqn):
                    once[atom, how] = how.for_each_pass(values.read(step, i))
            made[step, i] = once[atom, how]
        if passes_hoisted_weights(step):
            inner = _hoist_from_step(binder, step, values, entries_under(done, step))
            made |= {(step, *path): x for path, x in inner.items()}
    return made


def _hoist_from_step(
    binder: StepBinder, step: Step, values: "_Values", done: HoistedWeights
) -> HoistedWeights:
    """As `_hoist_from_program`, for the program in a step: of a loop, the last one."""
    eqn, plan = step.eqn, step.inner[-1]
    assert step.handler is not None
    known = values.passed_to(step)
    if not known:
        return {}
    if step.handler.is_call:
        return _hoist_from_program(binder, plan, known, done)
    first = sum(scan_arity(eqn)) if eqn.primitive.name == "scan" else len(eqn.invars)
    slices = {v: x for v, x in known.items() if _place(step, v) >= first}
    fixed = {v: x for v, x in known.items() if v not in slices}
    return _hoist_from_loop(binder, plan, fixed, slices, done)


def _place(step: Step, var: Any) -> int:
    """Which operand of a step an input of its program is."""
    assert step.handler is not None
    body = step.handler.bodies(step.eqn)[-1]
    return body.ins[list(step.inner[-1].invars).index(var)]


class _Values:
    """The values of variables that are inputs with known values, or views of these."""

    def __init__(self, binder: StepBinder, plan: Plan, known: Mapping[Any, Any]):
        self.outer = binder
        self.binder = binder.with_env(dict(known))
        self.makers = {
            v: s for s in plan.steps if _makes_views(s) for v in s.eqn.outvars
        }
        self.calls: dict[Step, _Values] = {}
        self.known = dict.fromkeys(known, True)

    def has(self, atom: Any) -> bool:
        if isinstance(atom, Literal):
            return False
        if atom not in self.known:
            self.known[atom] = self._has(atom)
        return self.known[atom]

    def _has(self, atom: Any) -> bool:
        if (step := self.makers.get(atom)) is None:
            return False
        if step.handler is not None:
            return self._call(step).has(_result(step, atom))
        if _is_barrier(step):
            return self.has(_before(step, atom))
        operands = variables(step.eqn.invars)
        return bool(operands) and all(map(self.has, operands))

    def read(self, step: Step, i: int) -> Any:
        """An operand, in the dtype that its step reads it in."""
        self._make(step.eqn.invars[i])
        return self.binder.read(step.eqn.invars[i], step.decision.reads[i])

    def passed_to(self, step: Step) -> dict[Any, Any]:
        """Inputs of the program that a step holds, which are no carries of a loop."""
        assert step.handler is not None
        body = step.handler.bodies(step.eqn)[-1]
        carried = {i for _, i in body.carries}
        places = zip(step.inner[-1].invars, body.ins, strict=True)
        return {
            var: self.read(step, place)
            for i, (var, place) in enumerate(places)
            if i not in carried and self.has(step.eqn.invars[place])
        }

    def _call(self, step: Step) -> "_Values":
        if step not in self.calls:
            plan = step.inner[-1]
            self.calls[step] = _Values(self.outer, plan, self.passed_to(step))
        return self.calls[step]

    def _make(self, atom: Any) -> None:
        if isinstance(atom, Literal) or atom in self.binder.env:
            return
        step = self.makers[atom]
        if step.handler is not None:
            self.binder.env[atom] = self._call(step).value(_result(step, atom))
            return
        if _is_barrier(step):
            self.binder.env[atom] = self.value(_before(step, atom))
            return
        for operand in step.eqn.invars:
            self._make(operand)
        with in_step_scope(step), eqn_context(step.eqn):
            outs = self.binder.apply(step)
        self.binder.env |= zip(step.eqn.outvars, outs, strict=True)

    def value(self, atom: Any) -> Any:
        self._make(atom)
        return self.binder.env[atom]


def _makes_views(step: Step) -> bool:
    """Whether a step may make views of operands: it moves one, or it is a call."""
    if step.handler is None:
        return step.eqn.primitive.name in _MOVES or _is_barrier(step)
    return passes_hoisted_weights(step) and step.handler.is_call


def _is_barrier(step: Step) -> bool:
    """Whether a step hands values on as they are.

    JAX puts one around what a checkpoint runs again. Weights are found behind it."""
    return step.eqn.primitive.name == "optimization_barrier"


def _before(step: Step, var: Any) -> Any:
    """The operand of a barrier that becomes a result of it."""
    return step.eqn.invars[step.eqn.outvars.index(var)]


def passes_hoisted_weights(step: Step) -> bool:
    """Whether the program that a step holds may read weights rounded outside of it."""
    is_known = step.handler is not None and step.handler.passes_hoisted_weights
    return is_known and not step.eqn.effects


def _result(step: Step, var: Any) -> Any:
    return step.inner[-1].outvars[step.eqn.outvars.index(var)]
