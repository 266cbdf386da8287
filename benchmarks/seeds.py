"""Trains a model from several seeds at once, several trainings beside each other."""

import argparse
import json
import re
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
import optax
from rich.console import Console
from rich.progress import MofNCompleteColumn, Progress, TimeElapsedColumn

from jaxamp_like.storage import to_full_state

from .curves import EXACT, Run, Task, at_least_one
from .rewrite import machine, versions
from .timing import attempts_side_by_side

CALL = 40  # steps of one call of the compiled program


@dataclass(frozen=True)
class Training:
    """A way to train a model.

    Args:
        task: the model with its data.
        begin: `begin(key, batch)` gives parameters, optimizer state, and what else a
            step carries on.
        step: `step(state, batch)` gives the next state and the loss.
        last_step: the same, for the last fifth of the steps; if not given, it is `step`
            as before."""

    task: Task
    begin: Callable[[Any, Any], Any]
    step: Callable[[Any, Any], tuple[Any, Any]]
    last_step: Callable[[Any, Any], tuple[Any, Any]] | None = None


@dataclass(frozen=True)
class Trained:
    """What came of a training.

    Args:
        runs: one for each seed.
        bytes_per_parameter: of parameters and optimizer state, from step to step."""

    runs: list[Run]
    bytes_per_parameter: float


def train(
    training: Training, steps: int, seeds: int, advance: Callable[[int], None]
) -> Trained:
    """Trains from all seeds at once: `vmap` makes one program of them."""
    keys = jax.vmap(jr.key)(jnp.arange(seeds))
    generators = _generators(seeds)
    run = last_run = _compiled(training.step)
    stops, begins_last = {*range(0, steps, CALL), steps}, steps
    if training.last_step is not None:
        last_run, begins_last = _compiled(training.last_step), round(0.8 * steps)
        stops.add(begins_last)
    one_step = _batches(training.task, _generators(seeds), 1)
    first = jax.tree.map(lambda x: x[0], one_step)
    state = eqx.filter_jit(eqx.filter_vmap(training.begin))(keys, first)
    losses = []
    for start, stop in pairwise(sorted(stops)):
        batches = _batches(training.task, generators, stop - start)
        state, loss = (run if start < begins_last else last_run)(state, batches)
        losses.append(np.asarray(loss))
        advance(stop - start)
    skipped = optax.tree_utils.tree_get(to_full_state(state[1]), "total_notfinite")
    by_seed = zip(np.concatenate(losses).T, np.asarray(skipped), strict=True)
    params = eqx.filter(state[0], eqx.is_inexact_array)
    size = sum(x.size for x in jax.tree.leaves(params))
    kept = sum(x.nbytes for x in jax.tree.leaves((params, state[1])))
    return Trained([Run(row, int(n), 1.0) for row, n in by_seed], kept / size)


def _compiled(step: Callable[[Any, Any], tuple[Any, Any]]) -> Any:
    """Many steps of all seeds, one after the other, compiled."""

    def run(state: Any, batches: Any) -> Any:
        arrays, static = eqx.partition(state, eqx.is_array)

        def one(arrays: Any, batch: Any) -> Any:
            after, loss = eqx.filter_vmap(step)(eqx.combine(arrays, static), batch)
            return eqx.filter(after, eqx.is_array), loss

        arrays, losses = jax.lax.scan(one, arrays, batches)
        return eqx.combine(arrays, static), losses

    # Equinox hands options on to JAX, but its types don't tell.
    return eqx.filter_jit(  # pyright: ignore
        run, donate="all", compiler_options=EXACT
    )


def _generators(seeds: int) -> list[np.random.Generator]:
    return [np.random.default_rng(seed) for seed in range(seeds)]


def _batches(task: Task, generators: Sequence[Any], steps: int) -> Any:
    """The batches of some steps, stacked: steps first, then seeds."""
    batches = [[task.batch(rng) for rng in generators] for _ in range(steps)]
    by_step = [jax.tree.map(lambda *xs: np.stack(xs), *row) for row in batches]
    return jax.tree.map(lambda *xs: np.stack(xs), *by_step)


def train_all(
    trainings: Mapping[str, Training],
    steps: int,
    seeds: int,
    workers: int,
    console: Console,
    keep: Path | None = None,
) -> dict[str, Trained]:
    """Trains all of them, as many beside each other as there are workers.

    One that fails is told of, and is not in what is returned. Each that ends is kept in
    the folder `keep`, and what is there already is not trained again."""
    columns = *Progress.get_default_columns(), MofNCompleteColumn(), TimeElapsedColumn()
    with Progress(*columns, console=console) as progress:
        bar = progress.add_task("", total=len(trainings) * steps)
        found = attempts_side_by_side(
            {
                name: partial(
                    _trained_once,
                    _file(keep, name, steps, seeds),
                    partial(train, one, steps, seeds, partial(progress.advance, bar)),
                )
                for name, one in trainings.items()
            },
            workers,
        )
    for name, one in found.items():
        if isinstance(one, Exception):
            console.print(f"FAILED {name}: {type(one).__name__}: {one}", markup=False)
    return {k: one for k, one in found.items() if isinstance(one, Trained)}


def _file(keep: Path | None, name: str, steps: int, seeds: int) -> Path | None:
    plain = re.sub(r"[^a-z0-9]+", "-", name.lower())
    return keep and keep / f"{plain}-{steps}-{seeds}.npz"


def _trained_once(path: Path | None, run: Callable[[], Trained]) -> Trained:
    """What a file of an earlier call holds, else what `run` gives, and then is kept."""
    if path is None:
        return run()
    if path.exists():
        with np.load(path) as kept:
            pairs = zip(kept["losses"], kept["skipped"], strict=True)
            runs = [Run(losses, int(skipped), 1.0) for losses, skipped in pairs]
            return Trained(runs, float(kept["bytes_per_parameter"]))
    trained = run()
    path.parent.mkdir(parents=True, exist_ok=True)
    np.savez(
        path,
        losses=np.stack([one.losses for one in trained.runs]),
        skipped=[one.skipped for one in trained.runs],
        bytes_per_parameter=trained.bytes_per_parameter,
    )
    return trained


def parser_of(documentation: str | None) -> argparse.ArgumentParser:
    """A parser of the options that all these commands have."""
    about = (documentation or "").partition("\n")[0]
    parser = argparse.ArgumentParser(description=about)
    parser.add_argument("--steps", type=at_least_one, default=2000, help="of each run")
    parser.add_argument("--seeds", type=at_least_one, default=3)
    parser.add_argument(
        "--workers", type=at_least_one, default=1, help="trainings at a time"
    )
    parser.add_argument(
        "--keep",
        type=Path,
        help="folder in which each training is kept as it ends, so that the command "
        "may be stopped and run in pieces; empty it when the code has changed",
    )
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results")
    return parser


def write_record(
    path: Path,
    began: float,
    steps: int,
    seeds: int,
    results: Mapping[str, Any],
    **more: Any,
) -> None:
    """Writes results, with what they were measured by.

    Args:
        path: of the file.
        began: when, by `time.perf_counter()`.
        steps: of each run.
        seeds: of each training.
        results: what is to be kept.
        more: what else the record says."""
    record = {
        "versions": versions(),
        "machine": machine(),
        "seconds": round(time.perf_counter() - began),
        "steps": steps,
        "seeds": seeds,
        **more,
        "results": results,
    }
    path.write_text(json.dumps(record, indent=2) + "\n")
