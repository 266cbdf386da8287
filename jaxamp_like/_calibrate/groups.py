"""What is decided together: contractions of one scope, of one primitive, or alike."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Literal, get_args

from .candidates import Candidate
from .costs import Run
from .marks import Contraction

Granularity = Literal["scope", "primitive", "equation"]
GRANULARITIES: tuple[str, ...] = get_args(Granularity)


@dataclass(frozen=True)
class Group:
    """Contractions that get one precision.

    Args:
        name: how tables call it: the path of a scope, a primitive, or a path with a
            primitive and the shapes of its operands.
        contractions: those that are in it.
        runs: what they do."""

    name: str
    contractions: tuple[Contraction, ...]
    runs: tuple[Run, ...]

    @property
    def flops(self) -> float:
        """Multiply-adds, times two, forward and backward."""
        return sum(run.flops for run in self.runs)

    @property
    def kept(self) -> int:
        """Elements that the forward contractions read and make, parameters aside.

        That is what is kept for the backward pass."""
        return sum(run.kept_read + run.kept_made for run in self.runs)

    def may_have(self, candidate: Candidate) -> bool:
        """Whether a candidate is for any of it: a rule of 8 bits is not for all."""
        if candidate.rule is None:
            return True
        return any(candidate.name in run.eight for run in self.runs)


def grouped(
    work: Mapping[Contraction, Sequence[Run]],
    granularity: str,
    patterns: Mapping[Contraction, str] = MappingProxyType({}),
) -> tuple[Group, ...]:
    """The groups of the contractions of a program, in the order of the program.

    By equation, those are alike whose shapes are of one pattern."""
    members: dict[str, list[Contraction]] = {}
    for one in work:
        path = "/".join(one.scope)
        if granularity == "scope":
            name = path or "(no scope)"
        elif granularity == "primitive":
            name = one.primitive
        else:
            shapes = patterns.get(one, one.shapes)
            name = " ".join(filter(None, (path, one.primitive, shapes)))
        members.setdefault(name, []).append(one)
    return tuple(
        Group(name, tuple(some), tuple(run for one in some for run in work[one]))
        for name, some in members.items()
    )
