"""The page of a calibration: error against cost, and what was kept, and why."""

import math
from typing import Any

from .._reports.page.page import render
from .evidence import Evidence, Tried, show_error

# Columns of tables, each with how the page's script writes it.
GROUPS = {
    "group": "text",
    "dtype": "text",
    "FLOPs": "flops",
    "kept as written": "bytes",
    "error alone, budgets": "short",
    "why": "text",
}
TRIED = {"set": "text", "cost": "share", "error, budgets": "short", "measured": "text"}

LEAST = 1e-4  # budgets: what is below is drawn there, as is an error of zero


def page(one: Evidence) -> str:
    """One file of HTML that opens without a network."""
    groups = [
        [g.name, g.dtype, g.flops, g.kept, _alone(g.sensitivity), g.why]
        for g in one.groups
    ]
    tried = [[t.what, t.cost, _number(t.error), _measured(t)] for t in one.tried]
    data = {
        "tables": {
            "groups": {"columns": _columns(GROUPS), "rows": groups},
            "tried": {"columns": _columns(TRIED), "rows": tried},
        },
        "charts": {"front": _front(one)} if one.tried else {},
    }
    return render(
        data,
        "calibration.html",
        title=f"{one.objective} by {one.granularity}",
        budget=repr(one.budget),
        tiles=_tiles(one),
        notes=one.notes,
        policy=repr(one.policy),
        versions=one.versions,
    )


def _columns(kinds: dict[str, str]) -> list[dict[str, str]]:
    return [{"title": title, "kind": kind} for title, kind in kinds.items()]


def _tiles(one: Evidence) -> list[tuple[str, str, str]]:
    low = len(one.groups) - len(one.kept_full)
    names = one.budget.limits()
    return [
        ("low", f"{one.low_share:.1%}", "of the contractions' FLOPs"),
        ("groups", f"{low} of {len(one.groups)}", "in low precision"),
        *(
            (name, show_error(getattr(one.held_out, name)), f"allowed {limit:g}")
            for name, limit in names.items()
        ),
        ("cost", f"{one.passes} passes", f"{one.compilations} compilations"),
    ]


def _alone(errors: dict[str, float] | None) -> Any:
    return "" if errors is None else _number(min(errors.values()))


def _number(error: float) -> Any:
    return error if math.isfinite(error) else "inf"  # which JSON has no number for


def _measured(one: Tried) -> str:
    return "the policy, held out" if one.is_real else "roundings"


def _front(one: Evidence) -> dict[str, Any]:
    def point(t: Tried) -> dict[str, Any]:
        error = min(max(t.error, LEAST), 1 / LEAST)
        shown = {
            "set": t.what,
            "measured": _measured(t),
            "budgets": show_error(t.error),
        }
        return {"cost": t.cost, "error": error} | shown

    axes: dict[str, Any] = {
        "x": {
            "field": "cost",
            "type": "quantitative",
            "title": f"{one.objective} over the function as written",
        },
        "y": {
            "field": "error",
            "type": "quantitative",
            "scale": {"type": "log"},
            "title": "error, in budgets",
        },
    }
    fields = ("set", "measured", "budgets", "cost")
    points = {
        "mark": {"type": "point", "filled": True, "size": 70},
        "encoding": {
            **axes,
            "color": {
                "field": "measured",
                "type": "nominal",
                "legend": {"orient": "top", "title": None},
            },
            "tooltip": [{"field": name} for name in fields],
        },
    }
    line = {
        "data": {"values": [point(t) for t in one.front]},
        "mark": {"type": "line", "strokeDash": [4, 3], "color": "#888888"},
        "encoding": axes,
    }
    limit = {
        "data": {"values": [{"error": 1}]},
        "mark": {"type": "rule", "color": "#d55e00"},
        "encoding": {"y": {"field": "error", "type": "quantitative"}},
    }
    return {
        "width": "container",
        "height": 320,
        "background": "transparent",
        "autosize": {"type": "fit-x", "contains": "padding"},
        "data": {"values": [point(t) for t in one.tried]},
        "layer": [limit, line, points],
    }
