"""The packages of others beside ours, on the same JAX, on every workload.

    python -m benchmarks.peers --json peers.json

Each peer is used as its README says: jmp casts what the loss takes and gives, mpx casts
what it takes, with norms, softmax and the loss wrapped by hand in
`mpx.force_full_precision`, and the original jaxamp rewrites the float32 code. What is
not installed, or does not run on this JAX, is told by name, with the reason. Flax's and
Keras's dtype arguments and qwix need layers of Flax or Keras, and can't express these
workloads, which are functions of JAX alone."""

import argparse
import importlib
import json
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import jax.numpy as jnp
from rich.console import Console

from .rewrite import (
    AS_WRITTEN,
    CONTENDERS,
    FIGURES as FIGURE_COLUMNS,
    LOSS_SCALES,
    UNOPTIMISED,
    Figures,
    Sample,
    add_section,
    errors_by_sample,
    figure_row,
    machine,
    make_table,
    ratio,
    read_off,
    references,
    root_mean_square,
    trace_times,
    versions,
)
from .workloads import WORKLOADS, Loss, Style, Workload

RECORD = Path(__file__).parent / "results" / "peers-bfloat16.json"
BESIDE = ("float32", "hand", "amp")
TRACING = 2.0  # times float32's is what it may take
ROUNDS = 0.05  # what two errors may differ by and still be the same

# --------------------------------------------------------------------------- the peers


def by_jmp(workload: Workload, dtype: str) -> Loss:
    jmp = importlib.import_module("jmp")
    policy = jmp.get_policy(f"params=float32,compute={dtype},output=float32")

    def loss(params, batch):
        return policy.cast_to_output(
            workload.loss(*policy.cast_to_compute((params, batch)))
        )

    return loss


def by_mpx(workload: Workload, dtype: str) -> Loss:
    mpx = importlib.import_module("mpx")

    class Wrapped(Style):
        def _to(self, dtype, tree):
            return mpx.cast_tree(tree, dtype)

        def in_full(self, fn):
            return mpx.force_full_precision(fn, self.dtype)

    fn = workload.styled(Wrapped(jnp.dtype(dtype)))

    def loss(params, batch):
        return fn(*mpx.cast_tree((params, batch), jnp.dtype(dtype)))

    return loss


def by_jaxamp(workload: Workload, dtype: str) -> Loss:
    jaxamp = importlib.import_module("jaxamp")
    return jaxamp.amp(workload.loss, compute_dtype=jnp.dtype(dtype))


PEERS: dict[str, Callable[[Workload, str], Loss]] = {
    "jmp": by_jmp,
    "mpx": by_mpx,
    "jaxamp": by_jaxamp,
}
# What is installed, by what is imported.
DISTRIBUTIONS = {"jmp": "jmp", "mpx": "mixed-precision-for-JAX", "jaxamp": "jaxamp"}

# ------------------------------------------------------------------------- a comparison


@dataclass(frozen=True)
class Rows:
    """Figures by contender, and for those that have none the reason."""

    figures: dict[str, Figures]
    failed: dict[str, str]


def reason(error: Exception) -> str:
    return f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"


def contenders(
    workload: Workload, dtype: str
) -> tuple[dict[str, Loss], dict[str, str]]:
    """What runs, and why the others don't."""
    made = {name: CONTENDERS[name](workload, dtype) for name in BESIDE}
    losses = {name: loss for name, loss in made.items() if loss is not None}
    failed = {}
    for name, make in PEERS.items():
        try:
            loss = make(workload, dtype)
            read_off(loss, *workload.shapes("toy"))
        except Exception as error:  # whatever theirs raises is what is to be told
            failed[name] = reason(error)
        else:
            losses[name] = loss
    return losses, failed


def errors(loss: Loss, samples: list[Sample], scale: float) -> dict[str, Any]:
    # What XLA rounds is settled before its backend; that one is spared the work.
    found = errors_by_sample(loss, samples, scale, AS_WRITTEN | UNOPTIMISED)
    names = ("loss_error", "gradient_error")
    return dict(zip(names, map(root_mean_square, found), strict=True))


def compare(
    workload: Workload, dtype: str, size: str, repeats: int, seeds: int
) -> Rows:
    losses, failed = contenders(workload, dtype)
    shapes = workload.shapes(size)
    times = trace_times(losses, *shapes, repeats)
    samples = references(workload, seeds)
    scale = LOSS_SCALES.get(dtype, 1.0)
    figures = {
        name: Figures(
            **read_off(loss, *shapes),
            trace_seconds=times[name],
            **errors(loss, samples, scale),
        )
        for name, loss in losses.items()
    }
    return Rows(figures, failed)


def behind(rows: Rows) -> list[str]:
    """In what peers of no larger gradient error beat `amp`, and what takes too long."""
    one, found = rows.figures["amp"], []
    for name in PEERS:
        peer = rows.figures.get(name)
        if peer is None or peer.gradient_error > (1 + ROUNDS) * one.gradient_error:
            continue
        if peer.saved_bytes < one.saved_bytes:
            less = 1 - peer.saved_bytes / one.saved_bytes
            found.append(f"{name} saves {less:.2%} fewer bytes")
        if peer.low_share > one.low_share:
            found.append(f"{name} has {peer.low_share:.3f} low")
    plain = rows.figures["float32"]
    if one.trace_seconds > TRACING * plain.trace_seconds:
        times = ratio(one.trace_seconds, plain.trace_seconds)
        found.append(f"tracing takes {times} times as long as float32's")
    return found


# --------------------------------------------------------------------------- the tables

COLUMNS = (
    "low\nshare",
    "saved\n/ f32",
    "grad\nerror\n/ hand",
    "loss\nerror\n/ hand",
    "trace\n/ f32",
)


def cells(one: Figures, plain: Figures, hand: Figures) -> list[str]:
    return [
        f"{one.low_share:.3f}",
        ratio(one.saved_bytes, plain.saved_bytes),
        ratio(one.gradient_error, hand.gradient_error),
        ratio(one.loss_error, hand.loss_error),
        ratio(one.trace_seconds, plain.trace_seconds),
    ]


def show(console: Console, results: dict[str, Rows], note: str) -> None:
    ratios = make_table(f"Peers ({note})", COLUMNS)
    figures = make_table(f"Figures ({note})", FIGURE_COLUMNS)
    for workload, rows in results.items():
        plain, hand = rows.figures["float32"], rows.figures["hand"]
        made = rows.figures.items()
        add_section(ratios, workload, {n: cells(one, plain, hand) for n, one in made})
        add_section(figures, workload, {n: figure_row(one) for n, one in made})
    console.print(ratios, figures)
    for workload, rows in results.items():
        for name, why in rows.failed.items():
            console.print(f"{workload}: {name} does not run: {why}", highlight=False)
        for line in behind(rows):
            console.print(f"{workload}: amp is behind: {line}", highlight=False)


def read(path: Path = RECORD) -> dict[str, Rows]:
    """The figures of a record."""
    return {
        workload: Rows(
            {name: Figures(**one) for name, one in rows["figures"].items()},
            rows["failed"],
        )
        for workload, rows in json.loads(path.read_text())["workloads"].items()
    }


def markdown(results: dict[str, Rows]) -> str:
    """The table of `benchmarks/README.md`: in a cell `amp`, then the peers that run."""
    names = [name for name in PEERS if any(name in r.figures for r in results.values())]
    lines = [
        f"| `amp` / {' / '.join(names)} | low share | saved, of float32's "
        "| gradient error, of hand's | tracing, of float32's |",
        "|---|---|---|---|---|",
    ]
    for workload, rows in results.items():
        plain, hand = rows.figures["float32"], rows.figures["hand"]
        shown = [rows.figures.get(name) for name in ("amp", *names)]
        columns = zip(*(row(one, plain, hand) for one in shown), strict=True)
        lines.append(f"| {workload} | {' | '.join(map(' / '.join, columns))} |")
    return "\n".join(lines)


def row(one: Figures | None, plain: Figures, hand: Figures) -> list[str]:
    if one is None:
        return ["-"] * 4
    share, saved, error, _, tracing = cells(one, plain, hand)
    return [f"{float(share):.2f}", saved, error, tracing]


# ------------------------------------------------------------------------- the command


def parse_args(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        "python -m benchmarks.peers",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--dtype", default="bfloat16", choices=("bfloat16", "float16"))
    parser.add_argument(
        "--size", default="real", choices=("toy", "real"), help="what is traced"
    )
    parser.add_argument("--workloads", nargs="+", choices=WORKLOADS, default=WORKLOADS)
    parser.add_argument("--repeats", type=int, default=3, help="of each timed trace")
    parser.add_argument("--seeds", type=int, default=64, help="for the errors")
    parser.add_argument("--json", type=Path, help="where to write the record")
    parser.add_argument(
        "--read", type=Path, help="a record to show, also as Markdown; measures nothing"
    )
    return parser.parse_args(argv)


def record(args: argparse.Namespace, results: dict[str, Rows]) -> dict[str, Any]:
    return {
        "versions": versions(DISTRIBUTIONS.values()),
        "machine": machine(),
        "dtype": args.dtype,
        "size": args.size,
        "seeds": args.seeds,
        "workloads": {workload: asdict(rows) for workload, rows in results.items()},
    }


def main(argv: list[str] | None = None) -> int:
    args = parse_args(argv)
    console = Console(width=max(Console().width, 120))
    if args.read is not None:
        show(console, read(args.read), str(args.read))
        print(markdown(read(args.read)))
        return 0
    results: dict[str, Rows] = {}
    for name in args.workloads:
        console.print(f"{name} ...", highlight=False)
        results[name] = compare(
            WORKLOADS[name], args.dtype, args.size, args.repeats, args.seeds
        )
        if args.json is not None:
            text = json.dumps(record(args, results), indent=2)
            args.json.write_text(text + "\n")
    show(console, results, f"{args.dtype}, {args.size} size, errors at toy size")
    return 0


if __name__ == "__main__":
    sys.exit(main())
