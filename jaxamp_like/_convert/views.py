"""Views of a summary: tables in the terminal, and a page."""

from pathlib import Path
from typing import Any

from .._reports.data.explained import human_bytes
from .._reports.extras import need
from .._reports.page.page import render, write_page
from .._reports.page.table import MAX_ROWS, note_rest, table_of
from .._reports.versions import versions
from .storage import Stored

_HEADINGS = (
    ("parameters", "Parameters", "How each is stored, and why."),
    ("leftCasts", "Casts that are left", "Others read these in full."),
    ("contractions", "Contractions", "In what precision the program multiplies."),
)


def print_summary(summary: Any) -> None:
    console = need("rich.console", "rich").Console()
    console.print(str(summary).split("\n")[0], highlight=False)
    for table in summary_tables(summary):
        console.print(table)


def summary_tables(summary: Any) -> list[Any]:
    """The tables of rich that tell a summary."""
    return [_parameters(summary), contraction_table(summary.contractions)]


def _parameters(summary: Any) -> Any:
    columns = ("parameter", "why", "was", "stored", "bytes before", "bytes now")
    table = table_of("Parameters, the largest first", columns, 4)
    largest = sorted(summary.leaves, key=lambda leaf: -leaf.bytes_before)
    for leaf in largest[:MAX_ROWS]:
        sizes = map(human_bytes, (leaf.bytes_before, leaf.bytes_now))
        table.add_row(
            f"{leaf.name} {_shape(leaf)}", leaf.why, leaf.before, leaf.now, *sizes
        )
    note_rest(table, len(largest))
    return table


def contraction_table(contractions: Any) -> Any:
    """The precision of each contraction."""
    columns = ("contraction", "scope", "line", "reads", "makes", "result", "times")
    table = table_of("Contractions", columns, 1)
    for one in contractions[:MAX_ROWS]:
        table.add_row(
            one.primitive,
            one.scope,
            one.line.rpartition("/")[2],
            ", ".join(dict.fromkeys(one.reads)),
            one.makes,
            _list(one.shape),
            str(one.times),
        )
    note_rest(table, len(contractions))
    return table


def write_summary(summary: Any, path: str | Path) -> Path:
    data = {
        "parameters": [
            [x.name, _shape(x), x.before, x.now, x.bytes_before, x.bytes_now, x.why]
            for x in summary.leaves
        ],
        "leftCasts": [[c.name, c.dtype, c.scope, c.line] for c in summary.casts],
        "contractions": [
            [
                c.scope,
                c.primitive,
                ", ".join(c.reads),
                c.makes,
                _list(c.shape),
                c.times,
                c.line,
            ]
            for c in summary.contractions
        ],
    }
    page = render(
        data,
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


def _tiles(summary: Any) -> list[tuple[str, str, str]]:
    low = sum(set(c.reads) <= {"bfloat16", "float16"} for c in summary.contractions)
    return [
        ("Stored", human_bytes(summary.bytes_now), f"{100 * summary.share:.1f} %"),
        ("In the model", human_bytes(summary.bytes_before), ""),
        ("Narrower", str(len(summary.changed)), f"of {len(summary.leaves)} arrays"),
        ("Casts left", str(len(summary.casts)), "of parameters"),
        ("Contractions", str(low), f"of {len(summary.contractions)} read 16 bits"),
    ]


def _shape(leaf: Stored) -> str:
    return _list(leaf.shape)


def _list(sizes: Any) -> str:
    return f"[{', '.join(map(str, sizes))}]"
