"""Contractions in MXFP8 and NVFP4 on a described B200, by roofline.

    python -m benchmarks.block_scaled [--sizes 4096] [--json results.json]

For a matrix product with both gradients, and for the stack of GPT blocks of
`benchmarks/quantised.py` (d = 4096, 8192 tokens, scanned and checkpointed, without the
core of attention): the time of `amp` in bfloat16 and by the rules, and of
`jax.nn.scaled_dot_general`, which is how one writes either format by hand. That has no
more of NVFP4's recipe than its numbers: no square blocks, no rotation, no chances. See
`benchmarks/roofline.py` for how times are read off; the speeds are the data sheet's."""

import argparse
import functools
import json
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

import jax
import jax.numpy as jnp
from rich.console import Console

from jaxamp_like import AmpWarning, default_amp_policy
from jaxamp_like._hlo.devices import described
from jaxamp_like._hlo.text import parse
from jaxamp_like.presets import quantised
from jaxamp_like.rules import mxfp8, nvfp4

from .quantised import (
    BLOCKS,
    Record,
    as_table,
    blocks,
    by_amp,
    matmul,
    shapes_of_blocks,
)
from .rewrite import versions
from .roofline import B200, figures, plugin_versions

SIZES = (4096, 8192)
NATIVE = "__cudnn$blockScaledDot"


def by_hand(mode: Literal["mxfp8", "nvfp4"]) -> Callable[..., Any]:
    """A dense layer of JAX's own function for a format."""
    # Outside of a trace, since it holds an array.
    config = jax.nn.get_scaled_dot_general_config(mode)

    def dot(x: Any, w: Any) -> Any:
        numbers = (((x.ndim - 1,), (0,)), ((), ()))
        low = x.astype(jnp.bfloat16), w.astype(jnp.bfloat16)
        return jax.nn.scaled_dot_general(
            *low, numbers, preferred_element_type=jnp.bfloat16, configs=[config] * 3
        )

    return dot


CONTENDERS: dict[str, Callable[[Any], Any]] = {
    "bfloat16": lambda fn: by_amp(fn, default_amp_policy),
    "mxfp8": lambda fn: by_amp(fn, quantised(mxfp8())),
    "nvfp4": lambda fn: by_amp(fn, quantised(nvfp4())),
    "nvfp4, to the nearest, not rotated": lambda fn: by_amp(
        fn, quantised(nvfp4(stochastic=False, rotate=False))
    ),
    "mxfp8 by hand": lambda fn: functools.partial(fn, by_hand("mxfp8")),
    "nvfp4 by hand": lambda fn: functools.partial(fn, by_hand("nvfp4")),
}


def described_step(fn: Callable[..., Any], args: Any) -> dict[str, Any]:
    """The roofline of a step with both gradients, and how it contracts."""
    compiled: Any = jax.jit(jax.value_and_grad(fn, (0, 1))).lower(*args).compile()
    text = compiled.as_text()
    temp = compiled.memory_analysis().temp_size_in_bytes
    native = sum(
        one.target == NATIVE
        for body in parse(text).computations.values()
        for one in body.values()
    )
    return {**vars(figures(text, temp, speeds=B200)), "native": native}


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--sizes", type=int, nargs="*", default=[*SIZES])
    parser.add_argument("--no-blocks", action="store_true")
    parser.add_argument("--contenders", nargs="*", default=[*CONTENDERS])
    parser.add_argument("--json", type=Path)
    options = parser.parse_args(argv)
    sharding = jax.sharding.SingleDeviceSharding(described("b200"))

    def struct(*shape: int) -> Any:
        return jax.ShapeDtypeStruct(shape, jnp.float32, sharding=sharding)

    work: dict[str, tuple[Any, Any]] = {
        f"{n} x {n} x {n}": (matmul, (struct(n, n), struct(n, n)))
        for n in options.sizes
    }
    if not options.no_blocks:
        work[BLOCKS] = blocks, shapes_of_blocks(struct)
    warnings.simplefilter("ignore", AmpWarning)
    record: Record = {
        name: {
            who: described_step(CONTENDERS[who](fn), args) for who in options.contenders
        }
        for name, (fn, args) in work.items()
    }
    where = "a described B200, by roofline"
    Console().print(as_table(record, f"Forward and backward on {where}"))
    if options.json:
        whole = {"device": where, "versions": versions() | plugin_versions()}
        options.json.write_text(json.dumps(whole | {"work": record}, indent=1))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
