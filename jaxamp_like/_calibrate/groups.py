"""Contractions that are decided together: by scope, by primitive or by equation."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Literal, get_args

from .candidates import Candidate
from .costs import ContractionCost
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
        costs: what the contractions do, forward and backward."""

    name: str
    contractions: tuple[Contraction, ...]
    costs: tuple[ContractionCost, ...]

    @property
    def flops(self) -> float:
        """Multiply-adds, times two, forward and backward."""
        return sum(run.flops for run in self.costs)

    @property
    def saved_elements(self) -> int:
        """Elements that its contractions read and make in the forward pass.

        These are kept for the backward pass. Parameters and batches don't count, since
        they are in memory anyway."""
        return sum(run.saved_read + run.saved_made for run in self.costs)

    def may_have(self, candidate: Candidate) -> bool:
        """Whether a candidate is for any of its contractions: 8-bit rules skip some."""
        if candidate.rule is None:
            return True
        return any(candidate.name in run.quantised_by for run in self.costs)


def grouped(
    work: Mapping[Contraction, Sequence[ContractionCost]],
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
