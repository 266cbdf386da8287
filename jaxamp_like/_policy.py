"""Which rule an equation gets: the policy dict, checked and looked up."""

import functools
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from difflib import get_close_matches
from typing import Any

import jax.extend.core.primitives as jax_primitives
import jax.numpy as jnp
import numpy as np

from ._dtypes import as_float_dtype
from ._errors import AmpError
from ._jax import Primitive
from ._primitives import CLASSES, FIXED
from ._rules import (
    Callback,
    Decision,
    Demand,
    Rule,
    Site,
    UseOriginalPrecision,
    use_original_precision,
    use_precision,
)
from ._structural import STRUCTURAL

AMP_DEFAULT = "amp_default"
AMP_STOP = ("amp_stop", "amp_step")
REWRITTEN = "amp_rewritten"
"""The scope around what `amp` has made: an outer `amp` leaves it as it is."""

_STOPS = frozenset({*AMP_STOP, REWRITTEN})

Key = Any  # a primitive, a scope, a path of scopes or a compiled regular expression


@dataclass(frozen=True)
class ByName(Rule):
    """Looks the primitive up by its name; unknown ones keep the author's dtypes."""

    rules: tuple[tuple[str, Rule], ...] = field(repr=False)

    @functools.cached_property
    def _table(self) -> dict[str, Rule]:
        return dict(self.rules)

    def rule_of(self, name: str) -> Rule:
        return self._table.get(name, use_original_precision)

    def demand(self, params: dict[str, Any], wanted: Demand) -> Demand:
        return wanted

    def decide(self, site: Site) -> Decision:
        return self.rule_of(site.primitive.name).decide(site)


def policy_by_name(table: Mapping[str, Rule]) -> dict[Any, Any]:
    """The policy dict of a table of rules by the names of primitives.

    Its keys are the primitives that JAX exports. Those that it does not export, and
    later ones, are looked up by name: under the key "amp_default"."""
    exported = [p for p in vars(jax_primitives).values() if isinstance(p, Primitive)]
    rules = {p: table[p.name] for p in exported if p.name in table}
    return {**rules, AMP_DEFAULT: ByName(tuple(table.items()))}


by_class = ByName(tuple(CLASSES.items()))

default_amp_policy: dict[Any, Any] = policy_by_name(CLASSES)
"""The policy that `amp` uses if none is given: a plain dict, to be extended by `|`.

It decides by numerics and by what surrounds an op. Contractions run in the compute
dtype; what leaves the range or the resolution of 16 bits runs as written; arithmetic
between low ops is low; data moves in the precision that it has."""


@dataclass(frozen=True)
class Found:
    """A rule, and the key of the policy under which it was found."""

    key: Key
    rule: Rule
    by_scope: bool = False


_STOPPED = Found(AMP_STOP[0], use_original_precision, by_scope=True)
_UNNAMED = Found(None, use_original_precision)


@dataclass(frozen=True, eq=False)
class CheckedPolicy:
    """A policy dict after its checks, as a hashable value (by identity)."""

    primitives: dict[Primitive, Rule] = field(default_factory=dict)
    names: dict[str, Rule] = field(default_factory=dict)
    paths: dict[tuple[str, ...], Rule] = field(default_factory=dict)
    patterns: dict[re.Pattern[str], Rule] = field(default_factory=dict)
    default: Rule | None = None

    def find(self, primitive: Primitive, scope: tuple[str, ...]) -> Found:
        """The rule of an equation: by scope (outermost first), primitive, default."""
        if not _STOPS.isdisjoint(scope):
            return _STOPPED
        found = self.find_scope(scope)
        if found is not None:
            return found
        if primitive in self.primitives:
            return Found(primitive, self.primitives[primitive])
        is_program = primitive.name in STRUCTURAL and primitive.name not in CLASSES
        if self.default is None or is_program:
            return _UNNAMED
        rule = self.default
        if isinstance(rule, ByName):
            rule = rule.rule_of(primitive.name)
        return Found(AMP_DEFAULT, rule)

    def find_scope(self, scope: tuple[str, ...]) -> Found | None:
        for depth in range(1, len(scope) + 1):
            for length in range(depth, 0, -1):  # among equals, the longest path
                part = scope[depth - length : depth]
                if length > 1 and part in self.paths:
                    return Found("/".join(part), self.paths[part], by_scope=True)
            if scope[depth - 1] in self.names:
                name = scope[depth - 1]
                return Found(name, self.names[name], by_scope=True)
            path = "/".join(scope[:depth])
            for pattern, rule in self.patterns.items():
                if pattern.fullmatch(path):
                    return Found(pattern, rule, by_scope=True)
        return None

    @property
    def is_empty(self) -> bool:
        tables = (self.primitives, self.names, self.paths, self.patterns)
        return self.default is None and not any(tables)

    def items(self) -> list[tuple[Key, Rule]]:
        """The policy's keys and rules, as they were given."""
        paths = {"/".join(parts): rule for parts, rule in self.paths.items()}
        default = {} if self.default is None else {AMP_DEFAULT: self.default}
        tables = (self.primitives, self.names, paths, self.patterns, default)
        return [item for table in tables for item in table.items()]

    def own_keys(self) -> list[Key]:
        """The keys that the user added: not those of the policy that was extended.

        What that one says of a primitive, it says by name too."""
        base = self.default if isinstance(self.default, ByName) else by_class
        own = [p for p, rule in self.primitives.items() if rule != base.rule_of(p.name)]
        return [*own, *self.names, *map("/".join, self.paths), *self.patterns]


def checked_policy(policy: Any) -> CheckedPolicy:
    """Checks a policy dict: every key and every rule, before anything is traced.

    Equal policies give one object, since rewritten programs are remembered by it."""
    if not isinstance(policy, Mapping):
        raise TypeError(
            "`amp_policy` must be a dict that maps primitives or scope names to rules, "
            f"but got {type(policy).__name__}. For example: "
            '`default_amp_policy | {"attention": "float32"}`.'
        )
    items = tuple(
        (key, as_rule(value, f"amp_policy[{_show(key)}]"))
        for key, value in policy.items()
    )
    try:
        return _checked(items)
    except TypeError as e:
        if "unhashable" not in str(e):
            raise
    raise TypeError(
        "Every rule of `amp_policy` must be hashable, since the policy is part of the "
        f"key of caches. Unhashable: {[r for _, r in items if not _is_hashable(r)]}."
    )


def _is_hashable(rule: Rule) -> bool:
    try:
        hash(rule)
    except TypeError:
        return False
    return True


@functools.lru_cache(maxsize=128)
def _checked(items: tuple[tuple[Key, Rule], ...]) -> CheckedPolicy:
    checked = CheckedPolicy()
    for key, rule in items:
        if isinstance(key, Primitive):
            _check_primitive_rule(key, rule)
            checked.primitives[key] = rule
        elif isinstance(key, re.Pattern):
            checked.patterns[key] = rule
        elif not isinstance(key, str):
            raise _bad_key(key)
        elif key == AMP_DEFAULT:
            object.__setattr__(checked, "default", rule)
        elif key in AMP_STOP:
            if not isinstance(rule, UseOriginalPrecision):
                raise AmpError(
                    f"{key!r} always means the author's dtypes; remove the key."
                )
        elif len(parts := tuple(filter(None, key.split("/")))) > 1:
            checked.paths[parts] = rule
        elif parts:
            checked.names[parts[0]] = rule
        else:
            raise _bad_key(key)
    return checked


def as_rule(value: Any, argument: str) -> Rule:
    """Returns `value` as a rule, or says which `argument` is none."""
    if isinstance(value, Rule):
        return value
    if isinstance(value, str | np.dtype) or _is_scalar_type(value):
        try:
            as_float_dtype(value, "dtype")
        except TypeError:
            close = get_close_matches(str(value), ["float32", "float16", "bfloat16"], 1)
            hint = f" Did you mean {close[0]!r}?" if close else ""
            raise TypeError(
                f"The rule of `{argument}` is {value!r}, which is no floating dtype."
                f"{hint}"
            ) from None
        return use_precision(value)
    if callable(value):
        return Callback(value)
    raise TypeError(
        f"The rule of `{argument}` must be a rule such as "
        "`use_compute_precision`, a dtype such as 'float32', or a callable "
        "`rule(compute_dtype, original_dtypes, *invars, **bind_params) -> (invars, "
        f"bind_params)`, but got {value!r}."
    )


def _is_scalar_type(value: Any) -> bool:
    """Whether `value` is `jnp.float32`, `np.float32`, `float` or the like."""
    is_number = isinstance(value, type) and issubclass(value, np.generic | float | int)
    return is_number or type(value) is type(jnp.float32)


def _check_primitive_rule(primitive: Primitive, rule: Rule) -> None:
    is_original = isinstance(rule, UseOriginalPrecision)
    if primitive.name in STRUCTURAL and not is_original:
        raise AmpError(
            f"`{primitive}` holds a whole program, so a casting rule can't stand for "
            "it. Put rules on the primitives inside, or on a `jax.named_scope` around "
            "it; only `use_original_precision` leaves all that is inside as written."
        )
    if (
        primitive.name in FIXED
        and not is_original
        and rule != CLASSES.get(primitive.name)
    ):
        raise AmpError(
            f"`{primitive}` only exists in the dtypes that it was traced with: it has "
            "no low-precision kernel, or carries code in these dtypes. Remove the key."
        )


def _bad_key(key: Key) -> TypeError:
    hint = ""
    if callable(key) and not isinstance(key, type):
        name = getattr(key, "__name__", "")
        if isinstance(getattr(jax_primitives, f"{name}_p", None), Primitive):
            hint = f" Use the primitive that it binds: `jax.lax.{name}_p`."
    return TypeError(
        "A key of `amp_policy` must be a primitive (`jax.lax.dot_general_p`), the "
        "name of a `jax.named_scope`, a path of such names joined by '/', a compiled "
        f"regular expression, or {AMP_DEFAULT!r}, but got {_show(key)}.{hint}"
    )


def _show(key: Key) -> str:
    return str(key) if isinstance(key, Primitive) else repr(key)
