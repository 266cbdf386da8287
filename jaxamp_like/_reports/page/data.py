"""The contents of the page as rows of plain data, aggregated and limited in number."""

from collections import Counter, defaultdict, deque
from collections.abc import Iterable
from typing import Any

from ..data.columns import columns, rows
from ..data.explained import ReportData
from ..data.numbers import OpNumerics, plain
from ..data.records import Difference, Program, ScopeNode
from ..data.units import human_bytes

MAX_ROWS = 3000
"""Rows of a table in the page: more than anybody reads, and half a megabyte."""

MAX_NODES = 3000


def tiles(report: ReportData) -> list[tuple[str, str, str]]:
    """The tiles of a report: label, figure, and the figure as written."""
    now, written = report.now.totals, report.written.totals
    how_many = f"{report.now.num_inserted} inserted, {written.casts} as written"
    found = [
        (
            "contraction FLOPs in low precision",
            f"{100 * now.low_share:.1f} %",
            f"as written {100 * written.low_share:.1f} %",
        ),
        ("casts", str(now.casts), how_many),
    ]
    if now.saved_bytes is not None and written.saved_bytes is not None:
        before = f"as written {human_bytes(written.saved_bytes)}"
        saved = human_bytes(now.saved_bytes)
        found.append(("saved for the backward pass", saved, before))
    return [*found, ("equations", str(len(report.now.ops)), "in the rewritten program")]


def tree(root: ScopeNode, other: ScopeNode | None) -> dict[str, Any]:
    """The scopes, with those of another report beside them.

    They are taken level by level, at most `MAX_NODES`. If the children of a scope don't
    all fit, those with most FLOPs are taken; `hidden` says how many are left out."""
    chosen: dict[str, list[ScopeNode]] = {}
    queue, room = deque([root]), MAX_NODES
    while queue and room > 0:
        node = queue.popleft()
        ranked = node.children
        if len(ranked) > room:
            ranked = sorted(ranked, key=lambda child: -sum(child.flops.values()))
        chosen[node.path] = list(ranked[:room])
        room -= len(chosen[node.path])
        queue.extend(chosen[node.path])
    return _node(root, other, chosen)


def _node(
    node: ScopeNode, other: ScopeNode | None, chosen: dict[str, list[ScopeNode]]
) -> dict[str, Any]:
    partners = {child.name: child for child in other.children} if other else {}
    children = chosen.get(node.path, [])
    values = _values(node)
    values[0] = values[0] or "(all)"
    found: dict[str, Any] = {
        "values": values,
        "hidden": len(node.children) - len(children),
        "children": [_node(c, partners.get(c.name), chosen) for c in children],
    }
    if other is not None:
        found["other"] = _values(other)
    return found


def _values(node: ScopeNode) -> list[Any]:
    return [read(node) for _, read in columns(ScopeNode)]


def table(record: type, records: Iterable[Any]) -> dict[str, Any]:
    """The columns and rows of a table, as plain data."""
    shown = columns(record)
    return {"columns": heads(record), "rows": plain(rows(shown, records)[:MAX_ROWS])}


def heads(record: type) -> list[dict[str, str]]:
    """Title and kind of each column of such records, for the page's script."""
    return [{"title": c.title, "kind": c.kind} for c, _ in columns(record)]


def differences(a: Program, b: Program) -> list[Difference]:
    """Equations that the two programs compute in different dtypes."""

    def dtypes(program: Program) -> dict[Any, Counter[str]]:
        found: dict[Any, Counter[str]] = defaultdict(Counter)
        for op in program.ops:
            if op.primitive != "convert_element_type" and op.dtype:
                place = op.place
                key = (place.scope, op.primitive, place.phase, place.source)
                found[key][op.dtype] += 1
        return found

    def told(count: Counter[str] | None) -> str:
        return ", ".join(f"{n} {name}" for name, n in sorted((count or {}).items()))

    ours, theirs = dtypes(a), dtypes(b)
    keys = dict.fromkeys([*ours, *theirs])
    return [
        Difference(*key, ours=told(ours.get(key)), theirs=told(theirs.get(key)))
        for key in keys
        if ours.get(key) != theirs.get(key)
    ]


def notable(ops: Iterable[OpNumerics]) -> list[OpNumerics]:
    """All of them, or as many as fit: those with trouble or the largest errors."""
    ops = list(ops)
    if len(ops) <= MAX_ROWS:
        return ops

    def rank(op):
        return (op.made_nonfinite is None, -op.vanished, -op.error)

    return sorted(sorted(ops, key=rank)[:MAX_ROWS], key=lambda op: op.order)
