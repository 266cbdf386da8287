"""What is decided together: contractions of one scope, of one primitive, or alike."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Literal, get_args

from .marks import Contraction

Granularity = Literal["scope", "primitive", "equation"]
GRANULARITIES: tuple[str, ...] = get_args(Granularity)


@dataclass(frozen=True)
class Group:
    """Contractions that get one precision.

    Args:
        name: how tables call it: the path of a scope, a primitive, or a path with a
            primitive and the shapes of its operands.
        contractions: those that are in it."""

    name: str
    contractions: tuple[Contraction, ...]


def group_name(one: Contraction, granularity: str, shapes: str) -> str:
    """The name of the group that a contraction is in.

    `shapes` are those of its operands, or a pattern that they are of."""
    path = "/".join(one.scope)
    if granularity == "scope":
        return path or "(no scope)"
    if granularity == "primitive":
        return one.primitive
    return " ".join(filter(None, (path, one.primitive, shapes)))


def grouped(
    found: Sequence[Contraction],
    granularity: str,
    patterns: Mapping[Contraction, str] = MappingProxyType({}),
) -> tuple[Group, ...]:
    """The groups of the contractions of a program, in the order of the program.

    By equation, those are alike whose shapes are of one pattern."""
    members: dict[str, list[Contraction]] = {}
    for one in dict.fromkeys(found):
        name = group_name(one, granularity, patterns.get(one, one.shapes))
        members.setdefault(name, []).append(one)
    return tuple(Group(name, tuple(some)) for name, some in members.items())
