"""Models of Equinox and NNX that compute in mixed precision, and are still models.

A function around a model would hide it: transforms such as `eqx.filter_grad` find
nothing to differentiate by in a function, and give no error. So `amp(model)` is a model
with the same parameters, an instance of a subclass of its class.

All of its methods are mixed: a model that is trained by a method of its own, such as
`model.encode`, must not silently run in full precision."""

import functools
from collections.abc import Callable, Hashable
from typing import Any, Protocol

import equinox as eqx
import jax

from .._amp_mistakes import computes_later
from .._errors import hiding_frames
from .._jax import is_array_or_shape
from .nnx import is_nnx_module, is_node, nnx_options
from .scopes import methods, new


class _NnxModule(Protocol):
    """What type checkers tell a `nnx.Module` by; Flax need not be installed."""

    def set_attributes(self, *filters: Any, **attributes: Any) -> None: ...
    def iter_modules(self) -> Any: ...


ModuleLike = eqx.Module | _NnxModule
Mix = Callable[[Callable[..., Any]], Callable[..., Any]]


def is_model(fn: Any) -> bool:
    """Whether a callable is an object of Equinox or NNX that holds parameters."""
    if is_nnx_module(fn):
        return True
    return isinstance(fn, eqx.Module) and holds_arrays(fn)


def holds_arrays(fn: Any) -> bool:
    """Whether a callable is a pytree with arrays in it."""
    leaves = jax.tree.leaves(fn)
    is_leaf = any(leaf is fn for leaf in leaves)
    return not is_leaf and any(map(is_array_or_shape, leaves))


def mixed_model(
    model: Any, key: Hashable, mix: Mix, rewrap: Mix, kind: str = "Mixed"
) -> Any:
    """`model` with methods that `mix` has rewritten.

    An Equinox module is copied, sharing its arrays. An NNX module shares all of its
    attributes with the result: what changes in the one changes in the other.

    Args:
        model: a model for which `is_model` is true.
        key: equal for two `mix` that do the same. Equal keys give one class, which is
            part of the tree's structure, by which JAX finds what it has compiled.
        mix: rewrites a function to mixed precision.
        rewrap: takes the original model, when it is unpickled, and returns the mixed
            one.
        kind: what the name of the class begins with."""
    ignored = _IgnoredInKey(mix), _IgnoredInKey(rewrap)
    cls = _mixed_class(type(model), key, *ignored, kind)
    return _as_instance(model, cls)


class _IgnoredInKey:
    """Holds an argument that must not count in the key of a cache."""

    def __init__(self, value: Any):
        self.value = value

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _IgnoredInKey)

    def __hash__(self) -> int:
        return 0


@functools.cache
def _mixed_class(
    cls: type, key: Hashable, mix: _IgnoredInKey, rewrap: _IgnoredInKey, kind: str
):
    of_nnx = not issubclass(cls, eqx.Module)

    def method(fn: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(fn)
        def body(self, *args, **kwargs):
            if type(self) is made:  # a copy that the trace has made of an NNX model
                object.__setattr__(self, "__class__", cls)
            return fn(self, *args, **kwargs)

        rewritten = mix.value(body)

        @functools.wraps(fn)
        @hiding_frames
        def method(self, *args, **kwargs):
            is_traced = of_nnx and kind == "Mixed"  # NNX objects are copied then
            plain = self if is_traced else _as_instance(self, cls)
            out = rewritten(plain, *args, **kwargs)
            # A model that is made of this one, as by `eqx.tree_at`, is mixed as well.
            return jax.tree.map(
                mixed_like_this, out, is_leaf=lambda x: is_plain(x) or is_node(x)
            )

        return method

    def is_plain(x: Any) -> bool:
        return type(x) is cls

    def mixed_like_this(x: Any) -> Any:
        return _as_instance(x, made) if is_plain(x) else x

    body: dict[str, Any] = {
        "__module__": cls.__module__,
        "__qualname__": f"{kind}{cls.__qualname__.rpartition('.')[2]}",
        "__doc__": cls.__doc__,
        "__reduce__": lambda self: (rewrap.value, (_as_instance(self, cls),)),
    }
    if not of_nnx:
        # It is compared by identity like a function, as JAX's transforms expect.
        body |= {"__hash__": object.__hash__, "__eq__": object.__eq__}
    body |= {name: method(getattr(cls, name)) for name in _mixed_methods(cls)}
    made = type(cls)(f"{kind}{cls.__name__}", (cls,), body, **nnx_options(cls))
    type.__setattr__(made, "_amp_plain", made)  # what `scope_modules` begins with
    return made


def _mixed_methods(cls: type) -> list[str]:
    # Of Equinox's wrappers (`eqx.filter_jit`, bound methods), only the call is mixed.
    is_wrapper = cls.__module__.startswith("equinox._")
    names = ["__call__"] if is_wrapper else methods(cls)
    # What returns before it computes can't be rewritten, and is left as it is.
    return [name for name in names if computes_later(getattr(cls, name)) is None]


def _as_instance(model: Any, cls: type) -> Any:
    """`model` as an instance of `cls`; an NNX model shares its attributes with it."""
    if not is_nnx_module(model):
        return new(cls, dict(vars(model)))
    made = object.__new__(cls)
    object.__setattr__(made, "__dict__", model.__dict__)
    return made
