"""Training curves of a GPT of characters in float8, by current and by delayed scaling.

    python -m benchmarks.curves_float8 [--steps 2000] [--seeds 3] [--out results]

The model, its data and its optimiser are those of `benchmarks.curves`. Its contractions
with weights read float8 but for the head's, small as they are: this is about numbers,
not about speed. A seed sets the initial weights and the order of the data, the same in
every precision. Fails where a mean final loss differs from that in bfloat16 by more
than the spread over seeds.

Needs the extras `benchmarks` and `examples`."""

import argparse
import json
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import jax.random as jr
import numpy as np
import optax
from matplotlib.figure import Figure
from rich.console import Console
from rich.progress import MofNCompleteColumn, Progress, TimeElapsedColumn

from jaxamp_like import Policy, amp, amp_with_state, get_policy, init_amp_state
from jaxamp_like.presets import quantised
from jaxamp_like.rules import float8

from .curves import (
    EXACT,
    TASKS,
    VOCABULARY,
    Figures,
    Run,
    at_least_one,
    draw,
    figures,
    make_optimiser,
)
from .rewrite import machine, make_table, versions

(GPT,) = (task for task in TASKS if task.name == "character GPT")
HISTORY = 16  # steps that delayed scaling remembers
BASE = "bfloat16"

Step = Callable[[Any, Any], tuple[Any, Any]]


def in_blocks(site: Any) -> bool:
    """Whether a contraction is none of the head's, which has no scope to tell by."""
    return all(VOCABULARY not in aval.shape for aval in site.avals[:2])


def _policy(**options: Any) -> Policy:
    return Policy(BASE, rules=quantised(float8(where=in_blocks, **options)))


POLICIES = {
    BASE: get_policy("mixed_bfloat16"),
    "float8, current": _policy(),
    "float8, delayed": _policy(delayed=True, amax_history_length=HISTORY),
}


def training(kind: str, tx: Any) -> tuple[Callable[..., Any], Step]:
    """What makes the state that a training begins with, and a step of it."""
    policy, is_delayed = POLICIES[kind], kind == "float8, delayed"
    if is_delayed:
        gradient = amp_with_state(jax.value_and_grad(GPT.loss), amp_policy=policy)
    else:
        gradient = jax.value_and_grad(amp(GPT.loss, amp_policy=policy))

    def begin(key, batch):
        params = GPT.init(key)
        state = init_amp_state(gradient, params, batch) if is_delayed else {}
        return params, tx.init(params), state

    def step(state, batch):
        params, opt_state, amp_state = state
        if is_delayed:
            (loss, grads), amp_state = gradient(amp_state, params, batch)
        else:
            loss, grads = gradient(params, batch)
        updates, opt_state = tx.update(grads, opt_state, params)
        return (optax.apply_updates(params, updates), opt_state, amp_state), loss

    return begin, jax.jit(step, donate_argnums=0, compiler_options=EXACT)


def train(
    begin: Callable[..., Any], step: Step, steps: int, seed: int, advance: Any
) -> Run:
    batches = _batches(seed, steps)
    first = next(batches)
    state = begin(jr.key(seed), first)
    losses = []
    for batch in (first, *batches):
        state, loss = step(state, batch)
        losses.append(float(loss))
        advance()
    skipped = optax.tree_utils.tree_get(state[1], "total_notfinite")
    return Run(np.array(losses), int(skipped), 1.0)


def _batches(seed: int, steps: int) -> Iterator[Any]:
    rng = np.random.default_rng(seed)
    for _ in range(steps):
        yield GPT.batch(rng)


def train_all(steps: int, seeds: int, console: Console) -> dict[str, list[Run]]:
    columns = *Progress.get_default_columns(), MofNCompleteColumn(), TimeElapsedColumn()
    with Progress(*columns, console=console) as progress:
        bar = progress.add_task("", total=len(POLICIES) * seeds * steps)
        runs: dict[str, list[Run]] = {}
        for kind in POLICIES:
            progress.update(bar, description=kind)
            begin, step = training(kind, make_optimiser(steps))
            runs[kind] = [
                train(begin, step, steps, seed, lambda: progress.advance(bar))
                for seed in range(seeds)
            ]
    return runs


def misses(results: dict[str, Figures]) -> Iterator[str]:
    """What is farther from bfloat16 than one seed from another."""
    for kind, one in results.items():
        if one.of_spread is not None and one.of_spread > 1:
            yield (
                f"{kind}: the final loss differs by {one.difference:+.4f} from "
                f"{BASE}'s, {one.of_spread:.2f} times the spread over seeds"
            )


def as_table(results: dict[str, Figures], title: str) -> Any:
    columns = ("final loss", "spread", "difference", "in spreads", "skipped")
    table = make_table(title, columns)
    for kind, one in results.items():
        spread, ratio = one.spread, one.of_spread
        table.add_row(
            GPT.name,
            kind,
            f"{one.mean:.5f}",
            "-" if spread is None else f"{spread:.5f}",
            f"{one.difference:+.5f}",
            "-" if ratio is None else f"{ratio:.2f}",
            ", ".join(map(str, one.skipped)),
        )
    return table


def plot(runs: dict[str, list[Run]], results: dict[str, Figures], path: Path) -> None:
    figure = Figure(figsize=(7, 4.8), layout="constrained")
    axes = figure.subplots()
    draw(axes, runs, results)
    axes.set_title(GPT.name)
    axes.set_ylabel("cross entropy")
    figure.savefig(path, dpi=130)


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--steps", type=at_least_one, default=2000, help="of each run")
    parser.add_argument("--seeds", type=at_least_one, default=3)
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results")
    options = parser.parse_args(argv)
    console = Console(width=max(Console().width, 120))
    began = time.perf_counter()
    runs = train_all(options.steps, options.seeds, console)
    results = {kind: figures(rows, runs[BASE]) for kind, rows in runs.items()}
    title = f"Float8 beside {BASE} (steps: {options.steps}, seeds: {options.seeds})"
    console.print(as_table(results, title))
    options.out.mkdir(parents=True, exist_ok=True)
    plot(runs, results, options.out / "curves_float8.png")
    record = {
        "versions": versions(),
        "machine": machine(),
        "seconds": round(time.perf_counter() - began),
        "steps": options.steps,
        "seeds": options.seeds,
        "results": {kind: vars(one) for kind, one in results.items()},
    }
    file = options.out / "curves_float8.json"
    file.write_text(json.dumps(record, indent=2) + "\n")
    missed = list(misses(results))
    console.print(*(f"MISSED {miss}" for miss in missed), sep="\n")
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
