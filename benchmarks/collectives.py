"""What a training step sends from device to device, read off the code compiled for it.

    python -m benchmarks.collectives [--machine v5e] [--models ...] [--ways ...]
        [--contenders amp float8] [--forward] [--unplaced]

The step (value and gradient of the loss) of each model is compiled for several
described H200s or TPUs, with its parameters and its batch split in the usual ways, by
`jit` and where the arrays lie; the models of `split_models` split their own work. None
of the machines is needed, see `benchmarks/roofline.py` and `benchmarks/tpu.py`. Every
collective is counted as often as it runs, with the bytes that a device sends in a ring:
of n devices, (n - 1)/n of what is gathered, scattered or exchanged, and twice that of
what is summed for all. What is sent takes at least its bytes over the bandwidth of the
link; nothing is taken to overlap. The contenders float8, mxfp8 and int8 are `amp` with
every weight in 8 bits; `--forward` compiles the loss alone. With `--unplaced` the
arguments are shapes, and the `in_shardings` of the step's `jit` alone tell where they
lie."""

import argparse
import json
import math
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec as P
from rich.console import Console
from rich.progress import track
from rich.table import Table

from jaxamp_like import amp, default_amp_policy
from jaxamp_like._hlo.devices import gpus, tpus
from jaxamp_like._hlo.text import Instruction, Module, Shape, parse
from jaxamp_like.presets import quantised
from jaxamp_like.rules import float8, int8, mxfp8

from . import tpu
from .rewrite import CONTENDERS, make_table, ratio, versions
from .roofline import figures, plugin_versions, walk
from .split_models import SPLITS, Split, in_style
from .workloads import GPT_SIZES, WORKLOADS, Workload

KINDS = (
    "all-gather",
    "all-reduce",
    "reduce-scatter",
    "all-to-all",
    "ragged-all-to-all",
    "collective-permute",
)


# ------------------------------------------------------------------------ reading HLO


@dataclass(frozen=True)
class Collective:
    """A collective of the compiled step.

    Args:
        kind: such as "all-gather".
        dtype: of what is sent.
        sent: bytes that a device sends each time.
        times: how often it runs in one step."""

    kind: str
    dtype: str
    sent: float
    times: int


def group_size(one: Instruction, devices: int) -> int:
    """How many devices take part in a collective."""
    if found := re.search(r"replica_groups=mesh\[([^\]]*)\] {([^}]*)}", one.attributes):
        sizes = dict(re.findall(r"('\w+')=(\d+)", found[1]))
        return math.prod(int(sizes[axis]) for axis in found[2].split(","))
    if found := re.search(r"replica_groups=\[\d+,(\d+)\]", one.attributes):
        return int(found[1])
    if found := re.search(r"replica_groups=\{\{([\d,]+)\}", one.attributes):
        return found[1].count(",") + 1
    return devices


def results(one: Instruction, kind: str) -> Sequence[Shape]:
    """What a collective leaves; one that starts gives its operands beside them."""
    starts = one.opcode.endswith("-start") and kind != "all-reduce"
    if not starts:
        return one.shapes
    arrays = [shape for shape in one.shapes if shape.dims or shape.dtype != "u32"]
    return arrays[len(arrays) // 2 :]


def sent_by(kind: str, left: float, n: int) -> float:
    """Bytes that a device sends in a ring of `n`, if `left` are its results' bytes."""
    share = (n - 1) / n
    return {
        "all-gather": share * left,
        "all-reduce": 2 * share * left,
        "reduce-scatter": share * left * n,
        "all-to-all": share * left,
        "ragged-all-to-all": share * left,
        "collective-permute": left,
    }[kind]


def collectives(module: Module, devices: int) -> list[Collective]:
    """All collectives of a module; of the branches of a conditional, the dearest."""

    seen: set[str] = set()  # channels

    def leaf(one: Instruction, scope: Any, times: int) -> Iterator[Collective]:
        kind = one.opcode.removesuffix("-start")
        if kind in KINDS:
            yield from collective(one, kind, devices, times)
        if one.opcode == "fusion":
            for name in one.called("calls"):
                yield from fused(name, times)

    def fused(name: str, times: int) -> Iterator[Collective]:
        """TPUs fuse a collective, in several parts, with what runs at the same time."""
        for one in module.computations[name].values():
            channel = re.search(r"channel_id=(\d+)", one.attributes)
            if one.opcode in KINDS and channel and channel[1] not in seen:
                seen.add(channel[1])
                scatters = name.startswith("all-reduce-scatter")
                kind = "reduce-scatter" if scatters else one.opcode
                for found in collective(one, one.opcode, devices, times):
                    # A sum of which a device takes its part is sent once, not twice.
                    sent = found.sent / 2 if scatters else found.sent
                    yield replace(found, kind=kind, sent=sent)
            for inner in one.called("calls"):
                yield from fused(inner, times)

    return walk(module, leaf, total_sent)


def collective(
    one: Instruction, kind: str, devices: int, times: int
) -> Iterator[Collective]:
    """One instruction, which may send arrays of several dtypes."""
    sizes: dict[str, int] = {}
    for shape in results(one, kind):
        sizes[shape.dtype] = sizes.get(shape.dtype, 0) + shape.size_in_bytes
    n = group_size(one, devices)
    for dtype, left in sizes.items():
        yield Collective(kind, dtype, sent_by(kind, left, n), times)


def gathered_weights(module: Module, devices: int, weights: Set[Any]) -> float:
    """Bytes of weights that a device sends to gather them, in 16 bits or fewer.

    An array of a gather is a weight if it has its sizes, in any order."""

    def leaf(one: Instruction, scope: Any, times: int) -> Iterator[Collective]:
        if one.opcode.removesuffix("-start") != "all-gather":
            return
        n = group_size(one, devices)
        for shape in results(one, "all-gather"):
            if shape.bits <= 16 and sizes(shape.dims) in weights:
                sent = sent_by("all-gather", shape.size_in_bytes, n)
                yield Collective("all-gather", shape.dtype, sent, times)

    return total_sent(walk(module, leaf, total_sent))


def sizes(shape: Sequence[int]) -> tuple[int, ...]:
    return tuple(sorted(n for n in shape if n != 1))


NO_WEIGHTS = ("embed", "position")


def weight_sizes(params: Any) -> Set[tuple[int, ...]]:
    """The sizes of the weights that contractions read; of a stack, those of a layer."""
    found: set[tuple[int, ...]] = set()
    for path, x in jax.tree_util.tree_leaves_with_path(params):
        name = jax.tree_util.keystr(path)
        is_stacked = "['blocks']['" in name
        if x.ndim - is_stacked == 2 and not any(one in name for one in NO_WEIGHTS):
            found.add(sizes(x.shape[is_stacked:]))
    return found


def total_sent(found: Iterable[Collective]) -> float:
    return sum(one.times * one.sent for one in found)


# ------------------------------------------------------------- how arrays are split


def largest_axis(shape: Sequence[int], n: int) -> int | None:
    """The longest axis that `n` divides."""
    fitting = [i for i, size in enumerate(shape) if size % n == 0]
    return max(fitting, key=lambda i: shape[i], default=None)


def along(shape: Sequence[int], axis: int | None, name: str) -> P:
    return P(*(name if i == axis else None for i in range(len(shape))))


def replicated(path: str, shape: Sequence[int], mesh: Mesh) -> P:
    return P()


def fully_sharded(path: str, shape: Sequence[int], mesh: Mesh) -> P:
    """Each array along its longest axis; of stacked layers, never along the stack."""
    sizes = list(shape)
    if "blocks" in path and len(sizes) == 3:
        sizes[0] = 1
    return along(shape, largest_axis(sizes, mesh.shape["data"]), "data")


# Weights whose columns are split, and those whose rows are, of a transformer's block.
COLUMNS, ROWS = ("'qkv'", "'up'", "'head'"), ("'mix'", "'down'")


def tensor_parallel(path: str, shape: Sequence[int], mesh: Mesh) -> P:
    """Two products after each other: columns of the first, rows of the second."""
    is_stacked = "['blocks']['" in path  # a scan's, not one of a list of blocks
    if len(shape) - is_stacked < 2:
        return P()
    if any(name in path for name in COLUMNS):
        return along(shape, len(shape) - 1, "model")
    if any(name in path for name in ROWS):
        return along(shape, len(shape) - 2, "model")
    return P()


def both(path: str, shape: Sequence[int], mesh: Mesh) -> P:
    """Tensor parallel, and what is left of each array split over the data's axis."""
    spec = [*tensor_parallel(path, shape, mesh)]
    spec += [None] * (len(shape) - len(spec))
    free = [n if spec[i] is None else 1 for i, n in enumerate(shape)]
    if "blocks" in path and len(free) == 3:
        free[0] = 1
    axis = largest_axis(free, mesh.shape["data"])
    if axis is not None and free[axis] > 1:
        spec[axis] = "data"
    return P(*spec)


@dataclass(frozen=True)
class Way:
    """A way to split the work.

    Args:
        axes: names and sizes of the mesh's axes, by the number of devices.
        spec: how a parameter is split, by its path and shape."""

    axes: Callable[[int], Mapping[str, int]]
    spec: Callable[[str, Sequence[int], Mesh], P]


WAYS = {
    "data parallel": Way(lambda n: {"data": n}, replicated),
    "fully sharded": Way(lambda n: {"data": n}, fully_sharded),
    "tensor parallel": Way(lambda n: {"data": 1, "model": n}, tensor_parallel),
    "sharded + tensor": Way(lambda n: {"data": n // 2, "model": 2}, both),
}


# ---------------------------------------------------------------------------- compiling


def described_devices(count: int) -> Sequence[Any]:
    """H200s in hosts of eight, as XLA sees them."""
    return gpus("h200", count)


def described_tpus(generation: str, count: int) -> Sequence[Any]:
    """Chips in two rows, as XLA sees them."""
    return tpus(f"{generation}:2x{count // 2}")


@dataclass(frozen=True)
class Machine:
    """What a step is compiled for.

    Args:
        devices: describes so many of them.
        link: bytes/s that a device sends, by the data sheet.
        step_seconds: the time that the kernels of a step take at least, from its
            compiled text and its temp bytes."""

    devices: Callable[[int], Sequence[Any]]
    link: float
    step_seconds: Callable[[str, int], float]


def gpu_seconds(text: str, temp: int) -> float:
    return figures(text, temp).step_seconds


def tpu_seconds(clock: float) -> Callable[[str, int], float]:
    """By the cycles that XLA estimates, at so many a second."""

    def seconds(text: str, temp: int) -> float:
        return tpu.total_cycles(tpu.pieces(parse(text))) / clock

    return seconds


MACHINES = {
    "H200": Machine(described_devices, 450e9, gpu_seconds),
    "v5e": Machine(partial(described_tpus, "v5e"), 200e9, tpu_seconds(1.5e9)),
}


def mesh_of(
    axes_of: Callable[[int], Mapping[str, int]],
    devices: Sequence[Any],
    kind: AxisType = AxisType.Auto,
) -> Mesh:
    axes = axes_of(len(devices))
    grid = np.array(devices).reshape(tuple(axes.values()))
    return Mesh(grid, tuple(axes), axis_types=(kind,) * len(axes))


@dataclass(frozen=True)
class Row:
    """What is read off one compiled step.

    Args:
        sent: bytes that a device sends in a step.
        by_kind: the same by kind and dtype.
        counts: how many collectives of each kind run in a step.
        link_seconds: at least, for what is sent.
        step_seconds: at least, for the kernels.
        temp_bytes: memory beside arguments and results, of a device.
        weights: of `sent`, what gathers of weights send in 16 bits or fewer."""

    sent: float
    link_seconds: float
    step_seconds: float
    temp_bytes: int
    by_kind: dict[str, float] = field(default_factory=dict)
    counts: dict[str, int] = field(default_factory=dict)
    weights: float = 0


def placed(shapes: Any, way: Way, mesh: Mesh) -> Any:
    """Parameters and batch as shapes, each with its place."""
    params, batch = shapes

    def at(x: Any, spec: P) -> Any:
        where = NamedSharding(mesh, spec)
        return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=where)

    def of(path: Any, x: Any) -> Any:
        return at(x, way.spec(jax.tree_util.keystr(path), x.shape, mesh))

    rows = jax.tree.map(lambda x: at(x, P("data")), batch)
    return jax.tree_util.tree_map_with_path(of, params), rows


def on(mesh: Mesh) -> AbstractContextManager[Any]:
    """A mesh whose arrays show in their types how they are split has to be set."""
    if AxisType.Explicit not in mesh.axis_types:
        return nullcontext()
    # JAX < 0.7 has it in `jax.sharding` only.
    has_set = hasattr(jax, "set_mesh")
    return jax.set_mesh(mesh) if has_set else jax.sharding.use_mesh(mesh)  # pyright: ignore


def lowered(
    loss: Any, args: Any, mesh: Mesh, forward: bool = False, unplaced: bool = False
) -> Any:
    """The step, whose gradients lie as the parameters do; or its loss alone.

    With `unplaced`, only the step's `in_shardings` tell where its arguments lie."""
    where = jax.tree.map(lambda x: x.sharding, args)
    whole = NamedSharding(mesh, P())
    options: dict[str, Any] = {"out_shardings": whole if forward else (whole, where[0])}
    if unplaced:
        options["in_shardings"] = where
        args = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), args)
    with on(mesh):
        step = jax.jit(loss if forward else jax.value_and_grad(loss), **options)
        return step.lower(*args)


def read_off(compiled: Any, devices: int, machine: Machine, params: Any = None) -> Row:
    text = compiled.as_text()
    by_kind: dict[str, float] = {}
    counts: dict[str, int] = {}
    for one in collectives(parse(text), devices):
        key = f"{one.kind} {one.dtype}"
        by_kind[key] = by_kind.get(key, 0) + one.times * one.sent
        counts[one.kind] = counts.get(one.kind, 0) + one.times
    sent = sum(by_kind.values())
    temp = compiled.memory_analysis().temp_size_in_bytes
    step = machine.step_seconds(text, temp)
    weights = gathered_weights(parse(text), devices, weight_sizes(params))
    return Row(sent, sent / machine.link, step, temp, by_kind, counts, weights)


def again(loss: Any, dtype: str) -> Any:
    return amp(loss, compute_dtype=dtype, gather_once=False)


EIGHT_BITS = {
    "float8": float8(where=None),
    "mxfp8": mxfp8(where=None),
    "int8": int8(where=None),
}


def in_eight_bits(loss: Any, dtype: str) -> dict[str, Any]:
    """`amp` by rules that quantise, also what is too small to gain time by that."""
    return {
        name: amp(loss, compute_dtype=dtype, amp_policy=quantised(rule))
        for name, rule in EIGHT_BITS.items()
    }


def of_workload(
    workload: Workload, way: Way, dtype: str, size: str, mesh: Mesh
) -> tuple[Any, Mapping[str, Any]]:
    """The arguments of a step, and the losses to compare."""
    made = {name: make(workload, dtype) for name, make in CONTENDERS.items()}
    made["amp again"] = again(workload.loss, dtype)
    made |= in_eight_bits(workload.loss, dtype)
    return placed(workload.shapes(size), way, mesh), made


def of_split(split: Split, dtype: str, mesh: Mesh) -> tuple[Any, Mapping[str, Any]]:
    plain = in_style(split, None, False, mesh)
    policy = default_amp_policy | split.rules
    mixed = partial(amp, plain, compute_dtype=dtype, amp_policy=policy)
    made = {
        "float32": plain,
        "hand": in_style(split, dtype, False, mesh),
        "lean": in_style(split, dtype, True, mesh),
        "amp": mixed(),
        "amp again": mixed(gather_once=False),
        **in_eight_bits(plain, dtype),
    }
    return split.arguments(mesh, mesh.size), made


def compare(
    args: Any,
    losses: Mapping[str, Any],
    mesh: Mesh,
    contenders: Sequence[str],
    machine: Machine,
    forward: bool = False,
    unplaced: bool = False,
) -> dict[str, Row]:
    def row(loss: Any) -> Row:
        compiled = lowered(loss, args, mesh, forward, unplaced).compile()
        return read_off(compiled, mesh.size, machine, args[0])

    return {
        name: row(losses[name]) for name in contenders if losses.get(name) is not None
    }


# ------------------------------------------------------------------------ the table

HEADINGS = (
    "sent\n/ hand",
    "gathers\n- hand",
    "temp\n/ hand",
    "step + link\n/ hand",
    "sent\nMB",
    "temp\nMB",
    "weights\nMB",
    "what is sent, MB",
)


def cells(row: Row, hand: Row | None) -> list[str]:
    def over(value: Callable[[Row], float]) -> str:
        return ratio(value(row), value(hand)) if hand else "-"

    gathers = row.counts.get("all-gather", 0)
    kinds = sorted(row.by_kind.items(), key=lambda item: -item[1])
    return [
        over(lambda r: r.sent),
        f"{gathers - hand.counts.get('all-gather', 0):+d}" if hand else "-",
        over(lambda r: r.temp_bytes),
        over(lambda r: r.step_seconds + r.link_seconds),
        f"{row.sent / 1e6:.1f}",
        f"{row.temp_bytes / 1e6:.1f}",
        f"{row.weights / 1e6:.1f}",
        ", ".join(f"{kind} {sent / 1e6:.1f}" for kind, sent in kinds),
    ]


def table(title: str, rows: Mapping[str, Row]) -> Table:
    made = make_table(title, HEADINGS)
    for name, row in rows.items():
        made.add_row("", name, *cells(row, rows.get("hand")))
    return made


# Their weights are named, and their batches lie, as the ways to split them expect.
MODELS = ("GPT unrolled", "GPT scanned")
COMPARED = ("float32", "hand", "lean", "amp", "amp lean", "amp again")


def parse_args(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.collectives")
    parser.add_argument("--machine", choices=MACHINES, default="H200")
    parser.add_argument("--devices", type=int, default=8, help="8, or a multiple")
    parser.add_argument("--models", nargs="*", choices=MODELS, default=MODELS)
    parser.add_argument("--ways", nargs="*", choices=WAYS, default=list(WAYS))
    parser.add_argument("--splits", nargs="*", choices=SPLITS, default=list(SPLITS))
    contenders = [*COMPARED, *EIGHT_BITS]
    parser.add_argument("--contenders", nargs="+", choices=contenders, default=COMPARED)
    parser.add_argument("--forward", action="store_true", help="the loss alone")
    parser.add_argument(
        "--unplaced", action="store_true", help="shapes, `in_shardings`"
    )
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--size", choices=("toy", "real"), default="real")
    parser.add_argument("--depth", type=int, help="layers of the GPTs, if not all")
    parser.add_argument("--json", type=Path, help="write the figures to this file")
    args = parser.parse_args(argv)
    if args.devices < 8 or args.devices % 8:
        parser.error(f"--devices must be 8 or a multiple of it, not {args.devices}")
    return args


Job = Callable[[], tuple[Any, Mapping[str, Any], Mesh]]


def jobs(args: argparse.Namespace, devices: Sequence[Any]) -> Iterator[tuple[str, Job]]:
    """What to compare: a title, and a function that does it."""
    for model in args.models:
        for name in args.ways:
            way = WAYS[name]
            mesh = mesh_of(way.axes, devices)
            given = WORKLOADS[model], way, args.dtype, args.size, mesh
            made = partial(of_workload, *given)
            yield f"{model}, {name}", lambda made=made, mesh=mesh: (*made(), mesh)
    for name in args.splits:
        split = SPLITS[name]
        mesh = mesh_of(split.axes, devices, split.axis_type)
        made = partial(of_split, split, args.dtype, mesh)
        yield name, lambda made=made, mesh=mesh: (*made(), mesh)


def main(argv: Sequence[str] | None = None) -> int:
    args = parse_args(argv)
    if args.depth is not None:
        GPT_SIZES[args.size]["depth"] = args.depth
    sizes = {"devices": args.devices, "dtype": args.dtype, "size": args.size}
    sizes["layers of the GPTs"] = GPT_SIZES[args.size]["depth"]
    machine, is_gpu = MACHINES[args.machine], args.machine == "H200"
    compiler = versions() | plugin_versions() if is_gpu else versions(["libtpu"])
    if args.forward:
        sizes["forward"] = True
    if args.unplaced:
        sizes["unplaced"] = True
    record = {"versions": compiler, "device": args.machine} | sizes
    jax.config.update("jax_platforms", "cpu")  # what is described, not what is here
    console = Console(width=max(Console().width, 170))
    found: dict[str, Any] = {}
    work = list(jobs(args, machine.devices(args.devices)))
    for title, make in track(work, "compiling", console=Console(stderr=True)):
        step_args, losses, mesh = make()
        asked = args.contenders, machine, args.forward, args.unplaced
        rows = compare(step_args, losses, mesh, *asked)
        console.print(table(f"{title}, {args.dtype}, {args.devices} devices", rows))
        found[title] = {name: asdict(row) for name, row in rows.items()}
        if args.json:
            args.json.write_text(json.dumps(record | {"rows": found}, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
