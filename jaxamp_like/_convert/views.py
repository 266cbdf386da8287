"""Views of a summary: tables in the terminal, and a page."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from .._reports.data.explained import human_bytes
from .._reports.extras import need
from .._reports.page.data import table
from .._reports.page.page import render, write_page
from .._reports.page.table import MAX_ROWS, record_table
from .._reports.versions import versions
from .records import Cast, Contraction
from .storage import Stored

_HEADINGS = (
    ("parameters", "Parameters", "How each is stored, and why."),
    ("leftCasts", "Casts that are left", "Other readers need these in float32."),
    ("contractions", "Contractions", "In what precision the program multiplies."),
)


def print_summary(summary: Any) -> None:
    console = need("rich.console", "rich").Console()
    console.print(str(summary).split("\n")[0], markup=False, highlight=False)
    title = "Parameters, the largest first"
    console.print(record_table(title, Stored, _by_size(summary), MAX_ROWS))
    console.print(contraction_table(summary.contractions))


def contraction_table(contractions: Sequence[Contraction]) -> Any:
    """The precision of each contraction."""
    return record_table("Contractions", Contraction, contractions, MAX_ROWS)


def write_summary(summary: Any, path: str | Path) -> Path:
    tables = {
        "parameters": table(Stored, _by_size(summary)),
        "leftCasts": table(Cast, summary.casts),
        "contractions": table(Contraction, summary.contractions),
    }
    page = render(
        {"tables": tables, "charts": {}},
        vega="",
        title=summary.name,
        reports=[],
        headlines=[("converted", _tiles(summary))],
        tables=_HEADINGS,
        numerics=None,
        sources=[],
        versions=versions(),
    )
    return write_page(path, page)


def _by_size(summary: Any) -> list[Stored]:
    return sorted(summary.leaves, key=lambda leaf: -leaf.bytes_before)


def _tiles(summary: Any) -> list[tuple[str, str, str]]:
    low = sum(set(c.reads).isdisjoint(_FULL) for c in summary.contractions)
    return [
        ("Stored", human_bytes(summary.bytes_now), f"{100 * summary.share:.1f} %"),
        ("In the model", human_bytes(summary.bytes_before), ""),
        ("Narrower", str(len(summary.changed)), f"of {len(summary.leaves)} arrays"),
        ("Casts left", str(len(summary.casts)), "of parameters"),
        ("Contractions", str(low), f"of {len(summary.contractions)} read 16 bits or 8"),
    ]


_FULL = {"float32", "float64"}
