"""Training curves of Optax's optimizers with their states in 8 and 4 bits.

    python -m benchmarks.curves_optimizers [--steps 600] [--seeds 4] [--optimizers Adam]

The models, their data and the ways to store are those of `benchmarks.curves_low_bits`;
each optimizer has a learning rate with which all three models learn. The losses of the
GAN swing, so it is trained from four times as many seeds. Fails where a mean
final loss with int8 states is higher than with float32 states by more than the spread
over seeds; 4 bits are there to compare with.

All of them take hours of a core. What the record has of other optimizers, trained as
many steps from as many seeds, stays in it: the command may be run optimizer by
optimizer.

Needs the extras `benchmarks` and `examples`."""

import json
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import optax
from matplotlib.figure import Figure
from rich.console import Console

from . import curves_low_bits
from .curves import Figures, make_optimiser
from .curves_low_bits import MODELS, PLAIN, WAYS, as_recorded, figures_of, training
from .rewrite import add_section, make_table
from .seeds import Trained, parser_of, train_all, write_record


@dataclass(frozen=True)
class Optimizer:
    """An optimizer of Optax.

    Args:
        make: `make(learning_rate)` gives it.
        peak_rate: the largest learning rate."""

    make: Callable[[Any], optax.GradientTransformation]
    peak_rate: float


OPTIMIZERS = {
    "AdaBelief": Optimizer(optax.adabelief, 3e-3),
    "Adagrad": Optimizer(optax.adagrad, 3e-2),
    "Adam": Optimizer(optax.adam, 3e-3),
    "Adamax": Optimizer(optax.adamax, 3e-3),
    "AdamW": Optimizer(optax.adamw, 3e-3),
    "Adan": Optimizer(optax.adan, 3e-3),
    "AdEMAMix": Optimizer(optax.contrib.ademamix, 1e-3),
    "ADOPT": Optimizer(optax.contrib.adopt, 3e-3),
    "AMSGrad": Optimizer(optax.amsgrad, 3e-3),
    "LAMB": Optimizer(optax.lamb, 1e-2),
    "Lion": Optimizer(optax.lion, 3e-4),
    "Muon": Optimizer(optax.contrib.muon, 1e-2),
    "NAdam": Optimizer(optax.nadam, 3e-3),
    "Nesterov": Optimizer(partial(optax.sgd, momentum=0.9, nesterov=True), 3e-3),
    "NovoGrad": Optimizer(optax.novograd, 3e-3),
    "RAdam": Optimizer(optax.radam, 3e-3),
    "RMSProp, momentum": Optimizer(partial(optax.rmsprop, momentum=0.9), 3e-4),
    "SGD, momentum": Optimizer(partial(optax.sgd, momentum=0.9), 1e-3),
    "Signum": Optimizer(optax.signum, 3e-4),
    "Yogi": Optimizer(optax.yogi, 3e-3),
}
FEW_BITS = ("int8 states", "int4 states")
STORED = (PLAIN, *FEW_BITS)
MORE_SEEDS = {"GAN": 4}  # times as many

Results = dict[str, dict[str, dict[str, Figures]]]  # by optimizer, model, way to store


def recorded_before(file: Path, steps: int, seeds: int) -> dict[str, Any]:
    """What a record has by optimizer, if it was made of as many steps and seeds."""
    if not file.exists():
        return {}
    record = json.loads(file.read_text())
    is_alike = (record["steps"], record["seeds"]) == (steps, seeds)
    return record["results"] if is_alike else {}


def diverges(by_task: dict[str, dict[str, Trained]]) -> bool:
    """Whether a loss is inf or NaN with float32 states, so that nothing is compared."""
    return not all(
        np.isfinite(run.final)
        for by_way in by_task.values()
        for run in by_way[PLAIN].runs
    )


def _figures(recorded: dict[str, Any]) -> Figures:
    return Figures(**{field.name: recorded[field.name] for field in fields(Figures)})


def misses(results: Results) -> Iterator[str]:
    """What ends in 8 bits above float32 by more than one seed is from another."""
    in_8_bits = FEW_BITS[0]
    for optimizer, by_task in results.items():
        for task, by_way in by_task.items():
            only = {task: {in_8_bits: by_way[in_8_bits]}}
            yield from (f"{optimizer}: {miss}" for miss in curves_low_bits.misses(only))


def signed_spreads(one: Figures) -> float:
    """How far a final loss is above float32's, in spreads over seeds."""
    return float(np.copysign(one.of_spread or 0.0, one.difference))


def plot(results: Results, path: Path) -> None:
    figure = Figure(figsize=(11, 4.8), layout="constrained")
    names = list(results)
    several = np.ravel(figure.subplots(1, len(MODELS), sharey=True))
    for axes, task in zip(several, MODELS, strict=True):
        axes.axvspan(-1, 1, color="#999999", alpha=0.3)
        for way, marker in zip(FEW_BITS, "o+", strict=True):
            values = [signed_spreads(results[name][task.name][way]) for name in names]
            axes.plot(np.clip(values, -3, 3), names, marker, label=way)
        axes.set_xlim(-3.2, 3.2)
        axes.set_title(task.name)
        axes.set_xlabel(f"final loss above {PLAIN}'s, in spreads over seeds")
        axes.grid(alpha=0.3)
    several[0].invert_yaxis()
    several[0].legend(fontsize="small", loc="upper left")
    figure.savefig(path, dpi=110)


def main(argv: list[str] | None = None) -> int:
    parser = parser_of(__doc__)
    parser.set_defaults(steps=600, seeds=4)
    parser.add_argument(
        "--optimizers", nargs="+", choices=OPTIMIZERS, default=[*OPTIMIZERS]
    )
    options = parser.parse_args(argv)
    console = Console(width=max(Console().width, 120))
    began = time.perf_counter()
    optimizers = {
        name: make_optimiser(options.steps, one.peak_rate, one.make)
        for name, one in OPTIMIZERS.items()
        if name in options.optimizers
    }
    trained: dict[str, Trained] = {}
    for task in MODELS:
        trained |= train_all(
            {
                _key(name, task.name, way): training(task, WAYS[way], optimizer)
                for name, optimizer in optimizers.items()
                for way in STORED
            },
            options.steps,
            options.seeds * MORE_SEEDS.get(task.name, 1),
            options.workers,
            console,
            options.keep,
        )
    whole = {
        name: {
            task.name: {way: trained[_key(name, task.name, way)] for way in STORED}
            for task in MODELS
        }
        for name in optimizers
        if all(_key(name, t.name, way) in trained for t in MODELS for way in STORED)
    }
    for name in [name for name, by_task in whole.items() if diverges(by_task)]:
        console.print(f"FAILED {name}: it diverges in float32; lower its `peak_rate`")
        del whole[name]
    new = {
        name: {
            task: as_recorded(figures_of(by_way), by_way)
            for task, by_way in by_task.items()
        }
        for name, by_task in whole.items()
    }
    file = options.out / "curves_optimizers.json"
    known = recorded_before(file, options.steps, options.seeds) | new
    recorded = {name: known[name] for name in OPTIMIZERS if name in known}
    results = {
        name: {
            task: {way: _figures(one) for way, one in by_way.items()}
            for task, by_way in by_task.items()
        }
        for name, by_task in recorded.items()
    }
    table = make_table(
        f"States in few bits (steps: {options.steps}, seeds: {options.seeds})",
        (PLAIN, "spread", *(f"{way}, in spreads" for way in FEW_BITS)),
    )
    for task in MODELS:
        cells = {
            name: [
                f"{by_task[task.name][PLAIN].mean:.5f}",
                f"{by_task[task.name][PLAIN].spread or 0:.5f}",
                *(f"{signed_spreads(by_task[task.name][k]):+.2f}" for k in FEW_BITS),
            ]
            for name, by_task in results.items()
        }
        add_section(table, task.name, cells)
    console.print(table)
    options.out.mkdir(parents=True, exist_ok=True)
    plot(results, options.out / "curves_optimizers.png")
    write_record(file, began, options.steps, options.seeds, recorded)
    missed = list(misses(results))
    console.print(*(f"MISSED {miss}" for miss in missed), sep="\n")
    return 1 if missed or len(new) < len(optimizers) else 0


def _key(optimizer: str, task: str, way: str) -> str:
    """The name of a training."""
    return f"{task}, {optimizer}, {way}"


if __name__ == "__main__":
    sys.exit(main())
