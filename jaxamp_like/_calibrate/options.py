"""Which groups may have which candidates."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from .candidates import Candidate
from .costs import Work
from .groups import Group
from .marks import Contraction
from .search import Choices


@dataclass(frozen=True)
class Options:
    """Which groups may have which candidates: a rule of 8 bits is not for all.

    Args:
        groups: what is decided together.
        work: what the contractions of groups do.
        candidates: the low precisions."""

    groups: Sequence[Group]
    work: Mapping[Contraction, Work]
    candidates: Sequence[Candidate]

    def has(self, i: int, candidate: Candidate) -> bool:
        """Whether a group may have a candidate: whether that is for any of it."""
        if candidate.rule is None:
            return True
        eight = (self.work[one].eight for one in self.groups[i].contractions)
        return any(candidate.name in names for names in eight)

    def takers(self, candidate: Candidate) -> list[int]:
        """The groups that may have a candidate."""
        return [i for i in range(len(self.groups)) if self.has(i, candidate)]

    def all_in(self, candidate: Candidate) -> Choices:
        """All groups in a candidate.

        Those that may not have it are in the compute dtype beside it, if that is a
        candidate, else in any other that they may have, or as written."""
        beside = Candidate(candidate.compute.name, candidate.compute)
        order = [candidate, beside, *self.candidates]
        known = [one for one in order if one in self.candidates]

        def choice(i: int) -> int:
            fitting = (one for one in known if self.has(i, one))
            found = next(fitting, None)
            return 0 if found is None else 1 + self.candidates.index(found)

        return tuple(choice(i) for i in range(len(self.groups)))

    def names(self, choices: Choices) -> list[str | None]:
        """The candidates that are chosen by name; `None` for as written."""
        known = [None, *(one.name for one in self.candidates)]
        return [known[choice] for choice in choices]
