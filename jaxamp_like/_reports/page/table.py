"""Reports in the terminal, by rich."""

import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

from ..data.columns import ColumnKind, ReadColumn, columns, rows
from ..data.explained import ReportData, shares, summary
from ..data.memory import MemoryRecord
from ..data.numbers import NumericsData, OpNumerics
from ..data.records import (
    CastRecord,
    ContractionRecord,
    RuleRecord,
    ScopeNode,
    quantised_contractions,
)
from ..data.units import human_bytes, human_flops
from ..extras import need

MAX_ROWS = 30


def _console() -> Any:
    """A console as wide as the terminal; into a file or pipe it writes whole names."""
    console = need("rich.console", "rich").Console()
    if not (console.is_terminal or console.is_jupyter or "COLUMNS" in os.environ):
        console.width = 160
    return console


def print_report(report: ReportData, depth: int) -> None:
    console = _console()
    console.print("\n".join(summary(report)), markup=False, highlight=False)
    for table in tables(report, depth):
        console.print(table)


def tables(report: ReportData, depth: int) -> Iterator[Any]:
    if not report.now.ops:
        return
    yield _scopes(report.scopes(depth))
    if quantised := quantised_contractions(report.now.ops):
        title = "Quantised contractions"
        yield record_table(title, ContractionRecord, quantised, MAX_ROWS)
    yield record_table("Memory", MemoryRecord, report.memory)
    casts = report.now.casts
    yield record_table("Casts, most frequent first", CastRecord, casts, MAX_ROWS)
    yield _rules(report)


def _table(title: str, shown: Iterable[ReadColumn]) -> Any:
    table = need("rich.table", "rich").Table(
        title=title or None,
        title_justify="left",
        box=need("rich.box", "rich").SIMPLE_HEAD,
    )
    for column, _ in shown:
        is_text = column.kind in ("text", "line")
        table.add_column(column.title, justify="left" if is_text else "right")
    return table


def _add_row(table: Any, shown: Iterable[ReadColumn], values: Iterable[Any]) -> None:
    # Values are shown as they are: rich would take brackets in names for markup.
    plain = need("rich.text", "rich").Text
    pairs = zip(shown, values, strict=True)
    table.add_row(*(plain(FORMATS[column.kind](value)) for (column, _), value in pairs))


def _count(show: Callable[[float], str]) -> Callable[[Any], str]:
    """Shows a number, or for a count by dtype its sum and the share of each dtype."""

    def shown(value: Any) -> str:
        if not isinstance(value, Mapping):
            return show(value)
        total = sum(value.values())
        return f"{show(total)} ({shares(value)})" if total else show(0)

    return shown


FORMATS: dict[ColumnKind, Callable[[Any], str]] = {
    "text": str,
    "line": lambda source: source.rpartition("/")[2],
    "number": _count(str),
    "flops": _count(human_flops),
    "bytes": _count(human_bytes),
    "share": lambda share: f"{100 * share:.3g} %" * bool(share),
    "short": lambda x: f"{x:.3g}",
    "flag": lambda is_so: "yes" * is_so,
}


def _scopes(root: ScopeNode) -> Any:
    shown = columns(ScopeNode, terminal=True)
    table = _table("Scopes", shown)

    for level, node in root.walk():
        name, *values = (read(node) for _, read in shown)
        _add_row(table, shown, ["  " * level + (name or "(all)"), *values])
    return table


def record_table(
    title: str, record: type, records: Iterable[Any], most: int | None = None
) -> Any:
    """A rich table of records of one kind; of its first `most` rows, if that is given.

    The columns are those that `Column.terminal` marks."""
    shown = columns(record, terminal=True)
    table = _table(title, shown)
    found = rows(shown, records)
    for row in found[:most]:
        _add_row(table, shown, row)
    if most is not None and len(found) > most:
        table.add_row(f"… and {len(found) - most} more")
    return table


def _rules(report: ReportData) -> Any:
    fired = [rule for rule in report.rules if rule.count]
    table = record_table("Rules that decided", RuleRecord, fired, MAX_ROWS)
    idle = [rule.key for rule in report.rules if not rule.count and rule.own]
    others = sum(not rule.count and not rule.own for rule in report.rules)
    yours = f"Keys of yours that matched nothing: {', '.join(idle)}. " if idle else ""
    rest = f"{others} other rules of the policy matched nothing here." if others else ""
    table.caption = yours + rest or None
    return table


def print_numerics(report: NumericsData, n: int) -> None:
    console = _console()
    console.print(str(report), markup=False, highlight=False)
    if report.ops:
        console.print(record_table("Largest errors", OpNumerics, report.worst(n)))
