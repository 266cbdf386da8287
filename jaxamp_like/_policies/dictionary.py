"""The policy dict: what its keys mean, and the one that `amp` uses by default."""

import functools
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, NoReturn, Protocol

import jax.extend.core.primitives as jax_primitives

from .._jax import Primitive
from .._rules import Decision, Demand, Match, Rule, Site, use_original_precision
from .._structural import STRUCTURAL
from .classes import CLASSES

AMP_DEFAULT = "amp_default"
AMP_STOP = ("amp_stop", "amp_step")
REWRITTEN = "amp_rewritten"
"""The scope around equations that `amp` has made; an outer `amp` leaves them alone."""

_STOPS = frozenset({*AMP_STOP, REWRITTEN})

Scope = tuple[str, ...]
Key = Any  # a primitive, a scope, a path of scopes or a compiled regular expression


EXPORTED: dict[str, Primitive] = {
    value.name: value
    for value in vars(jax_primitives).values()
    if isinstance(value, Primitive)
}
"""The primitives that JAX exports, by their names."""


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

    Its keys are the primitives of the table that JAX exports. All other primitives are
    looked up by name, in the table under the key "amp_default"."""
    rules = {p: table[name] for name, p in EXPORTED.items() if name in table}
    return {**rules, AMP_DEFAULT: ByName(tuple(table.items()))}


by_class = ByName(tuple(CLASSES.items()))


class _Given(dict[Any, Any]):
    """A dict that can't be changed in place, since the whole process shares it."""

    def _refuse(self, *args: Any, **kwargs: Any) -> NoReturn:
        raise TypeError(
            "`default_amp_policy` is the same for all of the process, and is not "
            "changed in place. Make another: `default_amp_policy | {key: rule}`."
        )

    def __ror__(self, other: Any) -> dict[Any, Any]:
        if not isinstance(other, Mapping):
            return NotImplemented
        if lost := [k for k in other if k in self and other[k] != self[k]]:
            raise TypeError(
                f"In `{{...}} | default_amp_policy` the default's rules come last, and "
                f"replace yours of {', '.join(map(show_key, lost))}. Write "
                "`default_amp_policy | {...}`."
            )
        return {**other, **self}

    def __add__(self, other: Any) -> NoReturn:
        raise TypeError(
            "Policies are joined by `|`: `default_amp_policy | {key: rule}`."
        )

    __setitem__: Any = _refuse
    __delitem__: Any = _refuse
    __ior__: Any = _refuse
    update: Any = _refuse
    setdefault: Any = _refuse
    pop: Any = _refuse
    popitem: Any = _refuse
    clear: Any = _refuse

    def __reduce__(self) -> Any:  # a copy is a dict like any other
        return dict, (dict(self),)


default_amp_policy: dict[Any, Any] = _Given(policy_by_name(CLASSES))
"""The policy that `amp` uses if none is given: a plain dict, to be extended by `|`.

Contractions read the compute dtype and give results in it. All else is computed from
these results in the author's dtypes, and data is moved in the precision that it has.
See `docs/default_policy.md`."""


class Lookup(Protocol):
    """A checked policy, which finds the rule of an equation."""

    def find(self, primitive: Primitive, scope: tuple[str, ...]) -> Match:
        """The rule of an equation of `primitive` in `scope`."""
        ...

    def own_keys(self) -> list[Key]:
        """The keys that the user gave: each should match some equation."""
        ...

    def items(self) -> Iterable[tuple[Key, Any]]:
        """All keys, with the rule, limit or policy that stands under each."""
        ...


def is_stopped(scope: tuple[str, ...]) -> bool:
    """Whether `amp_stop` or an inner `amp` stands in the name stack."""
    return not _STOPS.isdisjoint(scope)


def is_program(primitive: Primitive) -> bool:
    """Whether `primitive` holds a program whose equations are decided one by one."""
    return primitive.name in STRUCTURAL and primitive.name not in CLASSES


_LAYER_CLASS = "eqx.nn."  # Equinox's layers open a scope named after their class


def paths_to(scope: Scope) -> list[Scope]:
    """The path of a scope as it is, and without the class names of Equinox's layers.

    Equinox adds these class names between the names of modules, but users may leave
    them out, and write "attn/query_proj"."""
    if not scope or scope[-1].startswith(_LAYER_CLASS):
        return [scope]
    short: Scope = tuple(x for x in scope if not x.startswith(_LAYER_CLASS))
    return [scope] if short == scope else [scope, short]


def endings(path: Scope) -> Iterator[Scope]:
    """The paths that `path` ends with, the longest first."""
    return (path[start:] for start in range(len(path)))


def show_key(key: Key) -> str:
    return str(key) if isinstance(key, Primitive) else repr(key)
