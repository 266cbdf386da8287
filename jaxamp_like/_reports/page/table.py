"""Reports in the terminal, by rich."""

from collections import Counter
from collections.abc import Iterable, Iterator
from typing import Any

from ..data.explained import Explained, human_bytes, human_flops, shares, summary
from ..data.numbers import Numbers
from ..data.records import ScopeNode
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


def table_of(title: str, columns: Iterable[str], numbers: int) -> Any:
    """A table whose last `numbers` columns are set flush right."""
    columns = list(columns)
    table = need("rich.table", "rich").Table(
        title=title, title_justify="left", box=need("rich.box", "rich").SIMPLE_HEAD
    )
    for i, column in enumerate(columns):
        right = i >= len(columns) - numbers
        table.add_column(column, justify="right" if right else "left")
    return table


def _scopes(root: ScopeNode) -> Any:
    table = table_of(
        "Scopes", ("scope", "contractions", "FLOPs", "saved", "casts", "ops"), 4
    )

    def add(node: ScopeNode, level: int) -> None:
        table.add_row(
            "  " * level + (node.name or "(all)"),
            shares(node.flops),
            human_flops(sum(node.flops.values())),
            human_bytes(sum(node.saved.values())),
            str(node.casts),
            str(node.ops),
        )
        for child in node.children:
            add(child, level + 1)

    add(root, 0)
    return table


def _casts(report: Explained) -> Any:
    table = table_of("Casts, most frequent first", ("cast", "why", "phase", "count"), 1)
    count = Counter(
        (f"{c.source_dtype} → {c.target_dtype}", c.why, c.place.phase)
        for c in report.now.casts
    )
    for row, n in count.most_common(MAX_ROWS):
        table.add_row(*row, str(n))
    note_rest(table, len(count))
    return table


def _rules(report: Explained) -> Any:
    table = table_of("Rules that decided", ("key", "rule", "equations"), 1)
    fired = [rule for rule in report.rules if rule.count]
    for rule in fired[:MAX_ROWS]:
        table.add_row(rule.key, rule.rule, str(rule.count))
    note_rest(table, len(fired))
    idle = [rule.key for rule in report.rules if not rule.count and rule.own]
    others = sum(not rule.count and not rule.own for rule in report.rules)
    table.caption = f"Never matched: {', '.join(idle) or 'no key of yours'}" + (
        f", {others} of the policy that you extended" if others else ""
    )
    return table


def note_rest(table: Any, total: int) -> None:
    if total > MAX_ROWS:
        table.add_row(f"… and {total - MAX_ROWS} more")


def print_numerics(report: Numbers, n: int) -> None:
    console = need("rich.console", "rich").Console()
    console.print(str(report), highlight=False)
    if report.ops:
        console.print(_worst(report, n))


def _worst(report: Numbers, n: int) -> Any:
    columns = ("equation", "scope", "phase", "dtype", "range", "beyond / below float16")
    table = table_of("Largest errors", (*columns, "error"), 2)
    for op in report.worst(n):
        share = f"{100 * op.overflow['float16']:.2g} / "
        table.add_row(
            op.primitive,
            op.place.scope,
            op.place.phase,
            op.dtype,
            f"{op.smallest:.2g} to {op.largest:.2g}",
            f"{share}{100 * op.underflow['float16']:.2g} %",
            f"{op.error:.2g}",
        )
    return table
