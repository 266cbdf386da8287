"""Programs that are mapped over an axis: JAX's own wrappers bind them.

The body of manual sharding needs the mesh axes around it, and how a `custom_vmap` is
mapped is only known when that happens."""

from typing import Any

import jax
from jax.custom_batching import custom_vmap

from .._dtypes import cast_all
from .._jax import call_vmap_rule, consts, eqn_context, shard_map_options, typeof
from .._rules import Demand, Fact, author_dtype
from .base import ProgramBinder, Step
from .derivatives import trace_rule


def bind_shard_map(binder: ProgramBinder, step: Step, operands: list[Any]):
    (inner,) = step.inner
    dtypes = step.out_dtypes

    def body(*args):
        return cast_all(binder.run(inner, (), args), dtypes)

    with eqn_context(step.eqn):
        return jax.shard_map(body, **shard_map_options(step.eqn.params))(*operands)


def bind_pmap(binder: ProgramBinder, step: Step, operands: list[Any]):
    """`pmap` up to JAX 0.9; later it is a jitted `shard_map`."""
    (inner,), params = step.inner, step.eqn.params
    dtypes = step.out_dtypes

    def body(*args):
        return tuple(cast_all(binder.run(inner, (), args), dtypes))

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


def bind_custom_vmap(binder: ProgramBinder, step: Step, operands: list[Any]):
    """Binds a `custom_vmap` call; what the author's rule makes of it is rewritten too.

    The rule sees the author's dtypes, and so does what reads its results."""
    (inner,), eqn = step.inner, step.eqn
    binder = binder.in_mode(binder.remat_mode.in_rule)
    authors = [author_dtype(v.aval) for v in eqn.outvars]

    @custom_vmap
    def call(*args):
        return cast_all(binder.run(inner, consts(eqn.params["call"]), args), authors)

    @call.def_vmap
    def _(axis_size, batched, *args):
        are_batched = []

        def author_rule(*args):
            outs, where = call_vmap_rule(eqn, axis_size, batched, args)
            are_batched.extend(where)
            return outs

        avals = list(map(typeof, args))
        facts = tuple(d and Fact(d) for d in map(author_dtype, avals))
        wanted = [Demand.FULL] * len(authors)
        traced = trace_rule(author_rule, avals)
        outs, _ = binder.rewrite(traced, args, facts, step.scope, wanted)
        return cast_all(outs, authors), are_batched

    with eqn_context(eqn):
        return call(*operands)
