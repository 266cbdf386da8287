"""A function with marks, whose contractions are decided on in groups."""

import functools
from collections.abc import Mapping
from dataclasses import dataclass

from .candidates import FULL, Candidate
from .groups import Group, grouped
from .marks import Contraction, traced
from .measured_function import MeasuredFunction, Point
from .search import Choices
from .sizes import patterns
from .survey import Survey, survey


@dataclass
class MarkedProgram:
    """The program of a pass, with marks, and what can be decided in it.

    Args:
        subject: what is measured.
        point: the point whose arrays it is traced for.
        candidates: the low precisions.
        granularity: what is decided together."""

    subject: MeasuredFunction
    point: Point
    candidates: tuple[Candidate, ...]
    granularity: str

    def __post_init__(self) -> None:
        self.jaxpr, self.tree = traced(self.subject, self.point, self.candidates)

    @functools.cached_property
    def contractions(self) -> Survey:
        return survey(self.jaxpr)

    @functools.cached_property
    def patterns(self) -> Mapping[Contraction, str]:
        """The pattern of each contraction's shapes; empty unless by "equation"."""
        if self.granularity != "equation":
            return {}
        return patterns(self.subject, self.jaxpr, self.point, self.candidates)

    @functools.cached_property
    def groups(self) -> tuple[Group, ...]:
        return grouped(self.contractions.work, self.granularity, self.patterns)

    @property
    def nothing(self) -> Choices:
        """All groups as written."""
        return (0,) * len(self.groups)

    def keeps_low(self, choices: Choices) -> bool:
        """Whether any group keeps values in 8 bits under `choices`.

        Then the error is that of the policy, and not of roundings at contractions."""
        return any(c and self.candidates[c - 1].saves for c in choices)

    def kept_in_16_bits(self, choices: Choices) -> Choices:
        """The same choices, where they can be had without values kept in 8 bits."""

        def plain(choice: int) -> int:
            if not choice:
                return choice
            low = self.candidates[choice - 1]
            other = Candidate(low.compute.name, low.compute)
            is_known = low.saves is not None and other in self.candidates
            return 1 + self.candidates.index(other) if is_known else choice

        return tuple(map(plain, choices))

    def takers(self, candidate: Candidate) -> list[int]:
        """The groups that may have a candidate."""
        return [i for i, one in enumerate(self.groups) if one.may_have(candidate)]

    def all_in(self, candidate: Candidate) -> Choices:
        """All groups in a candidate.

        Groups that may not have it are in its compute dtype, if that is a candidate,
        else in the first other candidate that they may have, or as written."""
        beside = Candidate(candidate.compute.name, candidate.compute)
        order = [candidate, beside, *self.candidates]
        known = [one for one in order if one in self.candidates]

        def choice(group: Group) -> int:
            fitting = (one for one in known if group.may_have(one))
            return next((1 + self.candidates.index(one) for one in fitting), 0)

        return tuple(map(choice, self.groups))

    def names(self, choices: Choices) -> list[str]:
        """What each group is computed in under `choices`."""
        known = [FULL, *(one.name for one in self.candidates)]
        return [known[choice] for choice in choices]

    def precisions(self, choices: Choices) -> dict[Contraction, str]:
        """What each contraction is computed in under `choices`."""
        pairs = zip(self.groups, self.names(choices), strict=True)
        return {one: name for group, name in pairs for one in group.contractions}
