"""Flax Linen: modules that write their variables to a scope while they are called.

What is written while `amp` traces a method belongs to that trace: the scope would keep
tracers, which fail later, in code that has nothing to do with it. Flax is not imported
unless the user has done so."""

import functools
import inspect
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any, TypeVar

import jax

from .._jax import is_tracer

_F = TypeVar("_F", bound=Callable[..., Any])


def bound_modules(fn: Any, args: Any, kwargs: Any) -> list[Any]:
    """The modules with a scope that a call is given, or that `fn` closes over."""
    linen = sys.modules.get("flax.linen")
    if linen is None:
        return []
    while isinstance(fn, functools.partial):
        args, kwargs, fn = (args, fn.args), (kwargs, fn.keywords), fn.func
    inner = inspect.unwrap(fn)
    given = fn, getattr(fn, "__self__", None), *_closed_over(inner)
    leaves = [*given, *jax.tree.leaves((args, kwargs))]
    modules = {id(x): x for x in leaves if isinstance(x, linen.Module)}
    return [module for module in modules.values() if module.scope is not None]


def _closed_over(fn: Callable[..., Any]) -> Iterator[Any]:
    for cell in getattr(fn, "__closure__", None) or ():
        with suppress(ValueError):  # of a variable that has no value yet
            yield cell.cell_contents


def taking_over_compact(fn: Any, wrapper: _F) -> _F:
    """`wrapper`, marked as `nn.compact` marks a method, if `fn` is.

    Linen would otherwise say that submodules must be made under `nn.compact`."""
    if hasattr(fn, "compact"):
        vars(wrapper)["compact"] = fn.compact
    return wrapper


def are_initialising(modules: list[Any]) -> bool:
    """Whether modules are within `init`, which makes their parameters."""
    return any(module.is_initializing() for module in modules)


@contextmanager
def refusing_to_write(modules: list[Any]) -> Iterator[None]:
    """Raises an error if a call has left values of its own trace in variables."""
    before = {id(x) for module in modules for _, x in _variables(module)}
    yield
    for module in modules:
        for collection, x in _variables(module):
            if is_tracer(x) and id(x) not in before:
                raise TypeError(
                    f"A {type(module).__name__} writes its variables "
                    f"({collection!r}) inside of `amp`, in whose trace they are lost. "
                    "Leave the methods of modules as they are, and wrap the loss that "
                    "calls `model.apply(..., mutable=[...])`: `amp(loss_fn)`."
                )


def _variables(module: Any) -> list[tuple[str, Any]]:
    held = module.variables
    return [(name, x) for name in held for x in jax.tree.leaves(held[name])]
