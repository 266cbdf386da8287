"""What converting saves at inference, on an H200: bytes held, bytes moved, and time.

    python -m benchmarks.inference

needs what `benchmarks.roofline` needs, and no GPU: the GPT-like model is compiled for
the described device, one step of decoding with a cache and the logits of a batch.
`--run` times the same on the device that is here. Seven versions: float32 as written;
`amp`, which casts the parameters at each call; what `convert` makes; the same where the
caller keeps the cache low, for it is an input, and those keep the dtype that they come
in; *hand*, code with casts by hand, a low cache, and a tree of which everything was
cast; and `convert` with a low cache and weights in int8, which are cast where they are
multiplied, or in int4 by groups of 32."""

import argparse
import json
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import jax.random as jr
from jax import Array, lax
from rich.console import Console
from rich.progress import track

from jaxamp_like import amp, convert
from jaxamp_like.presets import quantised
from jaxamp_like.rules import int4, int8

from .rewrite import machine, make_table, ratio, versions
from .roofline import figures, run_command
from .timing import side_by_side, step_seconds
from .workloads import (
    FLOAT32,
    HEADS,
    Attention,
    Params,
    Style,
    block,
    dense,
    init_blocks,
    init_norm,
    layer_norm,
    normal,
    run_blocks,
)

SIZES = {
    "toy": dict(dim=64, depth=2, vocabulary=80, context=32, batches=(1, 2), prompts=2),
    "real": dict(
        dim=1024,
        depth=12,
        vocabulary=32768,
        context=1024,
        batches=(1, 4, 16),
        prompts=8,
    ),
}


# --------------------------------------------------------------------------- the model


def init(key: Array, c: dict[str, Any]) -> Params:
    keys = jr.split(key, 4)
    return {
        "embed": normal(keys[0], c["vocabulary"], c["dim"], fan_in=1),
        "position": 0.1 * normal(keys[1], c["context"], c["dim"], fan_in=1),
        "blocks": init_blocks(keys[2], c["depth"], c["dim"], stacked=True),
        "norm": init_norm(c["dim"]),
        "head": normal(keys[3], c["dim"], c["vocabulary"]),
    }


def logits_of(style: Style, params: Params, x: Array) -> Array:
    x = style.in_full(layer_norm)(x, params["norm"])
    return style.full(x @ style.low(params["head"]))


def batch(style: Style, params: Params, tokens: Array) -> Array:
    """The logits of whole texts."""
    x = params["embed"][tokens] + params["position"][: tokens.shape[1]]
    attention = Attention(-1e9)

    def one(p: Params, x: Array) -> Array:
        return block(style, attention, p, x)

    x = run_blocks(one, params["blocks"], style.low(x))
    return logits_of(style, params, x[:, -1])


def decode(
    style: Style, params: Params, cache: tuple[Array, Array], tokens: Array, at: Array
) -> tuple[Array, tuple[Array, Array]]:
    """The logits of one more token for each text, and the cache with it."""
    x = style.low(params["embed"][tokens] + params["position"][at])
    num, dim = x.shape

    def attend(p: Params, x: Array, keys: Array, values: Array):
        qkv = dense(style, p["qkv"], x).reshape(num, 3, HEADS, dim // HEADS)
        q, k, v = (qkv[:, i] for i in range(3))
        start = (0, at, 0, 0)
        keys = lax.dynamic_update_slice(keys, k[:, None].astype(keys.dtype), start)
        values = lax.dynamic_update_slice(
            values, v[:, None].astype(values.dtype), start
        )
        scores = jnp.einsum("bhd,bkhd->bhk", q, keys)

        def weights(scores: Array) -> Array:
            scores = scores / (dim // HEADS) ** 0.5
            is_past = jnp.arange(scores.shape[-1]) <= at
            return jax.nn.softmax(jnp.where(is_past, scores, -1e9), axis=-1)

        mixed = jnp.einsum("bhk,bkhd->bhd", style.in_full(weights)(scores), values)
        return dense(style, p["mix"], mixed.reshape(num, dim)), keys, values

    def one(x: Array, layer: Any):
        p, keys, values = layer
        normed = style.in_full(layer_norm)(x, p["norm1"])
        made, keys, values = attend(p, normed, keys, values)
        x = x + made
        hidden = dense(style, p["up"], style.in_full(layer_norm)(x, p["norm2"]))
        return x + dense(style, p["down"], jax.nn.gelu(hidden)), (keys, values)

    x, cache = lax.scan(one, x, (params["blocks"], *cache))
    return logits_of(style, params, x), cache


# ------------------------------------------------------------------------ the versions

# Of all sizes: one text is one row, but its step reads all weights.
EIGHT_BITS = quantised(int8(weight_only=True, where=None))
FOUR_BITS = quantised(int4())


@dataclass(frozen=True)
class Task:
    """A function of a style, and the shapes of what it takes beside parameters."""

    fn: Callable[..., Any]
    inputs: Callable[[str], tuple[Any, ...]]  # by the dtype of what is kept


def tasks(c: dict[str, Any]) -> dict[str, Task]:
    def shape(*dims: int, dtype: str = "int32") -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(dims, jnp.dtype(dtype))

    def decoding(num: int) -> Task:
        head = c["dim"] // HEADS
        cache = (c["depth"], num, c["context"], HEADS, head)

        def inputs(dtype: str) -> tuple[Any, ...]:
            kept = shape(*cache, dtype=dtype)
            return (kept, kept), shape(num), shape()

        return Task(decode, inputs)

    found = {f"decode, batch {num}": decoding(num) for num in c["batches"]}
    texts = shape(c["prompts"], c["context"])
    return found | {f"{c['prompts']} texts": Task(batch, lambda dtype: (texts,))}


def styled(task: Task, style: Style) -> Callable[..., Any]:
    def fn(params: Params, *inputs: Any) -> Any:
        return task.fn(style, params, *inputs)

    return fn


def contenders(
    task: Task, params: Any, dtype: str
) -> dict[str, tuple[Callable[..., Any], Any, tuple[Any, ...]]]:
    """The versions of a task: a function, its parameters and its inputs."""
    plain, full = styled(task, FLOAT32), task.inputs("float32")
    low = task.inputs(dtype)
    converted = convert(plain, params, *full, compute_dtype=dtype)
    eight, four = (
        convert(plain, params, *low, compute_dtype=dtype, amp_policy=policy)
        for policy in (EIGHT_BITS, FOUR_BITS)
    )
    cast = jax.tree.map(lambda x: cast_leaf(x, jnp.dtype(dtype)), params)
    found = {
        "float32": (plain, params, full),
        "amp": (amp(plain, compute_dtype=dtype), params, full),
        "convert": (converted.apply, converted.params, full),
    }
    if low != full:
        found["convert, low cache"] = (converted.apply, converted.params, low)
    return found | {
        "hand": (styled(task, Style(jnp.dtype(dtype))), cast, low),
        "convert, int8 weights": (eight.apply, eight.params, low),
        "convert, int4 weights": (four.apply, four.params, low),
    }


def cast_leaf(leaf: Any, dtype: Any) -> Any:
    is_shape = isinstance(leaf, jax.ShapeDtypeStruct)
    return leaf.update(dtype=dtype) if is_shape else leaf.astype(dtype)


@dataclass(frozen=True)
class Row:
    """What is read off a compiled version.

    Args:
        parameter_bytes: what the parameters take.
        seconds: the roofline time, or the median of those that were taken.
        moved_bytes: sum over all kernels, loops as often as they run.
        convert_kernels: those that do nothing but cast."""

    parameter_bytes: int
    seconds: float
    moved_bytes: float | None = None
    convert_kernels: int | None = None


def measure(fn: Any, params: Any, inputs: tuple[Any, ...], device: Any) -> Row:
    one = jax.sharding.SingleDeviceSharding(device)
    compiled = (
        jax.jit(fn, in_shardings=one, out_shardings=one)
        .lower(params, *inputs)
        .compile()
    )
    found = figures(compiled.as_text() or "", 0)
    return Row(
        size_in_bytes(params),
        found.step_seconds,
        found.moved_bytes,
        found.convert_kernels,
    )


def size_in_bytes(params: Any) -> int:
    return sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(params))


def drawn(inputs: Any, below: int) -> Any:
    """Arrays of these shapes, integers below a bound."""

    def draw(leaf: jax.ShapeDtypeStruct) -> Array:
        if jnp.issubdtype(leaf.dtype, jnp.integer):
            return jr.randint(jr.key(1), leaf.shape, below // 2, below, leaf.dtype)
        return jr.normal(jr.key(2), leaf.shape, leaf.dtype)

    return jax.tree.map(draw, inputs)


def timed(versions_of: dict[str, Any], below: int, rounds: int) -> dict[str, Row]:
    """The times of all versions of a task on the device that is here."""

    def compile_one(fn: Any, params: Any, inputs: Any) -> Any:
        arrays = drawn(inputs, below)
        step = jax.jit(fn).lower(params, *arrays).compile()
        return partial(step, params, *arrays)

    steps = side_by_side(
        {name: partial(compile_one, *one) for name, one in versions_of.items()}
    )
    seconds = step_seconds(steps, rounds)
    return {
        name: Row(size_in_bytes(versions_of[name][1]), seconds[name])
        for name in versions_of
    }


COLUMNS = (
    "parameters\nMB",
    "moved\nMB",
    "time\nµs",
    "speed\n/ f32",
    "time\n/ hand",
)
COLUMNS += ("convert\nkernels",)


def cells(row: Row, plain: Row, hand: Row) -> list[str]:
    return [
        f"{row.parameter_bytes / 1e6:.0f}",
        "-" if row.moved_bytes is None else f"{row.moved_bytes / 1e6:.0f}",
        f"{1e6 * row.seconds:.1f}",
        ratio(plain.seconds, row.seconds),
        ratio(row.seconds, hand.seconds),
        "-" if row.convert_kernels is None else str(row.convert_kernels),
    ]


def parse_args(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        "python -m benchmarks.inference",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--dtype", default="bfloat16", choices=("bfloat16", "float16"))
    parser.add_argument("--size", default="real", choices=SIZES)
    parser.add_argument("--run", action="store_true", help="time it on the device here")
    parser.add_argument("--rounds", type=int, default=20, help="of timed steps")
    parser.add_argument("--json", type=Path, help="where to write the record")
    return parser.parse_args(argv)


def compare(args: argparse.Namespace, device: Any) -> dict[str, Any]:
    """Of a described device, or where there is none, of the one that is here."""
    console = Console(width=110)
    c = SIZES[args.size]
    make = partial(init, c=c)
    params = (jax.eval_shape if device else lambda f, key: f(key))(make, jr.key(0))
    rows: dict[str, dict[str, Row]] = {}
    for name, task in track(list(tasks(c).items()), "Compiling", console=console):
        versions_of = contenders(task, params, args.dtype)
        rows[name] = (
            {k: measure(*v, device) for k, v in versions_of.items()}
            if device
            else timed(versions_of, c["context"], args.rounds)
        )
    where = f"{device.device_kind}, roofline" if device else f"{machine()}, timed"
    table = make_table(f"{args.dtype}, {args.size} size, {where}", COLUMNS)
    for name, found in rows.items():
        label = name
        for version, row in found.items():
            told = cells(row, found["float32"], found["hand"])
            table.add_row(label, version, *told, end_section=version == list(found)[-1])
            label = ""
    console.print(table)
    return {"tasks": {k: {n: asdict(r) for n, r in v.items()} for k, v in rows.items()}}


def run_here(args: argparse.Namespace) -> int:
    found = compare(args, None)
    if args.json is not None:
        about = {"machine": machine(), "dtype": args.dtype, "size": args.size}
        record = {"versions": versions()} | about | {"rounds": args.rounds}
        args.json.write_text(json.dumps(record | found, indent=2) + "\n")
    return 0


def main(argv: list[str] | None = None) -> int:
    args = parse_args(argv)
    return run_here(args) if args.run else run_command(args, compare)


if __name__ == "__main__":
    sys.exit(main())
