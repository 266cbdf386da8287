"""Linen and Haiku: functions that write their variables somewhere else as they run.

What is written while `amp` traces a function belongs to that trace: what holds the
variables would keep tracers, which fail later, in code that has nothing to do with it.
Neither library is imported unless the user has done so."""

import functools
import inspect
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any, NamedTuple, TypeVar

import jax

from .._jax import is_tracer

_F = TypeVar("_F", bound=Callable[..., Any])


class Holder(NamedTuple):
    """What holds variables that a call may write.

    Args:
        name: what it is.
        is_initialising: whether the call makes parameters, and little else is wanted.
        variables: reads them, as trees by the names of their collections.
        instead: what to write where `amp` stands around such a call."""

    name: str
    is_initialising: bool
    variables: Callable[[], dict[str, Any]]
    instead: str


def holders(fn: Any, args: Any, kwargs: Any) -> list[Holder]:
    """What holds variables that a call of `fn` may write."""
    modules = _bound_modules(fn, args, kwargs)
    return [*map(_of_linen, modules), *_of_haiku()]


def _of_linen(module: Any) -> Holder:
    return Holder(
        f"A {type(module).__name__}",
        module.is_initializing(),
        lambda: module.variables,
        "Leave the methods of modules as they are, and wrap the loss that calls "
        "`model.apply(..., mutable=[...])`: `amp(loss_fn)`.",
    )


def _of_haiku() -> list[Holder]:
    haiku = sys.modules.get("haiku")
    if haiku is None:
        return []
    try:
        is_initialising = haiku.running_init()
    except ValueError:  # not within `hk.transform`
        return []

    def variables() -> dict[str, Any]:
        keys = haiku.maybe_get_rng_sequence_state()
        return {"the keys of `hk.next_rng_key`": keys, **haiku.get_current_state()}

    instead = "Wrap what `hk.transform` makes: `amp(model.apply)`, or the loss around."
    return [Holder("A function of Haiku", is_initialising, variables, instead)]


def _bound_modules(fn: Any, args: Any, kwargs: Any) -> list[Any]:
    """Linen's modules with a scope that a call is given, or that `fn` closes over."""
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


@contextmanager
def refusing_to_write(held: Sequence[Holder]) -> Iterator[None]:
    """Raises an error if a call has left values of its own trace in variables."""
    before = {id(x) for holder in held for _, x in _leaves(holder)}
    yield
    for holder in held:
        for collection, x in _leaves(holder):
            if is_tracer(x) and id(x) not in before:
                raise TypeError(
                    f"{holder.name} writes its variables ({collection}) inside of "
                    f"`amp`, in whose trace they are lost. {holder.instead}"
                )


def _leaves(holder: Holder) -> list[tuple[str, Any]]:
    variables = holder.variables()
    return [(name, x) for name in variables for x in jax.tree.leaves(variables[name])]
