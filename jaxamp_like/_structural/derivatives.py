"""Derivative rules by the author.

The equation is wrapped in a new custom rule that differentiates the original equation,
which runs the author's rule, and rewrites what comes of it. So the rule sees the dtypes
that it was written for, and its contractions are low."""

from collections.abc import Callable, Sequence
from typing import Any

import jax

from .._dtypes import cast, cast_all
from .._jax import (
    Eqn,
    SymbolicZero,
    consts,
    eqn_context,
    reemit,
    typeof,
    without_scopes,
)
from .._rules import (
    Demand,
    Fact,
    Leaf,
    Mark,
    author_dtype,
)
from .base import (
    Facts,
    now,
)


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


def bind_custom_jvp(frame: Any, step: Any, operands: list[Any]):
    (inner,), eqn, frame = step.inner, step.eqn, frame.in_rule()
    dtypes = now(step.decision.outs)
    jaxpr = eqn.params["call_jaxpr"]
    avals = [v.aval for v in eqn.invars]

    @jax.custom_jvp
    def call(*args):
        return cast_all(frame.run(inner, consts(jaxpr), args), dtypes)

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
        return cast_all(outs[:half], dtypes), _cast_tangents(outs[half:], dtypes)

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


def bind_custom_vjp(frame: Any, step: Any, operands: list[Any]):
    """Binds a `custom_vjp` call.

    Only the operands that are differentiated may take part in the author's rule, and
    which these are is asked for by a `custom_jvp` around it: `shard_map` has no
    `custom_vjp` with symbolic zeros."""
    (inner,), eqn, frame = step.inner, step.eqn, frame.in_rule()
    dtypes = now(step.decision.outs)
    jaxpr = eqn.params["call_jaxpr"]

    @jax.custom_jvp
    def call(*args):
        return cast_all(frame.run(inner, consts(jaxpr), args), dtypes)

    def rule(primals, tangents):
        live = [i for i, t in enumerate(tangents) if not isinstance(t, SymbolicZero)]
        moving, moves = (tuple(x[i] for i in live) for x in (primals, tangents))
        reverse = _reverse_rule(frame, step, live, call)
        return jax.jvp(lambda *moving: reverse(moving, primals), moving, moves)

    call.defjvp(rule, symbolic_zeros=True)
    with eqn_context(eqn):
        return call(*operands)


def _reverse_rule(
    frame: Any, step: Any, live: Sequence[int], primal: Callable[..., Any]
) -> Callable[..., Any]:
    """A `custom_vjp` call as a function of its `live` operands, and of all."""
    (inner,), eqn = step.inner, step.eqn
    dtypes = now(step.decision.outs)
    avals = [v.aval for v in eqn.invars]
    num_outs = len(eqn.outvars)

    @jax.custom_vjp
    def reverse(moving, values):
        del moving  # those of the values that are live
        return primal(*values)

    def fwd(moving, values):
        del moving
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
        held = [typeof(values[i]).dtype for i in live]
        return cast_all(outs[:num_outs], dtypes), _Residuals(
            outs[num_outs:], (tree, res_avals, held)
        )

    def bwd(residuals, cotangents):
        tree, res_avals, held = residuals.static

        def author_bwd(*args):
            vjp = jax.tree.unflatten(tree, args[: len(res_avals)])
            return list(vjp(list(args[len(res_avals) :])))

        values = [*residuals.arrays, *cotangents]
        ct_avals = [
            v.aval if author_dtype(v.aval) is not None else typeof(ct)
            for v, ct in zip(eqn.outvars, cotangents, strict=True)
        ]
        wanted = [
            _demand_as(d, avals[i].dtype) for i, d in zip(live, held, strict=True)
        ]
        grads = frame.rewrite(
            author_bwd,
            [*res_avals, *ct_avals],
            values,
            _marked(values),
            step.scope,
            wanted,
        )
        authors = [author_dtype(avals[i]) for i in live]
        casts = [author and d for author, d in zip(authors, held, strict=True)]
        return tuple(cast_all(grads, casts)), None

    reverse.defvjp(fwd, bwd)
    return reverse


def _demand_as(now: Any, author: Any) -> Demand:
    return Demand.FULL if now == author else Demand.LOW


def _demands_of(step: Any) -> list[Demand]:
    """How a derivative rule's results are read: as the primal results are held."""
    return [
        _demand_as(fact and fact.dtype, author_dtype(v.aval))
        for fact, v in zip(step.decision.outs, step.eqn.outvars, strict=True)
    ]
