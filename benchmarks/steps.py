"""Times training steps on the device that is here: a GPU, or a CPU as a rehearsal.

    python -m benchmarks.steps --json steps.json

Value and gradient of every workload, as written (on a GPU float32 means TF32), by hand,
by `amp` and by the packages of others. `--workloads` also takes the transformers that
checkpoint their blocks, and the models of other packages. Rounds are interleaved, so
that clocks that drift hit everyone alike; medians are told, and ratios to float32's.
The error of the gradient is that of all parameters, as one vector, relative to float32
with products at JAX's highest precision. A CPU computes much of 16 bits in float32:
what it is slower or faster in says nothing about a GPU."""

import argparse
import json
import sys
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import jax.random as jr
from rich.console import Console

from jaxamp_like import amp

from .checkpointed import CHECKPOINTED
from .peers import DISTRIBUTIONS, PEERS, reason
from .rewrite import CONTENDERS, add_section, machine, make_table, ratio, versions
from .timing import attempts_side_by_side, step_seconds
from .workloads import WORKLOADS, Loss, Model, Workload

REFERENCE = "highest"
NAMES = (REFERENCE, *CONTENDERS, *PEERS)

Make = Callable[[Any, str], Loss | None]


def models() -> dict[str, Model]:
    """Every model that can be timed here: those of packages that are installed."""
    found: dict[str, Model] = {**WORKLOADS, **CHECKPOINTED}
    try:
        from .zoo import ZOO
    except ModuleNotFoundError:
        return found
    return found | ZOO


def makers(model: Model) -> Mapping[str, Make]:
    """The contenders, where nobody wrote a model by hand all but by hand."""
    if isinstance(model, Workload):
        return CONTENDERS | PEERS
    return {
        "float32": lambda model, dtype: model.loss,
        "amp": lambda model, dtype: amp(model.loss, compute_dtype=dtype),
        "amp lean": lambda model, dtype: amp(
            model.loss, compute_dtype=dtype, lean=True
        ),
        "jmp": PEERS["jmp"],
    }


def step_of(make: Make, model: Model, dtype: str, args: Any) -> Any:
    loss = make(model, dtype)
    if loss is None:
        return None
    step = jax.value_and_grad(loss, allow_int=True)
    return jax.jit(step).lower(*args).compile()


def exact_step(model: Model, args: Any) -> Any:
    with jax.default_matmul_precision("highest"):
        return (
            jax.jit(jax.value_and_grad(model.loss, allow_int=True))
            .lower(*args)
            .compile()
        )


def compiled(
    model: Model, dtype: str, names: list[str], args: Any
) -> tuple[dict[str, Any], dict[str, str]]:
    """What compiles, and why the rest does not."""
    work = {
        name: partial(step_of, make, model, dtype, args)
        for name, make in makers(model).items()
        if name in names
    }
    if REFERENCE in names:
        work[REFERENCE] = partial(exact_step, model, args)
    steps: dict[str, Any] = {}
    failed: dict[str, str] = {}
    for name, step in attempts_side_by_side(work).items():
        if isinstance(step, Exception):
            if name not in PEERS:  # whatever theirs raises is what is to be told
                raise step
            failed[name] = reason(step)
        elif step is not None:
            steps[name] = step
    return steps, failed


@jax.jit
def distance(grads: Any, exact: Any) -> Any:
    """Of two gradients, relative to the second."""

    def squares(trees: Any) -> Any:
        floats = (x for x in jax.tree.leaves(trees) if x.dtype != jax.dtypes.float0)
        return sum(jnp.sum(jnp.square(x.astype(jnp.float32))) for x in floats)

    differences = jax.tree.map(
        lambda x, y: x if x.dtype == jax.dtypes.float0 else x.astype(y.dtype) - y,
        grads,
        exact,
    )
    return jnp.sqrt(squares(differences) / squares(exact))


def errors(steps: dict[str, Any], args: Any) -> dict[str, float]:
    if REFERENCE not in steps:
        return {}
    _, exact = steps[REFERENCE](*args)
    return {
        name: float(distance(step(*args)[1], exact))
        for name, step in steps.items()
        if name != REFERENCE
    }


def measured(
    model: Model, dtype: str, size: str, names: list[str], rounds: int
) -> dict[str, Any]:
    keys = jr.split(jr.key(0))
    args = (
        jax.jit(model.init, static_argnums=1)(keys[0], size),
        model.batch(keys[1], size),
    )
    steps, failed = compiled(model, dtype, names, args)
    error = errors(steps, args)
    steps.pop(REFERENCE, None)
    seconds = step_seconds(
        {name: partial(step, *args) for name, step in steps.items()}, rounds
    )
    figures = {
        name: {
            "seconds": seconds[name],
            "temp_bytes": step.memory_analysis().temp_size_in_bytes,
            "gradient_error": error.get(name),
        }
        for name, step in steps.items()
    }
    return {"figures": figures, "failed": failed}


def show(console: Console, results: dict[str, Any], note: str) -> None:
    columns = (
        "step\nms",
        "time\n/ f32",
        "time\n/ hand",
        "temp\n/ f32",
        "error\n%",
        "error\n/ hand",
    )
    table = make_table(f"Steps ({note})", columns)
    for workload, rows in results.items():
        figures = rows["figures"]
        plain, hand = figures.get("float32", {}), figures.get("hand", {})

        def error_cells(one: dict[str, Any], hand: dict[str, Any]) -> tuple[str, str]:
            error = one["gradient_error"]
            if error is None:
                return "-", "-"
            return f"{100 * error:.3f}", ratio(error, hand.get("gradient_error"))

        cells = {
            name: (
                f"{1e3 * one['seconds']:.2f}",
                ratio(one["seconds"], plain.get("seconds")),
                ratio(one["seconds"], hand.get("seconds")),
                ratio(one["temp_bytes"], plain.get("temp_bytes")),
                *error_cells(one, hand),
            )
            for name, one in figures.items()
        }
        add_section(table, workload, cells)
    console.print(table)
    for workload, rows in results.items():
        for name, why in rows["failed"].items():
            console.print(f"{workload}: {name} does not run: {why}", highlight=False)


def main(argv: list[str] | None = None) -> int:
    known = models()
    parser = argparse.ArgumentParser(
        "python -m benchmarks.steps",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--dtype", default="bfloat16", choices=("bfloat16", "float16"))
    parser.add_argument("--size", default="real", choices=("toy", "real"))
    parser.add_argument("--workloads", nargs="+", choices=known, default=[*WORKLOADS])
    parser.add_argument("--contenders", nargs="+", choices=NAMES, default=[*NAMES])
    parser.add_argument("--rounds", type=int, default=20, help="of timed steps")
    parser.add_argument("--json", type=Path, help="where to write the record")
    args = parser.parse_args(argv)
    console = Console(width=max(Console().width, 100))
    results: dict[str, Any] = {}
    for name in args.workloads:
        results[name] = measured(
            known[name], args.dtype, args.size, args.contenders, args.rounds
        )
        if args.json is not None:
            record = {
                "versions": versions(DISTRIBUTIONS.values()),
                "machine": machine(),
                "dtype": args.dtype,
                "size": args.size,
                "rounds": args.rounds,
                "workloads": results,
            }
            args.json.write_text(json.dumps(record, indent=2) + "\n")
    show(console, results, f"{args.dtype}, {args.size} size, {machine()}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
