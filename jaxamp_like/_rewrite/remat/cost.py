"""What the backward pass keeps, in bytes, and what it makes again instead."""

from collections.abc import Iterable, Sequence
from math import prod
from typing import Any

from ..._dtypes import DType
from ..._jax import Literal
from ..._primitives import LINEAR, REDUCTIONS, SATURATING, VIEWS, is_cheap
from ..._rules import Fact, RematSource, author_dtype
from ..._structural import Step, steps_in


def saved_bytes_for(step: Step, active: set[Any]) -> int:
    """About how many bytes the backward pass keeps for a step; 0 if it is linear."""
    eqn, name = step.eqn, step.eqn.primitive.name
    varying = [not isinstance(a, Literal) and a in active for a in eqn.invars]
    if not any(varying) or name in LINEAR:
        return 0
    if (name == "mul" and sum(varying) == 1) or (name == "div" and not varying[1]):
        return 0
    if not step.inner:
        facts = step.decision.out_facts
        pairs = zip(eqn.outvars, facts, strict=True)
        return sum(num_bytes(v.aval, fact and fact.dtype) for v, fact in pairs)
    total = 0
    for plan in step.inner:
        inside = {v for v, varies in zip(plan.invars, varying, strict=True) if varies}
        for inner in plan.steps:
            total += saved_bytes_for(inner, inside)
            if any(v in inside for v in inner.variables_read):
                inside.update(inner.eqn.outvars)
    return total


def is_cheap_step(step: Step) -> bool:
    """Whether a step may be run twice."""
    if step.eqn.effects:
        return False
    if step.handler is not None and step.handler.may_recompute:
        return all(is_cheap_step(inner) for plan in step.inner for inner in plan.steps)
    return is_cheap(step.eqn) and step.may_recompute


def is_sharded(fact: Fact | None) -> bool:
    return fact is not None and fact.remat_source == RematSource.SHARDED


def looks_up(step: Step, facts: dict[Any, Fact | None]) -> bool:
    """Whether a step picks from a table that lies on several devices.

    The devices fetch together what each reader asks for, and would have to do so
    again."""
    if step.eqn.primitive.name == "gather":
        return is_sharded(facts.get(step.eqn.invars[0]))
    plans = step.inner if step.handler is not None else ()
    return any(looks_up(inner, plan.facts) for plan in plans for inner in plan.steps)


def readers_in(steps: Iterable[Step]) -> dict[Any, list[Step]]:
    """The steps that read each variable, once for each operand."""
    found: dict[Any, list[Step]] = {}
    for step in steps:
        for v in step.variables_read:
            found.setdefault(v, []).append(step)
    return found


def only_saturates(v: Any, readers: dict[Any, list[Step]]) -> bool:
    """Whether all `readers` of `v` make gates of it, of its parts, or of a shift of it.

    There has to be at least one."""
    found = readers.get(v, ())
    return bool(found) and all(_saturates(step, v, readers) for step in found)


def _saturates(step: Step, v: Any, readers: dict[Any, list[Step]]) -> bool:
    name, operands = step.eqn.primitive.name, step.eqn.invars
    if name in SATURATING:
        return True
    if step.handler is not None and step.handler.is_call:
        (plan,) = step.inner
        inner = readers_in(plan.steps)
        pairs = zip(operands, plan.invars, strict=True)
        given = [u for atom, u in pairs if atom is v]
        return all(u not in plan.outvars and only_saturates(u, inner) for u in given)
    is_shift = name == "add" and all(
        atom is v or num_elements(atom.aval) < num_elements(v.aval) for atom in operands
    )
    if name not in VIEWS and not is_shift:
        return False
    return all(only_saturates(out, readers) for out in step.eqn.outvars)


def has_sum(step: Step) -> bool:
    return any(s.eqn.primitive.name == "reduce_sum" for s in steps_in(step))


def is_low(v: Any, facts: dict[Any, Fact | None]) -> bool:
    fact = facts[v]
    return fact is not None and fact.dtype != author_dtype(v.aval)


def fact_dtype(fact: Fact | None) -> DType | None:
    return fact and fact.dtype


def num_bytes(aval: Any, dtype: DType | None) -> int:
    """The size in bytes; a dimension that is not known yet counts as 1."""
    known = (d for d in aval.shape if isinstance(d, int))
    return prod(known) * (dtype or aval.dtype).itemsize


def num_elements(aval: Any) -> int:
    """The number of elements; a dimension that is not known yet counts as 2."""
    return prod(d if isinstance(d, int) else 2 for d in aval.shape)


def mixes_rows(group: Sequence[Step]) -> bool:
    """Whether a group combines an array with sums that were taken across its rows.

    The statistics of a channel are such sums. To make them again takes a kernel of its
    own, which must read all that goes in once more."""
    sizes: dict[Any, int] = {}  # of summed arrays, for what is made of a sum
    for step in group:
        eqn = step.eqn
        summed = [sizes[v] for v in step.variables_read if v in sizes]
        if any(num_elements(v.aval) >= n for v in eqn.outvars for n in summed):
            return True
        if eqn.primitive.name in REDUCTIONS and not _is_trailing(eqn):
            summed.append(num_elements(eqn.invars[0].aval))
        if summed:
            sizes |= dict.fromkeys(eqn.outvars, max(summed))
    return False


def _is_trailing(eqn: Any) -> bool:
    ndim = eqn.invars[0].aval.ndim
    axes = sorted(eqn.params["axes"])
    return axes == list(range(ndim - len(axes), ndim))
