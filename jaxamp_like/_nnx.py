"""Flax NNX modules, which are mutated when they are called.

Flax is not imported unless the user has done so."""

import sys
from collections.abc import Callable
from typing import Any

import jax


def nnx_modules(tree: Any) -> list[Any]:
    """The NNX modules in a pytree, the owners of bound methods included."""
    nnx = sys.modules.get("flax.nnx")
    if nnx is None:
        return []

    def is_module(x):
        return isinstance(x, nnx.Module)

    leaves = jax.tree.leaves(tree, is_leaf=is_module)
    owners = (getattr(x, "__self__", x) for x in leaves)
    return list({id(x): x for x in owners if is_module(x)}.values())


def is_nnx_module(x: Any) -> bool:
    nnx = sys.modules.get("flax.nnx")
    return nnx is not None and isinstance(x, nnx.Module)


def named_submodules(model: Any) -> list[tuple[tuple[Any, ...], Any]]:
    """The modules inside of a module, each once, with the path to it."""
    from flax import nnx  # imported by the user already

    # A function since Flax 0.12, a method before.
    modules = getattr(nnx, "iter_modules", None) or type(model).iter_modules
    return [(path, module) for path, module in modules(model) if path]


def nnx_options(cls: type) -> dict[str, Any]:
    """The keywords that a subclass of `cls` is made with, if that is an NNX class."""
    options = "_pytree__is_pytree"  # whether its instances are pytrees, since Flax 0.12
    return {"pytree": getattr(cls, options)} if hasattr(cls, options) else {}


def call_with_modules(
    rewrite: Callable[[Callable[..., Any]], Callable[..., Any]],
    modules: list[Any],
    call: tuple[Callable[..., Any], Any, Any],
) -> Any:
    """Calls a rewritten function of the modules' state, and keeps the state it leaves.

    The modules are split together, so that what they share stays shared. `call` is the
    function with its arguments; `modules` are those among them."""
    from flax import nnx  # imported by the user already

    graph, state = nnx.split(modules)
    original = {id(m): i for i, m in enumerate(modules)}

    def is_module(x):
        return id(getattr(x, "__self__", x)) in original

    leaves, tree = jax.tree.flatten(call, is_leaf=is_module)
    places = [is_module(x) for x in leaves]
    others = [x for x, is_place in zip(leaves, places, strict=True) if not is_place]

    def pure(state, others):
        before = _leaves_by_path(nnx, state)
        merged = nnx.merge(graph, state)

        def substitute(x):
            owner = getattr(x, "__self__", None)
            if id(owner) in original:
                return getattr(merged[original[id(owner)]], x.__name__)
            return merged[original[id(x)]]

        rest = iter(others)
        full = [
            substitute(x) if is_place else next(rest)
            for x, is_place in zip(leaves, places, strict=True)
        ]
        fn, args, kwargs = jax.tree.unflatten(tree, full)
        out = fn(*args, **kwargs)
        return out, _changed(nnx, before, nnx.state(merged))

    out, changed = rewrite(pure)(state, others)
    if jax.tree.leaves(changed):
        nnx.update(modules, changed)
    return out


def _leaves_by_path(nnx: Any, state: Any) -> dict[Any, list[Any]]:
    return {path: jax.tree.leaves(v) for path, v in nnx.to_flat_state(state)}


def _changed(nnx: Any, before: dict[Any, list[Any]], after: Any) -> Any:
    """The part of the state that was written to.

    Only that is put back: a module made outside the current trace may be read, but
    Flax forbids to write to it."""
    now = _leaves_by_path(nnx, after)
    changed = [
        (path, variable)
        for path, variable in nnx.to_flat_state(after)
        if [*map(id, now[path])] != [*map(id, before.get(path, ()))]
    ]
    return nnx.from_flat_state(changed)
