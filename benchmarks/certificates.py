"""Whether training steps run in the dtypes that were decided, on GPUs, TPUs and CPUs.

None of the GPUs and TPUs is needed: XLA compiles for described ones.

    pip install -e '.[gpu-compile,tpu-compile]'
    python -m benchmarks.certificates --json certificates.json

What is certified is the value and gradient of a loss by its parameters, under `amp`: on
one device with its default policy or with one that quantises, and with its default
policy split over eight devices. The record is written after each program. What it holds
already, made by the same versions, is not compiled again: the command may be stopped,
and run in pieces."""

import argparse
import json
import re
import sys
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import jax
from rich.console import Console
from rich.progress import track
from rich.table import Table

from jaxamp_like import amp, default_amp_policy
from jaxamp_like._certify.certificate import Certificate
from jaxamp_like._certify.certify import compared
from jaxamp_like._hlo.devices import described, gpus, tpus
from jaxamp_like.presets import quantised
from jaxamp_like.rules import Rule, float8, int8, mxfp8, nvfp4

from . import collectives, xla_flags
from .collectives import WAYS, Way, mesh_of
from .front import MODELS, load_record
from .rewrite import add_section, make_table, versions
from .roofline import PLUGINS, lower_step
from .split_models import SPLITS, Split
from .workloads import WORKLOADS, Model, Workload

DEVICES = ("h200", "b200", "v5e", "cpu")
# Of the zoo: attention, a mask, convolutions, gathers and matrices made of functions.
ZOO = (
    "GPT-2 (Equinox)",
    "Llama (NNX)",
    "BERT (Linen)",
    "ConvNeXt (Linen)",
    "experts",
)
SIZES = ("toy", "real")
COUNT = 8  # devices that the work is split over


# --------------------------------------------------------------------------- programs


@dataclass(frozen=True)
class Program:
    """A training step to certify.

    Args:
        lower: lowers it, given a dtype, a size and the name of a device.
        devices: those that it is for.
        sizes: and the sizes. Toy ones can't be split over the devices."""

    lower: Callable[[str, str, str], Any]
    devices: Sequence[str] = DEVICES
    sizes: Sequence[str] = SIZES


def one_device(name: str) -> Any:
    return jax.devices("cpu")[0] if name == "cpu" else described(name)


def devices(name: str) -> Sequence[Any]:
    if name == "cpu":
        return jax.devices("cpu")[:COUNT]
    if name == "v5e":
        return tpus(f"v5e:2x{COUNT // 2}")
    return gpus(name, COUNT)


def of_model(
    model: Model, dtype: str, size: str, device: str, rule: Rule | None = None
) -> Any:
    policy = default_amp_policy if rule is None else quantised(rule)
    loss = amp(model.loss, compute_dtype=dtype, amp_policy=policy)
    return lower_step(loss, model.shapes(size), one_device(device))


def of_way(model: Workload, way: Way, dtype: str, size: str, device: str) -> Any:
    mesh = mesh_of(way.axes, devices(device))
    args, losses = collectives.of_workload(model, way, dtype, size, mesh)
    return collectives.lowered(losses["amp"], args, mesh)


def of_split(split: Split, dtype: str, size: str, device: str) -> Any:
    del size  # they have one
    mesh = mesh_of(split.axes, devices(device), split.axis_type)
    args, losses = collectives.of_split(split, dtype, mesh)
    return collectives.lowered(losses["amp"], args, mesh)


# Each with the devices that have kernels for it.
RULES = {
    "int8": (int8(where=None), DEVICES),
    "float8": (float8(where=None), ("h200", "b200")),
    "mxfp8": (mxfp8(where=None), ("b200",)),
    "nvfp4": (nvfp4(where=None), ("b200",)),
}
QUANTISED_MODELS = ("MLP", "GPT scanned")

PROGRAMS = {
    **{name: Program(partial(of_model, MODELS[name])) for name in (*WORKLOADS, *ZOO)},
    **{
        f"{name}, {rule_name}": Program(partial(of_model, MODELS[name], rule=rule), on)
        for name in QUANTISED_MODELS
        for rule_name, (rule, on) in RULES.items()
    },
    **{
        f"{name}, {way}": Program(
            partial(of_way, WORKLOADS[name], WAYS[way]), sizes=("real",)
        )
        for name in collectives.MODELS
        for way in WAYS
    },
    **{
        name: Program(partial(of_split, split), sizes=("real",))
        for name, split in SPLITS.items()
    },
}


def is_for(program: str, device: str, size: str) -> bool:
    return device in PROGRAMS[program].devices and size in PROGRAMS[program].sizes


# ---------------------------------------------------------------------------- figures


@dataclass(frozen=True)
class Figures:
    """What the certificate of a training step says.

    Args:
        contractions: how many were decided.
        share_tied: the share of the compiled contractions' FLOPs that belong to one.
        decided: how many contractions were decided to be what.
        others: how many sums, roundings and other kinds of operations were decided.
        told: how often each difference is, those that are no drifts included.
        drifts: each of them, in words.
        arrays: how many large arrays the compiled program writes.
        kept: bytes that it keeps in them for the backward pass, by dtype.
        kept_decided: the same of the decided program.
        options: of XLA's, if it couldn't compile without them.
        compile_seconds: what compiling took of the processors.
        certify_seconds: what reading and comparing both programs took, once XLA had
            printed them."""

    contractions: int
    share_tied: float
    decided: dict[str, int]
    others: dict[str, int]
    told: dict[str, int]
    drifts: list[str]
    arrays: int
    kept: dict[str, int]
    kept_decided: dict[str, int]
    options: dict[str, bool]
    compile_seconds: float
    certify_seconds: float


# XLA's own kernels for products have no tiles for some sizes.
BY_LIBRARY = {"xla_gpu_enable_triton_gemm": False}


def compiled_with(lowered: Any) -> tuple[Any, dict[str, bool]]:
    """The compiled program, and the options that it was compiled with."""
    try:
        return lowered.compile(), {}
    except jax.errors.JaxRuntimeError as error:
        if "tile sizes" not in str(error):
            raise
    return lowered.compile(BY_LIBRARY), BY_LIBRARY


T = TypeVar("T")


def timed(work: Callable[[], T]) -> tuple[T, float]:
    start = time.process_time()
    return work(), time.process_time() - start


def certified(
    name: str, dtype: str, size: str, device: str, hlo: Path | None = None
) -> Figures:
    """The figures of one program, whose two texts go to the folder `hlo`."""
    lowered = PROGRAMS[name].lower(dtype, size, device)
    (compiled, options), compile_seconds = timed(partial(compiled_with, lowered))

    before = lowered.as_text(dialect="hlo", debug_info=True)
    after = compiled.as_text()
    if hlo is not None:
        hlo.mkdir(parents=True, exist_ok=True)
        for text, stage in ((before, "decided"), (after, "compiled")):
            file = f"{name} {stage}.hlo".replace(" ", "_")
            (hlo / file).write_text(text)
    compare = partial(compared, before, after, name=name, device=one_device(device))
    certificate, certify_seconds = timed(compare)
    return figures(certificate, options, compile_seconds, certify_seconds)


def figures(
    certificate: Certificate, options: dict[str, bool], *seconds: float
) -> Figures:
    operations, arrays = certificate.operations, certificate.arrays
    kinds = Counter(one.kind for one in operations)
    contractions = [one.decided for one in operations if one.kind == "contraction"]
    told = [drift for one in operations for drift in one.drifts]
    told += [one.drift for one in arrays if one.drift]
    wrong = [one for one in (*operations, *arrays) if not one.is_as_decided]
    return Figures(
        contractions=kinds.pop("contraction", 0),
        share_tied=certificate.share_tied,
        decided=dict(Counter(contractions)),
        others=dict(kinds),
        told=dict(Counter(told)),
        drifts=[re.sub(r"\(/\S*/", "(", str(one)) for one in wrong],
        arrays=len(arrays),
        kept=certificate.kept_compiled,
        kept_decided=dict(certificate.kept),
        options=options,
        compile_seconds=seconds[0],
        certify_seconds=seconds[1],
    )


COLUMNS = (
    "contractions",
    "tied, %",
    "others",
    "arrays",
    "drifts",
    "kept\nMB",
    "decided\nMB",
    "compile\ns",
    "certify\ns",
)


def row(one: Figures) -> list[str]:
    return [
        f"{one.contractions}",
        f"{100 * one.share_tied:.1f}",
        f"{sum(one.others.values())}",
        f"{one.arrays}",
        f"{len(one.drifts)}",
        f"{sum(one.kept.values()) / 1e6:.0f}",
        f"{sum(one.kept_decided.values()) / 1e6:.0f}",
        f"{one.compile_seconds:.1f}",
        f"{one.certify_seconds:.1f}",
    ]


Record = dict[str, dict[str, Figures]]
"""By device, then by program."""


def as_table(record: Record, note: str) -> Table:
    table = make_table(f"Certificates ({note})", COLUMNS)
    names = dict.fromkeys(name for rows in record.values() for name in rows)
    for name in names:
        rows = {
            device: row(found[name])
            for device, found in record.items()
            if name in found
        }
        add_section(table, name, rows)
    return table


def as_json(head: Mapping[str, Any], record: Record) -> str:
    rows = {
        device: {name: asdict(one) for name, one in found.items()}
        for device, found in record.items()
    }
    return json.dumps({**head, "devices": rows}, indent=1) + "\n"


def parse_args(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        "python -m benchmarks.certificates",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--dtype", default="bfloat16", choices=("bfloat16", "float16"))
    parser.add_argument("--size", default="real", choices=SIZES)
    parser.add_argument("--devices", nargs="+", choices=DEVICES, default=[*DEVICES])
    parser.add_argument("--programs", nargs="+", choices=PROGRAMS, default=[*PROGRAMS])
    parser.add_argument("--jax", default="", help="the version that it is meant for")
    parser.add_argument("--json", type=Path, help="the record, read and written")
    parser.add_argument("--hlo", type=Path, help="a folder for both programs of each")
    return parser.parse_args(argv)


def main(argv: list[str] | None = None) -> int:
    args = parse_args(argv)
    if not jax.__version__.startswith(args.jax):
        raise SystemExit(f"This is JAX {jax.__version__}, and not {args.jax}.")
    xla_flags.add(f"--xla_force_host_platform_device_count={COUNT}")
    jax.config.update("jax_platforms", "cpu")  # what is described, not what is here
    console = Console(width=max(Console().width, 110))
    head = {
        "versions": versions([*PLUGINS, "libtpu"]),
        "dtype": args.dtype,
        "size": args.size,
    }
    known = load_record(args.json, head).get("devices", {})
    record: Record = {
        device: {name: Figures(**one) for name, one in rows.items()}
        for device, rows in known.items()
    }
    for device in args.devices:
        rows = record.setdefault(device, {})
        wanted = [one for one in args.programs if is_for(one, device, args.size)]
        lacking = [one for one in wanted if one not in rows]
        for name in track(lacking, f"Compiling for {device}", console=console):
            hlo = args.hlo / device if args.hlo else None
            rows[name] = certified(name, args.dtype, args.size, device, hlo)
            if args.json is not None:
                args.json.write_text(as_json(head, record))
    console.print(as_table(record, f"{args.dtype}, {args.size} size"))
    for device, rows in record.items():
        for name, one in rows.items():
            for drift in one.drifts:
                console.print(f"{device}, {name}: {drift}", highlight=False)
    return 0


if __name__ == "__main__":
    sys.exit(main())
