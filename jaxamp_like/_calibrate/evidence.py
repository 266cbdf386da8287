"""What a calibration found, as data: all that its views are made of."""

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Annotated

from .._policies.named import Policy
from .._policies.policy_map import PolicyMap
from .._reports.data.columns import Column
from .budget import Budget, Errors


@dataclass(frozen=True)
class Decided:
    """A group, and what was decided on it.

    Args:
        name: its path, its primitive, or both with shapes.
        dtype: what its contractions compute in: a dtype, or an 8-bit candidate.
        sensitivity: the error, in budgets, when it alone is low; by candidate that it
            may have. `None` where that did not have to be measured.
        flops: of its contractions, forward and backward.
        kept: bytes that are kept for the backward pass if it stays as written.
        price: what it costs as written, by the objective.
        why: in words."""

    name: Annotated[str, Column("group", terminal=True)]
    dtype: Annotated[str, Column("dtype", terminal=True)]
    sensitivity: dict[str, float] | None
    flops: Annotated[float, Column("FLOPs", "flops", terminal=True)]
    kept: Annotated[int, Column("kept as written", "bytes", terminal=True)]
    price: float
    why: Annotated[str, Column("why", at=90, terminal=True)]

    @property
    def alone(self) -> Annotated[str, Column("alone, budgets", at=60, terminal=True)]:
        """The least error of its candidates when it alone is low."""
        errors = (self.sensitivity or {}).values()
        return show_error(min(errors)) if errors else ""


@dataclass(frozen=True)
class Tried:
    """A set of groups that was measured together.

    Args:
        what: which.
        cost: by the objective, over that of the function as written.
        error: the largest, in budgets.
        is_real: whether `amp` made it; else the roundings alone were made."""

    what: Annotated[str, Column("set")]
    cost: Annotated[float, Column("cost", "share")]
    error: Annotated[float, Column("error, budgets", "short")]
    is_real: bool

    @property
    def measured(self) -> Annotated[str, Column("measured")]:
        """What was measured, in words."""
        return "the policy" if self.is_real else "roundings"


@dataclass(frozen=True)
class Evidence:
    """A calibration without its views; see `Calibration` for its fields."""

    policy: Policy | PolicyMap
    budget: Budget
    held_out: Errors
    met: bool
    low_share: float
    groups: tuple[Decided, ...]
    tried: tuple[Tried, ...]
    objective: str
    granularity: str
    candidates: tuple[str, ...]
    notes: tuple[str, ...] = ()
    passes: int = 0
    compilations: int = 0
    versions: dict[str, str] = field(default_factory=dict)
    seconds: float = field(default=0.0, compare=False)

    @property
    def kept_full(self) -> tuple[Decided, ...]:
        """The groups that stay as written."""
        return tuple(one for one in self.groups if one.dtype not in self.candidates)

    @property
    def front(self) -> tuple[Tried, ...]:
        """Of the sets that were measured, those that none beats in cost and error."""
        found: list[Tried] = []
        for one in sorted(self.tried, key=lambda t: (t.cost, t.error)):
            if not found or one.error < found[-1].error:
                found.append(one)
        return tuple(found)


def show_error(error: float) -> str:
    """An error as tables show it."""
    return "inf" if error == float("inf") else f"{error:.3g}"


def show_errors(errors: Errors, names: Iterable[str]) -> str:
    """Those errors that have these names."""
    return ", ".join(f"{name} {show_error(getattr(errors, name))}" for name in names)


def lines(one: Evidence) -> list[str]:
    """A calibration in words."""
    low = len(one.groups) - len(one.kept_full)
    found = show_errors(one.held_out, one.budget.limits())
    met = "meets" if one.met else "MISSES"
    rows = [
        f"{low} of {len(one.groups)} groups in low precision ({one.granularity}), "
        f"{one.low_share:.1%} of the contractions' FLOPs",
        f"held out: {found}; {met} {one.budget!r}",
        f"{one.passes} passes, {one.compilations} compilations",
    ]
    if len(one.candidates) > 1:
        count = Counter(group.dtype for group in one.groups)
        low_ones = [f"{n} in {dtype}" for dtype, n in count.most_common()]
        rows.insert(1, "groups by precision: " + ", ".join(low_ones))
    if one.kept_full:
        rows.append("as written:")
        rows += [f"  {group.name}: {group.why}" for group in one.kept_full]
    rows += [f"note: {note}" for note in one.notes]
    return [*rows, f"policy: {one.policy!r}"]
