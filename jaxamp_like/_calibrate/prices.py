"""What groups cost, by the objective."""

from collections.abc import Callable, Mapping, Sequence
from typing import Literal, NamedTuple, get_args

from .candidates import FULL, Candidate
from .costs import Device
from .groups import Group

Objective = Literal["flops", "bytes", "time", "memory"]
OBJECTIVES: tuple[str, ...] = get_args(Objective)
Profile = Mapping[str, Mapping[str, float]]


class Prices(NamedTuple):
    """What each group costs as written and in each candidate, by the objective.

    Args:
        full: by group, as written.
        low: by group, then by candidate.
        total: what all groups cost under some choices, if that is more than a sum."""

    full: list[float]
    low: list[list[float]]
    total: Callable[[tuple[int, ...]], float] | None = None

    def of(self, choices: Sequence[int]) -> float:
        """What all groups cost under `choices`."""
        if self.total is not None:
            return self.total(tuple(choices))
        pairs = zip(choices, self.full, self.low, strict=True)
        return sum(low[c - 1] if c else full for c, full, low in pairs)


def prices(
    groups: Sequence[Group],
    candidates: Sequence[Candidate],
    objective: str,
    device: Device | Profile,
    total: Callable[[tuple[int, ...]], float] | None = None,
) -> Prices:
    """Prices of groups: FLOPs weighted by the bits of operands, kept bytes or seconds.

    Args:
        groups: the groups.
        candidates: what they may get.
        objective: what is to be saved.
        device: what it is saved on, for the objective "time".
        total: what all groups cost under some choices, for the objective "memory".
    Raises:
        ValueError: a measured profile lacks a group or a precision."""

    def price(group: Group, name: str) -> float:
        if objective == "flops":
            return sum(run.flops * run.bits(name) / 32 for run in group.costs)
        if objective in ("bytes", "memory"):
            return sum(run.saved_bytes(name) for run in group.costs)
        if not isinstance(device, Device):
            return _measured(device, group.name, name)
        return sum(run.seconds(name, device) for run in group.costs)

    lows = [one.name for one in candidates]
    full = [price(group, FULL) for group in groups]
    low = [[price(group, name) for name in lows] for group in groups]
    return Prices(full, low, total if objective == "memory" else None)


def _measured(profile: Profile, group: str, dtype: str) -> float:
    try:
        return float(profile[group][dtype])
    except (KeyError, TypeError):
        low = "bfloat16" if dtype == FULL else dtype
        raise ValueError(
            f"The profile given as `device` has no time of {group!r} in {dtype}. It "
            "maps each group, as `granularity` has it, to seconds by dtype: "
            f"{{{group!r}: {{'float32': 2e-3, {low!r}: 1e-3}}, ...}}."
        ) from None
