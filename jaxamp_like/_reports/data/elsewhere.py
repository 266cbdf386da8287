"""What to write instead of attributes that reports do not have."""

_SAVED = "Write `report.save_html(path)`, or `report.to_json()`."
_TOTALS = "Write `report.now.totals`, and `report.written.totals` for it as written."
_FIRST = "Write `report.first_nonfinite`, or `report.ops` for all equations."

OF_VIEWS = {
    **dict.fromkeys("html to_html save export write".split(), _SAVED),
    **dict.fromkeys("show display".split(), "Write `report.print()`."),
}
OF_EXPLAIN = OF_VIEWS | {
    **dict.fromkeys("totals low_share share flops casts saved_bytes".split(), _TOTALS),
    **dict.fromkeys("ops contractions equations".split(), "Write `report.now.ops`."),
    **dict.fromkeys(
        "nan nans nonfinite underflow overflow errors".split(),
        "`trace_numerics(fn)(...)` runs the function and reports its numbers.",
    ),
}
OF_NUMERICS = OF_VIEWS | {
    **dict.fromkeys("nan nans inf infs nonfinite overflows first".split(), _FIRST),
}
