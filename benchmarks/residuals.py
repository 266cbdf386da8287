"""What is kept for the backward pass in 8 bits: bytes, errors, memory and time.

    python -m benchmarks.residuals [--json results/residuals.json]

Of the default and of `amp(fn, lean=...)` on the workloads, in bfloat16. Errors are of
the gradient at toy size, over those of contractions alone in bfloat16; temp memory and
roofline time are of the step compiled for an NVIDIA H200, over the default's."""

import argparse
import json
import sys
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich.console import Console

from jaxamp_like import amp

from .front import Figures, Settings, contractions_only, measured
from .rewrite import make_table, ratio, versions
from .roofline import described_device, plugin_versions
from .workloads import WORKLOADS, Workload

FORMATS = ("int8", "float8_e4m3fn")


def contenders(workload: Workload) -> dict[str, Any]:
    """The losses that are compared, by name."""
    made = {
        "contractions": contractions_only(workload, "bfloat16"),
        "default": amp(workload.loss, compute_dtype="bfloat16"),
    }
    return made | {
        form: amp(workload.loss, compute_dtype="bfloat16", lean=form)
        for form in FORMATS
    }


def show(console: Console, results: Mapping[str, Mapping[str, Figures]]) -> None:
    heads = ("saved", "/ default", "error", "temp", "time")
    table = make_table("Kept for the backward pass", heads)
    for name, rows in results.items():
        default, alone = rows["default"], rows["contractions"]
        for form in ("default", *FORMATS):
            one = rows[form]
            table.add_row(
                name,
                form,
                f"{one.saved_bytes / 1e6:.1f}",
                ratio(one.saved_bytes, default.saved_bytes),
                ratio(one.error, alone.error),
                ratio(one.temp_bytes or 0, default.temp_bytes),
                ratio(one.step_seconds or 0, default.step_seconds),
            )
    console.print(table)


def write_record(
    options: argparse.Namespace, results: Mapping[str, Mapping[str, Figures]]
) -> None:
    record = {
        "versions": versions() | plugin_versions(),
        "settings": {"size": options.size, "seeds": options.seeds},
        "results": {
            name: {form: asdict(one) for form, one in rows.items()}
            for name, rows in results.items()
        },
    }
    options.json.write_text(json.dumps(record, indent=2) + "\n")


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--workloads", nargs="+", choices=[*WORKLOADS])
    parser.add_argument("--size", choices=("toy", "real"), default="real")
    parser.add_argument("--seeds", type=int, default=8, help="draws for the errors")
    parser.add_argument("--json", type=Path, help="where to write the record")
    options = parser.parse_args(argv)
    console = Console(width=max(Console().width, 100))
    device = described_device()
    settings = Settings("bfloat16", options.size, options.seeds, repeats=1)
    results: dict[str, dict[str, Figures]] = {}
    for name in options.workloads or WORKLOADS:
        losses = contenders(WORKLOADS[name])
        results[name] = dict(measured(WORKLOADS[name], settings, losses, device))
        if options.json:  # after each, for compiling takes long
            write_record(options, results)
    show(console, results)
    return 0


if __name__ == "__main__":
    sys.exit(main())
