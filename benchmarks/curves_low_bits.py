"""Training curves with optimizer states in few bits, and without float32 parameters.

    python -m benchmarks.curves_low_bits [--steps 2000] [--seeds 3] [--tasks GAN]

Three models in float32: the digits and the characters of `benchmarks.curves`, and a
generative adversarial network whose two losses have one optimizer, AdamW. A seed sets
the initial weights and the order of the data, the same for every way to store. Fails
where the mean final loss is higher than with float32 states by more than the spread
over seeds; rounding parameters to the nearest is there to compare with, and may.

Needs the extras `benchmarks` and `examples`."""

import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
import optax
from matplotlib.figure import Figure
from rich.console import Console

from jaxamp_like.storage import (
    apply_updates,
    low_bit_state,
    update_in_float32,
)

from .curves import (
    TASKS,
    Figures,
    Run,
    Task,
    figures,
    make_optimiser,
    smooth,
)
from .rewrite import add_section, make_table
from .seeds import Trained, Training, parser_of, train_all, write_record
from .workloads import normal

# ------------------------------------------------------------------------------- a GAN

NOISE, HIDDEN, POINTS, MODES = 16, 128, 256, 8


def init_gan(key: Any) -> Any:
    def network(key: Any, sizes: Sequence[int]) -> list[Any]:
        pairs = zip(jr.split(key, len(sizes) - 1), sizes[:-1], sizes[1:], strict=True)
        return [(normal(k, m, n), jnp.zeros(n)) for k, m, n in pairs]

    generator, critic = jr.split(key)
    return {
        "generator": network(generator, (NOISE, HIDDEN, HIDDEN, 2)),
        "discriminator": network(critic, (2, HIDDEN, HIDDEN, 1)),
    }


def ring_batch(rng: np.random.Generator) -> Any:
    """Noise, and points of eight normal distributions around a circle."""
    angles = 2 * np.pi * rng.integers(MODES, size=POINTS) / MODES
    centres = np.stack([np.cos(angles), np.sin(angles)], axis=1)
    real = centres + 0.05 * rng.normal(size=centres.shape)
    noise = rng.normal(size=(POINTS, NOISE))
    return noise.astype(np.float32), real.astype(np.float32)


def gan_loss(params: Any, batch: Any) -> Any:
    """The sum of both losses, each with the other's network held."""
    noise, real = batch

    def run(layers: Any, x: Any) -> Any:
        for i, (w, b) in enumerate(layers):
            x = x @ w + b
            x = jax.nn.leaky_relu(x, 0.2) if i < len(layers) - 1 else x
        return x

    held = jax.lax.stop_gradient(params)
    fake = run(params["generator"], noise)
    judged = run(params["discriminator"], jax.lax.stop_gradient(fake))
    discriminator = jax.nn.softplus(judged).mean()
    discriminator += jax.nn.softplus(-run(params["discriminator"], real)).mean()
    generator = jax.nn.softplus(-run(held["discriminator"], fake)).mean()
    return discriminator + generator


MODELS = (*TASKS, Task("GAN", gan_loss, init_gan, ring_batch))

# ----------------------------------------------------------------------- ways to store


@dataclass(frozen=True)
class Way:
    """How a run stores what it keeps from step to step.

    Args:
        wrap: of the optimizer.
        rounding: of bfloat16 parameters; `None` keeps float32 ones.
        may_miss: whether it is there to compare with."""

    wrap: Callable[[Any], Any]
    rounding: Any = None
    may_miss: bool = False


PLAIN = "float32"
WAYS = {
    PLAIN: Way(lambda tx: tx),
    "int8 states": Way(lambda tx: low_bit_state(tx, "int8")),
    "float8 states": Way(lambda tx: low_bit_state(tx, "float8")),
    "int4 states": Way(lambda tx: low_bit_state(tx, "int4", block=128)),
    "bfloat16 parameters, by chance": Way(update_in_float32, "stochastic"),
    "the same, int8 states": Way(
        lambda tx: low_bit_state(update_in_float32(tx)), "stochastic"
    ),
    "bfloat16 parameters, to the nearest": Way(update_in_float32, "nearest", True),
}


def training(task: Task, way: Way, optimizer: Any) -> Training:
    tx = way.wrap(optimizer)

    def begin(key: Any, batch: Any) -> Any:
        del batch
        params = task.init(key)
        if way.rounding is not None:
            params = jax.tree.map(
                lambda x: x.astype(jnp.bfloat16) if eqx.is_inexact_array(x) else x,
                params,
            )
        opt_state = tx.init(eqx.filter(params, eqx.is_inexact_array))
        return params, opt_state, jr.fold_in(key, 1)

    def step(state: Any, batch: Any) -> Any:
        model, opt_state, key = state
        params, static = eqx.partition(model, eqx.is_inexact_array)

        def loss(params: Any) -> Any:
            full = jax.tree.map(lambda x: x.astype(jnp.float32), params)
            return task.loss(eqx.combine(full, static), batch)

        value, grads = jax.value_and_grad(loss)(params)
        updates, opt_state = tx.update(grads, opt_state, params)
        if way.rounding is None:
            params = optax.apply_updates(params, updates)
        else:
            key, now = jr.split(key)
            params = apply_updates(params, updates, rounding=way.rounding, key=now)
        return (eqx.combine(params, static), opt_state, key), value

    return Training(task, begin, step)


Results = dict[str, dict[str, Figures]]


def misses(results: Results) -> Iterator[str]:
    """What ends above float32 by more than one seed is from another."""
    for task, by_way in results.items():
        for name, one in by_way.items():
            is_far = one.of_spread is not None and one.of_spread > 1
            if is_far and one.difference > 0 and not WAYS[name].may_miss:
                yield (
                    f"{task}, {name}: the final loss is {one.difference:.4f} above "
                    f"{PLAIN}'s, {one.of_spread:.2f} times the spread over seeds"
                )


def figures_of(trained: dict[str, Trained]) -> dict[str, Figures]:
    """What is told of each way to store, beside float32."""
    plain = trained[PLAIN].runs
    return {name: figures(one.runs, plain) for name, one in trained.items()}


def as_recorded(
    by_way: dict[str, Figures], trained: dict[str, Trained]
) -> dict[str, Any]:
    """The same, with the bytes that each way takes."""
    return {
        name: vars(one) | {"bytes_per_parameter": trained[name].bytes_per_parameter}
        for name, one in by_way.items()
    }


def plot(runs: dict[str, dict[str, list[Run]]], path: Path) -> None:
    figure = Figure(figsize=(5.5 * len(runs), 4.8), layout="constrained")
    several = np.ravel(figure.subplots(1, len(runs)))
    for axes, (task, by_way) in zip(several, runs.items(), strict=True):
        plain = smooth(np.stack([run.losses for run in by_way[PLAIN]]))
        for name, rows in by_way.items():
            curves = smooth(np.stack([run.losses for run in rows]))
            steps = np.arange(curves.shape[-1]) + 1
            if name == PLAIN:
                low, high = (f(plain, 0) - plain.mean(0) for f in (np.min, np.max))
                axes.fill_between(steps, low, high, color="#999999", alpha=0.3)
            axes.plot(steps, curves.mean(0) - plain.mean(0), label=name)
        axes.set_title(task)
        axes.set_xlabel("training step")
        axes.set_ylabel(f"loss above that with {PLAIN} states")
        tail = plain[..., -1].std() * 8 + 1e-6
        axes.set_ylim(-tail, tail)
        axes.grid(alpha=0.3)
    figure.axes[0].legend(fontsize="small", loc="upper right")
    figure.savefig(path, dpi=110)


def main(argv: list[str] | None = None) -> int:
    parser = parser_of(__doc__)
    names = [task.name for task in MODELS]
    parser.add_argument("--tasks", nargs="+", choices=names, default=names)
    parser.add_argument("--name", default="curves_low_bits", help="of the record")
    options = parser.parse_args(argv)
    console = Console(width=max(Console().width, 120))
    began = time.perf_counter()
    models = [task for task in MODELS if task.name in options.tasks]
    trained = train_all(
        {
            f"{task.name}, {name}": training(task, way, make_optimiser(options.steps))
            for task in models
            for name, way in WAYS.items()
        },
        options.steps,
        options.seeds,
        options.workers,
        console,
        options.keep,
    )
    by_task = {
        task.name: {
            name: one
            for name in WAYS
            if (one := trained.get(f"{task.name}, {name}")) is not None
        }
        for task in models
    }
    results = {task: figures_of(by_way) for task, by_way in by_task.items()}
    title = f"States in few bits (steps: {options.steps}, seeds: {options.seeds})"
    table = make_table(
        title, ("final loss", "spread", "difference", "in spreads", "bytes / parameter")
    )
    for task, by_way in results.items():
        cells = {
            name: [
                f"{one.mean:.5f}",
                "-" if one.spread is None else f"{one.spread:.5f}",
                f"{one.difference:+.5f}",
                "-" if one.of_spread is None else f"{one.of_spread:.2f}",
                f"{by_task[task][name].bytes_per_parameter:.2f}",
            ]
            for name, one in by_way.items()
        }
        add_section(table, task, cells)
    console.print(table)
    options.out.mkdir(parents=True, exist_ok=True)
    runs = {
        task: {name: one.runs for name, one in by_way.items()}
        for task, by_way in by_task.items()
    }
    plot(runs, options.out / f"{options.name}.png")
    recorded = {
        task: as_recorded(by_way, by_task[task]) for task, by_way in results.items()
    }
    file = options.out / f"{options.name}.json"
    write_record(file, began, options.steps, options.seeds, recorded)
    missed = list(misses(results))
    console.print(*(f"MISSED {miss}" for miss in missed), sep="\n")
    return 1 if missed or len(trained) < len(models) * len(WAYS) else 0


if __name__ == "__main__":
    sys.exit(main())
