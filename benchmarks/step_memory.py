"""Memory of a whole training step of a GPT of 1.3 billion parameters, on an H200.

    python -m benchmarks.step_memory [--json results/step-memory.json]

The step is compiled for a GPU that need not be there, and XLA's own account of its
memory is told: what is kept from step to step (parameters and the state of AdamW), and
what is needed on top at the peak (gradients, residuals, temporaries). The blocks run in
a scan; the state is donated. `--depth`, `--dim` and the like make another model, and
`--run` compiles for the device that is here, and times the steps on it.

Needs the extra `gpu-compile`."""

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import jax.random as jr
import optax
from rich.console import Console

from jaxamp_like import amp
from jaxamp_like.storage import apply_updates, low_bit_state, update_in_float32

from .rewrite import machine, make_table, ratio, versions
from .roofline import described_device, plugin_versions
from .workloads import FLOAT32, Style, gpt, init_blocks, init_norm, normal

Loss = Callable[..., Any]


@dataclass(frozen=True)
class Way:
    """A way to train.

    Args:
        loss: which one is differentiated.
        wrap: of the optimizer.
        is_low: whether parameters are bfloat16 and have no float32 copy."""

    loss: Loss
    wrap: Callable[[Any], Any]
    is_low: bool = False


_plain = partial(gpt, FLOAT32)
_mixed = amp(_plain, compute_dtype="bfloat16")
_lean = amp(_plain, compute_dtype="bfloat16", lean="int8")


@partial(amp, compute_dtype="bfloat16")
def _of_low(params: Any, tokens: Any) -> Any:
    """The loss as float32 code, whatever the dtype of the parameters."""
    return _plain(jax.tree.map(lambda p: p.astype(jnp.float32), params), tokens)


WAYS = {
    "float32": Way(_plain, lambda tx: tx),
    "by hand": Way(partial(gpt, Style(jnp.bfloat16)), lambda tx: tx),
    # With `jax.checkpoint` around norms, softmax and activation functions, ...
    "by hand, checkpoints": Way(
        partial(gpt, Style(jnp.bfloat16, lean=True)), lambda tx: tx
    ),
    # ... or around each layer, of which all products are computed twice.
    "by hand, checkpointed layers": Way(
        partial(gpt, Style(jnp.bfloat16), remat=True), lambda tx: tx
    ),
    "amp": Way(_mixed, lambda tx: tx),
    "amp, checkpointed layers": Way(
        amp(partial(gpt, FLOAT32, remat=True), compute_dtype="bfloat16"), lambda tx: tx
    ),
    "amp, int8 states": Way(_mixed, low_bit_state),
    "amp, int4 states": Way(_mixed, lambda tx: low_bit_state(tx, "int4")),
    "amp, int8 states and residuals": Way(_lean, low_bit_state),
    "amp, int8 states, bfloat16 parameters": Way(
        _of_low, lambda tx: low_bit_state(update_in_float32(tx)), is_low=True
    ),
}


def init(options: argparse.Namespace, is_low: bool, key: Any) -> Any:
    keys = jr.split(key, 4)
    dim, vocabulary = options.dim, options.vocabulary
    params = {
        "embed": normal(keys[0], vocabulary, dim, fan_in=1),
        "blocks": init_blocks(keys[1], options.depth, dim, stacked=True),
        "norm": init_norm(dim),
        "head": normal(keys[2], dim, vocabulary),
        "position": normal(keys[3], options.length, dim, fan_in=1),
    }
    return jax.tree.map(lambda p: p.astype(jnp.bfloat16), params) if is_low else params


@dataclass(frozen=True)
class Training:
    """A compiled step, with what it begins with."""

    begin: Callable[[Any], Any]
    step: Any
    state: Any  # its shapes


def compiled(way: Way, options: argparse.Namespace, device: Any) -> Training:
    tx = way.wrap(optax.adamw(1e-4))

    def step(state: Any, tokens: Any, key: Any) -> Any:
        params, opt_state = state
        loss, grads = jax.value_and_grad(way.loss)(params, tokens)
        updates, opt_state = tx.update(grads, opt_state, params)
        if way.is_low:
            params = apply_updates(params, updates, key=key)
        else:
            params = optax.apply_updates(params, updates)
        return (params, opt_state), loss

    def begin(key: Any) -> Any:
        params = init(options, way.is_low, key)
        return params, tx.init(params)

    key = jax.eval_shape(lambda: jr.key(0))
    state = jax.eval_shape(begin, key)
    tokens = jax.ShapeDtypeStruct((options.batch, options.length + 1), jnp.int32)
    sharding = jax.sharding.SingleDeviceSharding(device)
    jitted = jax.jit(
        step, in_shardings=sharding, out_shardings=sharding, donate_argnums=0
    )
    return Training(begin, jitted.lower(state, tokens, key).compile(), state)


def measured(training: Training) -> dict[str, Any]:
    """Bytes kept from step to step, and those needed on top at the peak."""
    memory = training.step.memory_analysis()
    return {
        "parameters": sum(x.size for x in jax.tree.leaves(training.state[0])),
        "kept_bytes": memory.argument_size_in_bytes,
        "peak_bytes": memory.temp_size_in_bytes
        + memory.output_size_in_bytes
        - memory.alias_size_in_bytes,
    }


def timed(training: Training, options: argparse.Namespace) -> float:
    """Median seconds of a step on the device that is here."""
    state = jax.jit(training.begin)(jr.key(0))
    shape = options.batch, options.length + 1
    tokens = jr.randint(jr.key(1), shape, 0, options.vocabulary, jnp.int32)
    seconds, loss = [], jnp.nan
    for i in range(options.rounds + 1):
        key = jax.block_until_ready(jr.fold_in(jr.key(2), i))
        start = time.perf_counter()
        state, loss = jax.block_until_ready(training.step(state, tokens, key))
        seconds.append(time.perf_counter() - start)
    assert jnp.isfinite(loss)
    return statistics.median(seconds[1:])  # the first warms up


def all_ways(
    options: argparse.Namespace,
) -> Iterator[tuple[str, dict[str, Any]]]:
    """One after the other: of a step that runs, the state fills the device."""
    device = jax.devices()[0] if options.run else described_device()
    for name, way in WAYS.items():
        training = compiled(way, options, device)
        found = measured(training)
        if options.run:
            found["step_seconds"] = timed(training, options)
        yield name, found


def show(console: Console, found: dict[str, dict[str, Any]], where: str) -> None:
    columns = ("kept", "on top", "all", "/ float32", "step / ms")
    table = make_table(f"Memory of a step, GB ({where})", columns)

    def total(one: dict[str, Any]) -> int:
        return one["kept_bytes"] + one["peak_bytes"]

    for name, one in found.items():
        sizes = one["kept_bytes"], one["peak_bytes"], total(one)
        cells = [f"{size / 1e9:.2f}" for size in sizes]
        plain = total(found["float32"]) if "float32" in found else None
        seconds = one.get("step_seconds")
        told = "-" if seconds is None else f"{1e3 * seconds:.1f}"
        table.add_row("GPT", name, *cells, ratio(total(one), plain), told)
    console.print(table)


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    sizes = dict(depth=24, dim=2048, vocabulary=32768, length=1024, batch=4)
    for name, default in sizes.items():
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--run", action="store_true", help="on the device that is here")
    parser.add_argument("--rounds", type=int, default=10, help="of timed steps")
    parser.add_argument("--json", type=Path, help="where to write the record")
    options = parser.parse_args(argv)
    console = Console(width=max(Console().width, 100))
    where = f"{machine()}, timed" if options.run else "a described H200"
    record: dict[str, Any] = {
        "versions": versions() | ({} if options.run else plugin_versions()),
        "device": where,
        "sizes": {name: getattr(options, name) for name in sizes},
        "results": {},
    }
    for name, found in all_ways(options):
        record["results"][name] = found
        if options.json:  # after each, for compiling takes long
            options.json.write_text(json.dumps(record, indent=2) + "\n")
    show(console, record["results"], where)
    return 0


if __name__ == "__main__":
    sys.exit(main())
