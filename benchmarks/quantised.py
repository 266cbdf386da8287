"""Contractions in float8 and int8 on a described H200, by roofline.

    python -m benchmarks.quantised [--sizes 1024 4096] [--triton] [--json results.json]

For a matrix product with both gradients, and for a stack of GPT blocks without their
attention core (d = 4096, 8192 tokens, scanned and checkpointed): the time of `amp` in
bfloat16, of `amp` in float8, and of float8 written by hand with current scaling, whose
operands are kept in float8; of the blocks also with weights that are rounded before the
loop, and scales that checkpoints keep, the best that is known. See
`benchmarks/roofline.py` for how it is read off. `--run` times the same on the GPU that
is here. Fails where float8 is slower than bfloat16, less than 1.4 times as fast in the
blocks, or takes more than 1.02 of the best time by hand."""

import argparse
import functools
import json
import math
import sys
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from rich.console import Console
from rich.table import Table

from jaxamp_like import AmpWarning, amp, default_amp_policy
from jaxamp_like.presets import quantised
from jaxamp_like.rules import float8, int8

from .rewrite import machine, make_table, versions
from .roofline import described_device, figures, plugin_versions
from .timing import side_by_side, step_seconds

TOKENS, WIDTH, LAYERS = 8192, 4096, 4
SIZES = (1024, 2048, 4096, 8192, 16384)
RUNS = 20  # of which the median is told
BLOCKS = "GPT blocks"


class Bounds(NamedTuple):
    """Of times: what more is told as a miss."""

    of_bfloat16: float = 1.005  # wherever the predicate lets float8 be
    of_hand: float = 1.02  # the best by hand, of GPT blocks
    speed: float = 1.4  # beside bfloat16, of GPT blocks


BOUNDS = Bounds()


# ---------------------------------------------------------------------------- by hand


def scale_of(x: Any, largest: float) -> Any:
    """A power of two."""
    amax = jnp.max(jnp.abs(x)).astype(jnp.float32)
    scale = jnp.where(jnp.isfinite(amax) & (amax > 0), amax, largest) / largest
    bits = lax.bitcast_convert_type(jnp.clip(scale, 2.0**-60, 2.0**60), jnp.uint32)
    bits = (bits + jnp.uint32(0x7FFFFF)) & jnp.uint32(0xFF800000)
    return lax.bitcast_convert_type(bits, jnp.float32)


def to_float8(
    x: Any, dtype: Any = jnp.float8_e4m3fn, scale: Any = None
) -> tuple[Any, Any]:
    largest = float(jnp.finfo(dtype).max)
    scale = scale_of(x, largest) if scale is None else scale
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


SCALE = "scale"  # what the checkpoints of the best version keep


@jax.custom_vjp
def by_hand_ahead(x: Any, w: Any, low: Any, scale: Any) -> Any:
    del w
    return product(to_float8(x), (low, scale), (1, 0))


def _forward_ahead(x: Any, w: Any, low: Any, scale: Any) -> Any:
    del w
    own = checkpoint_name(scale_of(x, float(jnp.finfo(jnp.float8_e4m3fn).max)), SCALE)
    kept = to_float8(x, scale=own), (low, scale)
    return product(*kept, (1, 0)), kept


def _backward_ahead(kept: Any, ct: Any) -> Any:
    return *_backward(kept, ct), None, None


by_hand_ahead.defvjp(_forward_ahead, _backward_ahead)


def hand_ahead(x: Any, w: Any) -> Any:
    return by_hand_ahead(x.astype(jnp.bfloat16), *w)


def rounded_ahead(params: Any) -> Any:
    """Stacks of weights, each with its layers' numbers of 8 bits and scales."""
    stop = lax.stop_gradient
    return {name: (w, *jax.vmap(to_float8)(stop(w))) for name, w in params.items()}


# -------------------------------------------------------------------------- workloads


def matmul(dot: Callable[..., Any], w: Any, x: Any) -> Any:
    y = dot(jnp.sin(x), w)
    return jnp.sum(y.astype(jnp.float32) ** 2)


def blocks(
    dot: Callable[..., Any],
    params: Any,
    x: Any,
    prepare: Callable[[Any], Any] = lambda params: params,
    policy: Any = None,
) -> Any:
    """Blocks of a GPT, but for the core of attention."""

    def norm(x):
        x = x.astype(jnp.float32)
        mean, var = jnp.mean(x, -1, keepdims=True), jnp.var(x, -1, keepdims=True)
        return (x - mean) * lax.rsqrt(var + 1e-5)

    @functools.partial(jax.checkpoint, policy=policy)
    def block(x, w):
        q, k, v = jnp.split(dot(norm(x), w["qkv"]), 3, axis=-1)
        x = x + dot(q * k * v, w["out"]).astype(x.dtype)
        up = jax.nn.gelu(dot(norm(x), w["up"]).astype(jnp.float32))
        return x + dot(up, w["down"]).astype(x.dtype), None

    return jnp.mean(lax.scan(block, x, prepare(params))[0] ** 2)


def shapes_of_blocks(struct: Callable[..., Any]) -> tuple[Any, Any]:
    sizes = {"qkv": (1, 3), "out": (1, 1), "up": (1, 4), "down": (4, 1)}
    params = {
        name: struct(LAYERS, WIDTH * a, WIDTH * b) for name, (a, b) in sizes.items()
    }
    return params, struct(TOKENS, WIDTH)


CONTENDERS: dict[str, Callable[[Any], Any]] = {
    "bfloat16": lambda fn: by_amp(fn, default_amp_policy),
    "float8": lambda fn: by_amp(fn, quantised(float8())),
    "float8, weight gradients in bfloat16": lambda fn: by_amp(
        fn, quantised(float8(weight_gradient="compute"))
    ),
    "int8 forward": lambda fn: by_amp(fn, quantised(int8())),
    "float8 by hand": lambda fn: functools.partial(fn, hand),
    "float8 by hand, weights ahead": lambda fn: functools.partial(
        fn,
        hand_ahead,
        prepare=rounded_ahead,
        policy=jax.checkpoint_policies.save_only_these_names(SCALE),
    ),
}


OF_BLOCKS = "float8 by hand, weights ahead"  # elsewhere there is no loop


def by_amp(fn: Callable[..., Any], policy: Any) -> Callable[..., Any]:
    return amp(
        functools.partial(fn, jnp.matmul), compute_dtype="bfloat16", amp_policy=policy
    )


def described(fn: Callable[..., Any], args: Any, triton: bool) -> dict[str, Any]:
    """The roofline of a step with both gradients, compiled for an H200."""
    compiled: Any = compiled_step(fn, args, {"xla_gpu_enable_triton_gemm": triton})
    temp = compiled.memory_analysis().temp_size_in_bytes
    return vars(figures(compiled.as_text(), temp))


def timed(
    losses: dict[str, Callable[..., Any]], shapes: Any, rounds: int
) -> dict[str, dict[str, Any]]:
    """The median times of such steps on the device that is here."""
    args = jax.tree.map(
        lambda x: jax.random.normal(jax.random.key(0), x.shape, x.dtype), shapes
    )
    steps = side_by_side(
        {
            name: functools.partial(compiled_step, fn, args, {})
            for name, fn in losses.items()
        }
    )
    seconds = step_seconds(
        {name: functools.partial(step, *args) for name, step in steps.items()}, rounds
    )
    return {
        name: {
            "step_seconds": seconds[name],
            "temp_bytes": step.memory_analysis().temp_size_in_bytes,
        }
        for name, step in steps.items()
    }


def compiled_step(fn: Callable[..., Any], args: Any, options: Any) -> Any:
    step = jax.jit(jax.value_and_grad(fn, (0, 1)))
    return step.lower(*args).compile(options)


Record = dict[str, dict[str, dict[str, Any]]]
"""Figures by workload and contender."""


def misses(record: Record, bounds: Bounds = BOUNDS) -> Iterator[str]:
    """What is slower than it should be."""
    for name, found in record.items():
        seconds = {who: one["step_seconds"] for who, one in found.items()}
        rule, base = seconds.get("float8"), seconds.get("bfloat16")
        if rule is None:
            continue
        if base is not None and rule > bounds.of_bfloat16 * base:
            yield f"{name}: float8 takes {rule / base:.3f} of the time of bfloat16"
        if name != BLOCKS:
            continue
        if base is not None and base < bounds.speed * rule:
            yield f"{name}: float8 is {base / rule:.2f} times as fast as bfloat16"
        hands = [x for who, x in seconds.items() if "by hand" in who]
        if hands and rule > bounds.of_hand * min(hands):
            yield f"{name}: float8 takes {rule / min(hands):.3f} of the best by hand"


def as_table(record: Record, title: str) -> Table:
    columns = ("step / ms", "speed", "temp / GB", "kernels")
    table = make_table(title, columns)
    for name, found in record.items():
        base = found.get("bfloat16", {}).get("step_seconds", math.nan)
        for who, one in found.items():
            seconds, temp = one["step_seconds"], one["temp_bytes"]
            row = [name, who, f"{1e3 * seconds:.3f}", f"{base / seconds:.2f}"]
            table.add_row(*row, f"{temp / 1e9:.2f}", str(one.get("kernels", "")))
    return table


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--sizes", type=int, nargs="*", default=[*SIZES])
    parser.add_argument("--no-blocks", action="store_true")
    parser.add_argument("--triton", action="store_true", help="Triton's kernels too")
    parser.add_argument("--run", action="store_true", help="time it on the device here")
    parser.add_argument("--contenders", nargs="*", default=[*CONTENDERS])
    parser.add_argument("--json", type=Path)
    options = parser.parse_args(argv)
    device = None if options.run else described_device()
    sharding = device and jax.sharding.SingleDeviceSharding(device)

    def struct(*shape):
        return jax.ShapeDtypeStruct(shape, jnp.float32, sharding=sharding)

    work: dict[str, tuple[Any, Any]] = {
        f"{n} x {n} x {n}": (matmul, (struct(n, n), struct(n, n)))
        for n in options.sizes
    }
    if not options.no_blocks:
        work[BLOCKS] = blocks, shapes_of_blocks(struct)
    where = f"{machine()}, timed" if options.run else "a described H200, by roofline"
    about = {"device": where, "triton": options.triton, "versions": versions()}
    if not options.run:
        about["versions"] |= plugin_versions()
    record: Record = {}
    # That nothing is quantised of small products is what is to be seen here.
    warnings.simplefilter("ignore", AmpWarning)
    for name, (fn, args) in work.items():
        losses = {
            who: CONTENDERS[who](fn)
            for who in options.contenders
            if fn is blocks or who != OF_BLOCKS
        }
        record[name] = (
            timed(losses, args, RUNS)
            if options.run
            else {
                who: described(loss, args, options.triton)
                for who, loss in losses.items()
            }
        )
        if options.json:  # after each, for compiling takes long
            options.json.write_text(json.dumps(about | {"work": record}, indent=1))
    console = Console(width=max(Console().width, 100))
    console.print(as_table(record, f"Forward and backward on {where}"))
    missed = list(misses(record))
    for miss in missed:
        print(f"MISSED {miss}")
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
