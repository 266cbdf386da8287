"""What a policy was measured on: the contractions, by scope, that it decides of."""

import functools
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from .._errors import AmpError
from .._jax import Primitive
from .._primitives import CONTRACTIONS
from .._rules import UseOriginalPrecision
from .._rules.measured import Unmeasured
from .dictionary import Found, Key, Lookup, Scope, is_stopped


@dataclass(frozen=True)
class Measured:
    """The primitives of the contractions that were measured, by the path of a scope.

    Args:
        rows: paths, sorted, each with the names of primitives, sorted."""

    rows: tuple[tuple[str, tuple[str, ...]], ...]

    @classmethod
    def of(cls, contractions: Iterable[tuple[Scope, str]]) -> "Measured":
        """Of scopes with the names of primitives."""
        found: dict[str, set[str]] = {}
        for scope, primitive in contractions:
            found.setdefault("/".join(scope), set()).add(primitive)
        return cls(tuple((path, tuple(sorted(found[path]))) for path in sorted(found)))

    @classmethod
    def from_dict(cls, data: Any) -> "Measured":
        """Of what `to_dict` gave.

        Raises:
            AmpError: it is something else."""

        def is_row(path: Any, names: Any) -> bool:
            is_list = isinstance(path, str) and isinstance(names, list | tuple)
            return is_list and all(name in [*CONTRACTIONS] for name in names)

        if not isinstance(data, Mapping) or not all(
            is_row(path, names) for path, names in data.items()
        ):
            raise AmpError(
                "`measured` of a policy maps paths of scopes to lists of primitives "
                f"(any of {', '.join(CONTRACTIONS)}), but got {data!r}. Use what "
                "`to_dict` gave, or leave it out."
            )
        return cls.of(((path,), name) for path in data for name in data[path])

    def to_dict(self) -> dict[str, list[str]]:
        return {path: list(names) for path, names in self.rows}

    @functools.cached_property
    def _by_path(self) -> dict[str, tuple[str, ...]]:
        return dict(self.rows)

    def holds(self, primitive: str, scope: Scope) -> bool:
        """Whether contractions of a primitive in a scope were measured.

        What was measured may be called in other scopes, as a loss in a training step;
        what has no scope of its own may not, for it can't be told from what is new."""
        starts = range(max(len(scope), 1))
        paths = ("/".join(scope[start:]) for start in starts)
        return any(primitive in self._by_path.get(path, ()) for path in paths)


@dataclass(frozen=True, eq=False)
class MeasuredPolicy:
    """A policy that leaves contractions as written which were not measured."""

    policy: Lookup
    measured: Measured

    def find(self, primitive: Primitive, scope: Scope) -> Found:
        found = self.policy.find(primitive, scope)
        is_original = isinstance(found.rule, UseOriginalPrecision)
        if primitive.name not in CONTRACTIONS or is_stopped(scope) or is_original:
            return found
        if self.measured.holds(primitive.name, scope):
            return found
        return replace(found, rule=Unmeasured(found.rule))

    def own_keys(self) -> list[Key]:
        return self.policy.own_keys()

    def items(self) -> list[tuple[Key, Any]]:
        return self.policy.items()


@functools.lru_cache(maxsize=1024)
def limited_to(measured: Measured, policy: Lookup) -> Lookup:
    """One object for equal settings, since rewritten programs are remembered by it."""
    return MeasuredPolicy(policy, measured)
