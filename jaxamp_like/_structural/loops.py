"""Loops: a carry enters every iteration with the same dtype and precision."""

from collections.abc import Callable, Iterable, Sequence
from math import prod
from typing import Any

from jax import lax

from .._dtypes import DType, cast, cast_all, lowered
from .._jax import (
    Eqn,
    bind,
    checkpoint,
    consts,
    eqn_context,
    has_hi_type,
    raw,
    run_jaxpr,
    scan_arity,
    scan_operands,
    while_operands,
)
from .._primitives import VIEWS
from .._rules import Demand, Fact, Precision, Site, held_in_full
from .._rules.weights import joined
from .base import (
    REMAT,
    SOLVER,
    Body,
    Facts,
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
from .calls import bind_closed
from .running import run_programs
from .saved import is_marked_saved, mark_saved, save_marked
from .views import contraction_input_casts


def scan_bodies(eqn: Eqn) -> list[Body]:
    num_consts, num_carry = scan_arity(eqn)
    loop = [(i, num_consts + i) for i in range(num_carry)]
    ins, outs = range(len(eqn.invars)), range(len(eqn.outvars))
    return [Body(eqn.params["jaxpr"], ins, outs, loop, is_repeated=True)]


def while_bodies(eqn: Eqn) -> list[Body]:
    params = eqn.params
    num_cond, num_body = params["cond_nconsts"], params["body_nconsts"]
    num_carry = len(eqn.outvars)
    first = num_cond + num_body
    carry = range(first, first + num_carry)
    loop = [(i, num_body + i) for i in range(num_carry)]
    return [
        Body(params["cond_jaxpr"], [*range(num_cond), *carry], [None]),
        Body(
            params["body_jaxpr"],
            [*range(num_cond, first), *carry],
            range(num_carry),
            loop,
            is_repeated=True,
        ),
    ]


def decide_scan(planner: Planner, eqn: Eqn, site: Site):
    return _decide_loop(planner, site, scan_bodies(eqn))


def decide_while(planner: Planner, eqn: Eqn, site: Site):
    return _decide_loop(planner, site, while_bodies(eqn))


def _decide_loop(planner: Planner, site: Site, bodies: list[Body]):
    *others, body = bodies
    read = planner.demands.with_conditions(bodies, site.scope, site.wanted)
    wanted = planner.demands.body_wanted(body, site.scope, read)
    outs = {body.ins[i]: out for out, i in body.carries if site.facts[body.ins[i]]}
    adds_up = {
        body.ins[i] for i in planner.accumulators.must_stay_full(body, site.scope)
    }
    demands = planner.demands.of_body(body, site.scope, read)
    # A carry may be low if it is read low; `learn` finds whether it is made low.
    read_low = {
        i
        for i, how in zip(body.ins, demands, strict=True)
        if Demand.LOW in how and Demand.OTHER not in how
    }
    # These are read in full by the next iteration, or outside of the loop.
    read_full = {i for i, out in outs.items() if Demand.FULL in wanted[out]}
    # What a loop starts with is read by its first iteration. If the loop may run zero
    # times, it is the result as well, and is read as that is.
    inside_loop = zip(body.ins, demands, strict=True)
    starts_full = {i for i, how in inside_loop if Demand.FULL in how}
    if not site.params.get("length"):
        starts_full |= read_full
    low = (outs.keys() & read_low) - adds_up
    is_solver = SOLVER in site.scope and not site.by_scope
    # If examples of a `jax.vmap` share the value that a carry starts with, its
    # cotangents are added. So no carry is low there.
    if is_solver or site.partly_mapped:
        low = set()
    precisions = dict.fromkeys(outs, Precision.NEUTRAL)
    origins = {i: fact.origin for i in outs if (fact := site.facts[i])}
    given = list(as_body_inputs(site.facts))
    arithmetic_is_full = planner.arithmetic_is_full(site.scope)
    for i, var, how in zip(body.ins, raw(body.jaxpr).invars, demands, strict=True):
        is_sliced = given[i] is not None and site.avals[i].ndim > var.aval.ndim
        if is_sliced and how & ~Demand.WIDE == Demand.LOW:
            given[i] = _low_slices(given[i], site)
        elif not is_sliced and i not in outs and arithmetic_is_full:
            # All iterations read it, and their cotangents add up.
            given[i] = held_in_full(given[i], site.authors[i])

    def entering(i: int) -> Fact:
        fact = _carried(site, i, precisions[i], i in low)
        return fact._replace(from_accumulator=i in adds_up, origin=origins[i])

    def learn(i: int, made: Fact | None) -> bool:
        """Learns what an iteration makes of a carry; returns whether that is new."""
        assert made is not None  # `outs` holds carries that are floats, and no others
        before = entering(i)
        # What is read in full, by some op or after the loop, must not be rounded on
        # its way into the first iteration or the next, nor out of the last.
        is_wide = i in read_full and made.dtype == site.authors[i]
        is_wide |= i in starts_full and not _is_exact(site, i)
        if is_wide or made.precision == Precision.FULL:
            low.discard(i)
        precisions[i] = max(precisions[i], made.precision)
        origins[i] = joined((origins[i], made.origin))
        return entering(i) != before

    heirs = {
        body.ins[i]: [body.ins[j] for j in others]
        for i, others in body.forwarded_carries().items()
    }
    while True:  # precisions and origins only rise, and there are few
        carried = {i: entering(i) for i in outs}
        facts = [carried.get(i, fact) for i, fact in enumerate(given)]
        inner = planner.plan(body.jaxpr, _pick(facts, body.ins), site.scope, wanted)
        news = [i for i, out in outs.items() if learn(i, inner.out_facts[out])]
        if not news:
            break
        while news:
            i = news.pop()
            news += [j for j in heirs.get(i, ()) if learn(j, entering(i))]
    plans = (planner.plan(b.jaxpr, _pick(facts, b.ins), site.scope) for b in others)
    results = list(as_results(inner.out_facts))
    for i, out in outs.items():
        results[out] = carried[i]._replace(from_accumulator=False)
    for out, how in enumerate(site.wanted):
        if how == Demand.LOW and out not in outs.values():
            results[out] = _low_slices(results[out], site)
    decision = decision_of(
        site, dtypes_of(facts), results, "its carries keep one dtype"
    )
    return decision, (*plans, inner)


def _is_exact(site: Site, i: int) -> bool:
    """Whether a loop's carry may start low without a rounding."""
    fact, author = site.facts[i], site.authors[i]
    assert fact is not None and author is not None
    low = lowered(author, site.compute_dtype)
    is_exact = fact.constants is not None and fact.constants.exact_in(low)
    return fact.dtype == low or is_exact


def _low_slices(fact: Fact | None, site: Site) -> Fact | None:
    """The fact, lowered if it may be, of what a scan reads or stacks up slice by slice.

    An input is not cast, since its cast would be a second copy to keep."""
    if fact is None or fact.remat_source or fact.precision == Precision.FULL:
        return fact
    low = lowered(fact.dtype, site.compute_dtype)
    moved = Fact(low, Precision.LOW, is_broadcast=fact.is_broadcast, origin=fact.origin)
    return moved._replace(partners=fact.partners)


def _pick(facts: Sequence[Fact | None], ins: Sequence[int]) -> Facts:
    return tuple(facts[i] for i in ins)


def _carried(site: Site, i: int, precision: Precision, is_low: bool) -> Fact:
    """A carry's fact in the body: the author's dtype, or low."""
    fact, author = site.facts[i], site.authors[i]
    assert fact is not None and author is not None
    if is_low:
        dtype = lowered(author, site.compute_dtype)
        return Fact(dtype, max(fact.precision, precision, Precision.LOW))
    return Fact(author, max(fact.precision, precision))


def _save_all_but_casts(casts: Iterable[tuple[Any, DType]]) -> Callable[..., bool]:
    """A policy for `jax.checkpoint` by which the given casts are made again.

    Views of their variables are made again, too. A policy only sees shapes and dtypes:
    views of other values that have the same ones cost little to make again."""
    casts = list(casts)
    recast = {(var.aval.shape, var.aval.dtype, dtype) for var, dtype in casts}
    views = {(var.aval.size, d) for var, low in casts for d in (var.aval.dtype, low)}

    def saveable(primitive, *avals, **params):
        if is_marked_saved(primitive):
            return True
        if primitive is lax.convert_element_type_p:
            (aval,) = avals
            return (aval.shape, aval.dtype, params["new_dtype"]) not in recast
        if primitive.name == "dynamic_slice":  # the size of what it makes
            return (prod(params["slice_sizes"]), avals[0].dtype) not in views
        is_view = primitive.name in VIEWS
        return not (is_view and (avals[0].size, avals[0].dtype) in views)

    return saveable


def _holds_remat(plan: Plan) -> bool:
    """Whether some code in a plan is checkpointed by its author."""
    return any(step.eqn.primitive.name in REMAT for step in steps_of(plan))


def bind_scan(binder: ProgramBinder, step: Step, operands: list[Any]):
    """Binds a scan; what all iterations would make of its inputs is made before it.

    Weights that a rule quantises are rounded before the loop, all slices of a stack
    together. Inputs that contractions read low are cast before the loop, and cast again
    before the loop of the backward pass, so that no cast is kept for it. To that end
    casts and loop stand in one `jax.checkpoint`. Its body has new constants, so
    `lax.scan` makes a new loop.

    Casts stay in the body if the author has checkpoints in it, which the policy of the
    one around would overrule; and beside hi-types, which a classic checkpoint does not
    take."""
    (inner,), eqn, outer = step.inner, step.eqn, binder
    binder = binder.in_mode(binder.remat_mode.in_loop)
    all_fixed, _, all_slices = scan_operands(eqn, list(inner.invars))
    places = {var: i for i, var in enumerate(all_fixed)}
    casts = contraction_input_casts(inner)
    hoisted = [cast for cast in casts if cast[0] in places]
    if eqn.effects or _holds_remat(inner) or any(map(has_hi_type, operands)):
        hoisted = []
    consts_given, _, xs_given = scan_operands(eqn, operands)
    fixed = dict(zip(all_fixed, consts_given, strict=True))
    slices = dict(zip(all_slices, xs_given, strict=True))
    weights, stacks = (
        ({}, {}) if eqn.effects else outer.hoist_weights(step, fixed, slices)
    )
    if not hoisted and not weights and not stacks:
        return bind_closed(binder, step, operands)
    has_regions = binder.remat_mode.has_regions
    if hoisted:
        binder = binder.in_mode(binder.remat_mode.under_policy)
    dtypes = step.out_dtypes

    def loop(operands, weights, stacks):
        fixed, _, _ = scan_operands(eqn, operands)
        low = {(var, dtype): cast(fixed[places[var]], dtype) for var, dtype in hoisted}

        def iterate(_, inputs, slices):
            if hoisted:
                # Without a mark, JAX would run the loop again to have what it carries.
                fixed, carry, xs = scan_operands(eqn, inputs)
                inputs = [*fixed, *map(mark_saved, carry), *xs]
            numbers = {**weights, **dict(zip(stacks, slices, strict=True))}
            constants = consts(eqn.params["jaxpr"])
            return cast_all(binder.run(inner, constants, inputs, low, numbers), dtypes)

        return run_programs(eqn, operands, iterate, list(stacks.values()))

    with eqn_context(eqn):
        if not hoisted:
            return loop(operands, weights, stacks)
        policy = save_marked if has_regions else _save_all_but_casts(casts)

        def flat(operands, *values):
            pairs = zip((weights, stacks), values, strict=True)
            return loop(operands, *(dict(zip(x, y, strict=True)) for x, y in pairs))

        values = list(weights.values()), list(stacks.values())
        return checkpoint(flat, policy=policy, prevent_cse=False)(operands, *values)


def bind_while(binder: ProgramBinder, step: Step, operands: list[Any]):
    (cond, body), eqn, outer = step.inner, step.eqn, binder
    binder = binder.in_mode(binder.remat_mode.in_loop)
    params, dtypes = eqn.params, step.out_dtypes
    closed = binder.close(cond, params["cond_jaxpr"], (None,))
    _, for_body, _ = while_operands(eqn, operands)
    fixed = dict(zip(body.invars, for_body, strict=False))
    weights = {} if eqn.effects else outer.hoist_weights(step, fixed, {})[0]
    if not weights:
        jaxpr = binder.close(body, params["body_jaxpr"], dtypes)
        new = {"cond_jaxpr": closed, "body_jaxpr": jaxpr}
        with eqn_context(eqn):
            return bind(eqn.primitive, operands, params | new)

    def run(i, inputs, _):
        if i == 0:
            return run_jaxpr(closed, inputs)
        constants = consts(params["body_jaxpr"])
        outs = binder.run(body, constants, inputs, hoisted_weights=weights)
        return cast_all(outs, dtypes)

    with eqn_context(eqn):
        return run_programs(eqn, operands, run)
