"""The page's diagrams, as Vega-Lite specifications."""

import itertools
from collections.abc import Mapping
from typing import Any

import jax.numpy as jnp
import numpy as np

from ..data.explained import ReportData
from ..data.numbers import FORMATS, NumericsData
from ..data.records import PHASES

# Colours that are told apart with colour-blind eyes too (Okabe and Ito, 2008).
COLOURS = {
    "float64": "#666666",
    "float32": "#0072b2",
    "bfloat16": "#009e73",
    "float16": "#e69f00",
    "int8": "#cc79a7",
}
_OTHER = "#d55e00"  # for the 8-bit floats and all other dtypes


def framed(values: list[dict[str, Any]], **rest: Any) -> dict[str, Any]:
    """A Vega-Lite specification for `values`, which is as wide as its container."""
    return {
        "width": "container",
        "background": "transparent",
        "autosize": {"type": "fit-x", "contains": "padding"},
        "data": {"values": values},
        **rest,
    }


def _colour(names: set[str]) -> dict[str, Any]:
    domain = sorted(names)
    colours = [COLOURS.get(name, _OTHER) for name in domain]
    return {
        "field": "dtype",
        "type": "nominal",
        "scale": {"domain": domain, "range": colours},
        "legend": {"orient": "top", "title": None},
    }


def bars(
    amounts: Mapping[str, Mapping[str, int]], title: str, unit: str
) -> dict[str, Any]:
    """A bar for each key of `amounts`, divided by dtype."""
    values = [
        {"what": what, "dtype": dtype, "amount": n}
        for what, by_dtype in amounts.items()
        for dtype, n in by_dtype.items()
    ]
    return framed(
        values,
        description=f"{title}, by dtype",  # what a screen reader says
        height=24 * len({row["what"] for row in values}),
        mark={"type": "bar", "tooltip": True},
        encoding={
            "y": {"field": "what", "type": "nominal", "title": None, "sort": None},
            "x": {
                "field": "amount",
                "type": "quantitative",
                "title": title,
                "axis": {"format": "~s", "tickCount": 4, "labelFlush": True},
            },
            "color": _colour({v["dtype"] for v in values}),
            "tooltip": [
                {"field": "what", "title": "of"},
                {"field": "dtype"},
                {"field": "amount", "title": unit, "format": ".4~s"},
            ],
        },
    )


def of_report(report: ReportData, against: ReportData | None) -> dict[str, Any]:
    """FLOPs and saved bytes, by dtype."""
    programs = {"as written": report.written, "now": report.now}
    if against is not None:
        programs["compared"] = against.now
    totals = {label: program.totals for label, program in programs.items()}
    flops = {
        f"{phase}, {label}": total.flops.get(phase, {})
        for phase, (label, total) in itertools.product(PHASES, totals.items())
    }
    saved = {label: total.saved or {} for label, total in totals.items()}
    found = {
        "flops": bars(flops, "FLOPs of contractions", "FLOP"),
        "saved": bars(saved, "bytes saved for the backward pass", "bytes"),
    }
    return {name: spec for name, spec in found.items() if spec["data"]["values"]}


MAX_EQUATIONS = 48


def of_numerics(report: NumericsData) -> dict[str, Any]:
    """Exponents of the equations with the largest errors, and what formats hold."""
    shown = sorted(report.worst(MAX_EQUATIONS), key=lambda op: op.order)
    values = [
        {
            "equation": f"{i + 1}. {op.primitive} {op.place.scope}"[:44],
            "exponent": exponent,
            "share": share,
        }
        for i, op in enumerate(shown)
        for exponent, share in op.histogram.items()
    ]
    if not values:
        return {}
    heat = {
        "mark": {"type": "rect", "tooltip": True},
        "encoding": {
            "x": {
                "field": "exponent",
                "type": "quantitative",
                "bin": {"step": 1},
                "title": "binary exponent",
            },
            "y": {"field": "equation", "type": "nominal", "sort": None, "title": None},
            "color": {
                "field": "share",
                "type": "quantitative",
                "scale": {"scheme": "blues"},
                "legend": None,
            },
        },
    }
    lines = {
        "data": {"values": _format_limits(values)},
        "mark": {"type": "rule", "strokeDash": [4, 3], "tooltip": True},
        "encoding": {
            "x": {"field": "exponent", "type": "quantitative"},
            "color": {
                "field": "dtype",
                "type": "nominal",
                "scale": {
                    "domain": [*FORMATS],
                    "range": [COLOURS.get(name, _OTHER) for name in FORMATS],
                },
                "legend": {"orient": "top", "title": "range of"},
            },
        },
    }
    told = "binary exponents in the equations with the largest errors"
    spec = framed(values, description=told, height=15 * len(shown), layer=[heat, lines])
    return {"exponents": spec | {"resolve": {"scale": {"color": "independent"}}}}


def _format_limits(values: list[dict[str, Any]]) -> list[dict[str, Any]]:
    lowest = min(row["exponent"] for row in values)
    highest = max(row["exponent"] for row in values)
    limits = []
    for name in FORMATS:
        info = jnp.finfo(name)
        for edge in (float(info.smallest_subnormal), float(info.max)):
            exponent = float(np.floor(np.log2(edge))) + (edge > 1)
            if lowest - 8 <= exponent <= highest + 8:
                limits.append({"dtype": name, "exponent": exponent})
    return limits
