"""What a calibration found: a policy, with the evidence for it."""

import json
from collections import Counter
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields, is_dataclass
from pathlib import Path
from typing import Any

from .._files import write_text
from .._policies.named import Policy
from .._policies.policy_map import PolicyMap
from .._reports.data.units import human_bytes
from .._reports.extras import need
from .._reports.page.data import table
from .._reports.page.page import render
from .._reports.page.table import record_table
from .budget import Budget, Errors
from .chart import error_against_cost
from .records import Decided, Tried, show_error, show_errors


@dataclass(frozen=True)
class Calibration:
    """A policy found by measurement, and the evidence for it.

    Args:
        policy: the policy to pass to `amp`. It lowers only contractions that were
            measured, which its `measured` names.
        budget: what was allowed.
        held_out: the worst errors of the policy on the batches that were held out.
        met: whether these are within the budget.
        low_share: the share of the contractions' FLOPs that run low.
        groups: the groups of contractions, in the order of the program.
        tried: the sets of groups that were measured, from which the front is drawn.
        objective: what was to be saved.
        granularity: what was decided together.
        candidates: the low precisions, by name.
        notes: what the user should know.
        passes: how often the function was run.
        compilations: how many programs were compiled for that.
        versions: the versions of packages, and the device.
        seconds: how long the passes took, without compilation. Two calibrations that
            differ in this alone are equal.
        saved: for the objective "memory", the bytes that are kept for the backward pass
            "as written", under the "default" policy (in the first 16-bit candidate) and
            as "chosen"; empty for others."""

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
    saved: Mapping[str, int] = field(default_factory=dict)

    @property
    def kept_full(self) -> tuple[Decided, ...]:
        """The groups that stay as written."""
        return tuple(one for one in self.groups if one.dtype not in self.candidates)

    @property
    def front(self) -> tuple[Tried, ...]:
        """The measured sets that no other set beats in both cost and error."""
        found: list[Tried] = []
        for one in sorted(self.tried, key=lambda t: (t.cost, t.error)):
            if not found or one.error < found[-1].error:
                found.append(one)
        return tuple(found)

    def __str__(self) -> str:
        return "\n".join([*self._summary(), f"policy: {self.policy!r}"])

    def _summary(self) -> list[str]:
        """All but the policy, in words."""
        low = len(self.groups) - len(self.kept_full)
        found = show_errors(self.held_out, self.budget.limits())
        met = "meets" if self.met else "MISSES"
        rows = [
            f"{low} of {len(self.groups)} groups in low precision "
            f"({self.granularity}), {self.low_share:.1%} of the contractions' FLOPs",
            f"held out: {found}; {met} {self.budget!r}",
            f"{self.passes} passes, {self.compilations} compilations",
        ]
        if self.saved:
            sizes = [f"{human_bytes(n)} {how}" for how, n in self.saved.items()]
            rows.insert(1, f"saved for the backward pass: {', '.join(sizes)}")
        if len(self.candidates) > 1:
            count = Counter(group.dtype for group in self.groups)
            low_ones = [f"{n} in {dtype}" for dtype, n in count.most_common()]
            rows.insert(1, "groups by precision: " + ", ".join(low_ones))
        if self.kept_full:
            rows.append("as written:")
            rows += [f"  {group.name}: {group.why}" for group in self.kept_full]
        return [*rows, *(f"note: {note}" for note in self.notes)]

    def print(self) -> None:
        """Prints a table of all groups (needs rich, of the extra "report")."""
        console = need("rich.console", "rich").Console()
        console.print("\n".join(self._summary()), highlight=False)
        console.print(record_table("", Decided, self.groups))
        console.print(f"policy: {self.policy!r}", highlight=False)

    def to_dict(self) -> dict[str, Any]:
        """All of it as plain data that `json.dumps` takes; see `from_dict`."""
        kind = "map" if isinstance(self.policy, PolicyMap) else "policy"
        data = {f.name: _plain(getattr(self, f.name)) for f in fields(self)[1:]}
        return {"policy": {kind: self.policy.to_dict()}} | data

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> "Calibration":
        """The calibration whose `to_dict` gave `data`.

        Raises:
            ValueError: `data` is not what the `to_dict` of a calibration gives."""
        try:
            ((kind, policy),) = data["policy"].items()
            maker: Any = {"map": PolicyMap, "policy": Policy}[kind]
            values = dict(data) | {
                "policy": maker.from_dict(policy),
                "budget": Budget(**data["budget"]),
                "held_out": Errors(**data["held_out"]),
                "groups": tuple(Decided(**row) for row in data["groups"]),
                "tried": tuple(Tried(**row) for row in data["tried"]),
                "candidates": tuple(data["candidates"]),
                "notes": tuple(data["notes"]),
            }
            return cls(**values)
        except (KeyError, TypeError, ValueError, AttributeError) as e:
            raise ValueError(
                f"The data of a calibration is malformed: {e!r}. Use what `to_dict` "
                "gave."
            ) from e

    def to_json(self) -> str:
        """What `to_dict` gives, as JSON."""
        return json.dumps(self.to_dict(), indent=1)

    def save_html(self, path: str | Path) -> Path:
        """Writes a page: error against cost, what was kept and why, the policy.

        Args:
            path: the file, which is made or written over.
        Returns:
            The path.
        Raises:
            ImportError: the extra "report" is not installed.
            OSError: the file can't be written."""
        charts: dict[str, Any] = {}
        if self.tried:
            chart = error_against_cost(self.tried, self.front, self.objective)
            charts["front"] = chart
        tables = {
            "groups": table(Decided, self.groups),
            "tried": table(Tried, self.tried),
        }
        page = render(
            {"tables": tables, "charts": charts},
            "calibration.html",
            title=f"{self.objective} by {self.granularity}",
            budget=repr(self.budget),
            tiles=self._tiles(),
            notes=self.notes,
            policy=repr(self.policy),
            versions=self.versions,
        )
        return write_text(path, page, "report")

    def _tiles(self) -> list[tuple[str, str, str]]:
        low = len(self.groups) - len(self.kept_full)
        errors = [
            (name, show_error(getattr(self.held_out, name)), f"allowed {limit:g}")
            for name, limit in self.budget.limits().items()
        ]
        return [
            ("low", f"{self.low_share:.1%}", "of the contractions' FLOPs"),
            ("groups", f"{low} of {len(self.groups)}", "in low precision"),
            *errors,
            *self._saved_tile(),
            ("cost", f"{self.passes} passes", f"{self.compilations} compilations"),
        ]

    def _saved_tile(self) -> list[tuple[str, str, str]]:
        if not self.saved:
            return []
        chosen, default, written = (
            human_bytes(self.saved[how]) for how in ("chosen", "default", "as written")
        )
        note = f"default {default}, as written {written}"
        return [("saved for the backward pass", chosen, note)]


def _plain(value: Any) -> Any:
    if isinstance(value, tuple):
        return [_plain(item) for item in value]
    return asdict(value) if is_dataclass(value) else value  # type: ignore[arg-type]
