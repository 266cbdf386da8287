"""Trees of arguments and results as data: what an artifact says of how it is called.

Each node is written by its kind and name, so that no code of the model is needed to
read it. Nodes that only such code can make (modules, a user's own classes) are refused
when an artifact is saved."""

import functools
import math
from collections import namedtuple
from collections.abc import Callable, Iterator
from typing import Any

_PLAIN = (bool, int, float, str)


def encode(tree: Any, is_array: Callable[[Any], bool], what: str) -> Any:
    """A tree as JSON; arrays are left out, and numbered in JAX's order of leaves.

    Raises:
        TypeError: it holds something that can't be written so; the message names it."""
    places: Iterator[int] = iter(range(10**9))

    def go(node: Any, path: str) -> Any:
        if node is None:
            return {"none": True}
        if is_array(node):
            return {"array": next(places)}
        if isinstance(node, dict) and type(node) is dict:
            keys = sorted(node)  # as JAX flattens it
            if not all(isinstance(key, str) for key in keys):
                raise TypeError(_cannot(what, path, "a dict with keys that are no str"))
            return {"dict": [[key, go(node[key], f"{path}[{key!r}]")] for key in keys]}
        if isinstance(node, tuple) and hasattr(node, "_fields"):
            names: tuple[str, ...] = getattr(node, "_fields")  # noqa: B009
            items = [
                [name, go(getattr(node, name), f"{path}.{name}")] for name in names
            ]
            return {"namedtuple": [type(node).__name__, items]}
        if type(node) in (list, tuple):
            items = [go(x, f"{path}[{i}]") for i, x in enumerate(node)]
            return {type(node).__name__: items}
        if isinstance(node, float) and not math.isfinite(node):
            return {"float": str(float(node))}  # JSON has neither infinities nor NaNs
        if isinstance(node, _PLAIN):
            return {"value": node}
        raise TypeError(_cannot(what, path, f"a {type(node).__name__}"))

    return go(tree, "")


def _cannot(what: str, path: str, kind: str) -> str:
    return (
        f"{what} of an artifact are arrays and plain values in dicts, lists, tuples "
        f"and named tuples, but {path or 'the whole'} is {kind}. Wrap the function so "
        "that it takes and returns such."
    )


def decode(data: Any, arrays: list[Any]) -> Any:
    """The tree that `encode` wrote as `data`, with `arrays` in their places."""
    ((kind, value),) = data.items()
    if kind == "none":
        return None
    if kind == "array":
        return arrays[value]
    if kind == "value":
        return value
    if kind == "float":
        return float(value)
    if kind == "dict":
        return {key: decode(node, arrays) for key, node in value}
    if kind == "namedtuple":
        typename, fields = value
        made = _named_tuple(typename, tuple(name for name, _ in fields))
        return made(*(decode(node, arrays) for _, node in fields))
    items = [decode(node, arrays) for node in value]
    return tuple(items) if kind == "tuple" else items


@functools.cache
def _named_tuple(typename: str, names: tuple[str, ...]) -> Any:
    """A class, made only once, so that trees of two calls have the same structure."""
    return namedtuple(typename, names)
