"""Which arguments of a function hold its parameters.

The user says so by `argnums`; by default it is the first argument, as for `jax.grad`.
The container, size and name of an argument play no role."""

import functools
import inspect
import operator
from collections.abc import Callable
from typing import Any

import jax

from ._frameworks.modules import is_module_with_arrays
from ._frameworks.nnx import FunctionalCall
from ._rules import Origin

Argnums = tuple[int, ...]


def as_argnums(argnums: Any) -> Argnums:
    """`argnums` as a tuple of integers, or an error that names it."""
    try:
        given = argnums if isinstance(argnums, tuple | list) else (argnums,)
        return tuple(map(operator.index, given))
    except TypeError:
        raise TypeError(
            f"`argnums` must be an integer or a tuple of integers, but got {argnums!r}."
            + " Give an `nnx.DiffState` to `tx.value_and_grad(..., argnums=...)`."
            * (type(argnums).__name__ == "DiffState")
        ) from None


def after_model(argnums: Argnums) -> Argnums:
    """`argnums` where the model comes first, with the parameters that it holds."""
    return (0, *(i + (i >= 0) for i in argnums))


def positions_of(argnums: Argnums, num_args: int, name: str) -> list[int]:
    """The non-negative positions that `argnums` names; none if nothing was passed."""
    for i in argnums:
        if not -num_args <= i < max(num_args, 1):
            raise ValueError(
                f"`argnums` names argument {i}, but {name!r} was called with "
                f"{num_args} positional arguments."
            )
    return [range(num_args)[i] for i in argnums if num_args]


def argnums_of(fn: Callable[..., Any]) -> Argnums:
    """The arguments that hold parameters, if `argnums` is not given.

    It is the first one. There is none if the function, without wrappers such as those
    of `jax.jit`, is a module that holds its own parameters or a method of one."""
    inner: Any = inspect.unwrap(fn)
    while isinstance(inner, functools.partial):
        inner = inspect.unwrap(inner.func)
    return () if is_module_with_arrays(inner) else (0,)


def origins_of(
    fn: Callable[..., Any], args: Any, kwargs: dict[str, Any], argnums: Argnums
) -> list[Origin]:
    """For each leaf of `(args, kwargs)`, whether it is a parameter."""
    if isinstance(fn, FunctionalCall):
        return fn.labels(functools.partial(_labels, argnums=argnums), Origin.DATA)
    return _labels(fn, args, kwargs, argnums)[len(jax.tree.leaves(fn)) :]


def _labels(
    fn: Any,
    args: Any,
    kwargs: dict[str, Any],
    argnums: Argnums,
    is_leaf: Callable[[Any], bool] | None = None,
) -> list[Origin]:
    """The origin of each leaf of `(fn, args, kwargs)`."""
    names = _in_order(fn) if kwargs else []
    by_name = {i: name for i, name in enumerate(names) if name in kwargs}
    num_args = max([len(args), *(i + 1 for i in by_name)])
    name = getattr(fn, "__name__", type(fn).__name__)
    chosen = set(positions_of(argnums, num_args, name))
    named = {by_name[i] for i in chosen & by_name.keys()}

    pairs = [
        (fn, Origin.CLOSED_OVER),
        *((x, _said(i in chosen)) for i, x in enumerate(args)),
        *((kwargs[k], _said(k in named)) for k in sorted(kwargs)),
    ]
    return [
        origin for tree, origin in pairs for _ in jax.tree.leaves(tree, is_leaf=is_leaf)
    ]


def _said(is_parameter: bool) -> Origin:
    return Origin.PARAMETER if is_parameter else Origin.DATA


def _in_order(fn: Callable[..., Any]) -> list[str]:
    """The names of arguments, as the function declares them."""
    try:
        parameters = inspect.signature(fn).parameters.values()
    except (TypeError, ValueError):  # of some callables they can't be known
        return []
    return [
        p.name for p in parameters if p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)
    ]


def returns_tree_like(args: tuple[Any, ...], out: Any) -> bool:
    """Whether a result is a tree like the first argument, of two arrays or more.

    A gradient by parameters is one, and so are the parameters that a step returns."""
    wanted = _types(args[0]) if args else ((), [])
    parts = out if isinstance(out, tuple | list) else ()
    is_tree = len(wanted[1]) >= 2
    return is_tree and any(_types(x) == wanted for x in (out, *parts))


def _types(tree: Any) -> tuple[Any, list[Any]]:
    leaves, structure = jax.tree.flatten(tree)
    return structure, [getattr(x, "shape", None) for x in leaves]
