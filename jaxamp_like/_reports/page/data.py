"""What the page shows, as rows of plain data: aggregated, and bounded in number."""

from collections import Counter, defaultdict, deque
from collections.abc import Iterable
from typing import Any

from ..data.explained import Explained, human_bytes
from ..data.numbers import Numbers, OpNumerics, plain
from ..data.records import Program, ScopeNode

MAX_ROWS = 3000
"""Rows of a table in the page: more than anybody reads, and half a megabyte."""

MAX_NODES = 3000


def tiles(report: Explained) -> list[tuple[str, str, str]]:
    """Label, figure and what it was as written."""
    now, written = report.now.totals, report.written.totals
    inserted = sum(cast.inserted for cast in report.now.casts)
    found = [
        (
            "contraction FLOPs in low precision",
            f"{100 * now.low_share:.1f} %",
            f"as written {100 * written.low_share:.1f} %",
        ),
        ("casts", str(now.casts), f"{inserted} inserted, {written.casts} as written"),
    ]
    if now.saved is not None and written.saved is not None:
        found.append(
            (
                "saved for the backward pass",
                human_bytes(sum(now.saved.values())),
                f"as written {human_bytes(sum(written.saved.values()))}",
            )
        )
    return [*found, ("equations", str(len(report.now.ops)), "in the rewritten program")]


def tree(root: ScopeNode, other: ScopeNode | None) -> dict[str, Any]:
    """The scopes, with those of another report beside.

    Level by level, and within a level those with most FLOPs first, as many as
    `MAX_NODES`; `hidden` tells of how many children a scope had to do without."""
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
    found: dict[str, Any] = {
        "name": node.name or "(all)",
        "flops": node.flops,
        "saved": node.saved,
        "casts": node.casts,
        "ops": node.ops,
        "hidden": len(node.children) - len(children),
        "children": [_node(c, partners.get(c.name), chosen) for c in children],
    }
    if other is not None:
        found["other"] = {"flops": other.flops, "saved": other.saved}
    return found


def _ranked(count: Counter[Any]) -> list[list[Any]]:
    return [[*key, n] for key, n in count.most_common(MAX_ROWS)]


def op_rows(program: Program) -> list[list[Any]]:
    """Scope, primitive, phase, dtypes, rule, why, source; how many; their FLOPs."""
    count: Counter[Any] = Counter()
    flops: Counter[Any] = Counter()
    for op in program.ops:
        place = op.place
        key = (
            place.scope, op.primitive, place.phase, "/".join(dict.fromkeys(op.written)),
            op.dtype, op.key, op.rule, op.why, place.source,
        )  # fmt: skip
        count[key] += 1
        flops[key] += op.total_flops
    ranked = sorted(count, key=lambda key: (-flops[key], -count[key]))
    return [[*key, count[key], flops[key]] for key in ranked[:MAX_ROWS]]


def cast_rows(program: Program) -> list[list[Any]]:
    """Scope, from, to, phase, whether inserted, why, source; how many."""
    return _ranked(
        Counter(
            (
                cast.place.scope, cast.source_dtype, cast.target_dtype,
                cast.place.phase, "amp" if cast.inserted else "author",
                cast.why, cast.place.source,
            )
            for cast in program.casts
        )
    )  # fmt: skip


def difference_rows(a: Program, b: Program) -> list[list[Any]]:
    """Equations that the two programs compute in different dtypes.

    Scope, primitive, phase, source; the dtypes in the one and in the other."""

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
    rows = [
        [*key, told(ours.get(key)), told(theirs.get(key))]
        for key in keys
        if ours.get(key) != theirs.get(key)
    ]
    return rows[:MAX_ROWS]


def numerics_rows(report: Numbers) -> list[list[Any]]:
    """One row for each equation, in the order in which they ran."""
    return [_numbers(i, op) for i, op in enumerate(_notable(report.ops))]


def scope_numerics_rows(report: Numbers) -> list[list[Any]]:
    """One row for each scope, outer ones first."""
    return [
        [
            one.scope or "(all)", one.ops, plain(one.largest), one.smallest,
            one.nonfinite, one.vanished, plain(one.error), one.overflow["float16"],
            one.underflow["float16"], one.overflow["float8_e4m3fn"],
            one.underflow["float8_e4m3fn"],
        ]
        for one in report.by_scope()[:MAX_ROWS]
    ]  # fmt: skip


def _notable(ops: Iterable[OpNumerics]) -> list[OpNumerics]:
    """All of them, or as many as fit: those with trouble or the largest errors."""
    ops = list(ops)
    if len(ops) <= MAX_ROWS:
        return ops

    def rank(op):
        return (op.made_nonfinite is None, -op.vanished, -op.error)

    return sorted(sorted(ops, key=rank)[:MAX_ROWS], key=lambda op: op.order)


def _numbers(i: int, op: OpNumerics) -> list[Any]:
    name = op.primitive
    if op.author not in ("", op.primitive):
        name += f" (of {op.author})"
    return [
        i, op.place.scope, name, op.place.phase, op.dtype, plain(op.largest),
        op.smallest, op.nonfinite, op.vanished, plain(op.error),
        ", ".join(map(str, op.worst)), op.overflow["float16"], op.underflow["float16"],
        op.overflow["float8_e4m3fn"], op.underflow["float8_e4m3fn"], op.place.source,
    ]  # fmt: skip
