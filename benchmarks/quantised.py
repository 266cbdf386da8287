"""Contractions in float8 and int8 on a described H200, by roofline.

    python -m benchmarks.quantised [--sizes 1024 4096] [--triton] [--json results.json]

For a matrix product with both gradients, and for a stack of GPT blocks without their
attention core (d = 4096, 8192 tokens, scanned and checkpointed): the time of `amp` in
bfloat16, of `amp` in float8, and of float8 written by hand with current scaling, whose
operands are kept in float8. See `benchmarks/roofline.py` for how it is read off."""

import argparse
import functools
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from rich.console import Console

from jaxamp_like import amp, default_amp_policy
from jaxamp_like.presets import quantised
from jaxamp_like.rules import float8, int8

from .rewrite import make_table
from .roofline import Figures, described_device, figures

TOKENS, WIDTH, LAYERS = 8192, 4096, 4


# ---------------------------------------------------------------------------- by hand


def scale_of(x: Any, largest: float) -> Any:
    """A power of two."""
    amax = jnp.max(jnp.abs(x)).astype(jnp.float32)
    scale = jnp.where(jnp.isfinite(amax) & (amax > 0), amax, largest) / largest
    bits = lax.bitcast_convert_type(jnp.clip(scale, 2.0**-60, 2.0**60), jnp.uint32)
    bits = (bits + jnp.uint32(0x7FFFFF)) & jnp.uint32(0xFF800000)
    return lax.bitcast_convert_type(bits, jnp.float32)


def to_float8(x: Any, dtype: Any = jnp.float8_e4m3fn) -> tuple[Any, Any]:
    largest = float(jnp.finfo(dtype).max)
    scale = scale_of(x, largest)
    x = jnp.clip(x.astype(jnp.float32) * (1 / scale), -largest, largest)
    return x.astype(dtype), scale


def product(x: tuple[Any, Any], y: tuple[Any, Any], axes: tuple[int, int]) -> Any:
    numbers = (((axes[0],), (axes[1],)), ((), ()))
    out = lax.dot_general(x[0], y[0], numbers, preferred_element_type=jnp.bfloat16)
    return out * (x[1] * y[1]).astype(jnp.bfloat16)


@jax.custom_vjp
def by_hand(x: Any, w: Any) -> Any:
    return product(to_float8(x), to_float8(w), (1, 0))


def _forward(x: Any, w: Any) -> Any:
    kept = to_float8(x), to_float8(w)
    return product(*kept, (1, 0)), kept


def _backward(kept: Any, ct: Any) -> Any:
    x, w = kept
    low = to_float8(ct, jnp.float8_e5m2)
    dw = product(x, low, (0, 0)).astype(jnp.float32)
    return product(low, w, (1, 1)), dw


by_hand.defvjp(_forward, _backward)


def hand(x: Any, w: Any) -> Any:
    return by_hand(x.astype(jnp.bfloat16), w)


# -------------------------------------------------------------------------- workloads


def matmul(dot: Callable[..., Any], w: Any, x: Any) -> Any:
    y = dot(jnp.sin(x), w)
    return jnp.sum(y.astype(jnp.float32) ** 2)


def blocks(dot: Callable[..., Any], params: Any, x: Any) -> Any:
    """Blocks of a GPT, but for the core of attention."""

    def norm(x):
        x = x.astype(jnp.float32)
        mean, var = jnp.mean(x, -1, keepdims=True), jnp.var(x, -1, keepdims=True)
        return (x - mean) * lax.rsqrt(var + 1e-5)

    @jax.checkpoint
    def block(x, w):
        q, k, v = jnp.split(dot(norm(x), w["qkv"]), 3, axis=-1)
        x = x + dot(q * k * v, w["out"]).astype(x.dtype)
        up = jax.nn.gelu(dot(norm(x), w["up"]).astype(jnp.float32))
        return x + dot(up, w["down"]).astype(x.dtype), None

    return jnp.mean(lax.scan(block, x, params)[0] ** 2)


def shapes_of_blocks(struct: Callable[..., Any]) -> tuple[Any, Any]:
    sizes = {"qkv": (1, 3), "out": (1, 1), "up": (1, 4), "down": (4, 1)}
    params = {
        name: struct(LAYERS, WIDTH * a, WIDTH * b) for name, (a, b) in sizes.items()
    }
    return params, struct(TOKENS, WIDTH)


CONTENDERS: dict[str, Callable[[Any], Any]] = {
    "bfloat16": lambda fn: _amp(fn, default_amp_policy),
    "float8": lambda fn: _amp(fn, quantised(float8())),
    "float8, weight gradients in bfloat16": lambda fn: _amp(
        fn, quantised(float8(weight_gradient="compute"))
    ),
    "int8 forward": lambda fn: _amp(fn, quantised(int8())),
    "float8 by hand": lambda fn: functools.partial(fn, hand),
}


def _amp(fn: Callable[..., Any], policy: Any) -> Callable[..., Any]:
    return amp(
        functools.partial(fn, jnp.matmul), compute_dtype="bfloat16", amp_policy=policy
    )


def measure(fn: Callable[..., Any], args: Any, triton: bool) -> Figures:
    step = jax.jit(jax.value_and_grad(fn, (0, 1)))
    options: Any = {"xla_gpu_enable_triton_gemm": triton}
    compiled: Any = step.lower(*args).compile(options)
    temp = compiled.memory_analysis().temp_size_in_bytes
    return figures(compiled.as_text(), temp)


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument(
        "--sizes", type=int, nargs="*", default=[1024, 2048, 4096, 8192]
    )
    parser.add_argument("--no-blocks", action="store_true")
    parser.add_argument("--triton", action="store_true", help="Triton's kernels too")
    parser.add_argument("--contenders", nargs="*", default=[*CONTENDERS])
    parser.add_argument("--json", type=Path)
    options = parser.parse_args(argv)
    sharding = jax.sharding.SingleDeviceSharding(described_device())

    def struct(*shape):
        return jax.ShapeDtypeStruct(shape, jnp.float32, sharding=sharding)

    work: dict[str, tuple[Any, Any]] = {
        f"{n} x {n} x {n}": (matmul, (struct(n, n), struct(n, n)))
        for n in options.sizes
    }
    if not options.no_blocks:
        work["GPT blocks"] = blocks, shapes_of_blocks(struct)
    rows, record = [], {}
    for name, (fn, args) in work.items():
        found = {
            who: measure(CONTENDERS[who](fn), args, options.triton)
            for who in options.contenders
        }
        base = found.get("bfloat16")
        for who, one in found.items():
            speed = base.step_seconds / one.step_seconds if base else float("nan")
            row = [name, who, f"{1e3 * one.step_seconds:.3f}", f"{speed:.2f}"]
            rows.append([*row, f"{one.temp_bytes / 1e9:.2f}", str(one.kernels)])
        record[name] = {who: vars(one) for who, one in found.items()}
    columns = ("step / ms", "speed", "temp / GB", "kernels")
    table = make_table("Forward and backward on a described H200", columns)
    for row in rows:
        table.add_row(*row)
    Console().print(table)
    if options.json:
        options.json.write_text(json.dumps(record, indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main())
