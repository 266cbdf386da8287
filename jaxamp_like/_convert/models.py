"""Models of frameworks, taken apart: a function and a tree of parameters.

A model that holds its parameters (Equinox, NNX, Keras) is taken apart; one that is
given them (Linen, Haiku, a plain function) is called as it is."""

import functools
import itertools
import sys
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np

from .._errors import AmpError
from .._frameworks.modules import holds_parameters, is_keras
from .._frameworks.nnx import nnx_nodes
from .._jax import is_array_or_shape


class Model(NamedTuple):
    """A model, taken apart.

    Args:
        call: the model as a function of its parameters and inputs.
        params: the tree of parameters.
        rebuild: makes a model like the given one out of such a tree; `None` if it is
            one of Keras, or does not hold its parameters.
        name: the model's name in messages."""

    call: Callable[..., Any]
    params: Any
    rebuild: Callable[[Any], Any] | None
    name: str


def take_apart(fn: Any, params: Any) -> Model:
    """Finds the function and the parameters of what `convert` was given.

    Raises:
        TypeError, ValueError: they don't fit each other; the message says what to
            give instead."""
    name = getattr(fn, "__name__", None) or type(fn).__name__
    if holds_parameters(fn):
        if params is not None:
            raise ValueError(
                f"`fn` is a {type(fn).__name__}, which holds its parameters: give "
                "`None` as `params`, `convert(model, None, *example_inputs)`."
            )
        if is_keras(fn):
            return _of_keras(fn, name)
        fn, params = _call, fn
    elif params is None and _binds_keywords(fn):
        model, fn = fn.func, functools.partial(_call, **fn.keywords)
        name, params = type(model).__name__, model
    elif params is None:
        raise ValueError(
            "`params` is `None`, which is for models that hold their parameters "
            f"(Equinox, NNX, Keras), but `fn` is {name!r}. Give the tree of parameters "
            "that it takes as its first argument; to bind what is no array, "
            "`functools.partial(model, train=False)`."
        )
    elif hasattr(fn, "init") and callable(getattr(fn, "apply", None)):
        fn = fn.apply  # Linen, Haiku
    elif not callable(fn):
        raise TypeError(
            f"`fn` must be callable, but got {type(fn).__name__}. The function comes "
            "first: `convert(fn, params, *example_inputs)`."
        )
    if nnx_nodes(params):
        return _of_nnx(fn, params, name)
    rebuild = (lambda tree: tree) if fn is _call else None
    return Model(fn, params, rebuild, name)


def check_leaves(params: Any) -> None:
    """Checks that parameters are arrays; the settings of a module may be anything.

    Raises:
        TypeError: a leaf is no array; the message names it."""

    def is_module(x: Any) -> bool:
        return isinstance(x, eqx.Module)

    leaves, _ = jax.tree_util.tree_flatten_with_path(params, is_leaf=is_module)
    for path, leaf in leaves:
        if not is_array_or_shape(leaf) and not is_module(leaf):
            raise TypeError(
                f"Every leaf of `params` must be an array, but "
                f"`{path_name(path) or 'params'}` is {type(leaf).__name__}: {leaf!r}. "
                "Make numbers arrays by `jnp.asarray`, and bind what is no parameter "
                "to the function by `functools.partial`."
            )


def as_jax_has_them(params: Any) -> Any:
    """`params`, with NumPy's arrays made JAX's, and with the dtypes that JAX has.

    NumPy's arrays are copied, since they may be written to later."""

    def canonical(leaf: Any) -> Any:
        if isinstance(leaf, jax.ShapeDtypeStruct):
            return leaf.update(dtype=canonical_dtype(leaf.dtype))
        return jnp.array(leaf) if isinstance(leaf, np.ndarray | np.generic) else leaf

    return map_parameters(canonical, params)


def canonical_dtype(dtype: Any) -> Any:
    """The dtype that JAX has for another: 32 bits in place of 64, unless x64 is on."""
    return jax.dtypes.canonicalize_dtype(dtype, allow_extended_dtype=True)


def map_parameters(fn: Callable[..., Any], params: Any, *rows: Iterable[Any]) -> Any:
    """Maps the arrays of a tree; one that stands in several places stays one array.

    `fn` is given each array, and its item of each of `rows`, which have the order of
    the arrays."""
    made: dict[int, Any] = {}
    rest = zip(*rows, strict=True) if rows else itertools.repeat(())

    def once(leaf: Any) -> Any:
        if not is_array_or_shape(leaf):
            return leaf
        items = next(rest)
        if isinstance(leaf, jax.ShapeDtypeStruct):
            return fn(leaf, *items)
        if id(leaf) not in made:
            made[id(leaf)] = fn(leaf, *items)
        return made[id(leaf)]

    return jax.tree.map(once, params)


def first_positions(leaves: Sequence[Any]) -> list[int]:
    """For each array of a list, the position at which the same array stands first.

    Tied weights stand in several places. Two shapes without values don't tell whether
    they are of one array, so they count as different ones."""
    places: dict[int, int] = {}
    return [
        i if isinstance(x, jax.ShapeDtypeStruct) else places.setdefault(id(x), i)
        for i, x in enumerate(leaves)
    ]


def parameters_in(tree: Any) -> list[Any]:
    """The arrays of a tree."""
    return [x for x in jax.tree.leaves(tree) if is_array_or_shape(x)]


def path_name(path: Any) -> str:
    """The path of a leaf as it is named here: "encoder/0/kernel"."""
    parts = []
    for entry in path:
        part = next(
            (getattr(entry, k) for k in ("key", "idx", "name") if hasattr(entry, k)),
            entry,
        )
        parts.append(str(part))
    # A variable of NNX holds its array under "value", which is left out.
    held = len(parts) > 1 and parts[-1] == "value" and hasattr(path[-1], "name")
    return "/".join(parts[:-1] if held else parts)


def distinct(names: Sequence[str]) -> list[str]:
    """The names, numbered where a key with a "/" makes two of them the same.

    None of them is "__metadata__", which safetensors reserves."""
    made = {"__metadata__": None}
    for name in names:
        number, one = 1, name
        while one in made:
            number += 1
            one = f"{name}~{number}"
        made[one] = None
    return list(made)[1:]


def _binds_keywords(fn: Any) -> bool:
    """Whether `fn` is a model that holds its parameters, with keywords bound to it."""
    is_bound = isinstance(fn, functools.partial) and not fn.args
    return is_bound and holds_parameters(fn.func) and not is_keras(fn.func)


def _call(model: Callable[..., Any], *inputs: Any, **keywords: Any) -> Any:
    return model(*inputs, **keywords)


def _of_nnx(fn: Callable[..., Any], params: Any, name: str) -> Model:
    nnx = sys.modules["flax.nnx"]
    graph, state = nnx.split(params)

    def call(state: Any, *inputs: Any) -> Any:
        nodes = nnx.merge(graph, state)
        before = _held(nnx, nodes)
        out = fn(nodes, *inputs)
        after = _held(nnx, nodes)
        changed = [p for p in after if before.get(p) is not after[p]]
        changed += [p for p in before if p not in after]
        if changed:
            raise AmpError(
                f"The call changes {', '.join(changed[:4])} of the model, which a "
                "converted one can't do. Set the model to inference first, by "
                "`model.eval()`. What changes then too, as the cache of a decoder, is "
                "an input: convert a function of the parameters and of it that returns "
                "it, with `graph, params, cache = nnx.split(model, nnx.Param, ...)`."
            )
        return out

    def rebuild(state: Any) -> Any:
        return nnx.merge(graph, state)

    return Model(call, state, rebuild, name)


def _held(nnx: Any, nodes: Any) -> dict[str, Any]:
    """What the variables of nodes hold, by their paths.

    Keys and their counts are left out: a converted model draws the same numbers at each
    call, as its summary says."""
    state = nnx.state(nodes, nnx.Not(nnx.RngState))
    leaves, _ = jax.tree_util.tree_flatten_with_path(state)
    return {path_name(path): leaf for path, leaf in leaves}


def _of_keras(model: Any, name: str) -> Model:
    if not model.built:
        raise ValueError(
            f"The Keras model {model.name!r} has no variables yet: call it on an "
            "example, or `build` it, first."
        )
    groups = (model.trainable_variables, model.non_trainable_variables)
    names = [[v.path for v in group] for group in groups]
    params = {v.path: v.value for group in groups for v in group}
    if len(params) < sum(map(len, groups)):
        raise ValueError(
            f"Two variables of the Keras model {model.name!r} have the same path; give "
            "its layers different names."
        )

    def call(params: Any, *inputs: Any) -> Any:
        values = ([params[path] for path in group] for group in names)
        options = {"training": False} if model._call_has_training_arg else {}
        out, _ = model.stateless_call(*values, *inputs, **options)
        return out

    return Model(call, params, None, name)
