"""Error against memory and time: default, lean, every preset, contractions only, hand.

    python -m benchmarks.front --json front.json --plot front.png

For every workload and every model of the zoo: how far the gradient is from float32's,
what is kept for the backward pass, how long tracing takes, and how long a step takes at
least on an NVIDIA H200, read off the code compiled for it (see `benchmarks.roofline`;
`--no-roofline` does without its compiler). The record is written after each model, and
what it holds already, made by the same versions and sources with the same settings, is
not measured again: the command may be stopped, and run in pieces."""

import argparse
import hashlib
import json
import math
import statistics
import sys
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import jax
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FixedLocator, NullLocator, StrMethodFormatter
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

import jaxamp_like
from jaxamp_like import amp
from jaxamp_like.presets import (
    full_precision,
    jaxamp,
    jmp,
    mxnet,
    pytorch_autocast,
    tensorflow_graph_rewrite,
)
from jaxamp_like.rules import use_compute_precision

from . import measure, rewrite, roofline, workloads, zoo
from .rewrite import (
    AS_WRITTEN,
    LOSS_SCALES,
    UNOPTIMISED,
    Sample,
    errors_by_sample,
    machine,
    make_table,
    ratio,
    references,
    trace_times,
    versions,
)
from .workloads import WORKLOADS, Loss, Model, Workload
from .zoo import ZOO

MODELS: dict[str, Model] = {**WORKLOADS, **ZOO}

Contender = Callable[[Model, str], Loss | None]

EXACT = 1e-12  # instead of an error of zero, which has no place in a geometric mean


def contractions_only(model: Model, dtype: str) -> Loss:
    """Nothing low but contractions: a key for each of those that the model has."""
    jaxpr = jax.make_jaxpr(model.loss)(*model.shapes("toy"))
    primitives = {eqn.primitive for eqn, _ in measure.walk(jaxpr)}
    found = [p for p in primitives if p.name in measure.CONTRACTIONS]
    policy = full_precision() | dict.fromkeys(found, use_compute_precision)
    return amp(model.loss, compute_dtype=dtype, amp_policy=policy)


def by_policy(policy: Callable[[str], dict[Any, Any]]) -> Contender:
    def contender(model: Model, dtype: str) -> Loss:
        return amp(model.loss, compute_dtype=dtype, amp_policy=policy(dtype))

    return contender


def by_hand(model: Model, dtype: str) -> Loss | None:
    return model.hand(dtype) if isinstance(model, Workload) else None


def lean_by_hand(model: Model, dtype: str) -> Loss | None:
    lean = model.lean if isinstance(model, Workload) else None
    return lean(dtype) if lean else None


CONTENDERS: dict[str, Contender] = {
    "float32": lambda model, dtype: model.loss,
    "hand": by_hand,
    "hand lean": lean_by_hand,
    "default": lambda model, dtype: amp(model.loss, compute_dtype=dtype),
    "lean": lambda model, dtype: amp(model.loss, compute_dtype=dtype, lean=True),
    "contractions": contractions_only,
    "pytorch_autocast": by_policy(lambda dtype: pytorch_autocast()),
    "tensorflow_graph_rewrite": by_policy(tensorflow_graph_rewrite),
    "mxnet": by_policy(mxnet),
    "jmp": by_policy(lambda dtype: jmp()),
    "jaxamp": by_policy(lambda dtype: jaxamp()),
}
# What all others are measured by.
YARDSTICKS = ("float32", "contractions")


# -------------------------------------------------------------------------- measuring


@dataclass(frozen=True)
class Figures:
    """What is measured of one contender on one model.

    Args:
        error: of the gradient of all parameters, as one vector, relative to float32's,
            at toy size: the geometric mean over seeds, so that the ratio of two is the
            mean of the ratios seed by seed. XLA keeps every rounding.
        error_compiled: the same as XLA compiles it by default, when it may leave out a
            cast down with a cast up after it.
        saved_bytes: what is kept for the backward pass.
        trace_seconds: median time to trace value and gradient, with cold caches.
        step_seconds: the roofline step time.
        temp_bytes: the memory of the compiled step beside arguments and results."""

    error: float
    error_compiled: float
    saved_bytes: int
    trace_seconds: float
    step_seconds: float | None = None
    temp_bytes: int | None = None


Rows = dict[str, Figures]


@dataclass(frozen=True)
class Settings:
    """How a record was made."""

    dtype: str
    size: str = "real"
    seeds: int = 16
    repeats: int = 3
    roofline: bool = True


def mean_error(
    loss: Loss, samples: list[Sample], scale: float, options: dict[str, Any]
) -> float:
    """Of the gradients; infinite if one of them is not finite."""
    # What XLA rounds is settled before its backend; that one is spared the work.
    _, found = errors_by_sample(loss, samples, scale, options | UNOPTIMISED)
    if not all(map(math.isfinite, found)):
        return math.inf
    return statistics.geometric_mean(max(e, EXACT) for e in found)


def contenders_of(model: Model, dtype: str, names: Iterable[str]) -> dict[str, Loss]:
    made = {name: CONTENDERS[name](model, dtype) for name in names}
    return {name: loss for name, loss in made.items() if loss is not None}


def measured(
    model: Model, settings: Settings, losses: dict[str, Loss], device: Any = None
) -> Iterator[tuple[str, Figures]]:
    """Measures one contender after the other on one model."""
    shapes = model.shapes(settings.size)
    times = trace_times(losses, *shapes, settings.repeats)
    samples = references(model, settings.seeds, wide=False)
    scale = LOSS_SCALES.get(settings.dtype, 1.0)
    for name, loss in losses.items():
        saved = measure.saved_bytes(loss, *shapes, argnums=(0,))
        compiled = roofline.read_off(loss, shapes, device)[0] if device else None
        yield (
            name,
            Figures(
                error=mean_error(loss, samples, scale, AS_WRITTEN),
                error_compiled=mean_error(loss, samples, scale, {}),
                saved_bytes=sum(saved.values()),
                trace_seconds=times[name],
                step_seconds=compiled.step_seconds if compiled else None,
                temp_bytes=compiled.temp_bytes if compiled else None,
            ),
        )


# --------------------------------------------------------------------------- verdicts

# By how much another must be better to count: means of few seeds are not exact.
MARGINS = {"error": 0.05, "saved_bytes": 0.02, "step_seconds": 0.02}
# At most so many times the error of contractions alone in low precision.
LIMITS = {"default": 1.1, "lean": 1.2}
TAIL = 3.0  # times the error of any other


def over(name: str, one: Figures, other: Figures | None) -> float | None:
    """The ratio of a figure to another's; None where one of them was not measured."""
    ours, theirs = getattr(one, name), getattr(other, name, None)
    return None if ours is None or not theirs else ours / theirs


def beats(one: Figures, other: Figures) -> bool:
    """Whether one is better in all that both were measured in."""
    ratios = {name: over(name, one, other) for name in MARGINS}
    return all(r is None or r < 1 - MARGINS[name] for name, r in ratios.items())


def findings(rows: Rows) -> list[str]:
    """What is to be looked at in the figures of one model."""
    found = []
    others = {name: one for name, one in rows.items() if name != "float32"}
    for ours, limit in LIMITS.items():
        if ours not in rows:
            continue
        found += [
            f"{name} beats {ours}"
            for name, one in others.items()
            if name != ours and beats(one, rows[ours])
        ]
        above = over("error", rows[ours], rows.get("contractions"))
        if above is not None and above > limit:
            found.append(f"{ours} has {above:.2f} times the error of contractions")
        least = min(others, key=lambda name: others[name].error)
        tail = over("error", rows[ours], others[least])
        if tail is not None and tail > TAIL:
            found.append(f"{ours} has {tail:.1f} times the error of {least}")
    return found


# -------------------------------------------------------------------------- the table

COLUMNS = (
    "error\n/ contr.",
    "compiled\n/ contr.",
    "saved\n/ f32",
    "time\n/ f32",
    "temp\n/ f32",
    "trace\n/ f32",
    "error",
    "compiled",
)


def row(one: Figures, plain: Figures | None, alone: Figures | None) -> list[str]:
    def cell(name: str, other: Figures | None) -> str:
        found = over(name, one, other)
        return "-" if found is None else ratio(found, 1.0)

    return [
        cell("error", alone),
        cell("error_compiled", alone),
        cell("saved_bytes", plain),
        cell("step_seconds", plain),
        cell("temp_bytes", plain),
        cell("trace_seconds", plain),
        f"{one.error:.1e}",
        f"{one.error_compiled:.1e}",
    ]


def as_table(results: dict[str, Rows], note: str) -> Table:
    table = make_table(f"Error, memory and time ({note})", COLUMNS)
    for model, rows in results.items():
        plain, alone = (rows.get(name) for name in YARDSTICKS)
        shown = [name for name in rows if name != "float32"]
        for name in shown:
            label = model if name == shown[0] else ""
            cells = row(rows[name], plain, alone)
            table.add_row(label, name, *cells, end_section=name == shown[-1])
    return table


def verdict(results: dict[str, Rows]) -> str:
    lines = [
        f"- {model}: {finding}"
        for model, rows in results.items()
        for finding in findings(rows)
    ]
    limits = ", ".join(f"{name} at most {x}" for name, x in LIMITS.items())
    title = (
        f"Beaten by more than {MARGINS['error']:.0%} of error and "
        f"{MARGINS['saved_bytes']:.0%} of saved bytes and time, error above that of "
        f"contractions ({limits}), or above {TAIL:.0f} times another's:"
    )
    return "\n".join((title, *(lines or ["- none"])))


# --------------------------------------------------------------------------- the plot

# Ours in strong colours, drawn last.
STYLES = {
    "jaxamp": ("#b0a030", "*"),
    "jmp": ("#8c8c8c", ">"),
    "mxnet": ("#a8785a", "<"),
    "tensorflow_graph_rewrite": ("#e69f00", "X"),
    "pytorch_autocast": ("#cc79a7", "P"),
    "contractions": ("#222222", "s"),
    "hand": ("#009e73", "^"),
    "hand lean": ("#56b4e9", "v"),
    "lean": ("#0072b2", "D"),
    "default": ("#d55e00", "o"),
}
PANELS = {
    "saved_bytes": "saved for the backward pass / float32's",
    "step_seconds": "roofline step time / float32's",
}
TOP = 4.0  # what is above is drawn at the edge
TICKS = (0.8, 1.0, 1.25, 1.5, 2.0, 3.0, 4.0)


def points(results: dict[str, Rows], name: str, axis: str) -> list[tuple[float, float]]:
    """For every model, a contender's place on `axis` and its error."""
    found = []
    for rows in results.values():
        plain, alone = (rows.get(yardstick) for yardstick in YARDSTICKS)
        if name in rows:
            pair = over(axis, rows[name], plain), over("error", rows[name], alone)
            if None not in pair:
                found.append(pair)
    return found


def centre(found: list[tuple[float, float]]) -> list[float]:
    """The geometric mean, of what is finite."""
    finite = [pair for pair in found if math.isfinite(pair[1])] or found
    return [statistics.geometric_mean(values) for values in zip(*finite, strict=True)]


def draw(axes: Axes, results: dict[str, Rows], axis: str) -> None:
    axes.axhline(1.0, color="#222222", linewidth=0.8, alpha=0.4, zorder=0)
    for name, (colour, marker) in STYLES.items():
        found = points(results, name, axis)
        if not found:
            continue
        small = [(x, min(y, TOP)) for x, y in found]
        axes.scatter(
            *zip(*small, strict=True),
            s=16,
            color=colour,
            marker=marker,
            alpha=0.4,
            linewidths=0,
            clip_on=False,
        )
        x, y = centre(found)
        axes.scatter(
            x,
            min(y, TOP),
            s=200 if name in LIMITS else 110,
            color=colour,
            marker=marker,
            edgecolors="white",
            linewidths=1.2,
            zorder=3,
            label=name if len(found) == len(results) else f"{name} ({len(found)})",
        )
    axes.set_yscale("log")
    axes.set_ylim(top=TOP)
    axes.yaxis.set_major_locator(FixedLocator(TICKS))
    axes.yaxis.set_minor_locator(NullLocator())
    axes.yaxis.set_major_formatter(StrMethodFormatter("{x:g}"))
    axes.set_xlabel(f"{PANELS[axis]}  (better: left)")
    axes.grid(alpha=0.25)


def plot(results: dict[str, Rows], dtype: str, path: Path) -> None:
    has_times = any(
        one.step_seconds for rows in results.values() for one in rows.values()
    )
    axes_of = [axis for axis in PANELS if axis != "step_seconds" or has_times]
    figure = Figure(figsize=(5.6 * len(axes_of), 5.8), layout="constrained")
    panels = figure.subplots(1, len(axes_of), sharey=True, squeeze=False)[0]
    for axes, axis in zip(panels, axes_of, strict=True):
        draw(axes, results, axis)
    panels[0].set_ylabel("gradient error / contractions alone low  (better: down)")
    figure.suptitle(
        f"{dtype}, {len(results)} models; small: one model, large: geometric mean"
    )
    handles, labels = panels[0].get_legend_handles_labels()
    figure.legend(
        handles[::-1],
        labels[::-1],
        loc="outside lower center",
        ncols=5 if len(axes_of) > 1 else 3,
        frameon=False,
    )
    figure.savefig(path, dpi=130)


# ------------------------------------------------------------------------- the record


MEASURING = (measure, rewrite, roofline, workloads, zoo)


def sources() -> str:
    """A digest of the code that the figures depend on: versions change too seldom."""
    package = Path(jaxamp_like.__file__).parent
    files = sorted(package.rglob("*.py"))
    files += [Path(module.__file__ or "") for module in MEASURING]
    digest = hashlib.sha256()
    for file in files:
        digest.update(file.read_bytes())
    return digest.hexdigest()[:16]


def heading(settings: Settings) -> dict[str, Any]:
    found = versions() | (roofline.plugin_versions() if settings.roofline else {})
    return {
        "versions": found,
        "sources": sources(),
        "machine": machine(),
        "settings": asdict(settings),
    }


def load_record(path: Path | None, head: dict[str, Any]) -> dict[str, Any]:
    """A record, if it was made as `head` says; else nothing."""
    if path is None or not path.exists():
        return {}
    record = json.loads(path.read_text())
    return record if record | head == record else {}


def read_record(path: Path | None, head: dict[str, Any]) -> dict[str, Rows]:
    """The figures in a record, if it was made as `head` says."""
    return {
        model: {name: Figures(**one) for name, one in rows.items()}
        for model, rows in load_record(path, head).get("models", {}).items()
    }


def write_record(
    path: Path | None, head: dict[str, Any], results: dict[str, Rows]
) -> None:
    if path is None:
        return
    models = {
        model: {name: asdict(one) for name, one in rows.items()}
        for model, rows in results.items()
    }
    text = json.dumps(head | {"models": models}, indent=2)
    path.write_text(text + "\n")


def complete(
    results: dict[str, Rows],
    settings: Settings,
    models: Iterable[str],
    names: Iterable[str],
    save: Callable[[dict[str, Rows]], None],
    console: Console,
    device: Any = None,
) -> None:
    """Measures what `results` lacks, and has it saved after every model."""
    asked = {
        model: contenders_of(MODELS[model], settings.dtype, names) for model in models
    }
    lacking = {
        model: losses
        for model, losses in asked.items()
        if not results.get(model, {}).keys() >= losses.keys()
    }
    columns = (TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console) as progress:
        task = progress.add_task("", total=sum(map(len, lacking.values())))
        for model, losses in lacking.items():
            progress.update(task, description=model)
            rows = {}
            for name, one in measured(MODELS[model], settings, losses, device):
                rows[name] = one
                progress.update(task, advance=1, description=f"{model}, {name}")
            results[model] = results.get(model, {}) | rows
            save(results)


def parse_args(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        "python -m benchmarks.front",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--dtype", default="bfloat16", choices=("bfloat16", "float16"))
    parser.add_argument(
        "--size", default="real", choices=("toy", "real"), help="but for the errors"
    )
    parser.add_argument("--workloads", nargs="+", choices=MODELS, default=MODELS)
    parser.add_argument(
        "--policies",
        nargs="+",
        choices=CONTENDERS,
        default=CONTENDERS,
        help=f"beside {' and '.join(YARDSTICKS)}",
    )
    parser.add_argument("--seeds", type=int, default=16, help="for the errors")
    parser.add_argument("--repeats", type=int, default=3, help="of each timed trace")
    parser.add_argument("--json", type=Path, help="the record, read and written")
    parser.add_argument("--plot", type=Path, help="where to write the picture")
    parser.add_argument("--no-roofline", action="store_true", help="compile for no GPU")
    return parser.parse_args(argv)


def main(argv: list[str] | None = None) -> int:
    args = parse_args(argv)
    jax.config.update("jax_platforms", "cpu")  # the described GPU, not one that's here
    settings = Settings(
        args.dtype, args.size, args.seeds, args.repeats, not args.no_roofline
    )
    try:
        head = heading(settings)
    except roofline.NoPluginError as error:
        print(error, "\nOr leave it out: --no-roofline", file=sys.stderr)
        return 2
    console = Console(width=max(Console().width, 130))
    results = read_record(args.json, head)
    names = [name for name in CONTENDERS if name in {*args.policies, *YARDSTICKS}]
    complete(
        results,
        settings,
        args.workloads,
        names,
        lambda results: write_record(args.json, head, results),
        console,
        roofline.described_device() if settings.roofline else None,
    )
    in_order = {name: results[name] for name in MODELS if name in results}
    note = f"{args.dtype}, {args.size} size, errors at toy size"
    console.print(as_table(in_order, note))
    console.print(verdict(in_order))
    if args.plot is not None:
        plot(in_order, args.dtype, args.plot)
    return 0


if __name__ == "__main__":
    sys.exit(main())
