"""The rules of a policy as an immutable value: hashable, comparable, picklable."""

import re
from collections.abc import Iterator, Mapping
from typing import Any

import jax.extend.core.primitives as jax_primitives

from .._errors import AmpError
from .._jax import Primitive
from .._rules import Rule
from .._rules.given import as_rule
from .dictionary import (
    AMP_DEFAULT,
    AMP_STOP,
    CheckedPolicy,
    Key,
    checked_policy,
    show_key,
)


class FrozenRules(Mapping[Key, Rule]):
    """A policy dict that can't change.

    Two are equal if they say the same: keys are in normal form ("/a/b/" is "a/b"), and
    their order only counts among regular expressions, of which the first that matches
    is taken."""

    def __init__(self, rules: Mapping[Any, Any]):
        checked_policy(rules, "rules")
        items = {
            normal_key(key): as_rule(rule, f"rules[{show_key(key)}]")
            for key, rule in rules.items()
            if key not in AMP_STOP  # always means the same
        }
        self._rules = {key: items[key] for key in sorted(items, key=_order)}
        self._hash = hash(tuple(self._rules.items()))

    def __getitem__(self, key: Key) -> Rule:
        return self._rules[normal_key(key)]

    def __iter__(self) -> Iterator[Key]:
        return iter(self._rules)

    def __len__(self) -> int:
        return len(self._rules)

    def __or__(self, other: Mapping[Any, Any]) -> "FrozenRules":
        return FrozenRules(self._rules | dict(other))

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, FrozenRules):
            return NotImplemented
        return tuple(self._rules.items()) == tuple(other._rules.items())

    def __hash__(self) -> int:
        return self._hash

    def __repr__(self) -> str:
        return repr(self._rules)

    def __reduce__(self) -> Any:
        rows = [(PickledKey(key), rule) for key, rule in self._rules.items()]
        return _unpickle, (rows,)

    def checked(self) -> CheckedPolicy:
        return checked_policy(self._rules, "rules")


def _unpickle(rows: list[tuple["PickledKey", Rule]]) -> FrozenRules:
    return FrozenRules({key.key: rule for key, rule in rows})


class PickledKey:
    """A key whose pickle names primitives: a copy of one would be another."""

    def __init__(self, key: Key):
        self.key = key

    def __reduce__(self) -> Any:
        if isinstance(self.key, Primitive):
            return _pickled_primitive, (primitive_name(self.key),)
        return PickledKey, (self.key,)


def _pickled_primitive(name: str) -> PickledKey:
    return PickledKey(primitive_by_name(name))


def normal_key(key: Key) -> Key:
    if isinstance(key, str):
        return "/".join(filter(None, key.split("/")))
    if not is_path(key) or EXPRESSION.search("".join(key)):
        return key
    return "/".join(key)


def is_path(key: Any) -> bool:
    """Whether a key is a path as a tuple, whose names stand for themselves."""
    is_tuple = isinstance(key, tuple) and bool(key)
    return is_tuple and all(isinstance(x, str) and x and "/" not in x for x in key)


EXPRESSION = re.compile(r"[*+?^$|()\[\]{}\\]")
"""What a string may be a regular expression by."""


def _order(key: Key) -> tuple[int, str]:
    if isinstance(key, re.Pattern):
        return 2, ""  # sorting is stable: they keep their order
    if isinstance(key, str):
        return (3, "") if key == AMP_DEFAULT else (1, key)
    return 0, key.name


def primitive_name(primitive: Primitive) -> str:
    """The name by which `primitive_by_name` finds it again, perhaps in another JAX."""
    if _EXPORTED.get(primitive.name) is primitive:
        return primitive.name
    raise AmpError(
        f"The primitive `{primitive}` can't be saved: JAX does not export it, so it "
        "can't be found by its name again. Put its rule under a `jax.named_scope` "
        "around it instead."
    )


def primitive_by_name(name: str) -> Primitive:
    """The primitive of this name among those that JAX exports."""
    known = name if name in _EXPORTED else _RENAMED.get(name, name)
    if known not in _EXPORTED:
        raise AmpError(
            f"This version of JAX exports no primitive called {name!r}. Remove its "
            "rule from the saved policy, or load it with the JAX that it was saved by."
        )
    return _EXPORTED[known]


_EXPORTED: dict[str, Primitive] = {
    value.name: value
    for value in vars(jax_primitives).values()
    if isinstance(value, Primitive)
}
_RENAMED = {"pjit": "jit", "jit": "pjit", "remat2": "checkpoint"}  # between versions
