"""`scope_modules`: the submodules of a model name their scopes when they are called."""

import contextlib
import dataclasses
import functools
import inspect
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from typing import Any, TypeVar

import equinox as eqx
import jax

from .._errors import hiding_frames
from .._within import within
from .nnx import is_nnx_module, named_submodules, nnx_options

_Model = TypeVar("_Model")


@hiding_frames
def scope_modules(model: _Model) -> _Model:
    """Gives each submodule its path in the model as a `jax.named_scope` when called.

    Then policies can name the parts of an Equinox or NNX model: the query projection of
    `model.blocks[0].attention` runs in the scope "blocks/0/attention/query_proj". The
    names are those of fields, with the indices and keys of lists, tuples and dicts.
    Scopes open where a method is called from outside of its module, `__call__` or
    another one; static methods, class methods and properties open none. Submodules in
    static fields have no path. Scoping twice is the same as once.

    The submodules become instances of subclasses of their classes, told apart by their
    paths; attributes, `isinstance`, paths of leaves, `eqx.tree_at` and saved leaves
    work as before. But a scoped and an unscoped tree can't be combined, as by
    `jax.tree.map`: scope the model before its optimizer state is made, or inside of the
    function that `amp` wraps, so that only this function sees it. If a scan runs over
    layers, stack them before you scope the model; they then have one path.

    An Equinox model is copied, sharing its arrays. An NNX model, being mutable, is
    scoped in place. NNX refuses a node that changes its class inside of a transform of
    its own ("Expected a node of type ..."): within `nnx.grad` or `nnx.jit`, scope it in
    the function that `amp` wraps, which has a copy, or else once, where it is made.

    Args:
        model: an Equinox module, a pytree of them, or an NNX module.
    Returns:
        The model with scoped submodules. A module that is the model itself has no path,
        and keeps its class.
    Raises:
        TypeError: there is no Equinox or NNX module in `model`.

    >>> import numpy as np
    >>> from jaxamp_like import PolicyMap, amp
    >>> model = eqx.nn.MLP(2, 2, 4, depth=2, key=jax.random.key(0))
    >>> def predict(model, x):
    ...     return scope_modules(model)(x)
    >>> policy = PolicyMap("mixed_bfloat16", {"layers/0": "float32"})
    >>> y = amp(predict, amp_policy=policy)(model, np.ones(2, np.float32))
    """
    if is_nnx_module(model):
        for path, module in named_submodules(model):
            plain = _plain(type(module))
            object.__setattr__(module, "__class__", _scoped(plain, _join(*path)))
        return model
    if _is_module(model):
        return _inside(model, _plain(type(model)), "")
    if any(map(_is_module, jax.tree.leaves(model, is_leaf=_is_module))):
        return _in_tree(model, "")
    kind = "the class " * isinstance(model, type)
    name = model.__name__ if isinstance(model, type) else type(model).__name__
    raise TypeError(
        "`scope_modules` takes an Equinox module, a pytree of them or an NNX module, "
        f"but got {kind}{name}. Linen, Haiku and Keras name the scopes of "
        "their layers themselves; around other code put `jax.named_scope`."
    )


def _is_module(x: Any) -> bool:
    # An `eqx.nn.State` takes no instance of a subclass of `StateIndex` as a key.
    return isinstance(x, eqx.Module) and not isinstance(x, eqx.nn.StateIndex)


def _inside(module: Any, cls: type, path: str) -> Any:
    """`module` at `path`, as an instance of `cls`, with its submodules scoped."""
    values = dict(vars(module))
    for name in _dynamic_fields(cls) & values.keys():
        values[name] = _in_tree(values[name], _join(path, _part(name)))
    return new(cls, values)


def new(cls: type, values: dict[str, Any]) -> Any:
    """A module that holds `values`, without the `__init__` of its class."""
    module = object.__new__(cls)
    for name, value in values.items():
        object.__setattr__(module, name, value)
    return module


@functools.cache
def _dynamic_fields(cls: type) -> frozenset[str]:
    """The fields of a module that are part of the pytree."""
    fields = dataclasses.fields(cls)
    return frozenset(f.name for f in fields if not f.metadata.get("static", False))


def _in_tree(tree: Any, path: str) -> Any:
    """`tree` at `path` with its modules scoped."""
    leaves, treedef = jax.tree_util.tree_flatten_with_path(tree, is_leaf=_is_module)
    if not any(_is_module(leaf) for _, leaf in leaves):
        return tree

    def scoped(steps, leaf):
        if not _is_module(leaf):
            return leaf
        where = _join(path, *map(_step, steps))
        plain = _plain(type(leaf))
        return _inside(leaf, _scoped(plain, where) if where else plain, where)

    return treedef.unflatten([scoped(steps, leaf) for steps, leaf in leaves])


def _join(*parts: Any) -> str:
    return "/".join(str(part) for part in parts if part != "")


def _part(field: str) -> str:
    """A field as a part of a scope; "" for a private one, as of `eqx.filter_vmap`."""
    return "" if field.startswith("_") else field


def _step(key: Any) -> str:
    """A step of a tree path as a part of a scope."""
    if hasattr(key, "name"):
        return _part(key.name)
    return str(getattr(key, "idx", getattr(key, "key", key)))


# Classes. There is one for each plain class and path, always the same: the class is
# part of the structure of the tree, by which JAX finds what it has compiled.


def _plain(cls: type) -> type:
    return getattr(cls, "_amp_plain", cls)


@functools.cache
def _scoped(cls: type, path: str) -> type:
    """The subclass of `cls` whose methods run in the scope `path`."""
    body = {
        "__module__": cls.__module__,
        "__qualname__": cls.__qualname__,
        "__doc__": cls.__doc__,
        "__reduce__": lambda self: (_restore, (cls, path, dict(vars(self)))),
        "_amp_plain": cls,
    }
    opened = {name: _method(getattr(cls, name), path) for name in methods(cls)}
    return type(cls)(cls.__name__, (cls,), body | opened, **nnx_options(cls))


def _restore(cls: type, path: str, values: dict[str, Any]) -> Any:
    """Undoes pickling."""
    return new(_scoped(cls, path), values)


def methods(cls: type) -> list[str]:
    """The methods that are defined above `eqx.Module` or `nnx.Module`."""
    fields = getattr(cls, "__dataclass_fields__", {})
    names: dict[str, None] = {}
    for base in cls.__mro__:
        if base is eqx.Module or base.__module__ == "flax.nnx.module":
            break
        names |= dict.fromkeys(vars(base))
    return [name for name in names if name not in fields and _is_method(cls, name)]


def _is_method(cls: type, name: str) -> bool:
    if name.startswith("__") and name != "__call__":
        return False
    raw = inspect.getattr_static(cls, name)
    if isinstance(raw, staticmethod | classmethod | property | type):
        return False
    return callable(getattr(cls, name)) and hasattr(raw, "__get__")


def _method(fn: Callable[..., Any], path: str) -> Callable[..., Any]:
    @functools.wraps(fn)
    def method(self, *args, **kwargs):
        with _calling(path):
            return fn(self, *args, **kwargs)

    return method


_path: ContextVar[str] = ContextVar("path of the module that is called", default="")


@contextlib.contextmanager
def _calling(path: str) -> Iterator[None]:
    """Opens the scope `path`, or the rest of it if its beginning is open already."""
    around = _path.get()
    if path == around:
        yield  # a method that another one of the same module calls
        return
    with within(_path, path), jax.named_scope(path.removeprefix(f"{around}/")):
        yield
