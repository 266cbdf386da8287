"""Which groups of steps are worth a remat region, and what each reads and gives."""

from collections.abc import Callable, Iterable, Sequence
from typing import Any

from ..._dtypes import DType
from ..._jax import Literal, variables
from ..._primitives import REDUCTIONS
from ..._rules import author_dtype
from ..._structural import Plan, Step, steps_in
from ..memo import Memo
from .cost import (
    fact_dtype,
    is_cheap_step,
    is_sharded,
    mixes_rows,
    num_elements,
    saved_bytes_for,
)
from .eight_bits import kept_whole
from .grouping import Grouping
from .schedule import Region, Schedule, in_order, schedule

_NEXT_TO_NOTHING = 64  # results are so many times smaller than what is kept for them
# On GPUs, XLA reduces a row of so many elements and reads it again in one kernel: at
# 16384 it still does so, at 24576 no longer (JAX 0.10.2, as compiled for an H200).
_IN_ONE_KERNEL = 16384


_schedules = Memo()


def schedule_of(plan: Plan, has_regions: bool) -> Schedule:
    """The steps of a plan in order; with remat regions, if a binder has them.

    It is made when the plan is bound: of the plans that a loop tries until the dtypes
    of its carries stop changing, only the last one is."""
    make = _with_regions if has_regions else _plain
    return _schedules(plan, has_regions, lambda: make(plan))


def _plain(plan: Plan) -> Schedule:
    if not any(step.may_recompute for step in plan.steps):
        return schedule(plan.steps, plan.outvars)
    return schedule(plan.steps, plan.outvars, Grouping(plan).rounded_cotangents())


def _with_regions(plan: Plan) -> Schedule:
    """The schedule with remat regions, for a derivative that is still to be taken.

    A plan that holds a backward pass has no regions, as JAX has chosen its residuals
    already. A region would only hide from `amp_with_state` and from reports what is
    read and made in it."""
    is_backward = any(step.backward for step in plan.steps)
    may_pay = any(step.may_recompute or step.inner for step in plan.steps)
    if is_backward or not may_pay:
        return schedule_of(plan, False)
    grouping, facts, outvars = Grouping(plan), plan.facts, plan.outvars
    # How each variable is read outside of regions: known from the end backwards.
    readers: dict[Any, set[DType | None]] = {v: set() for v in facts}

    def read(atoms, dtypes):
        for atom, dtype in zip(atoms, dtypes, strict=True):
            if not isinstance(atom, Literal):
                readers[atom].add(dtype or fact_dtype(facts[atom]))

    read(outvars, [None] * len(outvars))
    is_split = any(map(is_sharded, facts.values()))
    ends = set(variables(outvars))

    def is_last(group, outs, paid):
        return _is_last(outs, paid, ends) and (
            is_split or any(map(_reduces_much, group))
        )

    units: list[Step | Region] = []
    for group in reversed(in_order(plan.steps, grouping.groups())):
        region = _region(group, grouping, readers, is_last)
        if region is not None:
            read(region.ins, [None] * len(region.ins))
            units.append(region)
            continue
        for step in reversed(group):
            is_read = any(readers[v] for v in step.eqn.outvars)
            if is_read or not is_cheap_step(step):
                read(step.eqn.invars, step.decision.reads)
                units.append(step)
    has_some = any(isinstance(unit, Region) for unit in units)
    ordered = reversed(units) if has_some else plan.steps
    found = schedule(ordered, outvars, grouping.rounded_cotangents())
    return found._replace(kept_whole=kept_whole(units, facts))


def _region(
    group: Sequence[Step],
    grouping: Grouping,
    readers: dict[Any, set[DType | None]],
    is_last: Callable[..., bool],
) -> Region | None:
    """The region of a group of steps, if less is kept with it than without."""
    if group[0] not in grouping.depth_of:
        return None
    mixes = mixes_rows(group)
    if mixes and not grouping.keeps_reductions:
        return None
    outs = {
        v: _border(v, readers[v], grouping)
        for step in group
        for v in step.eqn.outvars
        if readers[v]
    }
    steps = [*grouping.free_makers(group), *group]
    # Roots may read what the makers make, such as a mask, so they are sorted together.
    steps = sorted([*grouping.roots_of(steps), *steps], key=grouping.number.__getitem__)
    made = {v for step in steps for v in step.eqn.outvars}
    taken = dict.fromkeys(
        v for step in steps for v in step.variables_read if v not in made
    )
    paid = [v for v in taken if v in grouping.active and v not in grouping.free_vars]
    keeps = {v: low for v in paid if (low := grouping.saved_dtype(v))}
    in_8_bits = {v: how for v in paid if (how := grouping.saved_bits(v, steps))}
    is_rounded = in_8_bits or any(map(grouping.is_rounded, taken))
    if not any(outs.values()) and not is_rounded:
        return None  # nothing that it reads or gives is rounded
    gain = sum(saved_bytes_for(step, grouping.active) for step in group)
    gain -= sum(
        in_8_bits[v].num_bytes(v.aval) if v in in_8_bits else grouping.saved_bytes(v)
        for v in paid
    )
    ins = {v: keeps.get(v) for v in taken}
    sharded = frozenset(v for v in taken if is_sharded(grouping.facts[v]))
    if gain <= 0:
        return None
    ends = is_last(group, outs, paid)
    return Region(tuple(steps), ins, outs, sharded, ends, in_8_bits, mixes)


def _is_last(outs: Iterable[Any], paid: Iterable[Any], ends: set[Any]) -> bool:
    """Whether a region ends in something small, such as the loss.

    Its backward pass follows at once, so what both passes read is not kept for long. If
    the region were run again, XLA could put off its first run, which only the loss
    needs, and would hold the logits until then: their cotangent could not take their
    memory. On one GPU that is so only where rows are long. XLA reduces shorter rows and
    reads them again in one kernel, which is best run twice."""
    return ends.issuperset(outs) and _total(outs) * _NEXT_TO_NOTHING < _total(paid)


def _reduces_much(step: Step) -> bool:
    """Whether a step reduces more elements to a number than a GPU's kernel holds."""
    eqns = [s.eqn for s in steps_in(step) if s.eqn.primitive.name in REDUCTIONS]
    return any(
        num_elements(eqn.invars[0].aval)
        > _IN_ONE_KERNEL * num_elements(eqn.outvars[0].aval)
        for eqn in eqns
    )


def _total(values: Iterable[Any]) -> int:
    return sum(num_elements(v.aval) for v in values)


def _border(v: Any, readers: set[DType | None], grouping: Grouping) -> DType | None:
    """The dtype that all readers of a region's result read it in, if not its own.

    If they differ, it is the author's dtype, where one of them reads that and where
    cotangents add up."""
    dtype, author = fact_dtype(grouping.facts[v]), author_dtype(v.aval)
    if len(readers) == 1:
        (read,) = readers
        return None if read == dtype else read
    return author if v in grouping.shared and author in readers - {dtype} else None


def as_region(unit: Step | Region) -> Step | Region:
    """A single step as a region, if it is cheap and something is kept for it."""
    if isinstance(unit, Region) or not is_cheap_step(unit):
        return unit
    if not saved_bytes_for(unit, set(unit.variables_read)):
        return unit
    outs = dict.fromkeys(unit.eqn.outvars)
    return Region((unit,), dict.fromkeys(unit.variables_read), outs)
