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
"""The scope around what `amp` has made: an outer `amp` leaves it as it is."""

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

    Its keys are the primitives that JAX exports. Those that it does not export, and
    later ones, are looked up by name: under the key "amp_default"."""
    rules = {p: table[name] for name, p in EXPORTED.items() if name in table}
    return {**rules, AMP_DEFAULT: ByName(tuple(table.items()))}


by_class = ByName(tuple(CLASSES.items()))


class _Given(dict[Any, Any]):
    """A dict that can't be changed by accident, for everyone in the process."""

    def _refuse(self, *args: Any, **kwargs: Any) -> NoReturn:
        raise TypeError(
            "`default_amp_policy` is the same for all of the process, and is not "
            "changed in place. Make another: `default_amp_policy | {key: rule}`."
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

Contractions read the compute dtype and give results in it; all else is computed as
written, from these results, and data moves in the precision that it has. See
`docs/default_policy.md`."""


class Lookup(Protocol):
    """What finds the rule of an equation: a policy, checked."""

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
    """Whether what is inside of `primitive` is decided, equation by equation."""
    return primitive.name in STRUCTURAL and primitive.name not in CLASSES


_LAYER_CLASS = "eqx.nn."  # Equinox's layers put the name of their class in the stack


def paths_to(scope: Scope) -> list[Scope]:
    """The path of a scope: as it stands, and as a user may write it.

    The class names that Equinox's layers add stand between the names of modules, so the
    path without them is a path too: "attn/query_proj"."""
    if not scope or scope[-1].startswith(_LAYER_CLASS):
        return [scope]
    short: Scope = tuple(x for x in scope if not x.startswith(_LAYER_CLASS))
    return [scope] if short == scope else [scope, short]


def endings(path: Scope) -> Iterator[Scope]:
    """What a key may be that matches at the end of `path`, the longest first."""
    return (path[start:] for start in range(len(path)))


def show_key(key: Key) -> str:
    return str(key) if isinstance(key, Primitive) else repr(key)
