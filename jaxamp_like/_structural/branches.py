"""Branches: every one gets the same operands and must return the same dtypes."""

from typing import Any

from .._dtypes import widest
from .._jax import COND_FORWARDS_INPUTS, Eqn, bind, eqn_context
from .._rules import Fact, Site
from .._rules.weights import joined
from .base import (
    Body,
    Planner,
    ProgramBinder,
    Step,
    as_body_inputs,
    decision_of,
    dtypes_of,
)


def cond_bodies(eqn: Eqn) -> list[Body]:
    ins, outs = range(1, len(eqn.invars)), range(len(eqn.outvars))
    return [Body(branch, ins, outs) for branch in eqn.params["branches"]]


def decide_cond(planner: Planner, eqn: Eqn, site: Site):
    facts = as_body_inputs(site.facts[1:])
    if not COND_FORWARDS_INPUTS:
        # What the backward pass reads of an input is a result of the forward pass, a
        # copy of it, and in a loop one for each iteration.
        facts = tuple(fact and fact._replace(is_copied=True) for fact in facts)
    inner = tuple(
        planner.plan(branch, facts, site.scope, site.wanted)
        for branch in eqn.params["branches"]
    )
    outs = map(_join, *(plan.out_facts for plan in inner))
    return decision_of(site, dtypes_of(site.facts), outs, "its branches agree"), inner


def _join(*facts: Fact | None) -> Fact | None:
    known = [fact for fact in facts if fact is not None]
    if not known:
        return None
    dtype = widest(fact.dtype for fact in known)
    accumulates = any(fact.from_accumulator for fact in known)
    origin = joined(fact.origin for fact in known)
    precision = max(fact.precision for fact in known)
    return Fact(dtype, precision, from_accumulator=accumulates, origin=origin)


def bind_cond(binder: ProgramBinder, step: Step, operands: list[Any]):
    eqn, dtypes = step.eqn, step.out_dtypes
    branches = tuple(
        binder.close(plan, branch, dtypes)
        for plan, branch in zip(step.inner, eqn.params["branches"], strict=True)
    )
    with eqn_context(eqn):
        return bind(eqn.primitive, operands, eqn.params | {"branches": branches})
