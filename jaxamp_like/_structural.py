"""Structural primitives: those that hold programs. One row of `STRUCTURAL` for each.

A row says how values flow between an equation and its bodies, how it is decided (its
bodies are planned with the facts of its operands), and how it is bound again. Binding
copies the equation's parameters and replaces only the jaxprs, so that names, donation,
shardings, unrolling, remat policies and whatever a later JAX adds survive."""

from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from ._dtypes import DType, cast, lowered, widest
from ._jax import (
    Eqn,
    Jaxpr,
    SymbolicZero,
    consts,
    eqn_context,
    open_jaxpr,
    raw,
    reemit,
    scan_arity,
    shard_map_options,
    subjaxprs,
    typeof,
    without_scopes,
)
from ._lean import keep, save_named
from ._primitives import MOVEMENT
from ._rules import (
    Decision,
    Demand,
    Fact,
    Leaf,
    Mark,
    Site,
    author_dtype,
    is_full,
    low_if_read_low,
)

Facts = tuple[Fact | None, ...]


class Body(NamedTuple):
    """One program that an equation holds, and how values flow through it."""

    jaxpr: Jaxpr
    ins: Sequence[int]  # for each input, the operand of the equation
    outs: Sequence[int | None]  # for each result, the result of the equation
    loop: Sequence[tuple[int, int]] = ()  # results that become inputs, `(out, in)`


class Handler(NamedTuple):
    """How a structural primitive is read, decided and bound."""

    bodies: Callable[[Eqn], list[Body]]
    decide: Callable[[Any, Eqn, Site], tuple[Decision, tuple[Any, ...]]]
    bind: Callable[[Any, Any, list[Any]], Sequence[Any]]


def _decision(
    site: Site, reads: Iterable[Any], outs: Iterable[Any], why: str
) -> Decision:
    return Decision(tuple(reads), site.params, tuple(outs), why)


def _now(facts: Sequence[Fact | None]) -> tuple[DType | None, ...]:
    return tuple(fact and fact.dtype for fact in facts)


def _inside(facts: Sequence[Fact | None], leaf: Leaf = Leaf.ROOT) -> Facts:
    """Facts of operands as a body's inputs; a view outside is no view inside."""
    inside = {Leaf.ROOT: leaf, Leaf.CONST: Leaf.CONST, Leaf.RERUN: Leaf.RERUN}
    return tuple(
        fact and fact._replace(leaf=inside.get(fact.leaf, Leaf.NO)) for fact in facts
    )


def _outside(facts: Sequence[Fact | None]) -> Facts:
    return tuple(fact and fact._replace(leaf=Leaf.NO) for fact in facts)


def _author_facts(jaxpr: Jaxpr) -> Facts:
    authors = (author_dtype(v.aval) for v in raw(jaxpr).invars)
    return tuple(dtype and Fact(dtype) for dtype in authors)


# Calls: operands in, results out, dtypes flow through.


def _call(param: str) -> Callable[[Eqn], list[Body]]:
    def bodies(eqn):
        ins, outs = range(len(eqn.invars)), range(len(eqn.outvars))
        return [Body(eqn.params[param], ins, outs)]

    return bodies


def _decide_call(
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
    (body,) = STRUCTURAL[eqn.primitive.name].bodies(eqn)
    demands = planner.body_demands(body, site.scope, site.wanted)

    def as_read(fact, author, demand):
        if fact is not None and raises and is_full(demand):
            return fact._replace(dtype=author)
        return low_if_read_low(fact, demand, site.compute_dtype)

    facts = tuple(map(as_read, _inside(site.facts, leaf), site.authors, demands))
    inner = planner.plan(body.jaxpr, facts, site.scope, site.wanted)
    outs = _outside(inner.outs)
    return _decision(site, _now(facts), outs, "its body decides"), (inner,)


def _decide_inline(planner: Any, eqn: Eqn, site: Site):
    return _decide_call(planner, eqn, site, raises=not planner.lean)


def _decide_jit(planner: Any, eqn: Eqn, site: Site):
    params = eqn.params
    layouts = (*params.get("in_layouts", ()), *params.get("out_layouts", ()))
    if any(layout is not None for layout in layouts):
        return _decide_pinned(planner, eqn, site)  # a layout belongs to a dtype
    return _decide_inline(planner, eqn, site)


def _bind_jit(frame: Any, step: Any, operands: list[Any]):
    (inner,), eqn = step.inner, step.eqn
    closed = frame.close(inner, eqn.params["jaxpr"], _now(step.decision.outs))
    with eqn_context(eqn):
        return eqn.primitive.bind(*operands, **eqn.params | {"jaxpr": closed})


def _decide_remat(planner: Any, eqn: Eqn, site: Site):
    return _decide_call(planner, eqn, site, leaf=Leaf.RERUN)


def _bind_remat(frame: Any, step: Any, operands: list[Any]):
    (inner,), eqn = step.inner, step.eqn
    dtypes = _now(step.decision.outs)
    closed = frame.run_again().close(inner, eqn.params["jaxpr"], dtypes)
    body, values = open_jaxpr(closed)
    with eqn_context(eqn):
        return eqn.primitive.bind(*values, *operands, **eqn.params | {"jaxpr": body})


def _bind_inline(frame: Any, step: Any, operands: list[Any]):
    (inner,), (jaxpr,) = step.inner, subjaxprs(step.eqn.params)
    with eqn_context(step.eqn):
        return frame.run(inner, consts(jaxpr), operands)


# Pinned: the bodies are rewritten, but what goes in and out keeps the author's dtypes.


def _decide_pinned(planner: Any, eqn: Eqn, site: Site):
    inner = tuple(
        planner.plan(jaxpr, _author_facts(jaxpr), site.scope)
        for jaxpr in subjaxprs(eqn.params)
    )
    outs = (author and Fact(author, Mark.FULL) for author in site.out_authors)
    return _decision(
        site, site.authors, outs, "its dtypes are part of a contract"
    ), inner


def _bind_pinned(frame: Any, step: Any, operands: list[Any]):
    plans = iter(step.inner)

    def rewrite(value):
        if isinstance(value, tuple):  # a NamedTuple of jaxprs, such as a linear solve's
            items = [rewrite(item) for item in value]
            return type(value)(*items) if hasattr(value, "_fields") else tuple(items)
        if not hasattr(raw(value), "eqns"):
            return value
        authors = tuple(author_dtype(v.aval) for v in raw(value).outvars)
        return frame.close(next(plans), value, authors)

    params = {name: rewrite(value) for name, value in step.eqn.params.items()}
    return reemit(step.eqn, operands, params)


def _no_bodies(eqn: Eqn) -> list[Body]:
    return []


# Branches: every one gets the same operands and must return the same dtypes.


def _cond_bodies(eqn: Eqn) -> list[Body]:
    ins, outs = range(1, len(eqn.invars)), range(len(eqn.outvars))
    return [Body(branch, ins, outs) for branch in eqn.params["branches"]]


def _decide_cond(planner: Any, eqn: Eqn, site: Site):
    facts = _inside(site.facts[1:])
    inner = tuple(
        planner.plan(branch, facts, site.scope, site.wanted)
        for branch in eqn.params["branches"]
    )
    outs = map(_join, *(plan.outs for plan in inner))
    return _decision(site, _now(site.facts), outs, "its branches agree"), inner


def _join(*facts: Fact | None) -> Fact | None:
    known = [fact for fact in facts if fact is not None]
    if not known:
        return None
    dtype = widest(fact.dtype for fact in known)
    carried = any(fact.carried for fact in known)
    return Fact(dtype, max(fact.mark for fact in known), carried=carried)


def _bind_cond(frame: Any, step: Any, operands: list[Any]):
    eqn, dtypes = step.eqn, _now(step.decision.outs)
    branches = tuple(
        frame.close(plan, branch, dtypes)
        for plan, branch in zip(step.inner, eqn.params["branches"], strict=True)
    )
    with eqn_context(eqn):
        return eqn.primitive.bind(*operands, **eqn.params | {"branches": branches})


# Loops: a carry enters every iteration with the same dtype and mark.


def _scan_bodies(eqn: Eqn) -> list[Body]:
    num_consts, num_carry = scan_arity(eqn)
    loop = [(i, num_consts + i) for i in range(num_carry)]
    return [
        Body(eqn.params["jaxpr"], range(len(eqn.invars)), range(len(eqn.outvars)), loop)
    ]


def _while_bodies(eqn: Eqn) -> list[Body]:
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
        ),
    ]


def _decide_loop(planner: Any, eqn: Eqn, site: Site):
    *others, body = STRUCTURAL[eqn.primitive.name].bodies(eqn)
    wanted = planner.body_wanted(body, site.scope, site.wanted)
    outs = {body.ins[i]: out for out, i in body.loop if site.facts[body.ins[i]]}
    adds_up = {body.ins[i] for i in planner.must_stay_full(body, site.scope)}
    demands = planner.body_demands(body, site.scope, site.wanted)
    # Those may be low that are read low, and made by compute ops on every path.
    read_low = {
        i
        for i, how in zip(body.ins, demands, strict=True)
        if Demand.LOW in how and Demand.OTHER not in how
    }
    low = (outs.keys() & read_low) - adds_up
    marks = dict.fromkeys(outs, Mark.NEUTRAL)
    given = list(_inside(site.facts))
    for i, var, how in zip(body.ins, raw(body.jaxpr).invars, demands, strict=True):
        is_sliced = given[i] is not None and site.avals[i].ndim > var.aval.ndim
        if is_sliced and how == Demand.LOW:
            given[i] = _low_slices(given[i], site)
    while True:  # marks only rise, and there are three
        carried = {i: _carried(site, i, mark, i in low) for i, mark in marks.items()}
        carried |= {i: carried[i]._replace(carried=True) for i in outs.keys() & adds_up}
        facts = [carried.get(i, fact) for i, fact in enumerate(given)]
        inner = planner.plan(body.jaxpr, _pick(facts, body.ins), site.scope, wanted)
        made = {i: inner.outs[out].mark for i, out in outs.items()}
        stuck = {i for i in low if made[i] == Mark.FULL}
        if not stuck and all(mark <= carried[i].mark for i, mark in made.items()):
            break
        low -= stuck
        marks = {i: max(mark, made[i]) for i, mark in marks.items()}
    plans = (planner.plan(b.jaxpr, _pick(facts, b.ins), site.scope) for b in others)
    results = list(_outside(inner.outs))
    for i, out in outs.items():
        results[out] = carried[i]._replace(carried=False)
    decision = _decision(site, _now(facts), results, "its carries keep one dtype")
    return decision, (*plans, inner)


def _low_slices(fact: Fact | None, site: Site) -> Fact | None:
    """What a scan reads slice by slice, each once, may be cast before the loop.

    Unless it is an input, whose cast would be a second copy to keep."""
    if fact is None or fact.leaf or fact.mark == Mark.FULL:
        return fact
    return Fact(lowered(fact.dtype, site.compute_dtype), Mark.LOW, small=fact.small)


def _pick(facts: Sequence[Fact | None], ins: Sequence[int]) -> Facts:
    return tuple(facts[i] for i in ins)


def _carried(site: Site, i: int, mark: Mark, is_low: bool) -> Fact:
    """A carry's fact in the body: the author's dtype, or low."""
    fact, author = site.facts[i], site.authors[i]
    assert fact is not None and author is not None
    if is_low:
        dtype = lowered(author, site.compute_dtype)
        return Fact(dtype, max(fact.mark, mark, Mark.LOW))
    return Fact(author, max(fact.mark, mark))


def _save_all_but_casts(casts: Iterable[tuple[Any, DType]]) -> Callable[..., bool]:
    """A policy for `jax.checkpoint`: casts of such variables are made again.

    So are views of them; one of a value that looks alike costs little to make again."""
    casts = list(casts)
    recast = {(var.aval.shape, var.aval.dtype, dtype) for var, dtype in casts}
    low = {(var.aval.size, dtype) for var, dtype in casts}

    def saveable(primitive, *avals, **params):
        if primitive is lax.convert_element_type_p:
            (aval,) = avals
            return (aval.shape, aval.dtype, params["new_dtype"]) not in recast
        is_view = primitive.name in MOVEMENT
        return not (is_view and (avals[0].size, avals[0].dtype) in low)

    return saveable


def _holds_remat(plan: Any) -> bool:
    """Whether some code in a plan is checkpointed by its author."""
    return any(
        step.eqn.primitive.name in REMAT or any(map(_holds_remat, step.inner))
        for step in plan.steps
    )


def _bind_scan(frame: Any, step: Any, operands: list[Any]):
    """Binds a scan; the casts of parameters that every iteration reads come first.

    They are made before the loop, and made again before the loop of the backward pass:
    neither once an iteration nor kept in between. Such a loop is made by `lax.scan`,
    since the low values are new constants of its body. The policy of the checkpoint
    around it would overrule the author's checkpoints inside: there the casts stay in
    the body."""
    (inner,), eqn, frame = step.inner, step.eqn, frame.in_loop()
    num_consts, num_carry = scan_arity(eqn)
    places = {var: i for i, var in enumerate(inner.invars[:num_consts])}
    casts = frame.recast_roots(inner)
    ahead = [cast for cast in casts if cast[0] in places]
    if not ahead or eqn.effects or _holds_remat(inner):
        return _bind_jit(frame, step, operands)
    is_lean, frame = frame.is_lean, frame.under_policy()
    dtypes = _now(step.decision.outs)

    def loop(operands):
        fixed, rest = operands[:num_consts], operands[num_consts:]
        low = {(var, dtype): cast(fixed[places[var]], dtype) for var, dtype in ahead}

        def body(carry, xs):
            jaxpr = eqn.params["jaxpr"]
            # Without a name, JAX would run the loop again to have what it carries.
            carry = list(map(keep, carry))
            outs = frame.run(inner, consts(jaxpr), [*fixed, *carry, *xs], low)
            outs = _cast_all(outs, dtypes)
            return outs[:num_carry], outs[num_carry:]

        options = {name: eqn.params[name] for name in ("length", "reverse", "unroll")}
        carry, ys = lax.scan(body, rest[:num_carry], rest[num_carry:], **options)
        return [*carry, *ys]

    with eqn_context(eqn):
        policy = save_named if is_lean else _save_all_but_casts(casts)
        return jax.checkpoint(loop, policy=policy, prevent_cse=False)(operands)


def _bind_while(frame: Any, step: Any, operands: list[Any]):
    (cond, body), frame = step.inner, frame.in_loop()
    params = step.eqn.params
    new = {
        "cond_jaxpr": frame.close(cond, params["cond_jaxpr"], (None,)),
        "body_jaxpr": frame.close(body, params["body_jaxpr"], _now(step.decision.outs)),
    }
    with eqn_context(step.eqn):
        return step.eqn.primitive.bind(*operands, **params | new)


# Manual sharding: the body needs the mesh axes around it, so JAX's own wrapper binds.


def _bind_shard_map(frame: Any, step: Any, operands: list[Any]):
    (inner,) = step.inner
    dtypes = _now(step.decision.outs)

    def body(*args):
        return _cast_all(frame.run(inner, (), args), dtypes)

    with eqn_context(step.eqn):
        return jax.shard_map(body, **shard_map_options(step.eqn.params))(*operands)


def _bind_pmap(frame: Any, step: Any, operands: list[Any]):
    """`pmap` up to JAX 0.9; later it is a jitted `shard_map`."""
    (inner,), params = step.inner, step.eqn.params
    dtypes = _now(step.decision.outs)

    def body(*args):
        return tuple(_cast_all(frame.run(inner, (), args), dtypes))

    # JAX shows the name; `pmap` takes it from the function.
    body.__name__ = body.__qualname__ = params["name"]
    donated = [i for i, donate in enumerate(params["donated_invars"]) if donate]
    mapped = jax.pmap(
        body,
        axis_name=params["axis_name"],
        in_axes=tuple(params["in_axes"]),
        out_axes=tuple(params["out_axes"]),
        devices=params["devices"],
        donate_argnums=donated,
    )
    with eqn_context(step.eqn):
        return mapped(*operands)


# Derivative rules by the author. The equation is wrapped in a new custom rule that
# differentiates the original equation, which runs the author's rule, and rewrites what
# comes of it. So the rule sees the dtypes that it was written for, and its contractions
# are low.


def _cast_all(values: Sequence[Any], dtypes: Sequence[Any]) -> list[Any]:
    return [x if d is None else cast(x, d) for x, d in zip(values, dtypes, strict=True)]


def _on_operands(
    eqn: Eqn, values: Sequence[Any], live: Sequence[int]
) -> Callable[..., Any]:
    """The original equation as a function of its `live` operands."""
    bare = without_scopes(eqn)

    def fn(*args):
        operands = list(values)
        for i, x in zip(live, args, strict=True):
            operands[i] = x
        return reemit(bare, operands)

    return fn


def _rerun(facts: Facts) -> Facts:
    """Facts of a call's operands for a rule that is bound in place of the call."""
    leaves = {Leaf.ROOT: Leaf.RERUN}
    return tuple(f and f._replace(leaf=leaves.get(f.leaf, f.leaf)) for f in facts)


def _marked(values: Sequence[Any]) -> Facts:
    """Facts of values that have been rewritten already."""
    return tuple(
        dtype and Fact(dtype, Mark.LOW)
        for dtype in (author_dtype(typeof(x)) for x in values)
    )


def _bind_custom_jvp(frame: Any, step: Any, operands: list[Any]):
    (inner,), eqn, frame = step.inner, step.eqn, frame.in_rule()
    dtypes = _now(step.decision.outs)
    jaxpr = eqn.params["call_jaxpr"]
    avals = [v.aval for v in eqn.invars]

    @jax.custom_jvp
    def call(*args):
        return _cast_all(frame.run(inner, consts(jaxpr), args), dtypes)

    def rule(primals, tangents):
        live = [i for i, t in enumerate(tangents) if not isinstance(t, SymbolicZero)]

        def author_rule(*args):
            values, ts = args[: len(avals)], args[len(avals) :]
            fn = _on_operands(eqn, values, live)
            outs, out_ts = jax.jvp(fn, tuple(values[i] for i in live), ts)
            return [*outs, *out_ts]

        ts = [tangents[i] for i in live]
        values = [*primals, *ts]
        authors = [*avals, *(_tangent_aval(avals[i], tangents[i]) for i in live)]
        wanted = _demands_of(step)
        # Tangents are read as their primals: a sum of cotangents, once transposed.
        facts = _rerun(inner.ins)
        facts += tuple(facts[i] for i in live)
        outs = frame.rewrite(
            author_rule, authors, values, facts, step.scope, wanted * 2
        )
        half = len(outs) // 2
        return _cast_all(outs[:half], dtypes), _cast_tangents(outs[half:], dtypes)

    call.defjvp(rule, symbolic_zeros=True)
    with eqn_context(eqn):
        return call(*operands)


def _tangent_aval(aval: Any, tangent: Any) -> Any:
    """The aval that a tangent had for the author, not the one that it has now."""
    return typeof(tangent) if author_dtype(aval) is None else aval


def _cast_tangents(values: Sequence[Any], dtypes: Sequence[Any]) -> list[Any]:
    """As `_cast_all`, leaving the float0 tangents of integers alone."""
    return [
        x if d is None or x.dtype == jax.dtypes.float0 else cast(x, d)
        for x, d in zip(values, dtypes, strict=True)
    ]


@jax.tree_util.register_pytree_node_class
class _Residuals:
    """What a forward rule hands to the backward rule: arrays, and how to read them."""

    def __init__(self, arrays: Any, static: Any):
        self.arrays = arrays
        self.static = static

    def tree_flatten(self):
        return (self.arrays,), _Identity(self.static)

    @classmethod
    def tree_unflatten(cls, static, children):
        (arrays,) = children
        return cls(arrays, static.value)


class _Identity:
    """Hashable and equal by identity: carries any object as static data of a pytree."""

    def __init__(self, value):
        self.value = value

    def __eq__(self, other):
        return isinstance(other, _Identity) and self.value is other.value

    def __hash__(self):
        return id(self.value)


def _bind_custom_vjp(frame: Any, step: Any, operands: list[Any]):
    (inner,), eqn, frame = step.inner, step.eqn, frame.in_rule()
    dtypes = _now(step.decision.outs)
    jaxpr = eqn.params["call_jaxpr"]
    avals = [v.aval for v in eqn.invars]
    num_outs = len(eqn.outvars)

    @jax.custom_vjp
    def call(*args):
        return _cast_all(frame.run(inner, consts(jaxpr), args), dtypes)

    def fwd(*primals):
        values = [p.value for p in primals]
        live = [i for i, p in enumerate(primals) if p.perturbed]
        trees = []

        def author_fwd(*args):
            fn = _on_operands(eqn, args, live)
            outs, vjp = jax.vjp(fn, *(args[i] for i in live))
            residuals, tree = jax.tree.flatten(vjp)
            trees.append((tree, [typeof(x) for x in residuals]))
            return [*outs, *residuals]

        wanted = _demands_of(step)
        outs = frame.rewrite(
            author_fwd, avals, values, _rerun(inner.ins), step.scope, wanted
        )
        tree, res_avals = trees[0]
        now = [typeof(x).dtype for x in values]
        return _cast_all(outs[:num_outs], dtypes), _Residuals(
            outs[num_outs:], (tree, res_avals, live, now)
        )

    def bwd(residuals, cotangents):
        tree, res_avals, live, now = residuals.static
        cotangents = [_instantiate(ct) for ct in cotangents]

        def author_bwd(*args):
            vjp = jax.tree.unflatten(tree, args[: len(res_avals)])
            return list(vjp(list(args[len(res_avals) :])))

        values = [*residuals.arrays, *cotangents]
        ct_avals = [
            v.aval if author_dtype(v.aval) is not None else typeof(ct)
            for v, ct in zip(eqn.outvars, cotangents, strict=True)
        ]
        wanted = [_demand_as(now[i], avals[i].dtype) for i in live]
        grads = frame.rewrite(
            author_bwd,
            [*res_avals, *ct_avals],
            values,
            _marked(values),
            step.scope,
            wanted,
        )
        result: list[Any] = [None] * len(avals)
        for i, grad in zip(live, grads, strict=True):
            is_float = author_dtype(avals[i]) is not None
            result[i] = cast(grad, now[i]) if is_float else grad
        return tuple(result)

    call.defvjp(fwd, bwd, symbolic_zeros=True)
    with eqn_context(eqn):
        return call(*operands)


def _demand_as(now: Any, author: Any) -> Demand:
    return Demand.FULL if now == author else Demand.LOW


def _demands_of(step: Any) -> list[Demand]:
    """How a derivative rule's results are read: as the primal results are held."""
    return [
        _demand_as(fact and fact.dtype, author_dtype(v.aval))
        for fact, v in zip(step.decision.outs, step.eqn.outvars, strict=True)
    ]


def _instantiate(cotangent: Any) -> Any:
    if not isinstance(cotangent, SymbolicZero):
        return cotangent
    aval: Any = cotangent.aval
    if aval.dtype == jax.dtypes.float0:
        return np.zeros(aval.shape, jax.dtypes.float0)
    return jnp.zeros(aval.shape, aval.dtype)


REMAT = ("checkpoint", "remat2")

_JIT = Handler(_call("jaxpr"), _decide_jit, _bind_jit)
_SCAN = Handler(_scan_bodies, _decide_loop, _bind_scan)
_INLINE = Handler(_call("call_jaxpr"), _decide_inline, _bind_inline)

STRUCTURAL: dict[str, Handler] = {
    "jit": _JIT,
    "pjit": _JIT,  # its name up to JAX 0.6
    **dict.fromkeys(REMAT, Handler(_call("jaxpr"), _decide_remat, _bind_remat)),
    "closed_call": _INLINE,
    "core_call": _INLINE,
    "call": _INLINE,
    "eval_jaxpr": _INLINE,
    "cond": Handler(_cond_bodies, _decide_cond, _bind_cond),
    "scan": _SCAN,
    "while": Handler(_while_bodies, _decide_loop, _bind_while),
    "custom_jvp_call": Handler(_call("call_jaxpr"), _decide_inline, _bind_custom_jvp),
    "custom_vjp_call": Handler(_call("call_jaxpr"), _decide_call, _bind_custom_vjp),
    "custom_linear_solve": Handler(_no_bodies, _decide_pinned, _bind_pinned),
    "linear_call": Handler(_no_bodies, _decide_pinned, _bind_pinned),
    "custom_vmap_call": Handler(_no_bodies, _decide_pinned, _bind_pinned),
    "shard_map": Handler(_call("jaxpr"), _decide_call, _bind_shard_map),
    "xla_pmap": Handler(_call("call_jaxpr"), _decide_call, _bind_pmap),
}
"""How each structural primitive is rewritten, by its name."""
