"""What `calibrate` finds: beside the default, the presets and contractions alone.

    python -m benchmarks.calibrate models --json calibrate.json --plot calibrate.png
    python -m benchmarks.calibrate hard
    python -m benchmarks.calibrate cost
    python -m benchmarks.calibrate passes
    python -m benchmarks.calibrate planted --count 30

`models` calibrates the workloads and the zoo, each to the error of the default policy
and to that of contractions alone. `hard` calibrates a force field, a gated recurrence
and an adaptive solver to twice the error of contractions alone. `cost` tells what a
calibration of 24 layers takes, in the time of forward and backward passes; `passes`
counts these, and what is compiled, for several budgets. `planted` counts the models
with a known answer for which it is found. All at toy size, on the CPU."""

import argparse
import json
import math
import sys
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import jax.random as jr
from jax import Array, lax
from matplotlib.figure import Figure
from rich.console import Console

from jaxamp_like import AmpWarning, Budget, Policy, amp, calibrate
from jaxamp_like.reports import Calibration

from . import measure, xla_flags
from .front import CONTENDERS, MODELS, sources
from .rewrite import as_vector, machine, make_table, relative_error, versions
from .workloads import (
    FLOAT32,
    Attention,
    Loss,
    Model,
    Params,
    attend,
    cross_entropy,
    dense,
    init_blocks,
    init_norm,
    layer_norm,
    normal,
)

DTYPE = "bfloat16"
BATCHES = 4
BESIDE = ("default", "contractions", "pytorch_autocast", "jmp")
HARD = ("force field", "Mamba-2")


# --------------------------------------------------------------------------- measuring


def samples(model: Model) -> list[Any]:
    params = model.init(jr.key(0), "toy")
    keys = [jr.fold_in(jr.key(1), i) for i in range(BATCHES)]
    return [(params, model.batch(key, "toy")) for key in keys]


def gradient_of(loss: Loss) -> Callable[..., Any]:
    return jax.jit(jax.grad(loss, allow_int=True))


def worst_error(loss: Loss, true: list[Any], batches: list[Any]) -> float:
    """The largest error of the gradient, as one vector, over batches."""
    step = gradient_of(loss)
    got = (as_vector(step(*batch)) for batch in batches)
    return max(relative_error(a, b) for a, b in zip(got, true, strict=True))


def figures(loss: Loss, batches: list[Any], error: float) -> dict[str, float]:
    """Error, bytes kept and share of low FLOPs of one version of a model."""
    jaxpr = jax.make_jaxpr(jax.grad(loss, allow_int=True))(*batches[0])
    return {
        "error": error,
        "saved": sum(measure.saved_bytes(loss, *batches[0], argnums=[0]).values()),
        "low": measure.low_share(jaxpr),
    }


def found_for(
    model: Model, batches: list[Any], budget: float, **options: Any
) -> Calibration:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", AmpWarning)
        return calibrate(
            model.loss,
            batches,
            budget=budget,
            candidates=(DTYPE,),
            granularity="equation",
            perturbation=0,
            **options,
        )


# ------------------------------------------------------------------------------ models

Rows = dict[str, dict[str, float]]


def compare(model: Model) -> Rows:
    """Every contender, and what is found with the errors of two of them as budgets."""
    batches = samples(model)
    step = gradient_of(model.loss)
    true = [as_vector(step(*batch)) for batch in batches]
    rows = {"float32": figures(model.loss, batches, 0.0)}

    def measured(loss: Loss) -> dict[str, float]:
        return figures(loss, batches, worst_error(loss, true, batches))

    for name in BESIDE:
        loss = CONTENDERS[name](model, DTYPE)
        if loss is not None:
            rows[name] = measured(loss)
    known: dict[Any, Any] = {
        Policy("float32"): rows["float32"],
        Policy(DTYPE): rows["default"],
    }
    for name in ("default", "contractions"):
        budget = 1.0001 * rows[name]["error"]
        found = found_for(model, batches, budget, objective="bytes")
        if found.policy not in known:
            known[found.policy] = measured(amp(model.loss, amp_policy=found.policy))
        evidence = {"budget": budget, "met": found.met, "passes": found.passes}
        held_out = found.held_out.gradients
        rows[f"as {name}"] = known[found.policy] | evidence | {"held out": held_out}
    return rows


def findings(rows: Rows) -> list[str]:
    """Where what was found is worse than it has to be."""
    default, alone = rows["default"], rows["contractions"]
    same, other = rows["as default"], rows["as contractions"]
    said = []
    for name, row in (("default", same), ("contractions", other)):
        if not row["met"] or row["held out"] > row["budget"]:
            said.append(f"misses the error of {name} on held-out batches")
        if row["error"] > 1.001 * row["budget"]:
            said.append(
                f"misses the error of {name}: {row['error'] / row['budget']:.3f}"
            )
    if same["low"] < default["low"] - 1e-9:
        said.append(f"less low than the default: {same['low']:.3f}")
    if same["saved"] > default["saved"]:
        said.append("keeps more than the default")
    if other["saved"] >= alone["saved"]:
        said.append("keeps no less than contractions alone")
    return said


def show(results: dict[str, Rows], console: Console) -> None:
    columns = ("error", "error /\ncontractions", "saved /\nfloat32", "low")
    table = make_table(f"calibrate, {DTYPE}, toy size", columns)
    for model, rows in results.items():
        label = model
        for name, row in rows.items():
            if name != "float32":
                table.add_row(
                    label,
                    name,
                    f"{row['error']:.4f}",
                    f"{row['error'] / rows['contractions']['error']:.2f}",
                    f"{row['saved'] / max(rows['float32']['saved'], 1):.2f}",
                    f"{row['low']:.1%}",
                    end_section=name == "as contractions",
                )
                label = ""
    console.print(table)
    for model, rows in results.items():
        for said in findings(rows):
            console.print(f"{model}: {said}")


def plot(results: dict[str, Rows], path: Path) -> None:
    """Error against bytes kept: a small mark is a model, a large one all of them."""
    figure = Figure(figsize=(7, 5), layout="constrained")
    axes = figure.subplots()
    names = [*BESIDE, "as default", "as contractions"]
    for i, name in enumerate(names):
        rows = [r for r in results.values() if name in r and r[name]["error"] > 0]
        points = [
            (
                row[name]["saved"] / max(row["float32"]["saved"], 1),
                row[name]["error"] / row["contractions"]["error"],
            )
            for row in rows
        ]
        kept, error = (list(some) for some in zip(*points, strict=True))
        marker = "*" if name.startswith("as ") else "o"
        axes.scatter(kept, error, s=14, color=f"C{i}", marker=marker, alpha=0.5)
        middle = [math.exp(sum(map(math.log, x)) / len(x)) for x in (kept, error)]
        label = f"calibrated {name}" if marker == "*" else name
        axes.scatter(*middle, s=150, color=f"C{i}", marker=marker, label=label)
    axes.set(yscale="log", xlabel="kept for the backward pass, over float32's")
    axes.set_ylabel("error of the gradient, over that of contractions alone")
    axes.legend()
    figure.savefig(path, dpi=150)


def models(args: argparse.Namespace, console: Console) -> int:
    head = {
        "versions": versions(),
        "sources": sources(),
        "machine": machine(),
        "dtype": DTYPE,
        "batches": BATCHES,
    }
    record = {"head": head, "models": {}}
    if args.json is not None and args.json.exists():
        old = json.loads(args.json.read_text())
        record = old if old["head"] == head else record
    results = record["models"]
    for name in args.models or MODELS:
        if name not in results:
            console.print(f"{name} ...")
            results[name] = compare(MODELS[name])
            if args.json is not None:
                args.json.write_text(json.dumps(record, indent=1) + "\n")
    results = {name: results[name] for name in MODELS if name in results}
    show(results, console)
    if args.plot is not None:
        plot(results, args.plot)
    return int(any(map(findings, results.values())))


# -------------------------------------------------------------------------------- hard


def solver_loss(params: Params, batch: Any) -> Array:
    """An ODE with a learnt right-hand side, solved in steps that adapt to the error."""
    x, target = batch
    y = jnp.tanh(dense(FLOAT32, params["in"], x))

    def slope(y):
        return dense(FLOAT32, params["out"], jnp.tanh(dense(FLOAT32, params["up"], y)))

    def step(state, _):
        t, h, y = state
        h = jnp.minimum(h, 1.0 - t)
        a = slope(y)
        b = slope(y + h * a)
        error = jnp.max(jnp.abs(h * (b - a) / 2)) / 1e-3
        accept = error <= 1
        t, y = jnp.where(accept, t + h, t), jnp.where(accept, y + h * (a + b) / 2, y)
        return (t, h * jnp.clip(0.9 / jnp.sqrt(error + 1e-9), 0.3, 3.0), y), None

    def maybe(state, x):
        return lax.cond(state[0] < 1, lambda s: step(s, x), lambda s: (s, None), state)

    (_, _, y), _ = lax.scan(maybe, (jnp.float32(0), jnp.float32(0.1), y), length=40)
    return jnp.mean((dense(FLOAT32, params["head"], y) - target) ** 2)


def init_solver(key: Array, size: str) -> Params:
    keys = jr.split(key, 4)
    shapes = {"in": (8, 16), "up": (16, 32), "out": (32, 16), "head": (16, 4)}
    return {
        name: {"w": normal(k, *shape), "b": jnp.zeros(shape[1], jnp.float32)}
        for k, (name, shape) in zip(keys, shapes.items(), strict=True)
    }


def solver_batch(key: Array, size: str) -> Any:
    x = jr.normal(key, (12, 8), jnp.float32)
    return x, jnp.sin(x[:, :4] * 3)


SOLVER = Model("adaptive solver", solver_loss, init_solver, solver_batch)


def hard(args: argparse.Namespace, console: Console) -> int:
    table = make_table(
        f"twice the error of contractions alone, {DTYPE}",
        ("contractions", "found", "default", "low", "passes"),
    )
    missed = 0
    for model in (*(MODELS[name] for name in HARD), SOLVER):
        batches = samples(model)
        step = gradient_of(model.loss)
        true = [as_vector(step(*batch)) for batch in batches]
        errors = {}
        for name in ("contractions", "default"):
            loss = CONTENDERS[name](model, DTYPE)
            assert loss is not None
            errors[name] = worst_error(loss, true, batches)
        found = found_for(model, batches, 2 * errors["contractions"])
        error = worst_error(amp(model.loss, amp_policy=found.policy), true, batches)
        missed += not found.met or error > 2 * errors["contractions"]
        table.add_row(
            model.name,
            "",
            f"{errors['contractions']:.4f}",
            f"{error:.4f}",
            f"{errors['default']:.4f}",
            f"{found.low_share:.1%}",
            str(found.passes),
        )
    console.print(table)
    return int(missed > 0)


# -------------------------------------------------------------------------------- cost


def init_deep(key: Array, depth: int, dim: int, length: int) -> Params:
    keys = jr.split(key, 4)
    return {
        "embed": normal(keys[0], 512, dim, fan_in=1),
        "position": 0.1 * normal(keys[1], length, dim, fan_in=1),
        "blocks": init_blocks(keys[2], depth, dim),
        "norm": init_norm(dim),
        "head": normal(keys[3], dim, 512),
    }


def deep_loss(params: Params, tokens: Array) -> Array:
    """A GPT-like model that names two scopes in each of its blocks."""
    x = params["embed"][tokens[:, :-1]] + params["position"]
    for i, p in enumerate(params["blocks"]):
        with jax.named_scope(f"block_{i}/attention"):
            x = x + attend(FLOAT32, Attention(-1e9), p, layer_norm(x, p["norm1"]))
        with jax.named_scope(f"block_{i}/mlp"):
            up = dense(FLOAT32, p["up"], layer_norm(x, p["norm2"]))
            x = x + dense(FLOAT32, p["down"], jax.nn.gelu(up))
    with jax.named_scope("head"):
        logits = layer_norm(x, params["norm"]) @ params["head"]
    return cross_entropy(logits, tokens[:, 1:])


def deep_batches(args: argparse.Namespace, rows: int) -> list[Any]:
    params = init_deep(jr.key(0), args.depth, args.dim, args.length)
    shape = (rows, args.length + 1)
    keys = [jr.fold_in(jr.key(1), i) for i in range(BATCHES)]
    return [(params, jr.randint(key, shape, 0, 512, jnp.int32)) for key in keys]


def cost(args: argparse.Namespace, console: Console) -> int:
    batches = deep_batches(args, 8)
    step = jax.jit(jax.value_and_grad(deep_loss)).lower(*batches[0]).compile()

    def plain() -> float:
        """Seconds of a pass as written: before and after, as the machine is shared."""
        jax.block_until_ready(step(*batches[0]))
        began = time.perf_counter()
        for batch in batches:
            jax.block_until_ready(step(*batch))
        return (time.perf_counter() - began) / len(batches)

    before = plain()
    found = calibrate(
        deep_loss, batches, budget=args.budget, candidates=args.candidates
    )
    one_pass = (before + plain()) / 2
    console.print(str(found), highlight=False)
    console.print(
        f"a pass as written takes {one_pass:.2f} s; the {found.passes} passes of the "
        f"calibration took {found.seconds:.1f} s, as {found.seconds / one_pass:.1f} "
        f"passes as written, and there were {found.compilations} compilations"
    )
    return int(found.seconds > 40 * one_pass or found.compilations > 5)


# ------------------------------------------------------------------------------ passes

MOST_PASSES, MOST_COMPILATIONS = 40, 5


def passes(args: argparse.Namespace, console: Console) -> int:
    """Counts what calibrations run and compile, which no clock decides.

    Beside the model, small programs that compare two arrays are compiled, one for each
    shape of a parameter."""
    columns = ("budget", "groups", "low", "held out", "passes", "compilations")
    names = " or ".join(args.candidates)
    table = make_table(f"{args.depth} layers, {names}", columns)
    too_many = False
    batches = deep_batches(args, 2)
    for granularity in args.granularity:
        for budget in args.budgets:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", AmpWarning)
                found = calibrate(
                    deep_loss,
                    batches,
                    budget=budget,
                    candidates=args.candidates,
                    granularity=granularity,
                )
            too_many |= found.passes > MOST_PASSES
            too_many |= found.compilations > MOST_COMPILATIONS
            table.add_row(
                granularity,
                "",
                f"{budget:g}",
                str(len(found.groups)),
                f"{found.low_share:.1%}",
                f"{found.held_out.gradients:.4f}",
                str(found.passes),
                str(found.compilations),
            )
    console.print(table)
    return int(too_many)


# ----------------------------------------------------------------------------- planted


def planted(args: argparse.Namespace, console: Console) -> int:
    from tests.planted import planted as model_of

    right = 0
    for seed in range(args.count):
        model = model_of(seed)
        found = calibrate(
            model.loss,
            model.batches,
            budget=Budget(worst_leaf=0.05),
            candidates=args.candidates,
            perturbation=1e-5,
        )
        kept = [group.name for group in found.kept_full]
        right += kept == [model.answer]
        if kept != [model.answer]:
            console.print(f"{seed}: kept {kept}, and not {model.answer}")
    console.print(f"{right} of {args.count} right")
    return int(right < args.count)


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        "python -m benchmarks.calibrate",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    commands = parser.add_subparsers(required=True)
    one = commands.add_parser("models")
    one.add_argument("--models", nargs="+", choices=MODELS)
    one.add_argument("--json", type=Path, help="where the record is kept")
    one.add_argument("--plot", type=Path, help="where to draw error against bytes")
    one.set_defaults(run=models)
    commands.add_parser("hard").set_defaults(run=hard)
    one = commands.add_parser("cost")
    for name, default in (("depth", 24), ("dim", 128), ("length", 128)):
        one.add_argument(f"--{name}", type=int, default=default)
    one.add_argument("--budget", type=float, default=0.005)
    one.set_defaults(run=cost)
    one = commands.add_parser("passes")
    for name, default in (("depth", 24), ("dim", 32), ("length", 16)):
        one.add_argument(f"--{name}", type=int, default=default)
    one.add_argument("--budgets", type=float, nargs="+", default=[0.05, 0.005, 0.001])
    one.add_argument("--granularity", nargs="+", default=["scope", "equation"])
    one.set_defaults(run=passes)
    for one in (commands.choices["cost"], commands.choices["passes"]):
        one.add_argument("--candidates", nargs="+", default=[DTYPE])
    one = commands.add_parser("planted")
    one.add_argument("--count", type=int, default=30)
    one.add_argument("--candidates", nargs="+", default=["float16"])
    one.set_defaults(run=planted)
    args = parser.parse_args(argv)
    jax.config.update("jax_platforms", "cpu")
    if args.run is not cost:  # where seconds count
        # Figures are compared: XLA keeps every rounding, and its backend, which rounds
        # nothing, is spared most of its work.
        xla_flags.add("--xla_allow_excess_precision=false", *xla_flags.QUICK)
    return args.run(args, Console(width=max(Console().width, 110)))


if __name__ == "__main__":
    sys.exit(main())
