"""What it costs in accuracy to sum gradients over devices in 16 bits, by simulation.

    python -m benchmarks.reduction [--devices 8 64 1024] [--json FILE]

Each device has a gradient: what all have in common, and noise of its own, which is
larger the smaller its batch is. The gradients are rounded as a contraction rounds its
result, and summed: in a ring, where each device adds its own to what came before and
hands it on rounded; in a tree, where halves are added, rounded at each level; and in
float32, rounded no more. The error is that of the sum, as one vector, relative to the
sum of what was not rounded."""

import argparse
import json
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import jax.numpy as jnp
import numpy as np
from rich.console import Console

from .rewrite import make_table

Sum = Callable[[np.ndarray, np.dtype], np.ndarray]

SIZE = 4096  # of a gradient; the error hardly varies with it


def rounded(x: np.ndarray, dtype: np.dtype) -> np.ndarray:
    return x.astype(dtype).astype(np.float32)


def in_ring(x: np.ndarray, dtype: np.dtype) -> np.ndarray:
    total = x[0]
    for row in x[1:]:
        total = rounded(total + row, dtype)
    return total


def in_tree(x: np.ndarray, dtype: np.dtype) -> np.ndarray:
    while len(x) > 1:
        x = rounded(x[::2] + x[1::2], dtype)
    return x[0]


def in_full(x: np.ndarray, dtype: np.dtype) -> np.ndarray:
    return x.sum(axis=0, dtype=np.float32)


SUMS: dict[str, Sum] = {"float32": in_full, "tree": in_tree, "ring": in_ring}


def error(
    devices: int, noise: float, dtype: np.dtype, add: Sum, seeds: int = 4
) -> float:
    """Of the sum, relative; `noise` is that of one device over what is common."""
    found = []
    for seed in range(seeds):
        draw = np.random.default_rng(seed)
        common = draw.standard_normal(SIZE)
        own = noise * draw.standard_normal((devices, SIZE))
        true = (common + own).astype(np.float32)
        total = add(rounded(true, dtype), dtype)
        wanted = true.astype(np.float64).sum(axis=0)
        found.append(np.linalg.norm(total - wanted) / np.linalg.norm(wanted))
    return float(np.sqrt(np.mean(np.square(found))))


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.reduction")
    parser.add_argument("--devices", type=int, nargs="+", default=(8, 64, 1024))
    parser.add_argument("--noise", type=float, nargs="+", default=(0.0, 1.0, 10.0))
    parser.add_argument("--json", type=Path, help="write the figures to this file")
    args = parser.parse_args(argv)
    for n in args.devices:
        if n < 1 or n & (n - 1):
            parser.error(f"--devices must be powers of two, for the tree, not {n}")
    headings = [f"{n} devices\nnoise {s:g}" for n in args.devices for s in args.noise]
    table = make_table("Relative error of a sum of gradients", headings)
    record = {}
    for name in ("bfloat16", "float16"):
        for how, add in SUMS.items():
            dtype = np.dtype(jnp.dtype(name))
            row = [error(n, s, dtype, add) for n in args.devices for s in args.noise]
            table.add_row(name, how, *(f"{x:.1e}" for x in row))
            places = [heading.replace("\n", ", ") for heading in headings]
            record[f"{name}, {how}"] = dict(zip(places, row, strict=True))
    Console(width=max(Console().width, 150)).print(table)
    if args.json:
        args.json.write_text(json.dumps(record, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
