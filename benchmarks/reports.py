"""What it costs to look: `explain` beside tracing, `trace_numerics` beside a step.

    python -m benchmarks.reports

The first table is of a whole training step of a GPT-like model with 24 layers; the
second of the GPT workloads, value and gradient, compiled beforehand as a training loop
has its step compiled."""

import argparse
import json
import statistics
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import jax.random as jr
import optax
from rich.console import Console
from rich.table import Table

from jaxamp_like import amp, explain, trace_numerics

from . import workloads
from .rewrite import machine, versions
from .workloads import WORKLOADS

DTYPE = "bfloat16"


def seconds(fn: Callable[[], Any], repeats: int) -> float:
    times = []
    for _ in range(repeats):
        start = time.process_time()
        jax.block_until_ready(fn())
        times.append(time.process_time() - start)
    return statistics.median(times)


def training_step(depth: int) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    """A step of AdamW on an unrolled GPT-like model, and the shapes that it takes."""
    size = workloads.GPT_SIZES["toy"]
    workload = WORKLOADS["GPT unrolled"]
    tx = optax.adamw(1e-3)

    def init(key):
        params = workload.init(key, "toy")
        blocks = workloads.init_blocks(key, depth, size["dim"])
        params = params | {"blocks": blocks}
        return params, tx.init(params), workload.batch(key, "toy")

    def step(params, state, batch):
        loss, grads = jax.value_and_grad(amp(workload.loss, compute_dtype=DTYPE))(
            params, batch
        )
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state, loss

    return step, jax.eval_shape(init, jr.key(0))


def explain_costs(depth: int, repeats: int) -> dict[str, float]:
    step, args = training_step(depth)

    def trace():
        jax.clear_caches()
        jax.make_jaxpr(step)(*args)

    def report():
        jax.clear_caches()
        explain(step)(*args)

    trace()  # what is imported and cached for good is nobody's cost
    return {
        "trace_seconds": seconds(trace, repeats),
        "explain_seconds": seconds(report, repeats),
    }


def numerics_costs(name: str, size: str, repeats: int) -> dict[str, float]:
    workload = WORKLOADS[name]
    params_key, batch_key = jr.split(jr.key(0))
    args = jax.jit(
        lambda: (workload.init(params_key, size), workload.batch(batch_key, size))
    )()
    low = jax.value_and_grad(amp(workload.loss, compute_dtype=DTYPE))
    step = jax.jit(jax.value_and_grad(workload.loss))
    fns = {
        "step_seconds": partial(step, *args),
        "numerics_seconds": partial(trace_numerics(low), *args),
    }
    costs = {}
    for key, fn in fns.items():
        start = time.perf_counter()
        jax.block_until_ready(_arrays(fn()))
        costs[f"first_{key}"] = time.perf_counter() - start
    for key, fn in fns.items():
        times = []
        for _ in range(repeats):
            start = time.perf_counter()
            jax.block_until_ready(_arrays(fn()))
            times.append(time.perf_counter() - start)
        costs[key] = statistics.median(times)
    return costs


def _arrays(result: Any) -> list[Any]:
    return [x for x in jax.tree.leaves(result) if isinstance(x, jnp.ndarray)]


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser("python -m benchmarks.reports")
    parser.add_argument("--depth", type=int, default=24)
    parser.add_argument("--size", default="real", choices=("toy", "real"))
    parser.add_argument("--workloads", nargs="+", default=["GPT unrolled"])
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--json", type=Path, help="where to write the record")
    args = parser.parse_args(argv)
    console = Console(width=100)
    record: dict[str, Any] = {"versions": versions(), "machine": machine()}
    record |= {"explain": explain_costs(args.depth, args.repeats)}
    table = Table(title=f"explain: a training step of {args.depth} layers")
    for column in ("trace, s", "explain, s", "explain / trace"):
        table.add_column(column, justify="right")
    traced, explained = record["explain"].values()
    table.add_row(f"{traced:.2f}", f"{explained:.2f}", f"{explained / traced:.2f}")
    console.print(table)
    table = Table(title=f"trace_numerics: value and gradient, {args.size} size")
    columns = ("float32 step, s", "trace_numerics, s", "ratio", "the first time, s")
    for column in ("workload", *columns):
        table.add_column(column, justify="right")
    for name in args.workloads:
        record[name] = costs = numerics_costs(name, args.size, args.repeats)
        step, numerics = costs["step_seconds"], costs["numerics_seconds"]
        first = costs["first_numerics_seconds"]
        ratio = f"{numerics / step:.1f}"
        table.add_row(name, f"{step:.2f}", f"{numerics:.2f}", ratio, f"{first:.1f}")
    console.print(table)
    if args.json is not None:
        args.json.write_text(json.dumps(record, indent=2) + "\n")


if __name__ == "__main__":
    main()
