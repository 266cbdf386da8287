"""How fast a training step could be on an H200, read off the code compiled for it.

No GPU is needed: XLA compiles ahead of time for a described device. The compiler is in
the CUDA plugin, which has to be of the same version as jaxlib:

    pip install -e '.[benchmarks]'
    V=$(python -c 'import jaxlib; print(jaxlib.__version__)')
    pip install --no-deps jax-cuda13-plugin==$V jax-cuda13-pjrt==$V
    python -m benchmarks.roofline

(or the extra `gpu-compile`, if the newest JAX will do). The CUDA libraries themselves,
which `jax[cuda13]` brings along, are not needed.

What is compiled is the value and gradient of a loss by its parameters. A kernel takes
at least the time of its FLOPs at peak rate or of its bytes at full bandwidth, whichever
is longer; the roofline step time is the sum over all kernels, with those in loops as
often as they run. It is a lower bound: launches, caches and bad tiles don't count. XLA
chooses its kernels untuned, for there is nothing to time them on."""

import argparse
import importlib.metadata
import json
import re
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple, TypeVar

import jax
from rich.console import Console
from rich.progress import track
from rich.table import Table

from jaxamp_like._hlo.devices import described
from jaxamp_like._hlo.text import (
    Computation,
    Instruction,
    Module,
    Shape,
    contraction_flops,
    parse,
    trip_count,
)

from .checkpointed import CHECKPOINTED
from .rewrite import CONTENDERS, add_section, make_table, ratio, versions
from .workloads import WORKLOADS, Loss, Workload

# FLOP/s by bits of an operand. 16 bits is measured; a float32 product runs in TF32, at
# half of that, and 8 bits at twice. 64 bits is the data sheet's.
PEAK_FLOPS = {8: 1580e12, 16: 790e12, 32: 395e12, 64: 67e12}
BANDWIDTH = 4.3e12  # bytes/s, measured


class Speeds(NamedTuple):
    """Of a device: FLOP/s by the bits of an operand, and bytes/s of its memory."""

    flops: Mapping[int, float] = MappingProxyType(PEAK_FLOPS)
    bandwidth: float = BANDWIDTH


B200 = Speeds(
    MappingProxyType({4: 9e15, 8: 4.5e15, 16: 2.25e15, 32: 1.125e15}), bandwidth=8e12
)
"""By NVIDIA's data sheet, without sparsity; half of the speed of 16 bits for TF32."""
KNOWN: dict[str, Workload] = {**WORKLOADS, **CHECKPOINTED}
PLUGINS = ("jax-cuda13-plugin", "jax-cuda13-pjrt")


# ---------------------------------------------------------------- FLOPs of contractions


def contraction(
    one: Instruction, scope: Computation, speeds: Speeds | None = None
) -> tuple[int, float]:
    """FLOPs and, at peak rate, seconds of a contraction; zeros for all others."""
    flops = contraction_flops(one, scope)
    if not flops:
        return 0, 0.0
    lhs, rhs = (scope[name].shape for name in one.operands[:2])
    return flops, flops * seconds_per_flop(one, lhs, rhs, speeds)


def seconds_per_flop(
    one: Instruction, lhs: Shape, rhs: Shape, speeds: Speeds | None = None
) -> float:
    """By the wider operand, unless the author chose an algorithm."""
    peak = (speeds or Speeds()).flops
    chosen = re.match(r"(T|B)?F(\d+)_\w*?F\d+(?:_X(\d))?$", one.algorithm)
    if chosen is None:
        return 1 / peak[max(lhs.bits, rhs.bits)]
    kind, bits, passes = chosen.groups()
    return int(passes or 1) / peak[32 if kind == "T" else int(bits)]


# ----------------------------------------------------------------------- bytes moved

SLICES = frozenset({"slice", "dynamic-slice", "gather"})
# Which operand holds what is written into the first one.
UPDATES = {"dynamic-update-slice": 1, "scatter": 2}
MOVES = frozenset({"bitcast", "reshape", "transpose", "copy"})


def origin(one: Instruction, body: Computation) -> Instruction:
    """What `one` merely passes on under another shape."""
    while one.opcode in ("bitcast", "reshape"):
        one = body[one.operands[0]]
    return one


def results(body: Computation) -> list[Instruction]:
    """What a kernel writes."""
    root = next(one for one in body.values() if one.is_root)
    parts = root.operands if root.opcode == "tuple" else (root.name,)
    return [origin(body[name], body) for name in parts]


def updates_in_place(body: Computation) -> dict[str, Shape]:
    """Names of the results that overwrite a part of a parameter, and that part."""
    return {
        one.name: body[one.operands[UPDATES[one.opcode]]].shape
        for one in results(body)
        if one.opcode in UPDATES
        and origin(body[one.operands[0]], body).opcode == "parameter"
    }


def bytes_written(body: Computation) -> int:
    in_place = updates_in_place(body)

    def written(one: Instruction) -> Iterable[Shape]:
        if one.name in in_place:
            return [in_place[one.name]]
        if one.opcode == "custom-call" and len(one.shapes) > 1:
            return one.shapes[:-1]  # the last is the library's workspace
        return one.shapes

    return sum(shape.size_in_bytes for one in results(body) for shape in written(one))


def bytes_read(body: Computation) -> float:
    """Of every parameter, the part that the result depends on, read once.

    A kernel that slices a parameter reads the slice, and one that updates it in place
    nothing of it."""
    in_place = updates_in_place(body)
    needed = {one.name: float(one.is_root) for one in body.values()}
    for one in reversed(body.values()):
        share = needed[one.name] = min(needed[one.name], 1.0)
        for i, name in enumerate(one.operands):
            part = share
            if i == 0 and one.opcode in SLICES:
                part *= one.shape.elements / max(body[name].shape.elements, 1)
            elif i == 0 and one.name in in_place:
                part = 0.0
            elif one.opcode in ("broadcast", "dot"):
                part = float(share > 0)
            needed[name] += part
    return sum(
        needed[one.name] * shape.size_in_bytes
        for one in body.values()
        if one.opcode == "parameter"
        for shape in one.shapes
    )


# --------------------------------------------------------------------------- kernels

# What costs nothing, or is paid for where it started.
FREE = frozenset(
    "parameter constant tuple get-tuple-element bitcast after-all add-dependency "
    "partition-id replica-id opt-barrier".split()
)


@dataclass(frozen=True)
class Kernel:
    """A launch on the GPU, with what it takes at least.

    Args:
        name: of the instruction.
        times: how often it runs in one step.
        flops: of its contractions; all else is cheap beside the bytes.
        bytes: that it moves.
        seconds: of one run.
        convert_only: whether it does nothing but change a dtype or a layout."""

    name: str
    times: int
    flops: int
    bytes: float
    seconds: float
    convert_only: bool


def is_convert_only(body: Computation) -> bool:
    def is_float_convert(one: Instruction) -> bool:
        source = body[one.operands[0]].shape
        return (
            source.is_float and one.shape.is_float and source.dtype != one.shape.dtype
        )

    converts = [one for one in body.values() if one.opcode == "convert"]
    rest = {one.opcode for one in body.values()}
    rest -= {"convert", "parameter", "constant", "tuple", "get-tuple-element"}
    return rest <= MOVES and any(map(is_float_convert, converts))


def alone(one: Instruction, scope: Computation) -> Computation:
    """An instruction outside of fusions, as the body of one."""
    operands = {
        name: Instruction(name, "parameter", scope[name].shapes)
        for name in one.operands
    }
    # What starts a copy gives its source and destination, and a handle.
    shapes = one.shapes[:1] if one.opcode == "copy-start" else one.shapes
    root = Instruction(
        one.name, one.opcode, shapes, one.operands, one.attributes, is_root=True
    )
    return {**operands, one.name: root}


def inner(
    module: Module, body: Computation, speeds: Speeds | None = None
) -> Iterator[tuple[int, float]]:
    """FLOPs and seconds of the contractions in a fusion and the fusions within."""
    for one in body.values():
        yield contraction(one, body, speeds)
        for name in one.called("calls"):
            yield from inner(module, module.computations[name], speeds)


def kernel(
    module: Module,
    body: Computation,
    name: str,
    times: int,
    speeds: Speeds | None = None,
) -> Kernel:
    flops, compute = map(sum, zip(*inner(module, body, speeds), strict=True))
    bandwidth = BANDWIDTH if speeds is None else speeds.bandwidth
    moved = bytes_read(body) + bytes_written(body)
    return Kernel(
        name=name,
        times=times,
        flops=int(flops),
        bytes=moved,
        seconds=max(compute, moved / bandwidth),
        convert_only=is_convert_only(body),
    )


def trips(
    module: Module, one: Instruction, scope: Computation, unknown: int | None = None
) -> int:
    """How often a loop runs, or `unknown` if XLA does not know it."""
    found = trip_count(module, one, scope)
    if found is None:
        found = unknown
    if found is None:
        raise ValueError(f"XLA does not know how often {one.name} runs")
    return found


def total_seconds(found: Iterable[Kernel]) -> float:
    return sum(one.times * one.seconds for one in found)


T = TypeVar("T")


def walk(
    module: Module,
    leaf: Callable[[Instruction, Computation, int], Iterable[T]],
    cost: Callable[[Iterable[T]], float],
    unknown_trips: int | None = None,
) -> list[T]:
    """What `leaf` makes of every instruction that holds no others.

    Args:
        leaf: of an instruction, the computation that it stands in, and how often it
            runs in one step.
        cost: of the branches of a conditional, the dearest is taken.
        unknown_trips: how often a loop runs of which XLA does not know it; without, it
            is an error."""

    def inside(name: str, times: int) -> list[T]:
        found: list[T] = []
        scope = module.computations[name]
        for one in scope.values():
            if one.opcode == "while":
                (body,) = one.called("body")
                found += inside(body, times * trips(module, one, scope, unknown_trips))
            elif one.opcode == "conditional":
                names = one.called("branch_computations")
                names += one.called("true_computation") + one.called(
                    "false_computation"
                )
                found += max((inside(name, times) for name in names), key=cost)
            elif one.opcode in ("call", "async-start"):
                (body,) = one.called("to_apply", "calls")
                found += inside(body, times)
            else:
                found += leaf(one, scope, times)
        return found

    return inside(module.entry, 1)


def kernels(
    module: Module, unknown_trips: int | None = None, speeds: Speeds | None = None
) -> list[Kernel]:
    """All kernels of a module; of the branches of a conditional, the slowest.

    The speeds are those of an H200, if none are given."""

    def leaf(one: Instruction, scope: Computation, times: int) -> Iterator[Kernel]:
        if one.opcode in ("fusion", "fusion-start"):
            for body in one.called("calls"):
                yield kernel(module, module.computations[body], one.name, times, speeds)
        elif one.opcode not in FREE and not one.opcode.endswith(("-update", "-done")):
            yield kernel(module, alone(one, scope), one.name, times, speeds)

    return walk(module, leaf, total_seconds, unknown_trips)


# ------------------------------------------------------------------------- compiling


class NoPluginError(Exception):
    """The compiler for NVIDIA GPUs is missing."""


def plugin_versions() -> dict[str, str]:
    """Versions of the plugin's packages, provided that they are jaxlib's."""
    wanted = importlib.metadata.version("jaxlib")
    packages = " ".join(f"{name}=={wanted}" for name in PLUGINS)
    found = {}
    for name in PLUGINS:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            found[name] = "missing"
        if found[name] != wanted:
            raise NoPluginError(
                f"{name} is {found[name]}, but has to be {wanted} as jaxlib is. It "
                f"holds XLA's compiler for NVIDIA GPUs, and needs neither a GPU nor "
                f"CUDA:\n    pip install --no-deps {packages}"
            )
    return found


def has_plugin() -> bool:
    try:
        plugin_versions()
    except NoPluginError:
        return False
    return True


def described_device() -> Any:
    """An H200 as XLA sees it, without one being there."""
    return described("h200")


def lower_step(loss: Loss, shapes: tuple[Any, Any], device: Any) -> Any:
    sharding = jax.sharding.SingleDeviceSharding(device)
    step = jax.jit(
        jax.value_and_grad(loss), in_shardings=sharding, out_shardings=sharding
    )
    return step.lower(*shapes)


@dataclass(frozen=True)
class Figures:
    """What is read off the compiled step of one version of one workload.

    Args:
        step_seconds: the roofline step time.
        contraction_seconds: the part of it in kernels with a contraction.
        convert_seconds: the part of it in convert-only kernels.
        temp_bytes: memory beside arguments and results.
        moved_bytes: sum over all kernels.
        flops: of the contractions.
        kernels: how many there are, as compiled (a loop's body once).
        convert_kernels: how many of them only convert.
        compile_seconds: what compiling took of the processors."""

    step_seconds: float
    contraction_seconds: float
    convert_seconds: float
    temp_bytes: int
    moved_bytes: float
    flops: int
    kernels: int
    convert_kernels: int
    compile_seconds: float | None = None


def figures(
    text: str,
    temp_bytes: int,
    unknown_trips: int | None = None,
    speeds: Speeds | None = None,
) -> Figures:
    found = kernels(parse(text), unknown_trips=unknown_trips, speeds=speeds)
    converts = [one for one in found if one.convert_only]
    return Figures(
        step_seconds=total_seconds(found),
        contraction_seconds=total_seconds(one for one in found if one.flops),
        convert_seconds=total_seconds(converts),
        temp_bytes=temp_bytes,
        moved_bytes=sum(one.times * one.bytes for one in found),
        flops=sum(one.times * one.flops for one in found),
        kernels=len(found),
        convert_kernels=len(converts),
    )


def read_off(loss: Loss, shapes: tuple[Any, Any], device: Any) -> tuple[Figures, str]:
    """The figures of a training step compiled for `device`, and its code."""
    lowered = lower_step(loss, shapes, device)
    start = time.process_time()
    compiled = lowered.compile()
    took = time.process_time() - start
    text = compiled.as_text()
    found = figures(text, compiled.memory_analysis().temp_size_in_bytes)
    return replace(found, compile_seconds=took), text


def compare(
    workload: Workload,
    dtype: str,
    size: str,
    device: Any,
    contenders: Iterable[str] = tuple(CONTENDERS),
    hlo: Path | None = None,
) -> dict[str, Figures]:
    """Compiles every contender of one workload; the code goes to the folder `hlo`."""
    rows = {}
    for name in contenders:
        loss = CONTENDERS[name](workload, dtype)
        if loss is None:
            continue
        rows[name], text = read_off(loss, workload.shapes(size), device)
        if hlo is not None:
            hlo.mkdir(parents=True, exist_ok=True)
            file = f"{workload.name} {name}.hlo".replace(" ", "_")
            (hlo / file).write_text(text)
    return rows


# ------------------------------------------------------------------------ the tables

RATIOS = (
    "speed\n/ f32",
    "temp\n/ f32",
    "time\n/ hand",
    "temp\n/ hand",
    "converts\n- hand",
    "time\n/ lean",
    "temp\n/ lean",
    "converts\n- lean",
    "compile\n/ hand",
)
FIGURES = (
    "step\nµs",
    "contract\nµs",
    "convert\nµs",
    "temp\nMB",
    "moved\nMB",
    "GFLOP",
    "kernels",
    "convert\nkernels",
    "compile\ns",
)


def ratio_row(
    one: Figures, plain: Figures | None, *experts: Figures | None
) -> list[str]:
    def speed() -> str:
        return ratio(plain.step_seconds, one.step_seconds) if plain else "-"

    def over(name: str, other: Figures | None) -> str:
        ours, theirs = getattr(one, name), getattr(other, name, None)
        return ratio(ours, theirs) if ours is not None and theirs is not None else "-"

    row = [speed(), over("temp_bytes", plain)]
    for expert in experts:
        more = f"{one.convert_kernels - expert.convert_kernels:+d}" if expert else "-"
        row += [over("step_seconds", expert), over("temp_bytes", expert), more]
    return [*row, over("compile_seconds", experts[0])]


def figure_row(one: Figures) -> list[str]:
    return [
        f"{1e6 * one.step_seconds:.1f}",
        f"{1e6 * one.contraction_seconds:.1f}",
        f"{1e6 * one.convert_seconds:.1f}",
        f"{one.temp_bytes / 1e6:.1f}",
        f"{one.moved_bytes / 1e6:.0f}",
        f"{one.flops / 1e9:.0f}",
        f"{one.kernels}",
        f"{one.convert_kernels}",
        "-" if one.compile_seconds is None else f"{one.compile_seconds:.1f}",
    ]


def tables(records: dict[str, dict[str, Figures]], note: str) -> list[Table]:
    ratios = make_table(f"Ratios ({note})", RATIOS)
    absolute = make_table(f"Figures ({note})", FIGURES)
    for workload, rows in records.items():
        others = [rows.get(name) for name in ("float32", "hand", "lean")]
        ratio_rows = {name: ratio_row(one, *others) for name, one in rows.items()}
        add_section(ratios, workload, ratio_rows)
        add_section(absolute, workload, {n: figure_row(one) for n, one in rows.items()})
    return [ratios, absolute]


def parse_args(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        "python -m benchmarks.roofline",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--dtype", default="bfloat16", choices=("bfloat16", "float16"))
    parser.add_argument("--size", default="real", choices=("toy", "real"))
    parser.add_argument("--workloads", nargs="+", choices=KNOWN, default=WORKLOADS)
    parser.add_argument(
        "--checkpointed",
        action="store_const",
        const=CHECKPOINTED,
        dest="workloads",
        help="those whose author checkpoints every block, instead",
    )
    parser.add_argument(
        "--contenders", nargs="+", choices=CONTENDERS, default=CONTENDERS
    )
    parser.add_argument("--json", type=Path, help="where to write the record")
    parser.add_argument("--hlo", type=Path, help="a folder for the compiled code")
    return parser.parse_args(argv)


def run_command(
    args: argparse.Namespace,
    work: Callable[[argparse.Namespace, Any], dict[str, Any]],
) -> int:
    """Runs `work(args, device)` for the described device; returns the exit status.

    What `work` returns is written to `args.json`, with what it was measured by."""
    jax.config.update("jax_platforms", "cpu")  # the described GPU, not one that's here
    try:
        plugins = plugin_versions()
    except NoPluginError as error:
        print(error, file=sys.stderr)
        return 2
    device = described_device()
    found = work(args, device)
    if args.json is not None:
        record = {
            "versions": versions() | plugins,
            "device": device.device_kind,
            "peak_flops_by_bits": PEAK_FLOPS,
            "bandwidth": BANDWIDTH,
            "dtype": args.dtype,
            "size": args.size,
        }
        args.json.write_text(json.dumps(record | found, indent=2) + "\n")
    return 0


def compare_all(args: argparse.Namespace, device: Any) -> dict[str, Any]:
    console = Console(width=max(Console().width, 120))
    records = {}
    for name in track(list(args.workloads), "Compiling", console=console):
        records[name] = compare(
            KNOWN[name], args.dtype, args.size, device, args.contenders, args.hlo
        )
    note = f"{args.dtype}, {args.size} size, {device.device_kind}, roofline"
    for table in tables(records, note):
        console.print(table)
    return {
        "workloads": {
            workload: {name: asdict(one) for name, one in rows.items()}
            for workload, rows in records.items()
        }
    }


def main(argv: list[str] | None = None) -> int:
    return run_command(parse_args(argv), compare_all)


if __name__ == "__main__":
    sys.exit(main())
