"""Whether training steps run in the dtypes that were decided, on GPUs and TPUs.

None of the devices is needed: XLA compiles for described ones.

    pip install -e '.[gpu-compile,tpu-compile]'
    python -m benchmarks.certificates --json certificates.json

What is certified is the value and gradient of a loss by its parameters, under `amp`
with its default policy. The record is written after each model. What it holds already,
made by the same versions, is not compiled again: the command may be stopped, and run in
pieces."""

import argparse
import json
import re
import sys
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import jax
from rich.console import Console
from rich.progress import track
from rich.table import Table

from jaxamp_like import amp
from jaxamp_like._certify.certificate import Certificate
from jaxamp_like._certify.certify import compared
from jaxamp_like._hlo.devices import described

from .front import MODELS, load_record
from .rewrite import add_section, make_table, versions
from .roofline import PLUGINS, lower_step
from .workloads import WORKLOADS, Model

DEVICES = ("h200", "b200", "v5e")
# Of the zoo: attention, a mask, convolutions, gathers and matrices made of functions.
ZOO = (
    "GPT-2 (Equinox)",
    "Llama (NNX)",
    "BERT (Linen)",
    "ConvNeXt (Linen)",
    "experts",
)


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
    model: Model, dtype: str, size: str, device: Any, hlo: Path | None = None
) -> Figures:
    """The figures of one model; both of its programs go to the folder `hlo`."""
    loss = amp(model.loss, compute_dtype=dtype)
    lowered = lower_step(loss, model.shapes(size), device)
    (compiled, options), compile_seconds = timed(partial(compiled_with, lowered))

    before = lowered.as_text(dialect="hlo", debug_info=True)
    after = compiled.as_text()
    if hlo is not None:
        hlo.mkdir(parents=True, exist_ok=True)
        for text, stage in ((before, "decided"), (after, "compiled")):
            file = f"{model.name} {stage}.hlo".replace(" ", "_")
            (hlo / file).write_text(text)
    compare = partial(compared, before, after, name=model.name, device=device)
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
"""By device, then by model."""


def as_table(record: Record, note: str) -> Table:
    table = make_table(f"Certificates ({note})", COLUMNS)
    models = dict.fromkeys(model for rows in record.values() for model in rows)
    for model in models:
        rows = {
            device: row(found[model])
            for device, found in record.items()
            if model in found
        }
        add_section(table, model, rows)
    return table


def parse_args(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        "python -m benchmarks.certificates",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--dtype", default="bfloat16", choices=("bfloat16", "float16"))
    parser.add_argument("--size", default="real", choices=("toy", "real"))
    parser.add_argument("--devices", nargs="+", choices=DEVICES, default=[*DEVICES])
    parser.add_argument(
        "--models", nargs="+", choices=MODELS, default=[*WORKLOADS, *ZOO]
    )
    parser.add_argument("--json", type=Path, help="the record, read and written")
    parser.add_argument("--hlo", type=Path, help="a folder for both programs of each")
    return parser.parse_args(argv)


def main(argv: list[str] | None = None) -> int:
    args = parse_args(argv)
    jax.config.update("jax_platforms", "cpu")  # what is described, not what is here
    console = Console(width=max(Console().width, 110))
    head = {
        "versions": versions([*PLUGINS, "libtpu"]),
        "dtype": args.dtype,
        "size": args.size,
    }
    known = load_record(args.json, head).get("devices", {})
    record: Record = {
        device: {model: Figures(**one) for model, one in rows.items()}
        for device, rows in known.items()
    }
    for name in args.devices:
        device = described(name)
        rows = record.setdefault(name, {})
        lacking = [model for model in args.models if model not in rows]
        for model in track(lacking, f"Compiling for {name}", console=console):
            hlo = args.hlo / name if args.hlo else None
            rows[model] = certified(MODELS[model], args.dtype, args.size, device, hlo)
            if args.json is not None:
                devices = {
                    device: {model: asdict(one) for model, one in found.items()}
                    for device, found in record.items()
                }
                text = json.dumps(head | {"devices": devices}, indent=1)
                args.json.write_text(text + "\n")
    console.print(as_table(record, f"{args.dtype}, {args.size} size"))
    for device, rows in record.items():
        for model, one in rows.items():
            for drift in one.drifts:
                console.print(f"{device}, {model}: {drift}", highlight=False)
    return 0


if __name__ == "__main__":
    sys.exit(main())
