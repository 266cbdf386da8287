"""The page of a calibration: error against cost, and what was kept, and why."""

from typing import Any

from .._reports.page.data import table
from .._reports.page.page import render
from .records import Decided, Tried, show_error
from .result import Calibration

LEAST = 1e-4  # budgets: what is below is drawn there, as is an error of zero


def page(one: Calibration) -> str:
    """One file of HTML that opens without a network."""
    data = {
        "tables": {
            "groups": table(Decided, one.groups),
            "tried": table(Tried, one.tried),
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


def _tiles(one: Calibration) -> list[tuple[str, str, str]]:
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


def _front(one: Calibration) -> dict[str, Any]:
    """Error against cost, as a Vega-Lite specification."""
    error = _channel("error", "quantitative", title="error, in budgets")
    error["scale"] = {"type": "log"}
    cost = f"{one.objective} over the function as written"
    axes = {"x": _channel("cost", "quantitative", title=cost), "y": error}
    legend = {"orient": "top", "title": None}
    fields = ("set", "measured", "budgets", "cost")
    points = {
        "mark": {"type": "point", "filled": True, "size": 70},
        "encoding": {
            **axes,
            "color": _channel("measured", "nominal", legend=legend),
            "tooltip": [{"field": name} for name in fields],
        },
    }
    line = {
        "data": {"values": list(map(_point, one.front))},
        "mark": {"type": "line", "strokeDash": [4, 3], "color": "#888888"},
        "encoding": axes,
    }
    limit = {
        "data": {"values": [{"error": 1}]},
        "mark": {"type": "rule", "color": "#d55e00"},
        "encoding": {"y": _channel("error", "quantitative")},
    }
    return {
        "width": "container",
        "height": 320,
        "description": "error against cost of sets of groups",
        "background": "transparent",
        "autosize": {"type": "fit-x", "contains": "padding"},
        "data": {"values": list(map(_point, one.tried))},
        "layer": [limit, line, points],
    }


def _channel(name: str, kind: str, **options: Any) -> dict[str, Any]:
    return {"field": name, "type": kind, **options}


def _point(tried: Tried) -> dict[str, Any]:
    return {
        "cost": tried.cost,
        "error": min(max(tried.error, LEAST), 1 / LEAST),
        "set": tried.what,
        "measured": tried.measured,
        "budgets": show_error(tried.error),
    }
