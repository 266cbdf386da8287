"""What `amp` adds to tracing, lowering and compiling, as programs grow.

    python -m benchmarks.tracing

Loops of 10 to 1,000 carries, training steps in a loop, and GPT-like models of 1 to 96
layers, unrolled and scanned, with their gradients. Times are of processors, with JAX's
caches cleared before. The growth is the exponent of the size with which a time went up
between the first size and the last: 1 is linear."""

import argparse
import functools
import gc
import json
import math
import statistics
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import jax.random as jr
import optax
from jax import lax
from rich import box
from rich.console import Console
from rich.table import Table

from jaxamp_like import amp

from . import workloads
from .rewrite import machine, versions
from .workloads import FLOAT32, WORKLOADS, Style

DTYPE = "bfloat16"
STAGES = ("trace", "lower", "compile")
CONTENDERS = ("float32", "hand", "amp", "amp lean")

Fn = Callable[..., Any]
Times = dict[str, float]  # by stage


class Program(NamedTuple):
    """A function as it is written in some style, and the shapes that it takes."""

    styled: Callable[[Style], Fn]
    args: Sequence[Any]
    transform: Callable[[Fn], Fn] = lambda fn: fn

    def written_by(self, contender: str) -> Fn:
        if contender == "hand":
            return self.transform(self.styled(Style(DTYPE)))
        fn = self.styled(FLOAT32)
        if contender != "float32":
            fn = amp(fn, compute_dtype=DTYPE, lean=contender == "amp lean")
        return self.transform(fn)


class Case(NamedTuple):
    make: Callable[[int], Program]
    sizes: Sequence[int]
    size_of: str


# ------------------------------------------------------------------------ the programs


def shape(*dims: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(dims, jnp.float32)


def loop(update: Callable[[Any, list[Any]], list[Any]]) -> Callable[[int], Program]:
    """A scan with a contraction, whose result updates any number of carries."""

    def make(size: int) -> Program:
        def styled(style):
            def fn(w, xs, carries):
                def body(carries, x):
                    h = jnp.tanh(style.full(style.low(x) @ style.low(w)))
                    return update(h, carries), None

                return lax.scan(body, carries, xs)[0]

            return fn

        return Program(styled, (shape(8, 8), shape(4, 8, 8), [shape(8, 8)] * size))

    return make


def alone(h: Any, carries: list[Any]) -> list[Any]:
    return [0.9 * c + h for c in carries]


def in_a_ring(h: Any, carries: list[Any]) -> list[Any]:
    others = [*carries[1:], carries[0]]
    return [0.9 * c + h * d for c, d in zip(carries, others, strict=True)]


def of_all(h: Any, carries: list[Any]) -> list[Any]:
    total = sum(carries, start=h)
    return [0.9 * c + total for c in carries]


def history(h: Any, carries: list[Any]) -> list[Any]:
    return [h + carries[-1], *carries[:-1]]


def training_loop(num_params: int) -> Program:
    """Steps of AdamW in a scan: three carries for each parameter, and two more."""
    tx = optax.adamw(1e-3)
    params = {f"w{i}": shape(8, 8) for i in range(num_params)}

    def styled(style):
        def loss(params, x):
            for w in params.values():
                x = jnp.tanh(style.full(style.low(x) @ style.low(w)))
            return jnp.mean(x**2)

        def step(carry, x):
            params, state = carry
            value, grads = jax.value_and_grad(loss)(params, x)
            updates, state = tx.update(grads, state, params)
            return (optax.apply_updates(params, updates), state), value

        def fn(params, state, xs):
            return lax.scan(step, (params, state), xs)

        return fn

    return Program(styled, (params, jax.eval_shape(tx.init, params), shape(3, 8, 8)))


def layers(name: str, depth: int) -> Program:
    """Value and gradient of a GPT-like model of so many layers."""
    workload, size = WORKLOADS[name], workloads.GPT_SIZES["toy"]

    def init(key):
        blocks = workloads.init_blocks(key, depth, size["dim"], "scanned" in name)
        params = workload.init(key, "toy") | {"blocks": blocks}
        return params, workload.batch(key, "toy")

    def styled(style):
        return workload.loss if style == FLOAT32 else workload.hand(DTYPE)

    return Program(styled, jax.eval_shape(init, jr.key(0)), jax.value_and_grad)


_CARRIES = (10, 30, 100, 300, 1000)
_LAYERS = (1, 6, 24, 96)

CASES = {
    "carries that are updated alone": Case(loop(alone), _CARRIES, "carries"),
    "carries in a ring": Case(loop(in_a_ring), _CARRIES, "carries"),
    "carries that read all": Case(loop(of_all), _CARRIES, "carries"),
    "a history in carries": Case(loop(history), _CARRIES, "carries"),
    # 194 carries are those of 64 parameters.
    "steps of AdamW in a scan": Case(training_loop, (3, 10, 64, 333), "parameters"),
    "GPT unrolled": Case(functools.partial(layers, "GPT unrolled"), _LAYERS, "layers"),
    "GPT scanned": Case(functools.partial(layers, "GPT scanned"), _LAYERS, "layers"),
}

# ------------------------------------------------------------------------- the figures


def times_of(program: Program, contender: str, compiles: bool) -> Times:
    """Seconds of each stage, from nothing."""
    fn = program.written_by(contender)
    jax.clear_caches()
    gc.collect()  # else one contender pays for what another left behind
    start = time.process_time()  # what else the machine does is not in it
    traced = jax.jit(fn).trace(*program.args)
    took = {"trace": time.process_time() - start}
    start = time.process_time()
    lowered = traced.lower()
    took["lower"] = time.process_time() - start
    if compiles:
        start = time.process_time()
        lowered.compile()
        took["compile"] = time.process_time() - start
    return took


def measure(
    program: Program, contenders: Sequence[str], repeats: int, compiles: bool
) -> dict[str, Times]:
    """Medians; interleaved, so that clock drift hits everyone alike."""
    samples: dict[str, list[Times]] = {name: [] for name in contenders}
    for i in range(repeats):
        for name in contenders:
            # Once is enough for what is not ours and takes longest.
            samples[name].append(times_of(program, name, compiles and i == 0))
    return {
        name: {
            stage: statistics.median(t[stage] for t in times if stage in t)
            for stage in times[0]
        }
        for name, times in samples.items()
    }


def growth(times: dict[int, float]) -> float | None:
    """The exponent with which times grow, between the two largest sizes."""
    if len(times) < 2:
        return None
    (small, before), (large, after) = sorted(times.items())[-2:]
    return math.log(after / before) / math.log(large / small)


def table(title: str, case: Case, results: dict[int, dict[str, Times]]) -> Table:
    names = list(next(iter(results.values())))
    made = Table(title=title, box=box.SIMPLE)
    for column in ("", case.size_of, *names, "amp / float32"):
        made.add_column(column, justify="right")

    def add(stage: str, size: str, figures: dict[str, float | None]) -> None:
        shown = ("-" if x is None else f"{x:.2f}" for x in figures.values())
        full, low = figures.get("float32"), figures.get("amp")
        over = f"{low / full:.1f}" if full and low and size != "growth" else "-"
        made.add_row(stage, size, *shown, over)

    for stage in STAGES:
        times = {
            name: {n: by[name][stage] for n, by in results.items() if stage in by[name]}
            for name in names
        }
        for size in next(iter(times.values())):
            add(f"{stage}, s", str(size), {name: times[name][size] for name in names})
        add(stage, "growth", {name: growth(times[name]) for name in names})
        made.add_section()
    return made


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser("python -m benchmarks.tracing")
    parser.add_argument("--cases", nargs="+", choices=CASES, default=list(CASES))
    parser.add_argument("--contenders", nargs="+", choices=CONTENDERS)
    parser.add_argument("--largest", type=int, default=1000, help="size to go to")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--compile-to", type=int, default=1000, metavar="SIZE")
    parser.add_argument("--json", type=Path, help="where to write the record")
    args = parser.parse_args(argv)
    least = max(min(CASES[name].sizes) for name in args.cases)
    if args.largest < least:
        parser.error(f"--largest must be at least {least}, not {args.largest}")
    console = Console(width=100)
    record: dict[str, Any] = {"versions": versions(), "machine": machine()}
    for name in args.cases:
        case = CASES[name]
        contenders = args.contenders or CONTENDERS
        times_of(case.make(1), contenders[-1], compiles=True)  # what is cached for good
        results = {}
        for size in case.sizes:
            if size <= args.largest:
                compiles = size <= args.compile_to
                program = case.make(size)
                results[size] = measure(program, contenders, args.repeats, compiles)
        console.print(table(name, case, results))
        record[name] = results
        if args.json is not None:
            args.json.write_text(json.dumps(record, indent=2) + "\n")


if __name__ == "__main__":
    main()
