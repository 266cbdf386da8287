"""A function whose Python runs once for all that it is traced for."""

from collections.abc import Callable
from typing import Any

import jax


class Replayed:
    """Does what a function did when it was first traced for such arguments.

    Tracing equations again takes a fraction of the time of the Python that made them,
    and what `jit`, loops and derivative rules hold is the same object each time, so
    that JAX finds what it knows of it. To `amp` there is no difference: it sees what
    the Python left."""

    def __init__(self, fn: Callable[..., Any]):
        self.fn = fn
        self.known: dict[Any, tuple[Any, Any]] = {}

    def __call__(self, *args: Any) -> Any:
        leaves, tree = jax.tree.flatten(args)
        key = tree, tuple(map(jax.typeof, leaves))
        if key not in self.known:
            jaxpr, shapes = jax.make_jaxpr(self.fn, return_shape=True)(*args)
            self.known[key] = jaxpr, jax.tree.structure(shapes)
        jaxpr, out_tree = self.known[key]
        outs = jax.core.eval_jaxpr(
            getattr(jaxpr, "jaxpr", jaxpr), jaxpr.consts, *leaves
        )
        return jax.tree.unflatten(out_tree, outs)
