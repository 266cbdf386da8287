"""What the backward pass makes again: remat regions, and casts of what is live."""

import functools
from collections.abc import Callable, Iterable
from typing import Any

from .._dtypes import DType, bits
from .._jax import Literal, checkpoint, eqn_context, without_scopes
from .._primitives import KEEPING_INPUTS, LINEAR, holds_rule
from .._rules import (
    RematSource,
    behind_barrier,
    keeps_statistics,
    read_once,
    with_cotangent_barrier,
    with_low_residuals,
)
from .._rules.low_bits import LowBits
from .._structural import Step
from .._structural.remat_mode import RematMode
from .._structural.saved import mark_saved
from .casts import with_full_gradient
from .deduplication import code_of
from .remat import Region, Schedule
from .step_binder import StepBinder


def bind_region(outer: StepBinder, region: Region) -> list[Any]:
    """Binds steps so that only what goes into them is kept for the backward pass."""
    # The cotangent of a value that has other readers is not rounded here.
    kept = {v: dtype or outer.shared_low_dtype(v) for v, dtype in region.ins.items()}
    bits = region.in_8_bits
    ins = {v: (low, v in region.sharded, bits.get(v)) for v, low in kept.items()}
    code = (
        region.ends_in_loss,
        region.keeps_reductions,
        code_of(region.steps, ins, region.outs, outer.schedule.rounded_cotangents),
    )
    run = outer.deduplicated(code, functools.partial(_recomputed_region, outer, region))
    with eqn_context(without_scopes(region.steps[0].eqn)):
        operands = [_read_again(outer, v, low) for v, low in kept.items()]
        outs = run(operands, outer.low_copies(kept, kept.values(), bits))
    is_marked = outer.remat_mode == RematMode.REGIONS_UNDER_POLICY
    return list(map(mark_saved, outs)) if is_marked else outs


def _recomputed_region(outer: StepBinder, region: Region) -> Callable[..., list[Any]]:
    """A region as a function that is run again in the backward pass.

    Its arguments are a list of the region's operands, and one of the copies of these
    that are kept. Inside a loop there is nothing that XLA could merge the second run
    with."""
    # What is run again must not hold on to the outer binder, nor to its other values.
    with_env = outer.with_env
    schedule = Schedule(rounded_cotangents=outer.schedule.rounded_cotangents)

    def run(mode: RematMode, values: Iterable[Any]) -> list[Any]:
        binder = with_env(dict(zip(region.ins, values, strict=True)), mode)
        binder.schedule = schedule
        for step in region.steps:
            binder.env |= zip(step.eqn.outvars, binder.bind(step), strict=True)
        outs = []
        for v, dtype in region.outs.items():
            with eqn_context(makers[v].eqn):
                outs.append(binder.read(v, dtype))
        return outs

    def forward(*values):
        return run(RematMode.RECOMPUTED, values)

    def recompute(*values):
        if not is_apart:
            return run(region.recomputed_mode, values)
        pairs = zip(region.ins, values, strict=True)
        values = [x if v in stays else behind_barrier(x) for v, x in pairs]
        return list(map(with_cotangent_barrier, run(region.recomputed_mode, values)))

    stays = {*region.sharded, *region.in_8_bits}
    makers = {v: step for step in region.steps for v in step.eqn.outvars}
    is_apart = outer.remat_mode.is_straight_line and not region.ends_in_loss
    mark = mark_saved if outer.remat_mode == RematMode.REGIONS_UNDER_POLICY else None
    rules = any(holds_rule(step.eqn) for step in region.steps)
    return with_low_residuals(
        forward,
        recompute,
        False,
        mark,
        keeps_statistics,
        rules,
        is_apart=outer.remat_mode.is_straight_line,
    )


def recomputed_casts(binder: StepBinder, step: Step) -> list[int]:
    """Operands whose casts the backward pass makes again, and would keep otherwise.

    A cast of an input can be made again from the input, and a cast up from the low
    value that is held. If many views lead from the input, its low cast is kept."""
    reads, invars = step.decision.reads, step.eqn.invars
    if binder.remat_mode.is_recomputed:
        return []
    again = [i for i in step.recomputed_casts if binder.views.is_near(invars[i])]
    if step.is_compute:
        would_keep = any(not binder.is_hoisted_cast(invars[i], reads[i]) for i in again)
    else:
        would_keep = step.eqn.primitive.name not in LINEAR
    return [*again, *_upcast_operands(binder, step)] if would_keep else []


def _upcast_operands(binder: StepBinder, step: Step) -> list[int]:
    """Operands that are held low, and would be kept cast up."""
    if step.eqn.primitive.name not in KEEPING_INPUTS:
        return []
    pairs = zip(step.eqn.invars, step.decision.reads, strict=True)
    return [
        i
        for i, (atom, dtype) in enumerate(pairs)
        if not isinstance(atom, Literal)
        and dtype is not None
        and bits(binder.env[atom].dtype) < bits(dtype)
    ]


def operands_in_8_bits(binder: StepBinder, step: Step) -> dict[int, LowBits]:
    """Operands that are kept in 8 bits; none of what a region keeps as it is."""
    if not binder.remat_mode.has_regions:
        return {}
    atoms = step.eqn.invars
    return {
        i: how
        for i, how in enumerate(step.decision.residual_bits)
        if how is not None and atoms[i] not in binder.schedule.kept_whole
    }


def bind_recomputing_casts(
    binder: StepBinder, step: Step, again: list[int], bits: dict[int, LowBits]
) -> list[Any]:
    """Binds so that casts of the operands `again` are made again, not kept.

    Those of `bits` are kept in 8 bits.

    `prevent_cse` is off: inside a loop there is nothing to merge, and outside of one
    XLA may choose between a second cast and a copy that is kept."""
    atoms = step.eqn.invars
    given = {i: binder.operand(step, i) for i in range(len(atoms)) if i not in again}
    roots, chain = binder.views.inputs_of([atoms[i] for i in again])
    static = {i: x for i, x in given.items() if isinstance(atoms[i], Literal)}
    arrays = {i: x for i, x in given.items() if i not in static}
    with_env = binder.with_env
    pvaried = [binder.env[v] for s in chain if _is_pvary(s) for v in s.eqn.outvars]
    # The cotangent of a value that has other readers is not rounded here.
    kept = [binder.shared_low_dtype(v) for v in roots]
    ins = dict.fromkeys([*roots, *(atoms[i] for i in arrays)])
    is_apart = binder.remat_mode.is_straight_line
    first_pvary, first_array = len(roots), len(roots) + len(pvaried)

    def op(*operands):
        inner = with_env(dict(zip(roots, operands[:first_pvary], strict=True)))
        summed = iter(operands[first_pvary:first_array])
        for view in chain:
            # The scopes are those of the op that all of this is made for.
            with eqn_context(without_scopes(view.eqn)):
                outs = inner.apply(view)
                if _is_pvary(view):
                    outs = [with_full_gradient(next(summed), x) for x in outs]
                inner.env |= zip(view.eqn.outvars, outs, strict=True)
        read = dict(zip(arrays, operands[first_array:], strict=True))
        return inner.apply(step, static | read)

    code = code_of([*chain, step], ins), tuple(again), tuple(kept), tuple(bits.items())
    pairs = zip(roots, kept, strict=True)
    values = [_read_again(binder, v, low) for v, low in pairs]
    values += [*pvaried, *arrays.values()]
    if not any(kept) and not bits:
        return binder.deduplicated(code, lambda: checkpoint(op, prevent_cse=False))(
            *values
        )
    run = binder.deduplicated(
        code, lambda: with_low_residuals(op, op, prevent_cse=False, is_apart=is_apart)
    )
    copies = binder.low_copies(roots, kept)
    copies += [None] * (len(values) - len(arrays) - len(copies))
    copies += [
        binder.copy_in_8_bits(atoms[i], step.decision.reads[i], bits[i])
        if i in bits
        else None
        for i in arrays
    ]
    return run(values, copies)


def _read_again(binder: StepBinder, v: Any, low: DType | None) -> Any:
    """The value of a variable that the backward pass reads, too.

    Where a copy of the dtype `low` is kept for it, this is the value in full."""
    if low:
        return binder.in_full(v)
    value, fact = binder.env[v], binder.plan.facts.get(v)
    is_input = fact is not None and fact.remat_source == RematSource.INPUT
    if not is_input or not binder.merges_reads:
        return value
    if v not in binder.read_again:
        binder.read_again[v] = read_once(value)
    return binder.read_again[v]


def _is_pvary(view: Step) -> bool:
    """Whether a view's cotangents are summed over devices, once for all its readers."""
    return view.eqn.primitive.name == "pvary"
