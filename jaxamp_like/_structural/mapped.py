"""Manual sharding: the body needs the mesh axes around it: JAX's own wrappers bind."""

from typing import Any

import jax

from .._dtypes import cast_all
from .._jax import (
    eqn_context,
    shard_map_options,
)
from .base import (
    now,
)


def bind_shard_map(frame: Any, step: Any, operands: list[Any]):
    (inner,) = step.inner
    dtypes = now(step.decision.outs)

    def body(*args):
        return cast_all(frame.run(inner, (), args), dtypes)

    with eqn_context(step.eqn):
        return jax.shard_map(body, **shard_map_options(step.eqn.params))(*operands)


def bind_pmap(frame: Any, step: Any, operands: list[Any]):
    """`pmap` up to JAX 0.9; later it is a jitted `shard_map`."""
    (inner,), params = step.inner, step.eqn.params
    dtypes = now(step.decision.outs)

    def body(*args):
        return tuple(cast_all(frame.run(inner, (), args), dtypes))

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
