"""Training curves of two models in float32, float16 and bfloat16.

A vision transformer learns handwritten digits, a GPT the characters of the language
reference that Python's `help` shows. Both are float32 code; `amp` makes the 16-bit
versions of them, and float16 scales its loss and skips the steps that overflow. A seed
sets the initial weights and the order of the data, the same in every precision. What is
left to compare is how far 16 bits move the final loss, and how far another seed does.

Needs the extras `benchmarks` and `examples`."""

import argparse
import json
import statistics
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from importlib.metadata import version
from pathlib import Path
from pydoc_data.topics import topics
from typing import Any, NamedTuple

import equinox as eqx
import jax.numpy as jnp
import jax.random as jr
import numpy as np
import optax
from jax import Array
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from rich import box
from rich.console import Console
from rich.progress import MofNCompleteColumn, Progress, TimeElapsedColumn
from rich.table import Table

from examples import train_digits
from jaxamp_like import DynamicScalerState, amp, dynamic_scale_value_and_grad

from .rewrite import machine, versions
from .workloads import FLOAT32, Loss, Params, gpt, init_blocks, init_norm, normal

PRECISIONS = ("float32", "float16", "bfloat16")
TAIL = 20  # steps whose mean is the final loss, and a point of a drawn curve
PATIENCE = 50  # so short that even these runs find out where float16 overflows
PEAK_RATE = 3e-3
# XLA may leave out a cast to 16 bits and back. Here every rounding is to count.
EXACT = {"xla_allow_excess_precision": False}
PACKAGES = ("equinox", "optax", "scikit-learn")


# --------------------------------------------------------------------------- the tasks


@dataclass(frozen=True)
class Task:
    """A model with its data.

    Args:
        name: what tables call it.
        loss: `loss(params, batch)`, in float32.
        init: gives the parameters for a key.
        batch: draws a batch."""

    name: str
    loss: Loss
    init: Callable[[Array], Any]
    batch: Callable[[np.random.Generator], Any]


digits = cache(train_digits.load_data)


def digits_batch(rng: np.random.Generator) -> tuple[Array, Array]:
    data = digits()
    rows = rng.integers(len(data.train_labels), size=train_digits.BATCH)
    return data.train_images[rows], data.train_labels[rows]


VOCABULARY = 128  # ASCII
DIM, DEPTH, LENGTH, BATCH = 64, 2, 64, 16


def init_char_gpt(key: Array, dim: int = DIM, depth: int = DEPTH) -> Params:
    keys = jr.split(key, 4)
    return {
        "embed": normal(keys[0], VOCABULARY, dim, fan_in=1),
        "position": 0.1 * normal(keys[1], LENGTH, dim, fan_in=1),
        "blocks": init_blocks(keys[2], depth, dim),
        "norm": init_norm(dim),
        "head": normal(keys[3], dim, VOCABULARY),
    }


@cache
def characters() -> np.ndarray:
    """Half a million of them."""
    text = "\n".join(topics[name] for name in sorted(topics))
    return np.frombuffer(text.encode("ascii", errors="replace"), np.uint8)


def text_batch(rng: np.random.Generator) -> Array:
    text = characters()
    starts = rng.integers(len(text) - LENGTH, size=BATCH)
    windows = text[starts[:, None] + np.arange(LENGTH + 1)]
    return jnp.asarray(windows.astype(np.int32))


TASKS = (
    Task(
        "digits ViT",
        lambda model, batch: train_digits.cross_entropy(model, *batch),
        lambda key: train_digits.VisionTransformer(key),
        digits_batch,
    ),
    Task(
        "character GPT",
        lambda params, tokens: gpt(FLOAT32, params, tokens),
        init_char_gpt,
        text_batch,
    ),
)


# ---------------------------------------------------------------------------- training


class State(NamedTuple):
    params: Any
    opt_state: optax.OptState
    scaler: DynamicScalerState  # used by float16 only


Step = Callable[[State, Any], tuple[State, Array]]


def make_optimiser(
    steps: int,
    peak_rate: float = PEAK_RATE,
    optimizer: Callable[[Any], optax.GradientTransformation] = optax.adamw,
) -> optax.GradientTransformation:
    rates = optax.warmup_cosine_decay_schedule(
        0.0, peak_rate, max(steps // 10, 1), max(steps, 2)
    )
    # A step whose gradients are not finite is skipped, however many came before it.
    return optax.apply_if_finite(optimizer(rates), max_consecutive_errors=steps)


def make_step(loss: Loss, precision: str, tx: optax.GradientTransformation) -> Step:
    mixed = loss if precision == "float32" else amp(loss, compute_dtype=precision)
    scaled = dynamic_scale_value_and_grad(mixed)
    plain = eqx.filter_value_and_grad(mixed)

    def step(state: State, batch: Any) -> tuple[State, Array]:
        params, opt_state, scaler = state
        if precision == "float16":
            scaler, (value, grads) = scaled(params, batch, dynamic_scaler_state=scaler)
        else:
            value, grads = plain(params, batch)
        arrays = eqx.filter(params, eqx.is_array)
        updates, opt_state = tx.update(grads, opt_state, arrays)
        return State(eqx.apply_updates(params, updates), opt_state, scaler), value

    # Equinox hands options on to JAX, but its types don't tell.
    return eqx.filter_jit(step, compiler_options=EXACT)  # pyright: ignore


@dataclass(frozen=True)
class Run:
    """One training.

    Args:
        losses: of every step.
        skipped: steps that left the parameters as they were.
        scale: the loss scale after the last step; only float16 moves it."""

    losses: np.ndarray
    skipped: int
    scale: float

    @property
    def final(self) -> float:
        return float(np.mean(self.losses[-TAIL:]))


def train(
    params: Any,
    step: Step,
    batches: Iterable[Any],
    tx: optax.GradientTransformation,
) -> Run:
    opt_state = tx.init(eqx.filter(params, eqx.is_array))
    state = State(params, opt_state, DynamicScalerState(patience=PATIENCE))
    losses = []
    for batch in batches:
        state, loss = step(state, batch)
        losses.append(float(loss))
    skipped = optax.tree_utils.tree_get(state.opt_state, "total_notfinite")
    return Run(np.array(losses), int(skipped), float(state.scaler.scaler))


Runs = dict[str, dict[str, list[Run]]]  # by task, then by precision: one for each seed


def train_all(
    steps: int, seeds: int, console: Console, tasks: Sequence[Task] = TASKS
) -> Runs:
    columns = *Progress.get_default_columns(), MofNCompleteColumn(), TimeElapsedColumn()
    tx = make_optimiser(steps)
    runs: Runs = {}
    with Progress(*columns, console=console) as progress:
        bar = progress.add_task("", total=len(tasks) * len(PRECISIONS) * seeds * steps)

        def batches(task: Task, seed: int) -> Iterator[Any]:
            rng = np.random.default_rng(seed)
            for _ in range(steps):
                yield task.batch(rng)
                progress.advance(bar)

        for task in tasks:
            init = eqx.filter_jit(task.init)
            runs[task.name] = {}
            for precision in PRECISIONS:
                progress.update(bar, description=f"{task.name} {precision}")
                step = make_step(task.loss, precision, tx)
                runs[task.name][precision] = [
                    train(init(jr.key(seed)), step, batches(task, seed), tx)
                    for seed in range(seeds)
                ]
    return runs


# ------------------------------------------------------------------------- the figures


@dataclass(frozen=True)
class Figures:
    """What is told of one model in one precision.

    Args:
        finals: the mean loss of the last steps, for each seed.
        mean: of `finals`.
        spread: of `finals`, their standard deviation; None for a single seed.
        difference: of the means, to float32.
        of_spread: the size of that difference, in spreads of float32.
        largest: the largest difference that a seed makes to the same seed in float32.
        skipped: steps skipped, for each seed.
        scales: the last loss scale, for each seed."""

    finals: list[float]
    mean: float
    spread: float | None
    difference: float
    of_spread: float | None
    largest: float
    skipped: list[int]
    scales: list[float]


def figures(runs: list[Run], plain: list[Run]) -> Figures:
    def spread(finals: list[float]) -> float | None:
        return statistics.stdev(finals) if len(finals) > 1 else None

    finals, references = ([run.final for run in rows] for rows in (runs, plain))
    difference = statistics.fmean(finals) - statistics.fmean(references)
    yardstick = spread(references)
    pairs = zip(finals, references, strict=True)
    return Figures(
        finals=finals,
        mean=statistics.fmean(finals),
        spread=spread(finals),
        difference=difference,
        of_spread=abs(difference) / yardstick if yardstick else None,
        largest=max(abs(one - other) for one, other in pairs),
        skipped=[run.skipped for run in runs],
        scales=[run.scale for run in runs],
    )


Results = dict[str, dict[str, Figures]]


def summarise(runs: Runs) -> Results:
    return {
        task: {
            name: figures(rows, by_name["float32"]) for name, rows in by_name.items()
        }
        for task, by_name in runs.items()
    }


def verdict(results: Results) -> str:
    ratios = [
        one.of_spread
        for rows in results.values()
        for name, one in rows.items()
        if name != "float32"
    ]
    known = [ratio for ratio in ratios if ratio is not None]
    if not known:
        return "One seed has no spread: nothing to compare with."
    inside = sum(ratio <= 1 for ratio in known)
    if inside == len(known):
        return (
            "Every final loss in 16 bits is within the seed spread of float32: the "
            f"means differ by at most {max(known):.2f} spreads."
        )
    return (
        f"{inside} of {len(known)} final losses in 16 bits are within the seed spread "
        f"of float32; the means differ by up to {max(known):.2f} spreads."
    )


# -------------------------------------------------------------------------- the output

COLUMNS = (
    "model",
    "precision",
    "final loss",
    "spread",
    "difference",
    "in spreads",
    "largest",
    "skipped",
    "log2 scale",
)
NOTES = (
    f"final loss: mean over the last {TAIL} steps and over the seeds",
    "spread: standard deviation of the final loss over the seeds",
    "difference: of the final loss to float32; in spreads: its size, over float32's",
    "largest: the largest difference that a seed makes to the same seed in float32",
    "skipped: steps that overflowed, for each seed",
    "log2 scale: the loss scale after the last step, for each seed",
)


def row(task: str, precision: str, one: Figures) -> list[str]:
    plain, scaled = precision == "float32", precision == "float16"
    return [
        task,
        precision,
        f"{one.mean:.5f}",
        "-" if one.spread is None else f"{one.spread:.5f}",
        "-" if plain else f"{one.difference:+.5f}",
        "-" if plain or one.of_spread is None else f"{one.of_spread:.2f}",
        "-" if plain else f"{one.largest:.5f}",
        ", ".join(map(str, one.skipped)),
        ", ".join(f"{np.log2(scale):.0f}" for scale in one.scales) if scaled else "-",
    ]


def rows(results: Results) -> list[list[str]]:
    return [
        row(task, precision, one)
        for task, by_name in results.items()
        for precision, one in by_name.items()
    ]


def as_table(results: Results, title: str) -> Table:
    table = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD)
    for i, column in enumerate(COLUMNS):
        table.add_column(column, justify="left" if i < 2 else "right", no_wrap=True)
    for task, *cells in rows(results):
        first, last = cells[0] == PRECISIONS[0], cells[0] == PRECISIONS[-1]
        table.add_row(task if first else "", *cells, end_section=last)
    return table


def as_markdown(results: Results, title: str, name: str) -> str:
    rules = ["---"] * 2 + ["---:"] * (len(COLUMNS) - 2)
    lines = [COLUMNS, rules, *rows(results)]
    return "\n".join(
        (
            f"# {title}\n",
            verdict(results) + "\n",
            *(f"| {' | '.join(cells)} |" for cells in lines),
            "",
            *(f"- {note}" for note in NOTES),
            f"\n![Training curves]({name}.png)\n",
            f"Made by `python -m benchmarks.curves`; versions in `{name}.json`.\n",
        )
    )


def smooth(losses: np.ndarray, window: int = TAIL) -> np.ndarray:
    """Means over a sliding window along the last axis."""
    window = min(window, losses.shape[-1])
    return np.lib.stride_tricks.sliding_window_view(losses, window, axis=-1).mean(-1)


def draw(axes: Axes, runs: dict[str, list[Run]], results: dict[str, Figures]) -> None:
    # Wide below narrow, solid below dashed: the curves overlap and all must show.
    styles = (("#999999", 5.0, "-"), ("#0072b2", 1.8, "-"), ("#d55e00", 1.8, "--"))
    for (precision, by_seed), (colour, width, line) in zip(
        runs.items(), styles, strict=True
    ):
        curves = smooth(np.stack([run.losses for run in by_seed]))
        if curves.max() > 10 * curves.min():
            axes.set_yscale("log")
        last = len(by_seed[0].losses)
        steps = np.arange(last - curves.shape[-1], last) + 1
        one = results[precision]
        about = "" if one.spread is None else f" ± {one.spread:.4f}"
        axes.fill_between(
            steps, curves.min(0), curves.max(0), color=colour, alpha=0.2, linewidth=0
        )
        axes.plot(
            steps,
            curves.mean(0),
            line,
            color=colour,
            linewidth=width,
            label=f"{precision}: {one.mean:.4f}{about}",
        )
    axes.set_xlabel("training step")
    axes.grid(alpha=0.3, which="both")
    axes.legend(title="final loss")


def plot(runs: Runs, results: Results, path: Path) -> None:
    figure = Figure(figsize=(5.5 * len(runs), 4.8), layout="constrained")
    for axes, task in zip(np.ravel(figure.subplots(1, len(runs))), runs, strict=True):
        draw(axes, runs[task], results[task])
        axes.set_title(task)
        axes.set_ylabel(f"cross entropy (mean of the last {TAIL} steps)")
    seeds = len(next(iter(runs.values()))[PRECISIONS[0]])
    if seeds > 1:
        figure.suptitle(
            f"Mean of {seeds} seeds, in a band from the lowest to the highest"
        )
    figure.savefig(path, dpi=130)


def record(results: Results, steps: int, seeds: int, seconds: float) -> dict[str, Any]:
    return {
        "versions": versions() | {name: version(name) for name in PACKAGES},
        "machine": machine(),
        "seconds": round(seconds),
        "steps": steps,
        "seeds": seeds,
        "verdict": verdict(results),
        "tasks": {
            task: {name: vars(one) for name, one in by_name.items()}
            for task, by_name in results.items()
        },
    }


def at_least_one(text: str) -> int:
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"must be 1 or more, but is {number}")
    return number


def parse_args(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser("python -m benchmarks.curves", description=__doc__)
    parser.add_argument("--steps", type=at_least_one, default=400, help="of each run")
    parser.add_argument("--seeds", type=at_least_one, default=3)
    names = [task.name for task in TASKS]
    parser.add_argument("--tasks", nargs="+", choices=names, default=names)
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results")
    parser.add_argument("--name", default="curves", help="of the files, less endings")
    return parser.parse_args(argv)


def main(argv: list[str] | None = None) -> None:
    args = parse_args(argv)
    console = Console(width=max(Console().width, 120))
    start = time.perf_counter()
    tasks = [task for task in TASKS if task.name in args.tasks]
    runs = train_all(args.steps, args.seeds, console, tasks)
    seconds = time.perf_counter() - start
    results = summarise(runs)
    title = f"Training curves (steps: {args.steps}, seeds: {args.seeds})"
    console.print(as_table(results, title))
    console.print("\n".join(NOTES), style="dim")
    console.print(f"\n{verdict(results)}")
    args.out.mkdir(parents=True, exist_ok=True)
    plot(runs, results, args.out / f"{args.name}.png")
    text = as_markdown(results, title, args.name)
    (args.out / f"{args.name}.md").write_text(text)
    found = record(results, args.steps, args.seeds, seconds)
    (args.out / f"{args.name}.json").write_text(json.dumps(found, indent=2) + "\n")
    console.print(f"Figure, table and figures: {args.out}")


if __name__ == "__main__":
    main()
