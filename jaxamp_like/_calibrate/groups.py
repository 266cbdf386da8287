"""Contractions that are decided together: by scope, by primitive or by equation."""

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
        name: what tables call it: the path of a scope, a primitive, or a path with a
            primitive and the shapes of its operands.
        contractions: the contractions in it.
        runs: what the contractions do, forward and backward."""

    name: str
    contractions: tuple[Contraction, ...]
    runs: tuple[Run, ...]

    @property
    def flops(self) -> float:
        """Multiply-adds, times two, forward and backward."""
        return sum(run.flops for run in self.runs)

    @property
    def kept(self) -> int:
        """Elements that its contractions read and make in the forward pass.

        These are kept for the backward pass. Parameters and batches don't count, since
        they are in memory anyway."""
        return sum(run.kept_read + run.kept_made for run in self.runs)

    def may_have(self, candidate: Candidate) -> bool:
        """Whether a candidate is for any of its contractions: 8-bit rules skip some."""
        if candidate.rule is None:
            return True
        return any(candidate.name in run.eight for run in self.runs)


def grouped(
    work: Mapping[Contraction, Sequence[Run]],
    granularity: str,
    patterns: Mapping[Contraction, str] = MappingProxyType({}),
) -> tuple[Group, ...]:
    """The groups of the contractions of a program, in the order of the program.

    If `granularity` is "equation", a group holds the contractions of one scope and
    primitive whose shapes have one pattern."""
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
