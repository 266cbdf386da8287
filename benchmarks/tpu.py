"""What a training step takes on a TPU, read off the code compiled for it.

No TPU is needed: libtpu compiles ahead of time for a described one, and writes the
cycles that its own cost model estimates into the code.

    pip install -e '.[tpu-compile]'
    python -m benchmarks.tpu --json tpu.json

What is compiled is the value and gradient of a loss by its parameters. Cycles are
summed over all that is not free, in loops as often as they run; of a conditional's
branches the dearest counts. On a TPU a float32 product is one pass in bfloat16 by
default, so float32 code is as fast in its contractions: what mixed precision can save
are bytes.

The record is written after each version of each model. What it holds already, compiled
from the same program by the same compiler, is not compiled again: the command may be
stopped, and run in pieces."""

import argparse
import hashlib
import json
import re
import sys
import time
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import jax
from rich.console import Console
from rich.progress import track
from rich.table import Table

from jaxamp_like import amp
from jaxamp_like._hlo.devices import described
from jaxamp_like._hlo.text import Computation, Instruction, Module, parse

from .checkpointed import CHECKPOINTED
from .front import CONTENDERS as OURS, MODELS as OTHERS, Contender, load_record
from .peers import by_mpx
from .rewrite import add_section, make_table, ratio, versions
from .roofline import alone, is_convert_only, lower_step, walk
from .workloads import Loss, Model, Workload

GENERATIONS = ("v5e", "v6e", "v5p", "tpu7x")
MODELS = {**OTHERS, **CHECKPOINTED}
KNOWN = 2**62  # more cycles than this stand for "unknown"


def mpx(model: Model, dtype: str) -> Loss | None:
    return by_mpx(model, dtype) if isinstance(model, Workload) else None


def lean_int8(model: Model, dtype: str) -> Loss:
    """The default, which keeps what the backward pass reads in 8 bits."""
    return amp(model.loss, compute_dtype=dtype, lean="int8")


NAMES = (
    "float32",
    "hand",
    "hand lean",
    "default",
    "lean",
    "pytorch_autocast",
    "jmp",
)
CONTENDERS: dict[str, Contender] = {name: OURS[name] for name in NAMES}
CONTENDERS["mpx"] = mpx
CONTENDERS["lean int8"] = lean_int8


# ---------------------------------------------------------------- reading compiled code


@dataclass(frozen=True)
class Piece:
    """What the core does in one go.

    Args:
        name: of the instruction.
        op: that it was traced from, as XLA tells it.
        times: how often it runs in one step.
        cycles: of one run, as estimated; None where the cost model has none.
        convert_only: whether it does nothing but change a dtype or a layout."""

    name: str
    op: str
    times: int
    cycles: int | None
    convert_only: bool


def estimated(one: Instruction) -> int | None:
    found = re.search(r'"estimated_cycles":"(\d+)"', one.attributes)
    cycles = int(found[1]) if found else None
    return cycles if cycles is not None and cycles < KNOWN else None


def total_cycles(found: Iterable[Piece]) -> int:
    return sum(one.times * (one.cycles or 0) for one in found)


def pieces(module: Module) -> list[Piece]:
    """All that takes time; of the branches of a conditional, the dearest."""

    def leaf(one: Instruction, scope: Computation, times: int) -> Iterator[Piece]:
        if '"estimated_cycles"' not in one.attributes:
            return
        bodies = [module.computations[name] for name in one.called("calls")]
        bodies = bodies or [alone(one, scope)]
        converts = all(map(is_convert_only, bodies))
        yield Piece(one.name, one.op_name, times, estimated(one), converts)

    return walk(module, leaf, total_cycles)


@dataclass(frozen=True)
class Figures:
    """What is read off the compiled step of one version of one model.

    Args:
        cycles: that the cost model estimates for a step.
        temp_bytes: memory beside arguments and results.
        moved_bytes: that XLA counts as accessed, a loop's body once.
        pieces: how many there are, as compiled.
        converts: how many of them only convert.
        unknown: how many of them the cost model knows nothing of.
        compile_seconds: what compiling took of the processors.
        program: a digest of what was compiled."""

    cycles: int
    temp_bytes: int
    moved_bytes: float
    pieces: int
    converts: int
    unknown: int
    compile_seconds: float
    program: str


def digest(lowered: Any) -> str:
    """Tells programs apart, whatever code they were traced from."""
    return hashlib.sha256(lowered.as_text().encode()).hexdigest()[:16]


def read_off(lowered: Any, program: str) -> tuple[Figures, str]:
    """The figures of a training step, a `program`, and the code it is compiled to."""
    start = time.process_time()
    compiled = lowered.compile()
    took = time.process_time() - start
    text = compiled.as_text()
    found = pieces(parse(text))
    figures = Figures(
        cycles=total_cycles(found),
        temp_bytes=compiled.memory_analysis().temp_size_in_bytes,
        moved_bytes=compiled.cost_analysis()["bytes accessed"],
        pieces=len(found),
        converts=sum(one.convert_only for one in found),
        unknown=sum(one.cycles is None for one in found),
        compile_seconds=took,
        program=program,
    )
    return figures, text


Rows = dict[str, Figures]


def compare(
    model: Model,
    dtype: str,
    size: str,
    device: Any,
    names: Iterable[str],
    known: Rows,
    hlo: Path | None = None,
) -> Iterator[tuple[str, Figures]]:
    """The figures of contenders on one model, but for programs that are `known`.

    With a folder `hlo` for the compiled code, all are compiled."""
    for name in names:
        loss = CONTENDERS[name](model, dtype)
        if loss is None:
            continue
        lowered = lower_step(loss, model.shapes(size), device)
        program = digest(lowered)
        is_known = name in known and known[name].program == program
        if is_known and hlo is None:
            continue
        figures, text = read_off(lowered, program)
        if hlo is not None:
            hlo.mkdir(parents=True, exist_ok=True)
            file = f"{model.name} {name}.hlo".replace(" ", "_")
            (hlo / file).write_text(text)
        yield name, figures


# ------------------------------------------------------------------------- the record

Record = dict[str, dict[str, Rows]]  # by device, then by model


def heading(dtype: str, size: str) -> dict[str, Any]:
    compiler = {k: v for k, v in versions(["libtpu"]).items() if k != "jaxamp_like"}
    return {"versions": compiler, "dtype": dtype, "size": size}


def read_record(path: Path | None, head: dict[str, Any]) -> Record:
    """What a record holds, if it was made as `head` says."""
    devices = load_record(path, head).get("devices", {})
    return {
        device: {
            model: {name: Figures(**one) for name, one in rows.items()}
            for model, rows in models.items()
        }
        for device, models in devices.items()
    }


def write_record(path: Path | None, head: dict[str, Any], record: Record) -> None:
    if path is None:
        return
    devices = {
        device: {
            model: {name: asdict(rows[name]) for name in CONTENDERS if name in rows}
            for model, rows in models.items()
        }
        for device, models in record.items()
    }
    path.write_text(json.dumps(head | {"devices": devices}, indent=2) + "\n")


# ------------------------------------------------------------------------- the table

COLUMNS = (
    "Mcycles",
    "temp\nMB",
    "cycles\n/ f32",
    "temp\n/ f32",
    "cycles\n/ hand",
    "temp\n/ hand",
    "bytes\n/ hand",
    "converts",
    "compile\n/ hand",
)


def row(one: Figures, plain: Figures | None, hand: Figures | None) -> list[str]:
    def over(name: str, other: Figures | None) -> str:
        return ratio(getattr(one, name), getattr(other, name, None))

    return [
        f"{one.cycles / 1e6:.2f}",
        f"{one.temp_bytes / 1e6:.0f}",
        over("cycles", plain),
        over("temp_bytes", plain),
        over("cycles", hand),
        over("temp_bytes", hand),
        over("moved_bytes", hand),
        f"{one.converts}",
        over("compile_seconds", hand),
    ]


def as_table(results: dict[str, Rows], note: str) -> Table:
    table = make_table(f"As compiled for a TPU ({note})", COLUMNS)
    for model, rows in results.items():
        beside = rows.get("float32"), rows.get("hand")
        add_section(table, model, {n: row(one, *beside) for n, one in rows.items()})
    return table


# What the default may take of another's cycles and temporary memory.
LIMITS = {"float32": 1.02, "hand": 1.02, "pytorch_autocast": 1.05, "jmp": 1.05}
LITTLE = 1e6  # bytes, of which nobody is the worse


def findings(rows: Rows) -> list[str]:
    """In what the default of one model is dearer than it may be."""
    found: list[str] = []
    if "default" not in rows:
        return found
    ours = rows["default"]
    for other in LIMITS.keys() & rows.keys():
        one, limit = rows[other], LIMITS[other]
        if ours.cycles > limit * one.cycles:
            found.append(f"{ours.cycles / one.cycles:.2f} of {other}'s cycles")
        if ours.temp_bytes > limit * max(one.temp_bytes, LITTLE):
            found.append(f"{ours.temp_bytes / one.temp_bytes:.2f} of {other}'s memory")
    return sorted(found)


def parse_args(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        "python -m benchmarks.tpu",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--dtype", default="bfloat16", choices=("bfloat16", "float16"))
    parser.add_argument("--size", default="real", choices=("toy", "real"))
    parser.add_argument(
        "--devices", nargs="+", choices=GENERATIONS, default=[*GENERATIONS]
    )
    parser.add_argument("--models", nargs="+", choices=MODELS, default=[*MODELS])
    parser.add_argument(
        "--contenders", nargs="+", choices=CONTENDERS, default=[*CONTENDERS]
    )
    parser.add_argument("--json", type=Path, help="the record, read and written")
    parser.add_argument("--hlo", type=Path, help="a folder for the compiled code")
    return parser.parse_args(argv)


def main(argv: list[str] | None = None) -> int:
    args = parse_args(argv)
    jax.config.update("jax_platforms", "cpu")  # the described TPU, not one that's here
    console = Console(width=max(Console().width, 110))
    head = heading(args.dtype, args.size)
    record = read_record(args.json, head)
    for generation in args.devices:
        device = described(generation)
        hlo = args.hlo / generation if args.hlo else None
        models = record.setdefault(generation, {})
        for name in track(args.models, f"Compiling for {generation}", console=console):
            rows = models.setdefault(name, {})
            settings = MODELS[name], args.dtype, args.size, device, args.contenders
            for contender, figures in compare(*settings, rows, hlo):
                rows[contender] = figures
                write_record(args.json, head, record)
        results = {name: models[name] for name in MODELS if name in args.models}
        note = f"{args.dtype}, {args.size} size, {device.device_kind}"
        console.print(as_table(results, note))
        for model, rows in results.items():
            for found in findings(rows):
                console.print(f"{model}: {found}", highlight=False)
    return 0


if __name__ == "__main__":
    sys.exit(main())
