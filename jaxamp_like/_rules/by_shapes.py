"""A rule that tells contractions apart by the shapes of their operands."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp

from .._primitives.contractions import dot_numbers, is_contraction
from .base import Decision, DelegatingRule, Rule, Site
from .computing import use_compute_precision

ANY = "*"  # in a pattern: a size that is free
SUMMED = "+"  # behind the size of an axis that is summed over
NO_ROW = "the policy says nothing of its shapes"

Dims = tuple[tuple[str, ...], ...]


def shapes_of(params: dict[str, Any], avals: Sequence[Any]) -> str:
    """The shapes of both operands as text: "8x16+,16+x4"."""
    return as_text(_dims_of(params, avals))


def as_text(dims: Dims) -> str:
    return ",".join("x".join(one) or "()" for one in dims)


def as_dims(text: str) -> Dims:
    """The inverse of `as_text`."""
    return tuple(
        () if one == "()" else tuple(one.split("x")) for one in text.split(",")
    )


def _dims_of(params: dict[str, Any], avals: Sequence[Any]) -> Dims:
    numbers = dot_numbers(params)
    summed = ((), ()) if numbers is None else numbers[0]
    return tuple(
        tuple(f"{n}{SUMMED * (axis in axes)}" for axis, n in enumerate(aval.shape))
        for aval, axes in zip(avals, summed, strict=False)
    )


def widened(size: str) -> str:
    """The pattern of an axis of any size, which is summed over if this one is."""
    return ANY + SUMMED * size.endswith(SUMMED)


def overlap(a: Dims, b: Dims) -> bool:
    """Whether some shapes match both patterns."""
    return list(map(len, a)) == list(map(len, b)) and all(
        x == y or (widened(x) == widened(y) and widened(x) in (x, y))
        for one, other in zip(a, b, strict=True)
        for x, y in zip(one, other, strict=True)
    )


def pattern_of(
    patterns: Iterable[str], params: dict[str, Any], avals: Sequence[Any]
) -> str | None:
    """The first of some patterns that the shapes of the operands match."""
    dims = _dims_of(params, avals)
    return next((p for p in patterns if overlap(as_dims(p), dims)), None)


def is_pattern(text: Any) -> bool:
    """Whether it has the shapes of two operands."""
    return isinstance(text, str) and len(as_dims(text)) > 1


@dataclass(frozen=True)
class ByShapes(DelegatingRule):
    """Picks the rule by the shapes of both operands; "*" is any size.

    Args:
        rules: patterns, such as "*x16+,16+x4", and the rule of each. No shapes match
            two of them.
        otherwise: the rule of other shapes. A contraction that has such shapes and
            could be low is reported."""

    rules: tuple[tuple[str, Rule], ...]
    otherwise: Rule

    def __post_init__(self) -> None:
        super().__post_init__()
        for pattern, _ in self.rules:
            if not is_pattern(pattern):
                raise ValueError(
                    "A pattern of `rules` must be the shapes of both operands, such as "
                    f"'*x16+,16+x4', but got {pattern!r}."
                )

    @property
    def parts(self) -> tuple[Rule, ...]:
        return (self.otherwise, *(rule for _, rule in self.rules))

    def is_for(self, name: str) -> bool:
        return self.otherwise.is_for(name)

    def pattern_of(self, params: dict[str, Any], avals: Sequence[Any]) -> str | None:
        """The pattern that the shapes of the operands match."""
        return pattern_of((pattern for pattern, _ in self.rules), params, avals)

    def for_equation(self, params: dict[str, Any], avals: Sequence[Any]) -> Rule:
        pattern = self.pattern_of(params, avals)
        if pattern is not None:
            return dict(self.rules)[pattern].for_equation(params, avals)
        rule = self.otherwise.for_equation(params, avals)
        return OfUnknownShapes(rule) if is_contraction(params, avals) else rule


@dataclass(frozen=True)
class OfUnknownShapes(DelegatingRule):
    """The rule of a contraction whose shapes match no pattern.

    The reason says so where `use_compute_precision` would lower the contraction."""

    rule: Rule

    @property
    def parts(self) -> tuple[Rule, ...]:
        return (self.rule,)

    def decide(self, site: Site) -> Decision:
        decision = self.rule.decide(site)
        as_low = site._replace(compute_dtype=jnp.dtype(jnp.bfloat16), by_scope=False)
        may_be_low = use_compute_precision.decide(as_low).reads != site.authors
        why = f"{NO_ROW}; {decision.why}"
        return decision._replace(why=why) if may_be_low else decision
