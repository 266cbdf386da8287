"""The chart of a calibration: error against cost, as a Vega-Lite specification."""

from collections.abc import Sequence
from typing import Any

from .._reports.page.charts import framed
from .records import Tried, show_error

LEAST = 1e-4  # in budgets: smaller errors are drawn there, as is an error of zero


def error_against_cost(
    tried: Sequence[Tried], front: Sequence[Tried], objective: str
) -> dict[str, Any]:
    """A chart of all sets that were measured, with a line through the `front`."""
    error = _channel("error", "quantitative", title="error, in budgets")
    error["scale"] = {"type": "log"}
    cost = f"{objective} over the function as written"
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
        "data": {"values": list(map(_point, front))},
        "mark": {"type": "line", "strokeDash": [4, 3], "color": "#888888"},
        "encoding": axes,
    }
    limit = {
        "data": {"values": [{"error": 1}]},
        "mark": {"type": "rule", "color": "#d55e00"},
        "encoding": {"y": _channel("error", "quantitative")},
    }
    return framed(
        list(map(_point, tried)),
        height=320,
        description="error against cost of sets of groups",
        layer=[limit, line, points],
    )


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
