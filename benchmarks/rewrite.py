"""What the rewrite makes of each workload, beside the code as written and by hand.

Everything but the tracing time and the errors is read off jaxprs, so it is the same on
every machine. Run it with `python -m benchmarks.rewrite`."""

import argparse
import gc
import importlib.metadata
import json
import math
import os
import platform
import statistics
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import jax
import jax.experimental
import jax.numpy as jnp
import jax.random as jr
import numpy as np
from rich import box
from rich.console import Console
from rich.progress import track
from rich.table import Table

import jaxamp_like
from jaxamp_like import amp

from . import measure
from .workloads import WORKLOADS, Loss, Model, Workload

CONTENDERS: dict[str, Callable[[Workload, str], Loss | None]] = {
    "float32": lambda workload, dtype: workload.loss,
    "hand": lambda workload, dtype: workload.hand(dtype),
    "lean": lambda workload, dtype: workload.lean and workload.lean(dtype),
    "amp": lambda workload, dtype: amp(workload.loss, compute_dtype=dtype),
    "amp lean": lambda workload, dtype: amp(
        workload.loss, compute_dtype=dtype, lean=True
    ),
}

# A gradient of a mean over many tokens is below float16's smallest number: whoever
# trains in float16 scales the loss, and so do we, everyone alike.
LOSS_SCALES = {"float16": 2.0**10}

# Without this, XLA leaves out a cast down with a cast up after it: the errors would be
# those of what the CPU's compiler happens to fuse.
AS_WRITTEN = {"xla_allow_excess_precision": False}

# Random numbers take long to compile, and less to draw.
UNOPTIMISED = {"xla_backend_optimization_level": 0}

PACKAGES = ("jax", "jaxlib", "numpy")


@dataclass(frozen=True)
class Figures:
    """What is measured of one version of one workload.

    Args:
        low_share_forward: share of the contraction FLOPs in low precision, forward.
        low_share: the same for value and gradient.
        casts_forward: casts between floats, as written (a scan's body once), forward.
        casts: the same for value and gradient.
        saved_bytes: what is kept for the backward pass.
        weight_copies: how many low copies of parameters are among it.
        weight_copy_bytes: and their size.
        trace_seconds: median time to trace value and gradient, with cold caches.
        loss_error: relative error against float64, root mean square over seeds.
        gradient_error: the same for the gradient of all parameters, as one vector."""

    low_share_forward: float
    low_share: float
    casts_forward: int
    casts: int
    saved_bytes: int
    weight_copies: int
    weight_copy_bytes: int
    trace_seconds: float
    loss_error: float
    gradient_error: float


# --------------------------------------------------------------------- read off jaxprs


def read_off(loss: Loss, params: Any, batch: Any) -> dict[str, Any]:
    forward = jax.make_jaxpr(loss)(params, batch)
    both = jax.make_jaxpr(jax.value_and_grad(loss))(params, batch)
    saved = measure.saved(loss, params, batch, argnums=(0,))
    copies = measure.weight_copies(params, saved)
    return {
        "low_share_forward": measure.low_share(forward),
        "low_share": measure.low_share(both),
        "casts_forward": measure.casts(forward),
        "casts": measure.casts(both),
        "saved_bytes": sum(map(measure.size_in_bytes, saved)),
        "weight_copies": len(copies),
        "weight_copy_bytes": sum(map(measure.size_in_bytes, copies)),
    }


# ------------------------------------------------------------------------ tracing time


def trace_once(loss: Loss, params: Any, batch: Any) -> float:
    jax.clear_caches()
    gc.collect()  # else one contender pays for what another left behind
    start = time.process_time()  # one thread; what else the machine does is not in it
    jax.make_jaxpr(jax.value_and_grad(loss))(params, batch)
    return time.process_time() - start


def trace_times(
    losses: dict[str, Loss], params: Any, batch: Any, repeats: int
) -> dict[str, float]:
    """Medians; interleaved, so that clock drift hits everyone alike."""
    times: dict[str, list[float]] = {name: [] for name in losses}
    for _ in range(repeats):
        for name, loss in losses.items():
            times[name].append(trace_once(loss, params, batch))
    return {name: statistics.median(values) for name, values in times.items()}


# ------------------------------------------------------------------------------ errors


def enable_x64() -> AbstractContextManager[Any]:
    # JAX < 0.8 has it in `jax.experimental` only, and newer ones deprecate that.
    if hasattr(jax, "enable_x64"):
        return jax.enable_x64(True)
    return jax.experimental.enable_x64()  # pyright: ignore


def as_vector(tree: Any) -> np.ndarray:
    leaves = [np.asarray(x, np.float64).ravel() for x in jax.tree.leaves(tree)]
    return np.concatenate(leaves)


def widen(tree: Any) -> Any:
    def cast(x):
        is_float = jnp.issubdtype(x.dtype, jnp.floating)
        return np.asarray(x, np.float64) if is_float else np.asarray(x)

    return jax.tree.map(cast, tree)


def relative_error(value: np.ndarray, truth: np.ndarray) -> float:
    return float(np.linalg.norm(value - truth) / np.linalg.norm(truth))


def root_mean_square(values: Iterable[float]) -> float:
    return math.sqrt(statistics.fmean(value**2 for value in values))


Sample = tuple[Any, Any, np.ndarray, np.ndarray]


def references(model: Model, seeds: int, wide: bool = True) -> list[Sample]:
    """Parameters and batches at toy size, with true loss and gradient.

    Args:
        model: what is computed as it was written.
        seeds: how many samples.
        wide: whether the truth is computed in float64. A model that draws random
            numbers would draw others there; float32 is true enough for 16 bits."""

    def draw(key):
        params_key, batch_key = jr.split(key)
        return model.init(params_key, "toy"), model.batch(batch_key, "toy")

    drawn = jax.jit(draw, compiler_options=UNOPTIMISED)
    inputs = [drawn(jr.key(seed)) for seed in range(seeds)]
    with enable_x64() if wide else nullcontext():
        step = jax.jit(jax.value_and_grad(model.loss), compiler_options=AS_WRITTEN)
        truths = [step(*(widen(args) if wide else args)) for args in inputs]
    return [
        (params, batch, as_vector(value), as_vector(grads))
        for (params, batch), (value, grads) in zip(inputs, truths, strict=True)
    ]


def errors_by_sample(
    loss: Loss,
    samples: list[Sample],
    scale: float = 1.0,
    options: dict[str, Any] | None = AS_WRITTEN,
) -> tuple[list[float], list[float]]:
    """Relative errors of the loss and of its gradient, compiled with `options`."""

    def scaled(params, batch):
        return scale * loss(params, batch)

    step = jax.jit(jax.value_and_grad(scaled), compiler_options=options)
    value_errors, grad_errors = [], []
    for params, batch, true_value, true_grads in samples:
        value, grads = step(params, batch)
        value_errors.append(relative_error(as_vector(value) / scale, true_value))
        grad_errors.append(relative_error(as_vector(grads) / scale, true_grads))
    return value_errors, grad_errors


def errors(loss: Loss, samples: list[Sample], scale: float = 1.0) -> dict[str, Any]:
    value_errors, grad_errors = errors_by_sample(loss, samples, scale)
    return {
        "loss_error": root_mean_square(value_errors),
        "gradient_error": root_mean_square(grad_errors),
    }


# ---------------------------------------------------------------------------- a record


def compare(
    workload: Workload,
    dtype: str,
    size: str,
    contenders: Iterable[str] = tuple(CONTENDERS),
    repeats: int = 5,
    seeds: int = 1024,
) -> dict[str, Figures]:
    """Measures every contender on one workload."""
    made = {name: CONTENDERS[name](workload, dtype) for name in contenders}
    losses = {name: loss for name, loss in made.items() if loss is not None}
    params, batch = workload.shapes(size)
    times = trace_times(losses, params, batch, repeats)
    samples = references(workload, seeds)
    scale = LOSS_SCALES.get(dtype, 1.0)
    return {
        name: Figures(
            **read_off(loss, params, batch),
            trace_seconds=times[name],
            **errors(loss, samples, scale),
        )
        for name, loss in losses.items()
    }


def versions(others: Iterable[str] = ()) -> dict[str, str]:
    ours = {"jaxamp_like": jaxamp_like.__version__}  # also where it is not installed
    found = {"python": platform.python_version()} | ours
    for package in (*PACKAGES, *others):
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            found[package] = "not installed"
    return found


def machine() -> str:
    device = jax.devices()[0]
    if device.platform == "cpu":
        return f"CPU, {os.cpu_count()} cores"
    return device.device_kind


# -------------------------------------------------------------------------- the tables


def ratio(ours: float, theirs: float | None) -> str:
    return f"{ours / theirs:.2f}" if theirs else "-"


def ratio_row(one: Figures, plain: Figures | None, hand: Figures | None) -> list[str]:
    def over(name: str, other: Figures | None) -> str:
        return ratio(getattr(one, name), getattr(other, name) if other else None)

    return [
        over("saved_bytes", plain),
        over("saved_bytes", hand),
        over("casts_forward", hand),
        over("casts", hand),
        f"{one.low_share_forward:.3f}",
        f"{one.low_share:.3f}",
        over("trace_seconds", plain),
        over("loss_error", hand),
        over("gradient_error", hand),
    ]


def figure_row(one: Figures) -> list[str]:
    return [
        f"{one.saved_bytes / 1e6:.2f}",
        f"{one.weight_copies}",
        f"{one.weight_copy_bytes / 1e6:.2f}",
        f"{one.casts_forward}",
        f"{one.casts}",
        f"{1e3 * one.trace_seconds:.0f}",
        f"{one.loss_error:.1e}",
        f"{one.gradient_error:.1e}",
    ]


RATIOS = (
    "saved\n/ f32",
    "saved\n/ hand",
    "casts\nfwd\n/ hand",
    "casts\nboth\n/ hand",
    "low\nshare\nfwd",
    "low\nshare\nboth",
    "trace\n/ f32",
    "loss\nerror\n/ hand",
    "grad\nerror\n/ hand",
)
FIGURES = (
    "saved\nMB",
    "weight\ncopies",
    "copies\nMB",
    "casts\nfwd",
    "casts\nboth",
    "trace\nms",
    "loss\nerror",
    "grad\nerror",
)


def make_table(title: str, columns: Iterable[str]) -> Table:
    table = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD)
    table.add_column("workload", no_wrap=True)
    table.add_column("version", no_wrap=True)
    for column in columns:
        table.add_column(column, justify="right", no_wrap=True)
    return table


def add_section(table: Table, workload: str, rows: Mapping[str, Sequence[str]]) -> None:
    """The cells of every version of a workload, which is named once."""
    for i, (name, cells) in enumerate(rows.items()):
        last = i == len(rows) - 1
        table.add_row("" if i else workload, name, *cells, end_section=last)


def tables(results: dict[str, dict[str, Figures]], note: str) -> list[Table]:
    ratios = make_table(f"Ratios ({note})", RATIOS)
    figures = make_table(f"Figures ({note})", FIGURES)
    for workload, rows in results.items():
        beside = rows.get("float32"), rows.get("hand")
        ratio_rows = {name: ratio_row(one, *beside) for name, one in rows.items()}
        add_section(ratios, workload, ratio_rows)
        add_section(figures, workload, {n: figure_row(one) for n, one in rows.items()})
    return [ratios, figures]


def parse_args(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        "python -m benchmarks.rewrite", description=__doc__
    )
    parser.add_argument("--dtype", default="bfloat16", choices=("bfloat16", "float16"))
    parser.add_argument(
        "--size", default="real", choices=("toy", "real"), help="what is traced"
    )
    parser.add_argument("--workloads", nargs="+", choices=WORKLOADS, default=WORKLOADS)
    parser.add_argument(
        "--contenders", nargs="+", choices=CONTENDERS, default=CONTENDERS
    )
    parser.add_argument("--repeats", type=int, default=5, help="of each timed trace")
    parser.add_argument("--seeds", type=int, default=1024, help="for the errors")
    parser.add_argument("--json", type=Path, help="where to write the record")
    return parser.parse_args(argv)


def main(argv: list[str] | None = None) -> None:
    args = parse_args(argv)
    # Columns cut short are worse than lines that wrap, and a pipe has only 80.
    console = Console(width=max(Console().width, 120))
    results = {}
    for name in track(list(args.workloads), "Measuring", console=console):
        results[name] = compare(
            WORKLOADS[name],
            args.dtype,
            args.size,
            contenders=args.contenders,
            repeats=args.repeats,
            seeds=args.seeds,
        )
    for table in tables(results, f"{args.dtype}, {args.size} size, errors at toy size"):
        console.print(table)
    if args.json is not None:
        record = {
            "versions": versions(),
            "machine": machine(),
            "dtype": args.dtype,
            "size": args.size,
            "workloads": {
                workload: {name: asdict(one) for name, one in rows.items()}
                for workload, rows in results.items()
            },
        }
        args.json.write_text(json.dumps(record, indent=2) + "\n")


if __name__ == "__main__":
    main()
