"""The picture and figures of README's first screen, and the table of the comparison.

    python -m benchmarks.first_screen

Nothing is measured: the figures are those of `results/front-bfloat16.json`, which
`benchmarks.front` wrote, times on a GPU those of `results/steps-gpu.json`, which
`benchmarks.steps` wrote, and those of TPUs of `results/tpu-bfloat16.json`, which
`benchmarks.tpu` wrote. The tables of README and of docs/comparison.md are printed,
and a test compares them with these pages. The picture is drawn twice, for light pages
and dark ones, with letters that can be read where it is 360 pixels wide, as on a
phone."""

import json
import statistics
import sys
from collections.abc import Iterable
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from .front import Figures, Rows, over

ROOT = Path(__file__).parents[1]
RECORD = ROOT / "benchmarks" / "results" / "front-bfloat16.json"
MEASURED = ROOT / "benchmarks" / "results" / "steps-gpu.json"
TPUS = ROOT / "benchmarks" / "results" / "tpu-bfloat16.json"
PICTURES = {
    "light": ROOT / "docs" / "images" / "first_screen.png",
    "dark": ROOT / "docs" / "images" / "first_screen_dark.png",
}
# The colours of the background, of letters and axes, of the grid, and of `amp`.
INK = {
    "light": {
        "page": "#ffffff",
        "ink": "#222222",
        "grid": "#dddddd",
        "ours": "#c94a00",
    },
    "dark": {"page": "#1e2129", "ink": "#e2e4e9", "grid": "#3a3e48", "ours": "#ff8a4c"},
}

OURS = "default"
# What is shown of the record: its name in the table, and in the picture its name, mark,
# and where its name stands: so many points to the right of its mark, and above it.
SHOWN = {
    "hand": ("casts by hand", "casts by hand", "^", (-110, -5)),
    "hand lean": (
        "casts and `jax.checkpoint` by hand",
        "by hand with\njax.checkpoint",
        "v",
        (-14, 14),
    ),
    "pytorch_autocast": (
        "op lists of `torch.autocast`",
        "ops of torch.autocast",
        "P",
        (-14, -24),
    ),
    "jaxamp": (
        "op lists of the original jaxamp",
        "ops of jaxamp 0.0.4",
        "X",
        (-120, 16),
    ),
    "jmp": (
        "everything in bfloat16, as by jmp",
        "all in bfloat16, as jmp",
        ">",
        (-14, -24),
    ),
    OURS: ("**`amp`, the default**", "amp", "o", (16, -6)),
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
    """A note on the mean of a contender that some models lack: which models."""
    lacking = [model for model, rows in results.items() if name not in rows]
    return f" (without {', '.join(lacking)})" if lacking else ""


def row(results: dict[str, Rows], name: str, note: str = "") -> str:
    cells = [mean(results, name, "error", "contractions")]
    cells += [mean(results, name, figure, "float32") for figure in FIGURES]
    figures = " | ".join(f"{cell:.2f}" for cell in cells)
    return f"| {SHOWN[name][0]}{note} | {figures} |"


def table(results: dict[str, Rows]) -> str:
    """The means over models, as Markdown.

    After contenders that some models lack comes `amp` on the models that have them."""
    lines = [
        "| bfloat16 | gradient error | residuals | temp memory | step time |",
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


def measured(name: str) -> str:
    """The times of a step on a GPU, of each model that was run there, over float32's.

    `name` is that of a contender of `benchmarks.steps`."""
    workloads = json.loads(MEASURED.read_text())["workloads"].values()
    all_seconds = (
        {way: one["seconds"] for way, one in workload["figures"].items()}
        for workload in workloads
    )
    ratios = (seconds[name] / seconds["float32"] for seconds in all_seconds)
    return ", ".join(f"{ratio:.2f}" for ratio in ratios)


def short_table(results: dict[str, Rows]) -> str:
    """What README shows of the means, as Markdown: those over the models that were also
    written by hand with `jax.checkpoint`."""
    same = {m: rows for m, rows in results.items() if "hand lean" in rows}
    lines = [
        f"| bfloat16; means over {', '.join(names_of(same))} | activations kept "
        "| gradient error | time, estimated (H200) | time, measured (H100): GPT, ViT |",
        "|---|---|---|---|---|",
        "| float32 | 1 | 0 | 1 | 1, 1 |",
    ]
    shown = ((OURS, "amp"), ("hand lean", "lean"), ("jmp", "jmp"), ("hand", "hand"))
    for name, way in shown:
        cells = (
            mean(same, name, "saved_bytes", "float32"),
            mean(same, name, "error", "contractions"),
            mean(same, name, "step_seconds", "float32"),
        )
        row = " | ".join((*(f"{cell:.2f}" for cell in cells), measured(way)))
        lines += [f"| {SHOWN[name][0]} | {row} |"]
    return "\n".join(lines)


def names_of(models: Iterable[str]) -> list[str]:
    """The names of models as README writes them, which does not tell of scans."""
    return [model.removesuffix(" scanned") for model in models]


def on_tpus(results: dict[str, Rows], name: str) -> str:
    """The estimated cycles and the temporary memory of compiled steps, over float32's.

    They are means over the models, from the least to the most that TPUs have."""
    devices = json.loads(TPUS.read_text())["devices"].values()

    def over_float32(figure: str) -> str:
        means = [
            statistics.geometric_mean(
                by_model[model][name][figure] / by_model[model]["float32"][figure]
                for model in results
            )
            for by_model in devices
        ]
        least, most = f"{min(means):.2f}", f"{max(means):.2f}"
        return least if least == most else f"{least} to {most}"

    cycles, memory = over_float32("cycles"), over_float32("temp_bytes")
    return (
        f"{cycles} of float32's estimated cycles and {memory} of its temporary memory"
    )


def draw(axes: Axes, results: dict[str, Rows], ink: dict[str, str]) -> None:
    for name, (_, label, marker, place) in SHOWN.items():
        ours = name == OURS
        note = without(results, name)
        at = (
            mean(results, name, "saved_bytes", "float32"),
            mean(results, name, "error", "contractions"),
        )
        colour = ink["ours"] if ours else ink["ink"]
        axes.scatter(*at, s=300 if ours else 130, color=colour, marker=marker, zorder=3)
        axes.annotate(
            label + note,
            at,
            xytext=place,
            textcoords="offset points",
            color=colour,
            fontsize=20 if ours else 14,
            fontweight="bold" if ours else "normal",
        )
    partial = next(name for name in SHOWN if without(results, name))
    same = {model: rows for model, rows in results.items() if partial in rows}
    at = (
        mean(same, OURS, "saved_bytes", "float32"),
        mean(same, OURS, "error", "contractions"),
    )
    axes.scatter(*at, s=300, facecolors="none", edgecolors=ink["ours"], linewidths=2.5)
    axes.annotate(
        "amp" + without(results, partial),
        at,
        xytext=(-14, 16),
        textcoords="offset points",
        color=ink["ours"],
        fontsize=14,
    )


def picture(results: dict[str, Rows], scheme: str, path: Path) -> None:
    ink = INK[scheme]
    figure = Figure(figsize=(7.4, 5), layout="constrained", facecolor=ink["page"])
    axes = figure.subplots()
    axes.set_facecolor(ink["page"])
    draw(axes, results, ink)
    axes.set_xlim(0.25, 1.0)
    axes.set_ylim(0.9, 1.6)
    axes.set_xlabel("saved for the backward pass (float32: 1)", fontsize=15)
    axes.set_ylabel("gradient error (rounded products: 1)", fontsize=15)
    axes.tick_params(labelsize=14, colors=ink["ink"])
    for text in (axes.xaxis.label, axes.yaxis.label):
        text.set_color(ink["ink"])
    for side in axes.spines.values():
        side.set_color(ink["grid"])
    axes.grid(color=ink["grid"])
    axes.set_axisbelow(True)
    figure.savefig(path, dpi=130)


def main() -> int:
    results = read()
    tpus = (f"{name}: {on_tpus(results, name)}" for name in (OURS, "hand"))
    print(short_table(results), *tpus, table(results), sep="\n\n")
    for scheme, path in PICTURES.items():
        picture(results, scheme, path)
    return 0


if __name__ == "__main__":
    sys.exit(main())
