"""Linen, Haiku and Keras: functions that write variables elsewhere as they run.

What is written while `amp` traces a function belongs to that trace: what holds the
variables would keep tracers, which fail later, in code that has nothing to do with it.
None of them is imported unless the user has done so."""

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
        instead: what to write where `amp` stands around such a call.
        put_back: writes what `variables` has read, if what holds them lives on."""

    name: str
    is_initialising: bool
    variables: Callable[[], dict[str, Any]]
    instead: str
    put_back: Callable[[dict[str, Any]], None] = lambda _: None


def holders(fn: Any, args: Any, kwargs: Any) -> list[Holder]:
    """What holds variables that a call of `fn` may write."""
    linen, keras = (sys.modules.get(name) for name in ("flax.linen", "keras"))
    reached = _reached(fn, args, kwargs) if linen or keras else []
    modules = _instances(reached, linen and linen.Module)
    layers = _instances(reached, keras and keras.Layer)
    return [
        *(_of_linen(module) for module in modules if module.scope is not None),
        *_of_haiku(),
        *map(_of_keras, layers),
    ]


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


def _of_keras(layer: Any) -> Holder:
    def variables() -> dict[str, Any]:
        values = {v.path: _value_in_keras(v) for v in layer.variables}
        return {path: x for path, x in values.items() if x is not None}

    def put_back(values: dict[str, Any]) -> None:
        for variable in layer.variables:
            if variable.path in values:
                variable.assign(values[variable.path])

    instead = (
        "Call the model once before, so that it is built. To train it, wrap a loss "
        "that calls `model.stateless_call`, which returns what it writes."
    )
    name = f"A {type(layer).__name__} of Keras"
    return Holder(name, False, variables, instead, put_back)


def _value_in_keras(variable: Any) -> Any:
    """What a variable of Keras holds; `None` if it holds nothing at present."""
    try:
        value = variable.value
    except TypeError:  # `fit` has freed it, and keeps its value elsewhere
        return None
    # What is yet to be built has another value each time that it is read.
    return value if variable.value is value else None


def _reached(fn: Any, args: Any, kwargs: Any) -> list[Any]:
    """What a call is given, what it is a method of, and what `fn` closes over."""
    while isinstance(fn, functools.partial):
        args, kwargs, fn = (args, fn.args), (kwargs, fn.keywords), fn.func
    given = fn, getattr(fn, "__self__", None), *_closed_over(inspect.unwrap(fn))
    return [*given, *jax.tree.leaves((args, kwargs))]


def _instances(reached: list[Any], cls: type | None) -> list[Any]:
    found = [x for x in reached if cls is not None and isinstance(x, cls)]
    return list({id(x): x for x in found}.values())


def _closed_over(fn: Callable[..., Any]) -> Iterator[Any]:
    """What the variables hold that a function reads from outside, globals too."""
    known = getattr(fn, "__globals__", {})
    names = getattr(getattr(fn, "__code__", None), "co_names", ())
    yield from (known[name] for name in names if name in known)
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
    before = [holder.variables() for holder in held]
    known = {id(x) for variables in before for x in jax.tree.leaves(variables)}
    yield
    for holder, old in zip(held, before, strict=True):
        for collection, now in holder.variables().items():
            if any(is_tracer(x) and id(x) not in known for x in jax.tree.leaves(now)):
                holder.put_back(old)
                raise TypeError(
                    f"{holder.name} writes its variables ({collection}) inside of "
                    f"`amp`, in whose trace they are lost. {holder.instead}"
                )
