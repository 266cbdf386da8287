"""Reports in the terminal, by rich."""

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

from ..data.columns import Kind, Shown, columns, rows
from ..data.explained import Explained, human_bytes, human_flops, shares, summary
from ..data.numbers import Numbers, OpNumerics
from ..data.records import CastRecord, RuleRecord, ScopeNode
from ..extras import need

MAX_ROWS = 30


def print_report(report: Explained, depth: int) -> None:
    console = need("rich.console", "rich").Console()
    console.print("\n".join(summary(report)), highlight=False)
    for table in tables(report, depth):
        console.print(table)


def tables(report: Explained, depth: int) -> Iterator[Any]:
    if not report.now.ops:
        return
    yield _scopes(report.scopes(depth))
    yield _casts(report)
    yield _rules(report)


def _table(title: str, shown: Iterable[Shown]) -> Any:
    table = need("rich.table", "rich").Table(
        title=title, title_justify="left", box=need("rich.box", "rich").SIMPLE_HEAD
    )
    for column, _ in shown:
        is_text = column.kind in ("text", "line")
        table.add_column(column.title, justify="left" if is_text else "right")
    return table


def _add(table: Any, shown: Iterable[Shown], values: Iterable[Any]) -> None:
    pairs = zip(shown, values, strict=True)
    table.add_row(*(FORMATS[column.kind](value) for (column, _), value in pairs))


def _count(show: Callable[[float], str]) -> Callable[[Any], str]:
    """A number, or what a count by dtype adds up to and how it is shared out."""

    def shown(value: Any) -> str:
        if not isinstance(value, Mapping):
            return show(value)
        total = sum(value.values())
        return f"{show(total)} ({shares(value)})" if total else show(0)

    return shown


FORMATS: dict[Kind, Callable[[Any], str]] = {
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

    def add(node: ScopeNode, level: int) -> None:
        name, *values = (read(node) for _, read in shown)
        _add(table, shown, ["  " * level + (name or "(all)"), *values])
        for child in node.children:
            add(child, level + 1)

    add(root, 0)
    return table


def _casts(report: Explained) -> Any:
    shown = columns(CastRecord, terminal=True)
    table = _table("Casts, most frequent first", shown)
    found = rows(shown, report.now.casts)
    for row in found[:MAX_ROWS]:
        _add(table, shown, row)
    _note_rest(table, len(found))
    return table


def _rules(report: Explained) -> Any:
    shown = columns(RuleRecord, terminal=True)
    table = _table("Rules that decided", shown)
    fired = [rule for rule in report.rules if rule.count]
    for row in rows(shown, fired[:MAX_ROWS]):
        _add(table, shown, row)
    _note_rest(table, len(fired))
    idle = [rule.key for rule in report.rules if not rule.count and rule.own]
    others = sum(not rule.count and not rule.own for rule in report.rules)
    table.caption = f"Never matched: {', '.join(idle) or 'no key of yours'}" + (
        f", {others} of the policy that you extended" if others else ""
    )
    return table


def _note_rest(table: Any, total: int) -> None:
    if total > MAX_ROWS:
        table.add_row(f"… and {total - MAX_ROWS} more")


def print_numerics(report: Numbers, n: int) -> None:
    console = need("rich.console", "rich").Console()
    console.print(str(report), highlight=False)
    if report.ops:
        console.print(_worst(report, n))


def _worst(report: Numbers, n: int) -> Any:
    shown = columns(OpNumerics, terminal=True)
    table = _table("Largest errors", shown)
    for row in rows(shown, report.worst(n)):
        _add(table, shown, row)
    return table
