"""What sums of gradients over devices cost in accuracy in 16 bits and less, simulated.

    python -m benchmarks.reduction [--devices 8 64 1024] [--json FILE]

Each device has a gradient: what all have in common, and noise of its own, which is
larger the smaller its batch is. The gradients are rounded as a contraction rounds its
result, and summed: in a ring, where each device adds its own to what came before and
hands it on rounded; in a tree, where halves are added, rounded at each level; and in
float32, rounded no more. The error is that of the sum, as one vector, relative to the
sum of what was not rounded.

A second table is of `low_bit_mean`, which `jax.vmap` runs with an axis in the place of
devices: the error of its mean at the first step, and that of the sum of all means after
some steps, whose errors it feeds back. With 1024 devices it takes 4 GB and minutes."""

import argparse
import json
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
from rich.console import Console

from jaxamp_like.storage import low_bit_mean

from .rewrite import make_table

Sum = Callable[[np.ndarray, np.dtype], np.ndarray]

SIZE = 4096  # of a gradient; the error hardly varies with it
BLOCK = 64  # numbers with one scale, of which each device adds up one block
STEPS = 16
FORMATS = "bfloat16", "int8", "float8", "int4"


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


def error_in_few_bits(
    devices: int, noise: float, format: str, steps: int = STEPS
) -> tuple[float, float]:
    """Of the first mean by `low_bit_mean`, and of the sum of all means, relative."""
    mean = low_bit_mean("devices", format, block=BLOCK, min_size=0)
    common = jr.normal(jr.key(0), (BLOCK * devices,))

    def step(state: Any, key: Any) -> Any:
        own = jr.normal(key, (devices, common.size))
        grads = common + noise * own
        means, state = jax.vmap(mean.update, axis_name="devices")(grads, state)
        return state, (jnp.asarray(means)[0], grads.mean(0))

    @jax.jit
    def run(keys: Any) -> Any:
        state = jax.vmap(lambda _: mean.init(common), axis_name="devices")(
            jnp.arange(devices)
        )
        return jax.lax.scan(step, state, keys)[1]

    found, wanted = run(jr.split(jr.key(1), steps))

    def relative(x: Any, y: Any) -> float:
        return float(jnp.linalg.norm(x - y) / jnp.linalg.norm(y))

    return relative(found[0], wanted[0]), relative(found.sum(0), wanted.sum(0))


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
    places = [heading.replace("\n", ", ") for heading in headings]
    record = {}
    for name in ("bfloat16", "float16"):
        for how, add in SUMS.items():
            dtype = np.dtype(jnp.dtype(name))
            row = [error(n, s, dtype, add) for n in args.devices for s in args.noise]
            table.add_row(name, how, *(f"{x:.1e}" for x in row))
            record[f"{name}, {how}"] = dict(zip(places, row, strict=True))
    low = make_table("`low_bit_mean`: one mean, and the sum of all", headings)
    for format in FORMATS:
        pairs = [
            error_in_few_bits(n, s, format) for n in args.devices for s in args.noise
        ]
        for when, row in zip(
            ("one mean", "all"), zip(*pairs, strict=True), strict=True
        ):
            low.add_row(format, when, *(f"{x:.1e}" for x in row))
            record[f"low_bit_mean, {format}, {when}"] = dict(
                zip(places, row, strict=True)
            )
    console = Console(width=max(Console().width, 150))
    console.print(table, low)
    if args.json:
        args.json.write_text(json.dumps(record, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
