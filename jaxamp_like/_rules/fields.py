"""What the fields of a rule may hold, by their types: checked wherever a rule is made.

A rule is made by a function of the library, by its class, or from a saved policy. What
a type can't say (a range, fields that exclude each other) is checked by the class
itself."""

import functools
import types
import typing
from collections.abc import Callable
from dataclasses import fields
from typing import Any, Literal

import numpy as np

from .._suggestions import did_you_mean


def check_fields(rule: Any) -> None:
    """Checks the fields of a dataclass, and turns NumPy's numbers into Python's.

    Raises:
        TypeError: a field holds a value of another type than its own.
        ValueError: a field holds none of the strings that it may hold."""
    kinds = _kinds(type(rule))
    for field in fields(rule):
        value = _checked(getattr(rule, field.name), kinds[field.name], field.name)
        object.__setattr__(rule, field.name, value)


_kinds = functools.cache(typing.get_type_hints)


def _checked(value: Any, kind: Any, name: str) -> Any:
    """The value, if it is of one of the types that `kind` names."""
    for one in _alternatives(kind):
        origin, args = typing.get_origin(one), typing.get_args(one)
        if origin is Literal:
            if isinstance(value, str) and value in args:
                return value
        elif not isinstance(value, _ACCEPTED.get(one, origin or one)):
            continue
        elif origin is tuple:
            items: Any = value
            each = args[:1] * len(items) if args[-1] is Ellipsis else args
            if len(items) == len(each):
                pairs = enumerate(zip(items, each, strict=True))
                return tuple(_checked(x, k, f"{name}[{i}]") for i, (x, k) in pairs)
        elif one is bool or not isinstance(value, bool):
            return one(value) if one in _ACCEPTED else value
    *others, last = (word for one in _alternatives(kind) for word in _words(one))
    known = f"{', '.join(others)} or {last}" if others else last
    message = f"`{name}` must be {known}, but got {value!r}."
    literals = [k for k in _alternatives(kind) if typing.get_origin(k) is Literal]
    if not literals:
        raise TypeError(message)
    raise ValueError(message + did_you_mean(value, typing.get_args(literals[0])))


def _alternatives(kind: Any) -> tuple[Any, ...]:
    is_union = typing.get_origin(kind) in (types.UnionType, typing.Union)
    return typing.get_args(kind) if is_union else (kind,)


def _words(kind: Any) -> list[str]:
    """What a value of a type is, in words."""
    origin, args = typing.get_origin(kind), typing.get_args(kind)
    if origin is Literal:
        return list(map(repr, args))
    if origin is tuple and args[-1] is Ellipsis:
        return [f"a tuple, each item of which is {' or '.join(_words(args[0]))}"]
    if origin is tuple:
        return [f"a tuple of {' and '.join(word for k in args for word in _words(k))}"]
    return [_WORDS.get(origin or kind) or f"a {kind.__name__}"]


_ACCEPTED: dict[Any, Any] = {
    bool: (bool, np.bool_),
    int: (int, np.integer),
    float: (float, int, np.floating, np.integer),
}
_WORDS: dict[Any, str] = {
    bool: "True or False",
    int: "an integer",
    float: "a number",
    str: "a string",
    np.dtype: "a dtype",
    Callable: "callable",
    types.NoneType: "None",
}
