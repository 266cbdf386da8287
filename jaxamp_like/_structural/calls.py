"""Calls: operands in, results out, dtypes flow through."""

from typing import Any

import jax
import numpy as np

from .._dtypes import cast_all
from .._jax import Eqn, bind, consts, eqn_context, open_jaxpr, run_jaxpr, subjaxprs
from .._primitives import holds_rule
from .._rules import (
    Demand,
    RematSource,
    Site,
    is_full,
    low_if_read_low,
    with_low_residuals,
)
from .base import (
    Body,
    Plan,
    Planner,
    ProgramBinder,
    Step,
    as_body_inputs,
    as_results,
    decision_of,
    dtypes_of,
    steps_of,
)
from .pinned import decide_pinned
from .remat_mode import RematMode
from .saved import SaveNamesToo


def call_bodies(eqn: Eqn) -> list[Body]:
    (jaxpr,) = subjaxprs(eqn.params)
    return [Body(jaxpr, range(len(eqn.invars)), range(len(eqn.outvars)))]


def decide_call(
    planner: Planner,
    eqn: Eqn,
    site: Site,
    source: RematSource = RematSource.INPUT,
    casts_up: bool = False,
    sharded: RematSource | None = None,
):
    """Decides a call whose operands are cast outside of it, as its body reads them.

    What the body only reads low is cast low. With `casts_up`, what it only reads in
    full is cast up: other readers share a cast that is made outside. A call that keeps
    its operands for the backward pass is better given them low, without `casts_up`."""
    (body,) = call_bodies(eqn)
    demands = planner.demands.of_operands(eqn, [body], site.scope, site.wanted)

    def as_read(fact, author, demand):
        as_held = Demand.AS_HELD in demand
        if fact is not None and casts_up and is_full(demand) and not as_held:
            return fact._replace(dtype=author)
        return low_if_read_low(fact, demand, site.compute_dtype)

    given = as_body_inputs(site.facts, source, sharded)
    facts = tuple(map(as_read, given, site.authors, demands))
    inner = planner.plan(body.jaxpr, facts, site.scope, site.wanted)
    outs = as_results(inner.out_facts)
    return decision_of(site, dtypes_of(facts), outs, "its body decides"), (inner,)


def decide_inline(planner: Planner, eqn: Eqn, site: Site):
    casts_up = not planner.lean
    return decide_call(
        planner, eqn, site, casts_up=casts_up, sharded=RematSource.SHARDED
    )


def decide_jit(planner: Planner, eqn: Eqn, site: Site):
    params = eqn.params
    layouts = (*params.get("in_layouts", ()), *params.get("out_layouts", ()))
    if any(layout is not None for layout in layouts):
        return decide_pinned(planner, eqn, site)  # a layout belongs to a dtype
    site = site._replace(facts=planner.placed(site.facts, params))
    return decide_inline(planner, eqn, site)


def bind_jit(binder: ProgramBinder, step: Step, operands: list[Any]):
    # Weights that were rounded before a loop are not among the operands of the call.
    if binder.hoisted_weights_in(step):
        dtypes = step.out_dtypes
        return cast_all(bind_inline(binder, step, operands), dtypes)
    return bind_closed(binder, step, operands)


def bind_closed(binder: ProgramBinder, step: Step, operands: list[Any]):
    """Binds an equation with the one program that it holds, as a parameter."""
    (inner,), eqn = step.inner, step.eqn
    closed = binder.close(inner, eqn.params["jaxpr"], step.out_dtypes)
    with eqn_context(eqn):
        return bind(eqn.primitive, operands, eqn.params | {"jaxpr": closed})


def decide_remat(planner: Planner, eqn: Eqn, site: Site):
    decision, inner = decide_call(planner, eqn, site, source=RematSource.RECOMPUTED)
    if not _keeps_inputs_alone(eqn):
        return decision, inner
    keeps = tuple(fact and fact.saved_dtype for fact in inner[0].in_facts)
    if any(keeps):
        why = "its body decides; keeps what contractions made as it was made"
        decision = decision._replace(residual_dtypes=keeps, why=why)
    return decision, inner


def _keeps_inputs_alone(eqn: Eqn) -> bool:
    """Whether a checkpoint keeps what goes into it, and nothing else."""
    policies = (None, jax.checkpoint_policies.nothing_saveable)
    return not eqn.effects and eqn.params["policy"] in policies


def bind_remat(binder: ProgramBinder, step: Step, operands: list[Any]):
    (inner,), eqn, keeps = step.inner, step.eqn, step.decision.residual_dtypes
    bits = binder.inputs_in_8_bits(step) if _keeps_inputs_alone(eqn) else {}
    dtypes = step.out_dtypes
    weights = binder.hoisted_weights_in(step)
    closed = binder.in_mode(RematMode.RECOMPUTED).close(
        inner, eqn.params["jaxpr"], dtypes, weights
    )
    body, values = open_jaxpr(closed)
    prevent_cse = eqn.params["prevent_cse"]
    if isinstance(prevent_cse, tuple):  # for each operand, since JAX 0.9
        prevent_cse = (any(prevent_cse),) * len(values) + prevent_cse
    params = eqn.params | {"jaxpr": body, "prevent_cse": prevent_cse}
    if names := _names_kept(inner):
        params["policy"] = SaveNamesToo(names, params["policy"])
    with eqn_context(eqn):
        if not keeps and not bits:
            return bind(eqn.primitive, [*values, *operands], params)
        # `prevent_cse` is only for what is run again, not for the forward pass.
        prevent_cse = bool(np.any(params["prevent_cse"]))
        params["prevent_cse"] = False

        def forward(*operands):
            return bind(eqn.primitive, operands, params)

        def again(*operands):
            return run_jaxpr(body, operands)

        keeps = keeps or (None,) * len(operands)
        copies = [None] * len(values) + binder.low_copies(eqn.invars, keeps, bits)
        rules, is_apart = holds_rule(eqn), binder.remat_mode.is_straight_line
        call = with_low_residuals(
            forward, again, prevent_cse, holds_rules=rules, is_apart=is_apart
        )
        return call([*values, *operands], copies)


def _names_kept(plan: Plan) -> frozenset[str]:
    """Names of scales that are kept, since making them again would reduce arrays."""
    made = (step.decision.eight_bits for step in steps_of(plan))
    return frozenset(
        one.kept for one in made if one is not None and one.kept is not None
    )


def bind_inline(binder: ProgramBinder, step: Step, operands: list[Any]):
    (inner,), (jaxpr,) = step.inner, subjaxprs(step.eqn.params)
    with eqn_context(step.eqn):
        weights = binder.hoisted_weights_in(step)
        return binder.run(inner, consts(jaxpr), operands, hoisted_weights=weights)
