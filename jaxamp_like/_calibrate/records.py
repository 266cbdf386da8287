"""What a calibration tells of each group, and of each set that it measured."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Annotated

from .._reports.data.columns import Column
from .budget import Errors


@dataclass(frozen=True)
class Decided:
    """A group, and what was decided on it.

    Args:
        name: its path, its primitive, or both with shapes.
        dtype: what its contractions compute in: a dtype, or an 8-bit candidate.
        sensitivity: for each candidate that it may have, the error, in budgets, when
            this group alone is low. `None` if that did not have to be measured.
        flops: the FLOPs of its contractions, forward and backward.
        kept: bytes that are kept for the backward pass if it stays as written.
        price: what it costs as written, by the objective.
        why: the reason for `dtype`, in words."""

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
        what: the groups and their precision, in words.
        cost: its cost by the objective, over that of all groups as written.
        error: the largest of its errors, in budgets.
        is_real: whether the policy was measured as `amp` makes it; if not, only the
            roundings were made."""

    what: Annotated[str, Column("set")]
    cost: Annotated[float, Column("cost", "share")]
    error: Annotated[float, Column("error, budgets", "short")]
    is_real: bool

    @property
    def measured(self) -> Annotated[str, Column("measured")]:
        """What was measured, in words."""
        return "the policy" if self.is_real else "roundings"


def show_error(error: float) -> str:
    """An error as tables show it."""
    return "inf" if error == float("inf") else f"{error:.3g}"


def show_errors(errors: Errors, names: Iterable[str]) -> str:
    """The errors that have these names, as a text."""
    return ", ".join(f"{name} {show_error(getattr(errors, name))}" for name in names)
