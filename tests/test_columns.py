"""A report's column is said once: a field that says it is one shows everywhere."""

from dataclasses import dataclass
from typing import Annotated

import pytest

from jaxamp_like._reports.data.columns import Column, columns, rows
from jaxamp_like._reports.data.numbers import OpNumerics, ScopeNumerics
from jaxamp_like._reports.data.records import (
    CastRecord,
    Difference,
    OpRecord,
    RuleRecord,
    ScopeNode,
)
from jaxamp_like._reports.page.data import table
from jaxamp_like._reports.page.table import FORMATS

RECORDS = OpRecord, CastRecord, RuleRecord, Difference, ScopeNode, OpNumerics
every_record = pytest.mark.parametrize("record", (*RECORDS, ScopeNumerics))


@dataclass(frozen=True)
class Where:
    line: Annotated[int, Column("line", "number", at=20)]


@dataclass(frozen=True)
class Fruit:
    name: Annotated[str, Column("name", at=10, terminal=True)]
    where: Where
    by_year: Annotated[dict[str, int], Column("in {}", "number", keys=("2025", "2026"))]
    hidden: int = 0

    @property
    def pieces(self) -> Annotated[int, Column("pieces", "number", at=90, adds=True)]:
        return 1


APPLE = Fruit("apple", Where(3), {"2025": 1, "2026": 2})
PEAR = Fruit("pear", Where(4), {"2025": 0, "2026": 5})


def titles(record, **options):
    return [column.title for column, _ in columns(record, **options)]


def test_columns_of_fields_properties_inner_records_and_mappings():
    assert titles(Fruit) == ["name", "line", "in 2025", "in 2026", "pieces"]
    assert titles(Fruit, terminal=True) == ["name"]


def test_equal_rows_are_added_up_and_the_most_come_first():
    found = rows(columns(Fruit), [PEAR, APPLE, APPLE])
    assert found == [["apple", 3, 1, 2, 2], ["pear", 4, 0, 5, 1]]


def test_the_page_gets_columns_and_rows():
    found = table(Fruit, [APPLE])
    assert [c["title"] for c in found["columns"]] == titles(Fruit)
    assert found["rows"] == [["apple", 3, 1, 2, 1]]


@every_record
def test_every_column_of_a_record_can_be_written(record):
    assert len(set(titles(record))) == len(titles(record)) > 1
    assert {column.kind for column, _ in columns(record)} <= FORMATS.keys()
    assert set(titles(record, terminal=True)) <= set(titles(record))
