"""Derivative rules by the author.

An equation gets a new derivative rule, which calls `jax.vjp` or `jax.jvp` on the
original equation. That runs the author's rule in the dtypes that it was written for.
The program that was traced so is then rewritten, so that its contractions are low."""

import functools
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import jax
import numpy as np

from .._dtypes import cast, cast_all
from .._errors import explaining_rules, hiding_frames, without_derivative
from .._jax import (
    Eqn,
    Jaxpr,
    SymbolicZero,
    Zero,
    bind,
    closed,
    consts,
    eqn_context,
    is_array_aval,
    is_inexact,
    new_primitive,
    new_reference,
    open_jaxpr,
    raw,
    rebind,
    references_used,
    tangent_aval,
    to_classic,
    trace,
    typeof,
    without_scopes,
    writes_references,
)
from .._primitives import RULED, holds_rule
from .._primitives.matmul_precision import without_setting
from .._rules import Demand, Fact, Origin, Precision, RematSource, author_dtype, of_some
from .base import Facts, ProgramBinder, Step, as_body_inputs
from .calls import bind_inline
from .zeros import (
    instantiated,
    recording_cotangents,
    recording_zero_tangents,
    with_placed_results,
    with_recorded_operands,
    zero_cotangents,
)

_WITH_AXES = ("shard_map", "xla_pmap")


def _on_operands(
    eqn: Eqn, values: Sequence[Any], active: Sequence[int]
) -> Callable[..., Any]:
    """The original equation as a function of its `active` operands."""
    bare = without_scopes(eqn)
    return of_some(lambda *operands: rebind(bare, operands), active, values)


def derivative_of(eqn: Eqn) -> Jaxpr | None:
    """The derivative of an equation by an author's rule, as a program.

    It is `None` where there is no such rule, or where the rule can't be run by itself:
    JAX tells the user so if the function is differentiated. A rule in a `shard_map`
    knows its axes only there, so that the whole `shard_map` is differentiated."""
    avals = [atom.aval for atom in eqn.invars]
    first = eqn.params.get("num_consts", 0)
    active = [i for i, aval in enumerate(avals) if i >= first and is_inexact(aval)]
    is_rule = eqn.primitive.name in RULED
    is_around = eqn.primitive.name in _WITH_AXES and holds_rule(eqn)
    if not active or not (is_rule or is_around):
        return None
    is_backward = eqn.primitive.name != "custom_jvp_call"

    def derivative(args, tangents):
        fn, primals = _on_operands(eqn, args, active), [args[i] for i in active]
        if is_backward:
            return jax.vjp(fn, *primals)[1](list(map(_as_cotangent, tangents)))
        return jax.jvp(fn, primals, tangents)[1]

    tangents = (
        [v.aval for v in eqn.outvars] if is_backward else [avals[i] for i in active]
    )
    n = len(avals)
    return _traced(lambda *xs: derivative(xs[:n], list(xs[n:])), [*avals, *tangents])


def trace_rule(rule: Callable[..., Any], avals: Sequence[Any]) -> Jaxpr:
    """A rule as a program of classic equations.

    It is traced without `jax_default_matmul_precision`."""
    with hiding_frames, without_setting():
        return to_classic(trace(rule, avals))


def _traced(rule: Callable[..., Any], avals: Sequence[Any]) -> Jaxpr | None:
    """A rule as a program, if it can be traced by itself."""
    try:
        return trace_rule(rule, avals)
    except Exception:  # whatever the author's code raises
        return None


def _as_cotangent(x: Any) -> Any:
    is_float0 = not is_inexact(typeof(x))
    return np.zeros(x.shape, jax.dtypes.float0) if is_float0 else x


def _facts_of_values(values: Sequence[Any], origins: Sequence[Origin]) -> Facts:
    """Facts of values that a rewritten program has made."""
    dtypes = (author_dtype(typeof(x)) for x in values)
    return tuple(
        dtype and Fact(dtype, Precision.LOW, origin=origin)
        for dtype, origin in zip(dtypes, origins, strict=True)
    )


def bind_custom_jvp(binder: ProgramBinder, step: Step, operands: list[Any]):
    (inner,), eqn = step.inner, step.eqn
    binder = binder.in_mode(binder.remat_mode.in_rule)
    dtypes = step.out_dtypes
    jaxpr = eqn.params["call_jaxpr"]
    avals = [v.aval for v in eqn.invars]

    @jax.custom_jvp
    def call(*args):
        return cast_all(binder.run(inner, consts(jaxpr), args), dtypes)

    def rule(primals, tangents):
        active = [i for i, t in enumerate(tangents) if not isinstance(t, SymbolicZero)]
        zero_tangents: set[int] = set()  # results whose tangent is a symbolic zero

        def author_rule(*args):
            values, ts = args[: len(avals)], args[len(avals) :]
            fn = recording_zero_tangents(
                _on_operands(eqn, values, active), zero_tangents
            )
            primals = 0.0, *(values[i] for i in active)
            (_, *outs), (_, *out_ts) = jax.jvp(fn, primals, (0.0, *ts))
            return [*outs, *out_ts]

        ts = [tangents[i] for i in active]
        values = [*primals, *ts]
        authors = [*avals, *(_tangent_aval(avals[i], tangents[i]) for i in active)]
        wanted = _demands_of(step) * 2
        # A tangent has the fact of its primal: once this is transposed, the cotangents
        # of its readers add up as those of the primal do.
        facts = as_body_inputs(inner.in_facts, RematSource.RECOMPUTED)
        facts += tuple(facts[i] for i in active)
        with explaining_rules():
            traced = trace_rule(author_rule, authors)
            outs, _ = binder.rewrite(traced, values, facts, step.scope, wanted)
        half = len(outs) // 2
        values = cast_all(outs[:half], dtypes)
        out_tangents = _cast_tangents(outs[half:], dtypes)
        return values, [
            SymbolicZero(tangent_aval(x)) if i in zero_tangents else t
            for i, (x, t) in enumerate(zip(values, out_tangents, strict=True))
        ]

    call.defjvp(rule, symbolic_zeros=True)
    with eqn_context(eqn):
        return call(*operands)


def _tangent_aval(aval: Any, tangent: Any) -> Any:
    """The aval that a tangent had for the author, not the one that it has now."""
    return typeof(tangent) if author_dtype(aval) is None else aval


def _cast_tangents(values: Sequence[Any], dtypes: Sequence[Any]) -> list[Any]:
    """As `cast_all`, leaving the float0 tangents of integers alone."""
    return [
        x if d is None or x.dtype == jax.dtypes.float0 else cast(x, d)
        for x, d in zip(values, dtypes, strict=True)
    ]


def bind_remat_opt(binder: ProgramBinder, step: Step, operands: list[Any]):
    """Binds `remat_opt`, which `jax.custom_vjp` makes if `optimize_remat` is set.

    It holds an author's forward rule. Where its residuals are not read, JAX runs the
    function instead of the rule. Both are rewritten."""
    if binder.hoisted_weights_in(step):
        return bind_inline(binder, step, operands)
    (inner,), eqn, params = step.inner, step.eqn, step.eqn.params
    num_consts, num_res = params["num_consts"], params["num_res"]
    dtypes, wanted = step.out_dtypes, _demands_of(step)
    body, values = open_jaxpr(binder.close(inner, params["fwd_jaxpr"], dtypes))

    @functools.cache
    def function() -> tuple[Jaxpr, Sequence[Any]]:
        author = closed(*eqn.params["fun_jaxpr_thunk"]())
        facts, wants = inner.in_facts[num_consts:], wanted[num_res:]
        jaxpr, plan = binder.plan_traced(author, facts, step.scope, wants)
        made = binder.close(plan, jaxpr, dtypes[num_res:])
        return raw(made), consts(made)

    params = params | {
        "num_consts": num_consts + len(values),
        "fwd_jaxpr": closed(body, ()),
        "fun_jaxpr_thunk": function,
    }
    with eqn_context(eqn):
        return bind(eqn.primitive, [*values, *operands], params)


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


def bind_custom_vjp(binder: ProgramBinder, step: Step, operands: list[Any]):
    """Binds a `custom_vjp` call.

    The new rule asks for symbolic zeros only if the author's does: else it can't matter
    to him which operands are differentiated, and some of JAX (`shard_map`) does not
    know rules that ask. The first operands are what the author's function closes over:
    his rule has no derivative for these."""
    (inner,), eqn = step.inner, step.eqn
    binder = binder.in_mode(binder.remat_mode.in_rule)
    dtypes = step.out_dtypes
    jaxpr = eqn.params["call_jaxpr"]
    avals = [v.aval for v in eqn.invars]
    num_outs = len(eqn.outvars)
    places = [k for k, v in enumerate(eqn.outvars) if is_inexact(v.aval)]
    cotangent_avals = [eqn.outvars[k].aval for k in places]
    asks = bool(eqn.params.get("symbolic_zeros"))
    num_consts = eqn.params.get("num_consts", 0)
    references = references_used(jaxpr)
    # Under `jax.vmap`, what a function closes over is an operand like others, but its
    # rule still refuses to be differentiated with respect to that.
    differentiable = [
        i
        for i, (aval, fact) in enumerate(zip(avals, inner.in_facts, strict=True))
        if i >= num_consts
        and (is_inexact(aval) or i in references)
        and not (fact and fact.remat_source == RematSource.CONSTANT)
    ]

    @jax.custom_vjp
    def call(*args):
        return _in_front(cast_all(binder.run(inner, consts(jaxpr), args), dtypes))

    def fwd(*primals):
        values = [p.value for p in primals] if asks else list(primals)
        active = [i for i in differentiable if not asks or primals[i].perturbed]
        trees = []

        def author_fwd(*args):
            fn = _on_contents(_on_operands(eqn, args, active), active, references)
            fn = with_recorded_operands(with_placed_results(fn, asks))
            given = [args[i][...] if i in references else args[i] for i in active]
            _, vjp, (outs, made) = jax.vjp(fn, *given, has_aux=True)
            if writes_references(jaxpr):
                for i, reference in made.items():
                    args[i][...] = reference[...]
            residuals, tree = jax.tree.flatten(vjp)
            same = _references(residuals, [*enumerate(args), *made.items()])
            trees.append((tree, [typeof(x) for x in residuals], same))
            return [*outs, *(x for k, x in enumerate(residuals) if k not in same)]

        with explaining_rules():
            traced = trace_rule(author_fwd, avals)
        tree, res_avals, given = trees[0]
        backward = _Backward(tree, res_avals)
        if not asks:
            backward.trace_ahead(cotangent_avals)
        reads = binder.demands_of_rule(backward.known, len(res_avals), step.scope)
        wanted = [how for k, how in enumerate(reads) if k not in given]
        wanted = [*_demands_of(step), *wanted]
        with explaining_rules():
            in_facts = as_body_inputs(inner.in_facts, RematSource.RECOMPUTED)
            outs, facts = binder.rewrite(traced, values, in_facts, step.scope, wanted)
        made = iter(zip(outs[num_outs:], facts[num_outs:], strict=True))
        pairs = [
            (values[given[k]], None) if k in given else next(made)
            for k in range(len(res_avals))
        ]
        residuals = [x for x, _ in pairs]
        # What was a weight in the forward rule is one in the backward rule.
        origins = [fact.origin if fact else Origin.DATA for _, fact in pairs]
        held = [typeof(values[i]).dtype for i in active]
        return _in_front(cast_all(outs[:num_outs], dtypes)), _Residuals(
            residuals, (backward, active, held, origins)
        )

    def bwd(residuals, cotangents):
        backward, active, held, origins = residuals.static
        zeros = {k for k, ct in enumerate(cotangents) if isinstance(ct, SymbolicZero)}
        cts = [instantiated(cotangents[k]) for k in places]
        values = [*residuals.arrays, *cts]
        ct_avals = [
            typeof(ct).update(dtype=aval.dtype)  # shardings may differ
            if author_dtype(aval) is not None
            else typeof(ct)
            for ct, aval in zip(cts, cotangent_avals, strict=True)
        ]
        wanted = [
            _demand_as(d, avals[i].dtype) for i, d in zip(active, held, strict=True)
        ]
        with explaining_rules():
            traced, moved = backward.traced(ct_avals, zeros)
            grads, _ = binder.rewrite(
                traced,
                values,
                _facts_of_values(values, [*origins, *([Origin.DATA] * len(ct_avals))]),
                step.scope,
                wanted,
                (False,) * len(residuals.arrays) + (True,) * len(ct_avals),
            )
        casts = [
            author_dtype(avals[i]) and d for i, d in zip(active, held, strict=True)
        ]
        result: list[Any] = [None] * len(avals)
        for k, (i, grad) in enumerate(zip(active, cast_all(grads, casts), strict=True)):
            result[i] = grad if k in moved else None
        return tuple(result)

    call.defvjp(fwd, bwd, symbolic_zeros=asks)
    with eqn_context(eqn):
        return call(*map(_closed_over, operands[:num_consts]), *operands[num_consts:])


class _Backward:
    """An author's backward rule, a function of residuals and cotangents.

    Args:
        tree: the structure of the residuals.
        avals: the avals of the residuals."""

    def __init__(self, tree: Any, avals: Sequence[Any]):
        self.tree = tree
        self.avals = avals
        self.known: Jaxpr | None = None  # as it was traced for the forward rule
        self._cotangent_avals: Sequence[Any] = ()
        self._moved: set[int] = set()

    def trace_ahead(self, cotangent_avals: Sequence[Any]) -> None:
        """Traces the rule before its cotangents are there, if it can be traced so.

        `cotangent_avals` are the avals of the cotangents. The traced program
        tells how the residuals are read. The backward pass uses the same program, so
        that JAX does not trace the author's rule a second time for the same avals."""
        fn = self._fn(set(), self._moved)
        self.known = _traced(fn, [*self.avals, *cotangent_avals])
        self._cotangent_avals = cotangent_avals

    def traced(
        self, cotangent_avals: Sequence[Any], zeros: set[int]
    ) -> tuple[Jaxpr, set[int]]:
        """The rule as a program, and the operands for which it makes cotangents.

        `cotangent_avals` are the avals of the cotangents, and `zeros` says which
        results have a cotangent of zero."""
        is_ahead = not zeros and [*self._cotangent_avals] == [*cotangent_avals]
        if self.known is not None and is_ahead:
            return self.known, self._moved
        moved: set[int] = set()
        fn = self._fn(zeros, moved)
        return trace_rule(fn, [*self.avals, *cotangent_avals]), moved

    def _fn(self, zeros: set[int], moved: set[int]) -> Callable[..., list[Any]]:
        count = len(self.avals)

        def backward(*args: Any) -> list[Any]:
            vjp = jax.tree.unflatten(self.tree, args[:count])
            with zero_cotangents(zeros), recording_cotangents(moved):
                return list(vjp(list(args[count:])))

        return backward


def _in_front(outs: Sequence[Any]) -> list[Any]:
    """`outs`, in which the axis of a `jax.vmap` comes first, wherever there is one.

    Rewriting may leave this axis in one place for a function and in another for its
    forward rule. JAX takes its place from one of them for both."""
    return [_IN_FRONT.bind(x) if is_array_aval(typeof(x)) else x for x in outs]


_IN_FRONT = new_primitive(
    "amp_in_front",
    compute=lambda x: x,
    aval=lambda x: x,
    jvp=lambda xs, ts: (_IN_FRONT.bind(*xs), _moved(ts[0])),
    transpose=lambda ct, x: [ct],
)


def _moved(tangent: Any) -> Any:
    return tangent if isinstance(tangent, Zero) else _IN_FRONT.bind(tangent)


def _on_contents(
    fn: Callable[..., Any], active: Sequence[int], references: Sequence[int]
) -> Callable[..., Any]:
    """`fn`, given contents for its `references`; it also returns the new references.

    JAX differentiates with respect to arrays: it finds the cotangents of references
    that are made within what it differentiates."""

    def on_contents(*args: Any) -> tuple[list[Any], dict[int, Any]]:
        given = dict(zip(active, args, strict=True))
        made = {i: new_reference(x) for i, x in given.items() if i in references}
        return fn(*(given | made).values()), made

    return on_contents


def _references(
    values: Sequence[Any], operands: Iterable[tuple[int, Any]]
) -> dict[int, int]:
    """Which of `values` are references that came in, and as which of the operands.

    A backward rule may write to them, and no traced function returns one."""
    places = {id(x): i for i, x in operands if not is_array_aval(typeof(x))}
    return {k: places[id(x)] for k, x in enumerate(values) if id(x) in places}


def _closed_over(x: Any) -> Any:
    """A value that a `custom_vjp` function closes over: an error if differentiated."""
    return _undifferentiated(x) if is_inexact(typeof(x)) else x


_undifferentiated = without_derivative(
    "A `jax.custom_vjp` function was differentiated with respect to a value that it "
    "closes over, for which its rule has no gradient. (Without `amp`, JAX refuses it "
    "too.)\nPass the value as an argument, or `jax.lax.stop_gradient` of it."
)


def _demand_as(now: Any, author: Any) -> Demand:
    return Demand.FULL if now == author else Demand.LOW


def _demands_of(step: Step) -> list[Demand]:
    """How a derivative rule's results are read: as the primal results are held."""
    return [
        _demand_as(fact and fact.dtype, author_dtype(v.aval))
        for fact, v in zip(step.decision.out_facts, step.eqn.outvars, strict=True)
    ]
