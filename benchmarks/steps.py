"""Times training steps on the device that is here: a GPU, or a CPU as a rehearsal.

    python -m benchmarks.steps --json steps.json

Value and gradient of every workload, as written (on a GPU float32 means TF32), by hand,
by `amp` and by the packages of others. Rounds are interleaved, so that clocks that
drift hit everyone alike; medians are told, and ratios to float32's. A CPU computes much
of 16 bits in float32: what it is slower or faster in says nothing about a GPU."""

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.random as jr
from rich.console import Console

from .peers import DISTRIBUTIONS, PEERS, reason
from .rewrite import CONTENDERS, add_section, machine, make_table, ratio, versions
from .workloads import WORKLOADS, Workload

Step = Callable[..., Any]
NAMES = (*CONTENDERS, *PEERS)


def compiled(
    workload: Workload, dtype: str, names: list[str], args: Any
) -> tuple[dict[str, Any], dict[str, str]]:
    """What compiles, and why the rest does not."""
    makers = CONTENDERS | PEERS
    steps: dict[str, Any] = {}
    failed: dict[str, str] = {}
    for name in names:
        try:
            loss = makers[name](workload, dtype)
            if loss is not None:
                step = jax.jit(jax.value_and_grad(loss))
                steps[name] = step.lower(*args).compile()
        except Exception as error:
            if name not in PEERS:  # whatever theirs raise is what is to be told
                raise
            failed[name] = reason(error)
    return steps, failed


def timed(steps: dict[str, Step], args: Any, rounds: int) -> dict[str, float]:
    """Median seconds of a step."""
    times: dict[str, list[float]] = {name: [] for name in steps}
    for i in range(rounds + 1):
        for name, step in steps.items():
            start = time.perf_counter()
            jax.block_until_ready(step(*args))
            if i:  # the first round warms up
                times[name].append(time.perf_counter() - start)
    return {name: statistics.median(found) for name, found in times.items()}


def measured(
    workload: Workload, dtype: str, size: str, names: list[str], rounds: int
) -> dict[str, Any]:
    keys = jr.split(jr.key(0))
    args = workload.init(keys[0], size), workload.batch(keys[1], size)
    steps, failed = compiled(workload, dtype, names, args)
    seconds = timed(steps, args, rounds)
    figures = {
        name: {
            "seconds": seconds[name],
            "temp_bytes": step.memory_analysis().temp_size_in_bytes,
        }
        for name, step in steps.items()
    }
    return {"figures": figures, "failed": failed}


def show(console: Console, results: dict[str, Any], note: str) -> None:
    columns = ("step\nms", "time\n/ f32", "time\n/ hand", "temp\n/ f32")
    table = make_table(f"Steps ({note})", columns)
    for workload, rows in results.items():
        figures = rows["figures"]
        plain, hand = figures.get("float32", {}), figures.get("hand", {})
        cells = {
            name: (
                f"{1e3 * one['seconds']:.2f}",
                ratio(one["seconds"], plain.get("seconds")),
                ratio(one["seconds"], hand.get("seconds")),
                ratio(one["temp_bytes"], plain.get("temp_bytes")),
            )
            for name, one in figures.items()
        }
        add_section(table, workload, cells)
    console.print(table)
    for workload, rows in results.items():
        for name, why in rows["failed"].items():
            console.print(f"{workload}: {name} does not run: {why}", highlight=False)


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        "python -m benchmarks.steps",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--dtype", default="bfloat16", choices=("bfloat16", "float16"))
    parser.add_argument("--size", default="real", choices=("toy", "real"))
    parser.add_argument("--workloads", nargs="+", choices=WORKLOADS, default=WORKLOADS)
    parser.add_argument("--contenders", nargs="+", choices=NAMES, default=[*NAMES])
    parser.add_argument("--rounds", type=int, default=20, help="of timed steps")
    parser.add_argument("--json", type=Path, help="where to write the record")
    args = parser.parse_args(argv)
    console = Console(width=max(Console().width, 100))
    results: dict[str, Any] = {}
    for name in args.workloads:
        results[name] = measured(
            WORKLOADS[name], args.dtype, args.size, args.contenders, args.rounds
        )
        if args.json is not None:
            record = {
                "versions": versions(DISTRIBUTIONS.values()),
                "machine": machine(),
                "dtype": args.dtype,
                "size": args.size,
                "rounds": args.rounds,
                "workloads": results,
            }
            args.json.write_text(json.dumps(record, indent=2) + "\n")
    show(console, results, f"{args.dtype}, {args.size} size, {machine()}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
