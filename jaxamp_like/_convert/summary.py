"""What a conversion has made: how parameters are stored, what is left to cast."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .._files import write_text
from .._reports.data.units import human_bytes
from .._reports.extras import need
from .._reports.page.data import table
from .._reports.page.page import render
from .._reports.page.table import MAX_ROWS, record_table
from .._reports.versions import versions
from .records import Cast, ContractionRecord
from .storage import Stored

_MOST = 12  # leaves to print
_FULL = {"float32", "float64"}
_HEADINGS = (
    ("parameters", "Parameters", "How each is stored, and why."),
    ("leftCasts", "Casts that are left", "Other readers need these in float32."),
    ("contractions", "Contractions", "In what precision the program multiplies."),
)


@dataclass(frozen=True, repr=False)
class Summary:
    """What became of the parameters of a converted function.

    `print(summary)` tells what was stored and saved, and which parameters stay as they
    are and why; `summary.print()` shows tables (rich); `to_json` gives everything;
    `save_html` writes a page.

    Args:
        name: the name of the function.
        parameters: how each parameter is stored.
        constants: how each array that the function closes over is stored.
        casts: casts of parameters that are left, because others read these in full.
        contractions: the contractions of the converted program, in order.
        notes: sentences on what the program does at each call."""

    name: str
    parameters: tuple[Stored, ...]
    constants: tuple[Stored, ...] = ()
    casts: tuple[Cast, ...] = ()
    contractions: tuple[ContractionRecord, ...] = ()
    notes: tuple[str, ...] = ()

    @property
    def leaves(self) -> tuple[Stored, ...]:
        """Parameters, then constants."""
        return (*self.parameters, *self.constants)

    @property
    def bytes_before(self) -> int:
        """Bytes of the parameters and constants in the model."""
        return sum(leaf.bytes_before for leaf in self.leaves)

    @property
    def bytes_now(self) -> int:
        """Bytes of the parameters and constants as they are stored."""
        return sum(leaf.bytes_now for leaf in self.leaves)

    @property
    def share(self) -> float:
        """`bytes_now` as a share of `bytes_before`; 1 if there are no parameters."""
        return self.bytes_now / self.bytes_before if self.bytes_before else 1.0

    @property
    def kept(self) -> tuple[Stored, ...]:
        """What is stored as it was, the largest first."""
        kept = (x for x in self.leaves if not x.is_changed)
        return tuple(sorted(kept, key=lambda leaf: -leaf.bytes_now))

    @property
    def changed(self) -> tuple[Stored, ...]:
        """What is stored in another dtype or folded, the largest first."""
        changed = (x for x in self.leaves if x.is_changed)
        return tuple(sorted(changed, key=lambda leaf: -leaf.bytes_before))

    def __str__(self) -> str:
        before, now = map(human_bytes, (self.bytes_before, self.bytes_now))
        # Of what is stored quantised, float32 scales are as the parameters were.
        new = {leaf.now for leaf in self.leaves} - {leaf.before for leaf in self.leaves}
        dtypes = f": {', '.join(sorted(new))}" if new else ""
        lines = [
            f"{self.name}: {before} of parameters stored in {now} ({self.share:.3f}), "
            f"{len(self.changed)} of {len(self.leaves)} narrower{dtypes}"
        ]
        lines += [
            f"  {leaf.name} {leaf.was} stays: {leaf.why}" for leaf in self.kept[:_MOST]
        ]
        if len(self.kept) > _MOST:
            lines.append(f"  ... and {len(self.kept) - _MOST} more")
        if self.casts:
            names = list(dict.fromkeys(cast.name for cast in self.casts))
            more = f" and {len(names) - _MOST} more" if len(names) > _MOST else ""
            lines.append(f"Still cast at each call: {', '.join(names[:_MOST])}{more}")
        return "\n".join([*lines, *self.notes])

    __repr__ = __str__

    def to_dict(self) -> dict[str, Any]:
        """All of it as plain data."""
        totals = {"bytes_before": self.bytes_before, "bytes_now": self.bytes_now}
        lists = {
            key: [item._asdict() for item in value]
            for key, value in vars(self).items()
            if key not in ("name", "notes")
        }
        return {"name": self.name, **totals, **lists, "notes": list(self.notes)}

    def to_json(self) -> str:
        """All of it as JSON.

        >>> json.loads(Summary("f", ()).to_json())["bytes_now"]
        0
        """
        return json.dumps(self.to_dict(), indent=1)

    def print(self) -> None:
        """Prints tables to the terminal.

        Raises:
            ImportError: rich is not installed."""
        console = need("rich.console", "rich").Console()
        console.print(str(self).split("\n")[0], markup=False, highlight=False)
        title = "Parameters, the largest first"
        console.print(record_table(title, Stored, self._by_size(), MAX_ROWS))
        console.print(contraction_table(self))
        for note in self.notes:
            console.print(note, markup=False, highlight=False)

    def save_html(self, path: str | Path) -> Path:
        """Writes one page that opens without a network.

        Args:
            path: where to; parent folders are made.
        Returns:
            The path.
        Raises:
            ImportError: the extra "report" is not installed.
            OSError: the path can't be written to; the message says why."""
        tables = {
            "parameters": table(Stored, self._by_size()),
            "leftCasts": table(Cast, self.casts),
            "contractions": table(ContractionRecord, self.contractions),
        }
        page = render(
            {"tables": tables, "charts": {}},
            vega="",
            title=self.name,
            reports=[],
            headlines=[("converted", self._tiles())],
            notes=self.notes,
            tables=_HEADINGS,
            numerics=None,
            sources=[],
            versions=versions(),
        )
        return write_text(path, page, "report")

    def _by_size(self) -> list[Stored]:
        return sorted(self.leaves, key=lambda leaf: -leaf.bytes_before)

    def _tiles(self) -> list[tuple[str, str, str]]:
        low = sum(set(c.reads).isdisjoint(_FULL) for c in self.contractions)
        return [
            ("Stored", human_bytes(self.bytes_now), f"{100 * self.share:.1f} %"),
            ("In the model", human_bytes(self.bytes_before), ""),
            ("Narrower", str(len(self.changed)), f"of {len(self.leaves)} arrays"),
            ("Casts left", str(len(self.casts)), "of parameters"),
            (
                "Contractions",
                str(low),
                f"of {len(self.contractions)} read 16 bits or 8",
            ),
        ]


def contraction_table(summary: Summary) -> Any:
    """The precision of each contraction, as a table of rich."""
    return record_table(
        "Contractions", ContractionRecord, summary.contractions, MAX_ROWS
    )


def from_dict(data: dict[str, Any]) -> Summary:
    """The summary whose `to_dict` gave `data`."""

    def rows(kind: Any, key: str) -> tuple[Any, ...]:
        return tuple(
            kind(**{k: tuple(v) if isinstance(v, list) else v for k, v in row.items()})
            for row in data[key]
        )

    return Summary(
        data["name"],
        rows(Stored, "parameters"),
        rows(Stored, "constants"),
        rows(Cast, "casts"),
        rows(ContractionRecord, "contractions"),
        tuple(data.get("notes", ())),  # artifacts of earlier versions have none
    )
