"""The HTML page: one file that opens without a network.

Python code aggregates the data, a jinja2 template lays it out, a script in the page
sorts and filters it, and Vega-Lite, which is part of the page, draws charts. Data is
shown by scope and line, not by equation, so that the page of a huge program is no
larger than that of a small one."""

import functools
import html
import json
from collections.abc import Mapping
from importlib import resources
from typing import Any

from ..data.explained import ReportData, about_memory, shares, summary
from ..data.heading import label
from ..data.memory import MemoryRecord
from ..data.numbers import NumericsData, OpNumerics, ScopeNumerics
from ..data.records import (
    CastRecord,
    ContractionRecord,
    Difference,
    OpRecord,
    RuleRecord,
    ScopeNode,
    quantised_contractions,
)
from ..data.units import human_bytes, human_flops
from ..extras import need
from . import charts, compiled, source
from .compiled import Compiled
from .data import differences, heads, notable, table, tiles, tree


def page(
    report: ReportData | None,
    against: ReportData | None = None,
    numerics: NumericsData | None = None,
    certificate: Compiled | None = None,
) -> str:
    """The page of a report, of another one beside it, of numerics and a certificate.

    Either a report or numerics must be given."""
    data: dict[str, Any] = {}
    tables: dict[str, Any] = {}
    drawn: dict[str, Any] = {}
    if report is not None:
        data["tree"] = tree(report.scopes(), against and against.scopes())
        data["treeColumns"] = heads(ScopeNode)
        tables["memory"] = table(MemoryRecord, report.memory)
        tables["ops"] = table(OpRecord, report.now.ops)
        tables["casts"] = table(CastRecord, report.now.casts)
        tables["rules"] = table(RuleRecord, report.rules)
        if quantised := quantised_contractions(report.now.ops):
            tables["quantised"] = table(ContractionRecord, quantised)
        if against is not None:
            found = differences(report.now, against.now)
            tables["differences"] = table(Difference, found)
        drawn |= charts.of_report(report, against)
    if numerics is not None:
        tables["numerics"] = table(OpNumerics, notable(numerics.ops))
        tables["scopeNumerics"] = table(ScopeNumerics, numerics.by_scope())
        drawn |= charts.of_numerics(numerics)
    if certificate is not None:
        tables |= compiled.tables(certificate)
        drawn |= compiled.charts(certificate)
    subject: Any = report or numerics
    return render(
        data | {"tables": tables, "charts": drawn},
        title=subject.name,
        reports=[
            (label(r.settings, "explain"), tiles(r)) for r in (report, against) if r
        ],
        notes=report.notes if report else (),
        numerics=numerics,
        sources=source.view(report.now) if report else [],
        versions=subject.versions,
        about_memory=about_memory(report) if report else "",
        quantised="quantised" in tables,
        certificate=certificate,
        certified=compiled.tiles(certificate) if certificate is not None else [],
    )


def render(
    data: Mapping[str, Any],
    template: str = "page.html",
    vega: str | None = None,
    **context: Any,
) -> str:
    """Fills in a template: `data` is for the page's script, `context` for the template.

    `vega` is the script that draws charts: Vega-Lite if not given, none if ""."""
    jinja2 = need("jinja2")
    loader = jinja2.FunctionLoader(_asset)
    environment = jinja2.Environment(loader=loader, autoescape=True)
    assets = {name: _asset(f"page.{name}") for name in ("css", "js")}
    return environment.get_template(template).render(
        data=_for_script(json.dumps(data, separators=(",", ":"))),
        vega=_vega() if vega is None else vega,
        **assets,
        **context,
    )


def _asset(name: str) -> str:
    return (
        resources.files(__name__.rpartition(".")[0])
        .joinpath("assets", name)
        .read_text("utf-8")
    )


def _for_script(text: str) -> str:
    """JSON that can stand in a script: nothing in it ends the element."""
    return text.replace("<", "\\u003c")


@functools.cache
def _vega() -> str:
    bundle: str = need("vl_convert", "vl-convert-python").javascript_bundle()
    return bundle.replace("</script", "<\\/script")


# -------------------------------------------------------------------------- notebooks


def notebook_view(report: ReportData) -> str:
    """A few lines and the two upper levels of scopes."""
    rows = [_row(node, level) for level, node in report.scopes(2).walk()]
    head = ("scope", "contractions", "FLOPs", "saved", "casts")
    return _lines(summary(report)) + _html_table(head, rows if report.now.ops else [])


def notebook_numerics(numerics: NumericsData) -> str:
    """What went wrong first, and the worst equations."""
    rows = [
        (op.describe(), f"{op.error:.2g}", f"{op.largest:.3g}", f"{op.smallest:.3g}")
        for op in numerics.worst()
    ]
    head = ("equation", "error", "largest", "smallest")
    return _lines(str(numerics).split("\n")) + _html_table(head, rows)


def _row(node: ScopeNode, level: int) -> tuple[str, ...]:
    return (
        "\u2003" * level + (node.name or "(all)"),
        shares(node.flops),
        human_flops(sum(node.flops.values())),
        human_bytes(sum(node.saved.values())),
        str(node.casts),
    )


def _lines(lines: list[str]) -> str:
    return f"<pre>{html.escape(chr(10).join(lines))}</pre>"


def _html_table(head: tuple[str, ...], rows: list[tuple[str, ...]]) -> str:
    if not rows:
        return ""
    cells = [
        "<tr>" + "".join(f"<td>{html.escape(cell)}</td>" for cell in row) + "</tr>"
        for row in rows
    ]
    titles = "".join(f'<th scope="col">{title}</th>' for title in head)
    return f"<table><tr>{titles}</tr>{''.join(cells)}</table>"
