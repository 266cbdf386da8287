"""The contractions, by scope, that a policy was measured on.

Where equations were decided one by one, the shapes of their operands count too."""

import functools
import itertools
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from .._errors import AmpError
from .._jax import Primitive
from .._primitives import CONTRACTIONS
from .._rules import Match, UseOriginalPrecision
from .._rules.by_shapes import ByShapes, is_pattern
from .._rules.measured import OfMeasuredShapes, Unmeasured, as_measured
from .dictionary import Key, Lookup, Scope, is_stopped


class MeasuredKind(NamedTuple):
    """Contractions that were measured in one scope.

    Args:
        primitive: its name.
        shapes: sorted patterns of both operands' shapes; empty if any shapes match."""

    primitive: str
    shapes: tuple[str, ...] = ()


Contractions = Sequence[str] | Mapping[str, Sequence[str]]
"""Names of primitives, or a mapping of them to patterns of both operands' shapes."""


@dataclass(frozen=True)
class Measured:
    """The kinds of contractions that were measured, by the path of a scope.

    Args:
        rows: sorted paths, each with the sorted kinds that were measured there."""

    rows: tuple[tuple[str, tuple[MeasuredKind, ...]], ...]

    @classmethod
    def of(cls, contractions: Iterable[tuple[Scope, str, str | None]]) -> "Measured":
        """From triples of a scope, a primitive's name, and shapes if these count."""
        found: dict[str, dict[str, set[str | None]]] = {}
        for scope, primitive, shapes in contractions:
            by_name = found.setdefault("/".join(scope), {})
            by_name.setdefault(primitive, set()).add(shapes)
        return cls.from_dict(
            {
                path: {name: () if None in some else some for name, some in row.items()}
                for path, row in found.items()
            }
        )

    @classmethod
    def from_dict(cls, data: Any) -> "Measured":
        """From the data that `to_dict` gave.

        Raises:
            AmpError: it is something else."""

        def is_row(path: Any, row: Any) -> bool:
            if not isinstance(path, str) or not isinstance(row, list | tuple | Mapping):
                return False
            shapes = row.values() if isinstance(row, Mapping) else ()
            return all(name in [*CONTRACTIONS] for name in row) and all(
                not isinstance(some, str) and all(map(is_pattern, some))
                for some in shapes
            )

        if not isinstance(data, Mapping) or not all(
            is_row(path, row) for path, row in data.items()
        ):
            raise AmpError(
                "`measured` of a policy maps paths of scopes to lists of primitives "
                f"(any of {', '.join(CONTRACTIONS)}), or these to lists of shapes "
                f"('*x16+,16+x4'), but got {data!r}. Use what `to_dict` gave, or leave "
                "it out."
            )

        def kinds(row: Any) -> tuple[MeasuredKind, ...]:
            by_name = row if isinstance(row, Mapping) else dict.fromkeys(row, ())
            return tuple(
                MeasuredKind(n, tuple(sorted(by_name[n]))) for n in sorted(by_name)
            )

        return cls(tuple((path, kinds(data[path])) for path in sorted(data)))

    def to_dict(self) -> dict[str, Any]:
        def row(kinds: tuple[MeasuredKind, ...]) -> Any:
            if any(kind.shapes for kind in kinds):
                return {kind.primitive: list(kind.shapes) for kind in kinds}
            return [kind.primitive for kind in kinds]

        return {path: row(kinds) for path, kinds in self.rows}

    @functools.cached_property
    def _by_path(self) -> dict[str, dict[str, tuple[str, ...]]]:
        return {path: dict(kinds) for path, kinds in self.rows}

    def shapes(self, primitive: str, scope: Scope) -> tuple[str, ...] | None:
        """The shapes that were measured of a primitive in a scope; `None` if none were.

        An empty tuple stands for any shapes, as in a `MeasuredKind`. A measured scope
        may be called inside of other scopes, as a loss is in a training step.
        Contractions that were measured outside of all scopes only count there: within
        other scopes they could not be told from new ones."""
        starts = range(max(len(scope), 1))
        rows = [self._by_path.get("/".join(scope[start:]), {}) for start in starts]
        found = [row[primitive] for row in rows if primitive in row]
        if not found:
            return None
        return tuple(itertools.chain(*found)) if all(found) else ()


@dataclass(frozen=True, eq=False)
class MeasuredPolicy:
    """A policy that leaves contractions as written which were not measured."""

    policy: Lookup
    measured: Measured

    def find(self, primitive: Primitive, scope: Scope) -> Match:
        match = self.policy.find(primitive, scope)
        is_original = isinstance(match.rule, UseOriginalPrecision)
        if primitive.name not in CONTRACTIONS or is_stopped(scope) or is_original:
            return match
        shapes = self.measured.shapes(primitive.name, scope)
        if shapes is None:
            return replace(match, rule=Unmeasured(match.rule))
        rule = as_measured(match.rule)
        if shapes and not isinstance(rule, ByShapes):  # which tells of others
            rule = OfMeasuredShapes(rule, shapes)
        return replace(match, rule=rule)

    def own_keys(self) -> list[Key]:
        return self.policy.own_keys()

    def items(self) -> Iterable[tuple[Key, Any]]:
        return self.policy.items()


@functools.lru_cache(maxsize=1024)
def limited_to(measured: Measured, policy: Lookup) -> Lookup:
    """One object for equal settings, since rewritten programs are remembered by it."""
    return MeasuredPolicy(policy, measured)
