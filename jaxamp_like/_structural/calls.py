"""Calls: operands in, results out, dtypes flow through."""

from typing import Any

from .._jax import (
    Eqn,
    consts,
    eqn_context,
    open_jaxpr,
    subjaxprs,
)
from .._rules import (
    Leaf,
    Site,
    is_full,
    low_if_read_low,
)
from .base import (
    Body,
    decision_of,
    inside,
    now,
    outside,
)
from .pinned import decide_pinned


def call_bodies(eqn: Eqn) -> list[Body]:
    (jaxpr,) = subjaxprs(eqn.params)
    return [Body(jaxpr, range(len(eqn.invars)), range(len(eqn.outvars)))]


def decide_call(
    planner: Any,
    eqn: Eqn,
    site: Site,
    leaf: Leaf = Leaf.ROOT,
    raises: bool = False,
):
    """Decides a call whose operands arrive as its body reads them.

    What is only read low is cast outside, and so, if it `raises`, is what is only read
    in full: there the cast is shared with other readers. A call that keeps its operands
    for the backward pass is better given them low."""
    (body,) = call_bodies(eqn)
    demands = planner.body_demands(body, site.scope, site.wanted)

    def as_read(fact, author, demand):
        if fact is not None and raises and is_full(demand):
            return fact._replace(dtype=author)
        return low_if_read_low(fact, demand, site.compute_dtype)

    facts = tuple(map(as_read, inside(site.facts, leaf), site.authors, demands))
    inner = planner.plan(body.jaxpr, facts, site.scope, site.wanted)
    outs = outside(inner.outs)
    return decision_of(site, now(facts), outs, "its body decides"), (inner,)


def decide_inline(planner: Any, eqn: Eqn, site: Site):
    return decide_call(planner, eqn, site, raises=not planner.lean)


def decide_jit(planner: Any, eqn: Eqn, site: Site):
    params = eqn.params
    layouts = (*params.get("in_layouts", ()), *params.get("out_layouts", ()))
    if any(layout is not None for layout in layouts):
        return decide_pinned(planner, eqn, site)  # a layout belongs to a dtype
    return decide_inline(planner, eqn, site)


def bind_jit(frame: Any, step: Any, operands: list[Any]):
    (inner,), eqn = step.inner, step.eqn
    closed = frame.close(inner, eqn.params["jaxpr"], now(step.decision.outs))
    with eqn_context(eqn):
        return eqn.primitive.bind(*operands, **eqn.params | {"jaxpr": closed})


def decide_remat(planner: Any, eqn: Eqn, site: Site):
    return decide_call(planner, eqn, site, leaf=Leaf.RERUN)


def bind_remat(frame: Any, step: Any, operands: list[Any]):
    (inner,), eqn = step.inner, step.eqn
    dtypes = now(step.decision.outs)
    closed = frame.run_again().close(inner, eqn.params["jaxpr"], dtypes)
    body, values = open_jaxpr(closed)
    with eqn_context(eqn):
        return eqn.primitive.bind(*values, *operands, **eqn.params | {"jaxpr": body})


def bind_inline(frame: Any, step: Any, operands: list[Any]):
    (inner,), (jaxpr,) = step.inner, subjaxprs(step.eqn.params)
    with eqn_context(step.eqn):
        return frame.run(inner, consts(jaxpr), operands)
