"""The picture and the table of README's first screen, made of a committed record.

    python -m benchmarks.first_screen

Nothing is measured: the figures are those of `results/front-bfloat16.json`, which
`benchmarks.front` wrote. The table is printed, and a test compares it with README's."""

import json
import re
import statistics
import sys
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from .front import Figures, Rows, over

ROOT = Path(__file__).parents[1]
RECORD = ROOT / "benchmarks" / "results" / "front-bfloat16.json"
PICTURE = ROOT / "docs" / "images" / "first_screen.png"

OURS = "default"
# What is shown of the record: its name in the table and the picture, colour and mark.
SHOWN = {
    "hand": ("by hand", "#009e73", "^"),
    "hand lean": ("by hand, with `jax.checkpoint`", "#56b4e9", "v"),
    "pytorch_autocast": ("op lists of torch.autocast", "#cc79a7", "P"),
    "jaxamp": ("op lists of the original jaxamp", "#b09020", "X"),
    "jmp": ("everything in bfloat16, as by jmp", "#6c6c6c", ">"),
    OURS: ("**`amp`, the default**", "#d55e00", "o"),
}
PANELS = {
    "saved_bytes": "residuals saved for the backward pass",
    "step_seconds": "roofline step time on an H200",
}
FIGURES = ("saved_bytes", "temp_bytes", "step_seconds")


def read(path: Path = RECORD) -> dict[str, Rows]:
    models = json.loads(path.read_text())["models"]
    return {
        model: {name: Figures(**one) for name, one in rows.items()}
        for model, rows in models.items()
    }


def mean(results: dict[str, Rows], name: str, figure: str, yardstick: str) -> float:
    """The geometric mean over models of a figure, relative to another contender's."""
    ratios = [
        over(figure, rows[name], rows[yardstick])
        for rows in results.values()
        if name in rows
    ]
    known = [ratio for ratio in ratios if ratio is not None]
    return statistics.geometric_mean(known)


def without(results: dict[str, Rows], name: str) -> str:
    """What a mean of a contender that not every model has is to be called."""
    lacking = [model for model, rows in results.items() if name not in rows]
    return f" (without {', '.join(lacking)})" if lacking else ""


def row(results: dict[str, Rows], name: str, note: str = "") -> str:
    cells = [mean(results, name, "error", "contractions")]
    cells += [mean(results, name, figure, "float32") for figure in FIGURES]
    figures = " | ".join(f"{cell:.2f}" for cell in cells)
    return f"| {SHOWN[name][0]}{note} | {figures} |"


def table(results: dict[str, Rows]) -> str:
    """The means over models, as Markdown.

    What not every model has stands beside ours of the same models."""
    lines = [
        "| bfloat16 | gradient error | saved residuals | temp memory | step time |",
        "|---|---|---|---|---|",
        "| float32 | 0 | 1.00 | 1.00 | 1.00 |",
    ]
    parts = {without(results, name): name for name in SHOWN}
    for note, partial in sorted(parts.items()):
        same = {model: rows for model, rows in results.items() if partial in rows}
        names = [
            name for name in SHOWN if name == OURS or without(results, name) == note
        ]
        lines += [row(same, name, note) for name in names]
    return "\n".join(lines)


def draw(axes: Axes, results: dict[str, Rows], figure: str) -> None:
    axes.axvline(1.0, color="#444444", linewidth=1.0, linestyle="--", label="float32")
    for name, (label, colour, marker) in SHOWN.items():
        ours = name == OURS
        axes.scatter(
            mean(results, name, figure, "float32"),
            mean(results, name, "error", "contractions"),
            s=260 if ours else 100,
            color=colour,
            marker=marker,
            label=re.sub("[*`]", "", label) + without(results, name),
            zorder=3,
        )
    axes.set_xlim(0, 1.1)
    axes.set_ylim(bottom=0.9)
    axes.set_xlabel(f"{PANELS[figure]}, of float32's  (better: left)")
    axes.grid(alpha=0.25)


def picture(results: dict[str, Rows], path: Path = PICTURE) -> None:
    figure = Figure(figsize=(10, 4.6), layout="constrained")
    panels = figure.subplots(1, len(PANELS), sharey=True)
    for axes, axis in zip(panels, PANELS, strict=True):
        draw(axes, results, axis)
    panels[0].set_ylabel("gradient error  (better: down)")
    figure.suptitle(f"Training in bfloat16, means of {', '.join(results)}")
    handles, labels = panels[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=4, frameon=False)
    figure.savefig(path, dpi=110)


def main() -> int:
    results = read()
    print(table(results))
    picture(results)
    return 0


if __name__ == "__main__":
    sys.exit(main())
