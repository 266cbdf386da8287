"""Training curves of a GPT of characters in float8, MXFP8 and NVFP4.

    python -m benchmarks.curves_quantised [--steps 2000] [--seeds 3] [--out results]
    python -m benchmarks.curves_quantised --dim 256 --depth 8 --peak-rate 0.001 --name …

The model, its data and its optimiser are those of `benchmarks.curves`, or wider and
deeper. Its contractions with weights read 8 or 4 bits but for the head's, small as they
are: this is about numbers, not about speed. As NVIDIA's recipe has it, the last 15 % of
the blocks stay in bfloat16 under NVFP4; of two blocks that is none. A seed sets the
initial weights and the order of the data, the same in every precision. Fails where a
mean final loss differs from that in bfloat16 by more than the spread over seeds, or is
above it by more than 1.5 % in NVFP4 with its recipe. Each part of the recipe is also
left out alone, and float8 is varied. To see what costs, weights, activations or
cotangents are rounded alone, and all else is contracted in float32. What a record in
the folder tells of the same model stays in it, so that kinds may be trained one by one.

Needs the extras `benchmarks` and `examples`."""

import json
import math
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
import optax
from matplotlib.figure import Figure
from rich.console import Console

from jaxamp_like import (
    Policy,
    PolicyMap,
    amp,
    amp_with_state,
    get_policy,
    init_amp_state,
)
from jaxamp_like._quantised.axes import Axes
from jaxamp_like._quantised.block_scaled import BlockScaled, Side
from jaxamp_like._quantised.blocks import (
    BlockRounding,
    Blocks,
    PowerOfTwoBlocks,
    to_rows,
)
from jaxamp_like.presets import quantised
from jaxamp_like.rules import Rule, float8, mxfp8, nvfp4

from .curves import (
    DEPTH,
    DIM,
    PEAK_RATE,
    TASKS,
    VOCABULARY,
    Figures,
    Run,
    at_least_one,
    figures,
    init_char_gpt,
    make_optimiser,
)
from .rewrite import make_table
from .seeds import Training, parser_of, train_all, write_record
from .workloads import FLOAT32, gpt

(_GPT,) = (task for task in TASKS if task.name == "character GPT")
GPT = replace(_GPT, loss=partial(gpt, FLOAT32, scoped=True))
KEPT = 0.15  # of the blocks, in bfloat16
HISTORY = 16  # steps that delayed scaling remembers
BASE = "bfloat16"


def in_blocks(site: Any) -> bool:
    """Whether a contraction is none of the head's, which has no scope to tell by."""
    return all(VOCABULARY not in aval.shape for aval in site.avals[:2])


@dataclass(frozen=True)
class Kind:
    """A precision.

    Args:
        policy: of it.
        bound: by how much it may end above bfloat16, as a share of that loss; `None`
            is the spread over seeds, either way; infinity is for what only compares.
        ends_in_base: whether the last fifth of the steps is made in bfloat16.
        keeps_last: whether the last blocks stay in bfloat16."""

    policy: Policy
    bound: float | None = None
    ends_in_base: bool = False
    keeps_last: bool = False

    def policy_for(self, depth: int) -> Policy | PolicyMap:
        kept = round(KEPT * depth) if self.keeps_last else 0
        last = {
            f"block_{depth - 1 - i}": get_policy("mixed_bfloat16") for i in range(kept)
        }
        return PolicyMap(self.policy, last) if last else self.policy


def _kind(rule: Rule, bound: float | None = None) -> Kind:
    return Kind(Policy(BASE, rules=quantised(rule)), bound)


def _float8(bound: float | None = None, **options: Any) -> Kind:
    return _kind(float8(where=in_blocks, **options), bound)


def _nvfp4(
    bound: float | None = math.inf, keeps_last: bool = True, **options: Any
) -> Kind:
    kind = _kind(nvfp4(where=in_blocks, emulate=True, **options), bound)
    return replace(kind, keeps_last=keeps_last)


MXFP8 = mxfp8()


class Exact(PowerOfTwoBlocks):
    """An array that is laid out in blocks, and not rounded."""

    def __call__(self, x: Any) -> Blocks:
        rows = to_rows(x.astype(jnp.float32), self.axes)
        rows = jnp.pad(rows, ((0, 0), (0, 0), (0, -rows.shape[-1] % self.size)))
        scales = jnp.ones((*rows.shape[:-1], rows.shape[-1] // self.size))
        return Blocks(rows, scales, None, x.shape, self.axes)


@dataclass(frozen=True, repr=False)
class OneSide(BlockScaled):
    """A rule that rounds as another one does, but only one kind of operand.

    Args:
        rule: the other one, which must not rotate what it rounds.
        side: the kind of operand."""

    name: ClassVar[str] = "one_side"
    size: ClassVar[int] = 0  # as `rule` says

    rule: Rule = MXFP8
    side: Side = "operand"
    emulate: bool = True

    def rounding(self, side: Side, axes: Axes, of_weight: bool) -> BlockRounding:
        assert isinstance(self.rule, BlockScaled)
        how = self.rule.rounding(side, axes, of_weight)
        exact = Exact(jnp.dtype("float32"), axes, rounds_up=True, size=how.size)
        return how if side == self.side else exact


def _one_side(rule: Any, side: Side) -> Kind:
    return _kind(OneSide(rule=rule, side=side, where=in_blocks), math.inf)


SIDES: dict[str, Side] = {
    "weights": "weight",
    "activations": "operand",
    "cotangents": "cotangent",
}
DELAYED = "float8, delayed"
KINDS = {
    BASE: Kind(get_policy("mixed_bfloat16")),
    "float8, current": _float8(),
    DELAYED: _float8(delayed=True, amax_history_length=HISTORY),
    "float8, weight gradients in bfloat16": _float8(
        math.inf, weight_gradient="compute"
    ),
    "float8, cotangents in e4m3": _float8(math.inf, grad_dtype="float8_e4m3fn"),
    "float8, scales by row": _float8(math.inf, granularity="row"),
    "MXFP8": _kind(mxfp8(where=in_blocks, emulate=True)),
    "NVFP4": _nvfp4(0.015),
    "NVFP4, cotangents to the nearest": _nvfp4(stochastic=False),
    "NVFP4, not rotated": _nvfp4(rotate=False),
    "NVFP4, weights in rows": _nvfp4(square_weights=False),
    "NVFP4, last blocks too": _nvfp4(keeps_last=False),
    "NVFP4, none of these": _nvfp4(
        keeps_last=False, stochastic=False, rotate=False, square_weights=False
    ),
    "NVFP4, then bfloat16": replace(_nvfp4(), ends_in_base=True),
    **{f"MXFP8, {k} alone": _one_side(MXFP8, side) for k, side in SIDES.items()},
    **{
        f"NVFP4, {k} alone": _one_side(nvfp4(rotate=False), side)
        for k, side in SIDES.items()
    },
}


@dataclass(frozen=True)
class Size:
    """Of the model.

    Args:
        dim: how wide it is.
        depth: how many blocks it has.
        peak_rate: the largest learning rate."""

    dim: int = DIM
    depth: int = DEPTH
    peak_rate: float = PEAK_RATE


def training(name: str, steps: int, size: Size) -> Training:
    tx, kind = make_optimiser(steps, size.peak_rate), KINDS[name]
    if name == DELAYED:
        gradient = amp_with_state(jax.value_and_grad(GPT.loss), amp_policy=kind.policy)
    else:
        gradient = _gradient(kind, size)

    def begin(key: Any, batch: Any) -> Any:
        params = init_char_gpt(key, size.dim, size.depth)
        state = init_amp_state(gradient, params, batch) if name == DELAYED else {}
        return params, tx.init(params), state

    def step(gradient: Any, state: Any, batch: Any) -> Any:
        params, opt_state, amp_state = state
        if name == DELAYED:
            (loss, grads), amp_state = gradient(amp_state, params, batch)
        else:
            loss, grads = gradient(params, batch)
        updates, opt_state = tx.update(grads, opt_state, params)
        return (optax.apply_updates(params, updates), opt_state, amp_state), loss

    last = partial(step, _gradient(KINDS[BASE], size)) if kind.ends_in_base else None
    return Training(GPT, begin, partial(step, gradient), last)


def _gradient(kind: Kind, size: Size) -> Any:
    return jax.value_and_grad(amp(GPT.loss, amp_policy=kind.policy_for(size.depth)))


def misses(results: dict[str, Figures]) -> Iterator[str]:
    """What ends farther from bfloat16 than it may."""
    for name, one in results.items():
        bound = KINDS[name].bound
        if one.of_spread is None:
            continue
        share = one.difference / results[BASE].mean
        if one.of_spread > 1 if bound is None else share > bound:
            yield (
                f"{name}: the final loss differs by {one.difference:+.4f} from "
                f"{BASE}'s, {one.of_spread:.2f} times the spread over seeds, "
                f"{share:+.1%}"
            )


def as_table(results: dict[str, Figures], title: str) -> Any:
    columns = ("final loss", "spread", "difference", "± of the mean", "in spreads")
    table = make_table(title, (*columns, "skipped"))
    for name, one in results.items():
        spread, ratio, error = one.spread, one.of_spread, paired_error(one, results)
        table.add_row(
            GPT.name,
            name,
            f"{one.mean:.5f}",
            "-" if spread is None else f"{spread:.5f}",
            f"{one.difference:+.5f}",
            "-" if error is None else f"{error:.5f}",
            "-" if ratio is None else f"{ratio:.2f}",
            str(sum(one.skipped)),
        )
    return table


def paired_error(one: Figures, results: dict[str, Figures]) -> float | None:
    """The standard error of the mean difference, seed by seed."""
    differences = np.subtract(one.finals, results[BASE].finals)
    if len(differences) < 2:
        return None
    return float(differences.std(ddof=1) / math.sqrt(len(differences)))


def plot(results: dict[str, Figures], path: Path) -> None:
    """How far each kind ends above bfloat16, seed by seed and in the mean."""
    figure = Figure(figsize=(8, 0.3 * len(results) + 1.5), layout="constrained")
    axes = figure.subplots()
    base = results[BASE]
    spread, others = base.spread or 0, [name for name in results if name != BASE]
    axes.axvspan(-spread, spread, color="#999999", alpha=0.3)
    for name in others:
        above = np.subtract(results[name].finals, base.finals)
        axes.plot(above, [name] * len(above), ".", color="#4477aa")
        axes.plot(above.mean(), name, "|", color="#222222", markersize=12)
    axes.invert_yaxis()
    axes.set_title(GPT.name)
    axes.set_xlabel(f"final loss above {BASE}'s (band: its spread over seeds)")
    axes.grid(alpha=0.3)
    figure.savefig(path, dpi=110)


def runs_of_record(
    path: Path, steps: int, seeds: int, size: Size
) -> dict[str, list[Run]]:
    """The runs that a record of the same model tells of, by their final losses."""
    if not path.exists():
        return {}
    record = json.loads(path.read_text())
    is_same = record["model"] == asdict(size)
    if not is_same or (record["steps"], record["seeds"]) != (steps, seeds):
        return {}
    return {
        name: [
            Run(np.full(steps, final), skipped, 1.0)
            for final, skipped in zip(one["finals"], one["skipped"], strict=True)
        ]
        for name, one in record["results"].items()
    }


def main(argv: list[str] | None = None) -> int:
    parser = parser_of(__doc__)
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=[*KINDS])
    parser.add_argument("--dim", type=at_least_one, default=DIM)
    parser.add_argument("--depth", type=at_least_one, default=DEPTH)
    parser.add_argument("--peak-rate", type=float, default=PEAK_RATE)
    parser.add_argument("--name", default="curves_quantised", help="of the record")
    options = parser.parse_args(argv)
    console = Console(width=max(Console().width, 150))
    began = time.perf_counter()
    size = Size(options.dim, options.depth, options.peak_rate)
    file = options.out / f"{options.name}.json"
    runs = runs_of_record(file, options.steps, options.seeds, size)
    kinds = (
        options.kinds if BASE in runs else {BASE: None, **dict.fromkeys(options.kinds)}
    )
    trained = train_all(
        {name: training(name, options.steps, size) for name in kinds},
        options.steps,
        options.seeds,
        options.workers,
        console,
        options.keep,
    )
    runs |= {name: one.runs for name, one in trained.items()}
    results = {name: figures(runs[name], runs[BASE]) for name in KINDS if name in runs}
    title = f"Beside {BASE} (steps: {options.steps}, seeds: {options.seeds})"
    console.print(as_table(results, title))
    options.out.mkdir(parents=True, exist_ok=True)
    plot(results, options.out / f"{options.name}.png")
    recorded = {name: vars(one) for name, one in results.items()}
    write_record(
        file, began, options.steps, options.seeds, recorded, model=asdict(size)
    )
    missed = list(misses(results))
    console.print(*(f"MISSED {miss}" for miss in missed), sep="\n")
    return 1 if missed or len(trained) < len(kinds) else 0


if __name__ == "__main__":
    sys.exit(main())
