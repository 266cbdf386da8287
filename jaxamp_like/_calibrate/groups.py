"""What is decided together: contractions of one scope, of one primitive, or alike."""

from collections.abc import Sequence
from dataclasses import dataclass
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


def group_name(one: Contraction, granularity: str) -> str:
    """The name of the group that a contraction is in."""
    path = "/".join(one.scope)
    if granularity == "scope":
        return path or "(no scope)"
    if granularity == "primitive":
        return one.primitive
    return " ".join(filter(None, (path, one.primitive, one.shapes)))


def grouped(found: Sequence[Contraction], granularity: str) -> tuple[Group, ...]:
    """The groups of the contractions of a program, in the order of the program."""
    members: dict[str, list[Contraction]] = {}
    for one in dict.fromkeys(found):
        members.setdefault(group_name(one, granularity), []).append(one)
    return tuple(Group(name, tuple(some)) for name, some in members.items())
