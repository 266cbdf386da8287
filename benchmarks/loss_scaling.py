"""What loss scaling adds to a training step, beside other scalers. One run, one table.

All of them scale the same loss, `amp` of a GPT-like model in float16, and train it by
the same optimizer; each skips steps that overflow as its own documentation says. Read
off the compiled step: the instructions and the bytes that scaling adds, and the size
of the program. Measured: the time of a step, in rounds that go from one to the next.

    pip install -e '.[benchmarks,peers]'
    python -m benchmarks.loss_scaling

With the compiler for NVIDIA GPUs (see `benchmarks.roofline`) the same figures come for
an H200 as well, with the roofline step time; no GPU is needed."""

import argparse
import importlib
import importlib.metadata
import json
import statistics
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr
import optax
from rich import box
from rich.console import Console
from rich.progress import track
from rich.table import Table

from jaxamp_like import (
    DynamicScalerState,
    amp,
    dynamic_scale_value_and_grad,
    loss_scale_optimizer,
)

from . import roofline
from .rewrite import machine, versions
from .workloads import WORKLOADS, Loss

WORKLOAD = WORKLOADS["GPT unrolled"]
OPTIMIZER = optax.adamw(1e-4)
SCALE = 2.0**10

# `step(carry, batch) -> (carry, loss)`; a carry begins with the parameters.
Step = Callable[[Any, Any], tuple[Any, Any]]


@dataclass(frozen=True)
class Contender:
    """A way to scale the loss.

    Args:
        make: of a loss makes `init(params) -> carry` and the step.
        scale: reads the scale off a carry.
        package: what has to be installed, and its name on the registry."""

    make: Callable[[Loss], tuple[Callable[[Any], Any], Step]]
    scale: Callable[[Any], Any]
    package: tuple[str, str] = ("jaxamp_like", "jaxamp_like")


# ------------------------------------------------------------------------- contenders


def unscaled(loss: Loss) -> tuple[Callable[[Any], Any], Step]:
    def step(carry: Any, batch: Any) -> tuple[Any, Any]:
        params, opt_state = carry
        value, grads = jax.value_and_grad(loss)(params, batch)
        updates, opt_state = OPTIMIZER.update(grads, opt_state, params)
        return (optax.apply_updates(params, updates), opt_state), value

    return lambda params: (params, OPTIMIZER.init(params)), step


def ours_by_optimizer(loss: Loss) -> tuple[Callable[[Any], Any], Step]:
    tx = loss_scale_optimizer(OPTIMIZER, DynamicScalerState(scaler=SCALE))

    def step(carry: Any, batch: Any) -> tuple[Any, Any]:
        params, opt_state = carry
        value, grads = tx.value_and_grad(loss, opt_state)(params, batch)
        updates, opt_state = tx.update(grads, opt_state, params)
        return (optax.apply_updates(params, updates), opt_state), value

    return lambda params: (params, tx.init(params)), step


def ours_by_transform(loss: Loss, redo: int = 0) -> tuple[Callable[[Any], Any], Step]:
    scaled = dynamic_scale_value_and_grad(loss, redo_on_nan=redo)

    def step(carry: Any, batch: Any) -> tuple[Any, Any]:
        params, opt_state, scaler = carry
        scaler, (value, grads) = scaled(params, batch, dynamic_scaler_state=scaler)
        updates, new_state = OPTIMIZER.update(grads, opt_state, params)
        new = optax.apply_updates(params, updates), new_state
        return (*scaler.accept(new, (params, opt_state)), scaler), value

    def init(params: Any) -> Any:
        return params, OPTIMIZER.init(params), DynamicScalerState(scaler=SCALE)

    return init, step


def with_jmp(loss: Loss) -> tuple[Callable[[Any], Any], Step]:
    jmp = importlib.import_module("jmp")

    def step(carry: Any, batch: Any) -> tuple[Any, Any]:
        params, opt_state, scaler = carry

        def scaled(params: Any) -> tuple[Any, Any]:
            value = loss(params, batch)
            return scaler.scale(value), value

        (_, value), grads = jax.value_and_grad(scaled, has_aux=True)(params)
        grads = scaler.unscale(grads)
        finite = jmp.all_finite(grads)
        updates, new_state = OPTIMIZER.update(grads, opt_state, params)
        new = optax.apply_updates(params, updates), new_state
        kept = jmp.select_tree(finite, new, (params, opt_state))
        return (*kept, scaler.adjust(finite)), value

    def init(params: Any) -> Any:
        scaler = jmp.DynamicLossScale(jnp.asarray(SCALE, jnp.float32))
        return params, OPTIMIZER.init(params), scaler

    return init, step


def with_flax(loss: Loss) -> tuple[Callable[[Any], Any], Step]:
    dynamic_scale = importlib.import_module("flax.training.dynamic_scale")

    def step(carry: Any, batch: Any) -> tuple[Any, Any]:
        params, opt_state, scaler = carry
        scaler, finite, value, grads = scaler.value_and_grad(loss)(params, batch)
        updates, new_state = OPTIMIZER.update(grads, opt_state, params)
        new = optax.apply_updates(params, updates), new_state
        kept = jax.tree.map(
            lambda x, y: jnp.where(finite, x, y), new, (params, opt_state)
        )
        return (*kept, scaler), value

    def init(params: Any) -> Any:
        scaler = dynamic_scale.DynamicScale(scale=jnp.float32(SCALE))
        scaler = scaler.replace(fin_steps=jnp.int32(0))
        return params, OPTIMIZER.init(params), scaler

    return init, step


def with_mpx(loss: Loss) -> tuple[Callable[[Any], Any], Step]:
    """Of its `filter_value_and_grad` what scales: that also casts all parameters."""
    mpx = importlib.import_module("mpx")

    def step(carry: Any, batch: Any) -> tuple[Any, Any]:
        params, opt_state, scaler = carry
        grad = eqx.filter_value_and_grad(mpx.scaled(loss, scaler))
        value, grads = grad(params, batch)
        finite = mpx.all_finite(grads)
        scaler = scaler.adjust(finite)
        grads, value = scaler.unscale(grads), scaler.unscale(value)
        params, opt_state = mpx.optimizer_update(
            params, OPTIMIZER, opt_state, grads, finite
        )
        return (params, opt_state, scaler), value

    def init(params: Any) -> Any:
        # Its settings are Python numbers, which `jit` would make arrays of.
        scaler = mpx.DynamicLossScaling(jnp.float32(SCALE), jnp.float32(1))
        return params, OPTIMIZER.init(params), scaler

    return init, step


def with_jaxamp(loss: Loss, redo: int = 0) -> tuple[Callable[[Any], Any], Step]:
    jaxamp = importlib.import_module("jaxamp")
    scaled = jaxamp.dynamic_scale_value_and_grad(loss, redo_on_nan=redo)
    tx = optax.apply_if_finite(OPTIMIZER, 1000)  # as its README has it

    def step(carry: Any, batch: Any) -> tuple[Any, Any]:
        params, opt_state, scaler = carry
        scaler, (value, grads) = scaled(params, batch, dynamic_scaler_state=scaler)
        updates, opt_state = tx.update(grads, opt_state, params)
        return (optax.apply_updates(params, updates), opt_state, scaler), value

    def init(params: Any) -> Any:
        scaler = jaxamp.DynamicScalerState(
            patience=jnp.int32(2000),
            adjust_factor=jnp.float32(2),
            scaler=jnp.float32(SCALE),
            count=jnp.int32(0),
            total_resets=jnp.int32(0),
        )
        return params, tx.init(params), scaler

    return init, step


CONTENDERS = {
    "unscaled": Contender(unscaled, lambda carry: jnp.float32(1)),
    "loss_scale_optimizer": Contender(
        ours_by_optimizer, lambda carry: carry[1].scaler.scaler
    ),
    "dynamic_scale_value_and_grad": Contender(
        ours_by_transform, lambda carry: carry[2].scaler
    ),
    "the same, redo_on_nan=2": Contender(
        lambda loss: ours_by_transform(loss, 2), lambda carry: carry[2].scaler
    ),
    "jmp": Contender(with_jmp, lambda carry: carry[2].loss_scale, ("jmp", "jmp")),
    "flax DynamicScale": Contender(
        with_flax, lambda carry: carry[2].scale, ("flax", "flax")
    ),
    "mpx": Contender(
        with_mpx,
        lambda carry: carry[2].loss_scaling,
        ("mpx", "mixed_precision_for_JAX"),
    ),
    "jaxamp": Contender(
        with_jaxamp, lambda carry: carry[2].scaler, ("jaxamp", "jaxamp")
    ),
    "jaxamp, redo_on_nan=2": Contender(
        lambda loss: with_jaxamp(loss, 2),
        lambda carry: carry[2].scaler,
        ("jaxamp", "jaxamp"),
    ),
}


# ---------------------------------------------------------------------- compiled code


@dataclass(frozen=True)
class Program:
    """A contender's step as a function of arrays.

    Args:
        run: `run(arrays, batch) -> (arrays, loss)`.
        arrays: what it begins with, as a flat list.
        carry: of arrays makes what the contender carries, settings and all."""

    run: Callable[[list[Any], Any], tuple[list[Any], Any]]
    arrays: list[Any]
    carry: Callable[[list[Any]], Any]


def mixed(params: Any, batch: Any) -> Any:
    return amp(WORKLOAD.loss, compute_dtype="float16")(params, batch)


def program(contender: Contender, params: Any, loss: Loss = mixed) -> Program:
    init, step = contender.make(loss)
    leaves, tree = jax.tree.flatten(init(params))

    def carry(arrays: list[Any]) -> Any:
        # Some scalers take nothing but arrays in their fields, not even for a moment.
        rest = iter(arrays)
        return tree.unflatten([next(rest) if eqx.is_array(x) else x for x in leaves])

    def run(arrays: list[Any], batch: Any) -> tuple[list[Any], Any]:
        following, value = step(carry(arrays), batch)
        return [x for x in jax.tree.leaves(following) if eqx.is_array(x)], value

    return Program(run, [x for x in leaves if eqx.is_array(x)], carry)


@dataclass(frozen=True)
class Compiled:
    """What is read off a compiled step.

    Args:
        ops: its instructions, each once however often it runs.
        bytes: that they access; on a CPU by XLA's own count, for the H200 the sum over
            all kernels.
        seconds: the roofline step time on an H200."""

    ops: int
    bytes: float
    seconds: float | None = None


def compiled(contender: Contender, size: str, device: Any = None) -> Compiled:
    """Compiles for the CPU, or for a described device."""
    params, batch = WORKLOAD.shapes(size)
    one = program(
        contender, jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), params)
    )
    shapes = jax.eval_shape(lambda: one.arrays)
    options: dict[str, Any] = {}
    if device is not None:
        sharding = jax.sharding.SingleDeviceSharding(device)
        options = dict(in_shardings=sharding, out_shardings=sharding)
    step = jax.jit(one.run, donate_argnums=0, **options).lower(shapes, batch)
    result = step.compile()
    text = str(result.as_text())
    ops = text.count(" = ")
    if device is None:
        cost: Any = result.cost_analysis()
        return Compiled(ops, cost["bytes accessed"])
    # A step that is repeated on overflow is counted as it runs without one.
    found = roofline.figures(text, 0, unknown_trips=1)
    return Compiled(ops, found.moved_bytes, found.step_seconds)


# --------------------------------------------------------------------------- running


Times = list[tuple[float, float]]


def step_times(
    contenders: dict[str, Contender], size: str, rounds: int
) -> dict[str, Times]:
    """Seconds of each step, by the clock and of all threads together.

    Interleaved, so that drift hits everyone alike. On a machine that is busy otherwise
    the time of the threads says more than the clock."""
    batch = WORKLOAD.batch(jr.key(1), size)
    runs = {}
    for name, contender in contenders.items():
        one = program(contender, WORKLOAD.init(jr.key(0), size))
        runs[name] = jax.jit(one.run, donate_argnums=0), one.arrays
    times: dict[str, Times] = {name: [] for name in runs}
    for i in track(range(rounds + 1), "Timing", transient=True):
        # Whoever comes first after a switch finds cold caches: everyone in turn.
        names = list(runs)
        for name in names[i % len(names) :] + names[: i % len(names)]:
            run, arrays = runs[name]
            start = time.perf_counter(), time.process_time()
            arrays, _ = jax.block_until_ready(run(arrays, batch))
            spent = time.perf_counter() - start[0], time.process_time() - start[1]
            if i:  # the first compiles
                times[name].append(spent)
            runs[name] = run, arrays
    return times


def parameters_after(contender: Contender, steps: int) -> Any:
    one = program(contender, WORKLOAD.init(jr.key(0), "toy"))
    run, arrays = jax.jit(one.run), one.arrays
    for i in range(steps):
        arrays, _ = run(arrays, WORKLOAD.batch(jr.key(i), "toy"))
    return one.carry(arrays)[0]


def parameter_error(contender: Contender) -> float:
    """The largest, after three steps, to those of the unscaled loss."""
    ends = (parameters_after(one, 3) for one in (contender, CONTENDERS["unscaled"]))
    pairs = zip(*map(jax.tree.leaves, ends), strict=True)
    return max(float(jnp.abs(a - b).max()) for a, b in pairs)


def after_bad_steps(contender: Contender, steps: int = 200) -> tuple[float, bool]:
    """The scale after steps that gave NaN, and whether a good one then does no harm."""

    def loss(params: Any, batch: Any) -> Any:
        tokens, factor = batch
        return factor * mixed(params, tokens)

    one = program(contender, WORKLOAD.init(jr.key(0), "toy"), loss)
    run, arrays = jax.jit(one.run), one.arrays
    tokens = WORKLOAD.batch(jr.key(1), "toy")
    for _ in range(steps):
        arrays, _ = run(arrays, (tokens, jnp.float32(jnp.nan)))
    scale = float(contender.scale(one.carry(arrays)))
    arrays, _ = run(arrays, (tokens, jnp.float32(1)))
    params = one.carry(arrays)[0]
    return scale, all(bool(jnp.isfinite(x).all()) for x in jax.tree.leaves(params))


# ------------------------------------------------------------------------ the record

Row = dict[str, Any]


def failure(error: Exception) -> str:
    lines = str(error).strip().splitlines() or [""]
    return f"{type(error).__name__}: {lines[0]}"[:160]


def row(name: str, contender: Contender, size: str, device: Any) -> Row:
    """All that needs no clock. A peer that fails on this JAX is told of, not hidden."""
    module, package = contender.package
    try:
        importlib.import_module(module)
    except ImportError:
        return {"failure": f"not installed: pip install {package}"}
    found: Row = {}
    try:
        found["parameter_error"] = parameter_error(contender)
        found["cpu"] = asdict(compiled(contender, size))
        if device is not None and size != "toy":  # too small for XLA's GPU tiles
            found["h200"] = asdict(compiled(contender, size, device))
        if name != "unscaled":
            scale, is_alive = after_bad_steps(contender)
            found["after_bad_steps"] = {"scale": scale, "alive": is_alive}
    except Exception as error:
        if module == "jaxamp_like":
            raise
        found["failure"] = failure(error)
    return found


def measure(size: str, timed_size: str, rounds: int) -> dict[str, Row]:
    device = roofline.described_device() if roofline.has_plugin() else None
    rows = {
        name: row(name, contender, size, device)
        for name, contender in track(CONTENDERS.items(), "Compiling", transient=True)
    }
    working = {k: v for k, v in CONTENDERS.items() if "failure" not in rows[k]}
    times = step_times(working, timed_size, rounds) if rounds else {}
    for name, seconds in times.items():
        for i, clock in enumerate(("step", "threads")):
            mine, plain = ([t[i] for t in s] for s in (seconds, times["unscaled"]))
            rows[name][f"{clock}_seconds"] = statistics.median(mine)
            ratios = (a / b for a, b in zip(mine, plain, strict=True))
            rows[name][f"{clock}_ratio"] = statistics.median(ratios)
    return rows


# ------------------------------------------------------------------------- the table

COLUMNS = (
    "ops\nadded",
    "MB\nadded",
    "size\nratio",
    "H200\nMB added",
    "H200\ntime ratio",
    "step\nratio",
    "threads\nratio",
    "parameter\nerror",
    "scale after\n200 NaNs",
    "then\nalive",
)


def cells(found: Row, plain: Row) -> list[str]:
    if "failure" in found:
        return [found["failure"]]
    cpu, base = found["cpu"], plain["cpu"]
    shown = [
        f"{cpu['ops'] - base['ops']:+d}",
        f"{(cpu['bytes'] - base['bytes']) / 1e6:+.1f}",
        f"{cpu['ops'] / base['ops']:.3f}",
    ]
    if "h200" in found:
        gpu, base = found["h200"], plain["h200"]
        shown += [
            f"{(gpu['bytes'] - base['bytes']) / 1e6:+.1f}",
            f"{gpu['seconds'] / base['seconds']:.3f}",
        ]
    else:
        shown += ["-", "-"]
    for name in ("step_ratio", "threads_ratio"):
        shown.append(f"{found[name]:.3f}" if name in found else "-")
    shown.append(f"{found['parameter_error']:.0e}")
    after = found.get("after_bad_steps")
    shown += [f"{after['scale']:.3g}", str(after["alive"])] if after else ["-", "-"]
    return shown


def table(rows: dict[str, Row], title: str) -> Table:
    made = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD)
    made.add_column("scaler", no_wrap=True)
    for column in COLUMNS:
        made.add_column(column, justify="right")
    for name, found in rows.items():
        made.add_row(name, *cells(found, rows["unscaled"]))
    return made


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        "python -m benchmarks.loss_scaling",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    sizes = ("toy", "moderate", "real")
    parser.add_argument("--size", default="real", choices=sizes, help="compiled")
    parser.add_argument("--timed-size", default="moderate", choices=sizes)
    parser.add_argument("--rounds", type=int, default=15, help="of timed steps, or 0")
    parser.add_argument("--json", type=Path, help="where to write the record")
    args = parser.parse_args(argv)
    console = Console(width=max(Console().width, 130))
    rows = measure(args.size, args.timed_size, args.rounds)
    console.print(
        table(
            rows,
            f"Compiled at {args.size} size; timed at {args.timed_size}, {machine()}",
        )
    )
    if args.json is not None:
        record = {
            "versions": versions() | peers(),
            "machine": machine(),
            "size": args.size,
            "timed_size": args.timed_size,
            "rounds": args.rounds,
            "scalers": rows,
        }
        args.json.write_text(json.dumps(record, indent=2) + "\n")


def peers() -> dict[str, str]:
    found = {}
    for contender in CONTENDERS.values():
        package = contender.package[1]
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            found[package] = "not installed"
    return found


if __name__ == "__main__":
    main()
