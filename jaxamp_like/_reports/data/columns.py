"""Columns of tables, declared once, with the fields of the records that they show.

A field or a property whose type is `Annotated[..., Column(...)]` is a column of every
table of such records in the page and, if it says so, in the terminal. Fields are in the
JSON too. The columns of a record inside of another one are columns of both."""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from operator import attrgetter
from typing import (
    Annotated,
    Any,
    Literal,
    NamedTuple,
    get_args,
    get_origin,
    get_type_hints,
)

ColumnKind = Literal[
    "text", "number", "flops", "bytes", "share", "short", "line", "flag"
]
"""How a value is written; see `FORMATS` for the terminal, `page.js` for the page."""


@dataclass(frozen=True)
class Column:
    """One column of a table.

    Args:
        title: its head; if values are mappings, with "{}" for the key: "beyond {}".
        kind: how its values are written.
        at: columns are sorted by this number; those of equal ones stay as declared.
        adds: whether it is added up over rows that are equal in all other columns.
        keys: if values are mappings, the keys that are shown, a column for each.
        terminal: whether the terminal shows it too."""

    title: str
    kind: ColumnKind = "text"
    at: int = 50
    adds: bool = False
    keys: tuple[str, ...] = ()
    terminal: bool = False


class ReadColumn(NamedTuple):
    """A column, and how to read its value from a record."""

    column: Column
    read: Callable[[Any], Any]


def columns(record: type, *, terminal: bool = False) -> list[ReadColumn]:
    """The columns of a kind of records, in order."""
    found = [s for s in _declared(record) if s.column.terminal or not terminal]
    return sorted(found, key=lambda shown: shown.column.at)


def _declared(record: type) -> Iterator[ReadColumn]:
    for name, hint in _hints(record).items():
        read = attrgetter(name)
        if get_origin(hint) is Annotated:
            yield from _of(get_args(hint)[1], read)
        elif hasattr(hint, "__dataclass_fields__"):
            yield from (
                ReadColumn(column, _after(read, inner))
                for column, inner in _declared(hint)
            )


def _hints(record: type) -> dict[str, Any]:
    hints = get_type_hints(record, include_extras=True)
    for name, value in vars(record).items():
        if isinstance(value, property):
            hints |= {name: get_type_hints(value.fget, include_extras=True)["return"]}
    return hints


def _of(column: Column, read: Callable[[Any], Any]) -> Iterator[ReadColumn]:
    if not column.keys:
        yield ReadColumn(column, read)
    for key in column.keys:
        one = Column(column.title.format(key), column.kind, column.at)
        yield ReadColumn(one, _after(read, lambda mapping, key=key: mapping[key]))


def _after(
    first: Callable[[Any], Any], then: Callable[[Any], Any]
) -> Callable[[Any], Any]:
    return lambda record: then(first(record))


def rows(shown: Iterable[ReadColumn], records: Iterable[Any]) -> list[list[Any]]:
    """One row for each record; rows that differ only in sums are added up into one.

    The largest sums come first; without sums, the order is that of the records."""
    shown = list(shown)
    sums = [i for i, (column, _) in enumerate(shown) if column.adds]
    if not sums:
        return [[read(record) for _, read in shown] for record in records]
    totals: dict[tuple[Any, ...], list[Any]] = {}
    for record in records:
        row = [read(record) for _, read in shown]
        key = tuple(x for i, x in enumerate(row) if i not in sums)
        if key in totals:
            for i in sums:
                totals[key][i] += row[i]
        else:
            totals[key] = row
    return sorted(totals.values(), key=lambda row: [-row[i] for i in reversed(sums)])
