"""Runs the benchmarks one after the other, and says which record belongs to which page.

    python -m benchmarks --list         # jobs, their records, pages, what they need
    python -m benchmarks --quick        # everything at small settings
    python -m benchmarks                # everything as it was recorded
    python -m benchmarks --gpu          # what is measured on the GPU that is here
    python -m benchmarks --only peers front

Each job is a command of its own, in a process of its own: one that fails or lacks what
it needs stops no other, and is told at the end. Records are written to `--out`:
benchmarks/results, which the pages show, or with `--quick` or `--gpu`
build/benchmarks."""

import argparse
import os
import shlex
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from rich import box
from rich.console import Console
from rich.table import Table

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "benchmarks" / "results"

FIGURES = "benchmarks/README.md"
COMPARISON = "docs/comparison.md"
TOY = "--size toy"


@dataclass(frozen=True)
class Job:
    """A command with its settings, and where its figures are shown.

    Args:
        module: of this package.
        settings: with which the figures of the pages were made.
        quick: instead of them, for a short run. Not at toy size where a GPU's code is
            compiled: XLA finds no tiles for some of its products.
        record: the file that it writes, "" for none; `--out` names its folder if there
            are `more`.
        pages: that show its figures.
        printed: the file that what it prints is kept in.
        more: files that it writes beside the record.
        plot: the picture that it draws of the record.
        needs: what must be installed or there, beside the extra `benchmarks`."""

    module: str
    settings: str
    quick: str
    record: str
    pages: tuple[str, ...]
    printed: str = ""
    more: tuple[str, ...] = ()
    plot: str = ""
    needs: str = ""

    @property
    def files(self) -> tuple[str, ...]:
        return tuple(filter(None, (self.record, self.printed, *self.more, self.plot)))

    def arguments(self, out: Path, quick: bool) -> list[str]:
        where: list[str] = []
        if self.more:
            where = ["--out", str(out)]
        elif self.record:
            where = ["--json", str(out / self.record)]
        if self.plot:
            where += ["--plot", str(out / self.plot)]
        return [*shlex.split(self.quick if quick else self.settings), *where]


COMPILER = "XLA's compiler for NVIDIA GPUs (extra gpu-compile)"
TPU_COMPILER = "XLA's compiler for TPUs (extra tpu-compile)"
PEERS = "extra peers"


def both(module: str, settings: str, quick: str, needs: str = "") -> dict[str, Job]:
    """A job for each of the two formats of 16 bits, with a table as it was printed."""
    return {
        f"{module}-{dtype}": Job(
            module,
            f"--dtype {dtype} {settings}",
            f"--dtype {dtype} {quick}",
            f"{module}-{dtype}.json",
            (FIGURES,),
            printed=f"{module}-{dtype}.txt",
            needs=needs,
        )
        for dtype in ("bfloat16", "float16")
    }


FRONT = (
    '--workloads "GPT scanned" LSTM ViT CNN --policies hand "hand lean" default '
    "pytorch_autocast jmp jaxamp"
)
ON_TPUS = "--devices v5e --contenders float32 hand default pytorch_autocast jmp"
SOME = '--workloads MLP LSTM "GPT-2 (Equinox)"'
SPLITS = '--splits "fully sharded, by types" "fully sharded, shard_map"'
EIGHT_BITS = "amp float8 mxfp8 int8"

JOBS = {
    "front": Job(
        "front",
        f"{FRONT} --seeds 8 --repeats 1",
        f"{FRONT} --seeds 2 --repeats 1",
        "front-bfloat16.json",
        ("README.md", COMPARISON, FIGURES),
        needs=COMPILER,
    ),
    **{
        f"front-all-{dtype}": Job(
            "front",
            f"--no-roofline --seeds 4 --repeats 1 --dtype {dtype}",
            f"{SOME} --no-roofline --seeds 2 --repeats 1 --dtype {dtype} {TOY}",
            f"front-all-{dtype}.json",
            (COMPARISON, FIGURES),
            plot=f"front-all-{dtype}.png",
        )
        for dtype in ("bfloat16", "float16")
    },
    "first_screen": Job("first_screen", "", "", "", ("README.md", COMPARISON)),
    **both("rewrite", "", f"{TOY} --seeds 16 --repeats 1"),
    "peers": Job(
        "peers",
        "--seeds 32 --repeats 3",
        f"{TOY} --seeds 4 --repeats 1",
        "peers-bfloat16.json",
        (FIGURES,),
        printed="peers-bfloat16.txt",
        needs=PEERS,
    ),
    **both("roofline", "", "--workloads MLP CNN LSTM", needs=COMPILER),
    "checkpointed": Job(
        "roofline",
        "--checkpointed --contenders float32 hand amp",
        f"--checkpointed --contenders hand amp {TOY}",
        "checkpointed-bfloat16.json",
        (FIGURES,),
        needs=COMPILER,
    ),
    "tpu": Job(
        "tpu",
        ON_TPUS,
        f"--devices v5e --models MLP LSTM {TOY}",
        "tpu-bfloat16.json",
        (FIGURES,),
        needs=TPU_COMPILER,
    ),
    "certificates": Job(
        "certificates",
        "",
        f"--programs MLP CNN LSTM {TOY}",
        "certificates.json",
        ("docs/certify.md",),
        needs=f"{COMPILER}; {TPU_COMPILER}",
    ),
    # libtpu of JAX 0.12 aborts on two programs: name the others for `--devices v5e`.
    "certificates-jax-0.12": Job(
        "certificates",
        "--jax 0.12 --devices h200 b200 cpu",
        f"--programs MLP CNN LSTM {TOY}",
        "certificates-jax-0.12.json",
        ("docs/certify.md",),
        needs=f"JAX 0.12; {COMPILER}",
    ),
    "certificates-jax-0.6": Job(
        "certificates",
        "--jax 0.6 --devices v5e cpu",
        f"--programs MLP CNN LSTM {TOY}",
        "certificates-jax-0.6.json",
        ("docs/certify.md",),
        needs=f"JAX 0.6; {TPU_COMPILER}",
    ),
    "certificates-toy": Job(
        "certificates",
        TOY,
        f"--programs MLP CNN LSTM {TOY}",
        "certificates-toy.json",
        ("docs/certify.md",),
        needs=f"{COMPILER}; {TPU_COMPILER}",
    ),
    "collectives": Job(
        "collectives",
        "--depth 2",
        f'--models "GPT scanned" --depth 1 {SPLITS}',
        "collectives.json",
        (FIGURES, "docs/many_devices.md"),
        needs=COMPILER,
    ),
    "collectives-unplaced": Job(
        "collectives",
        "--unplaced --depth 2 --splits --contenders float32 hand amp "
        '"amp again" --ways "fully sharded" "sharded + tensor"',
        f'--unplaced --models "GPT scanned" --depth 1 --splits {TOY}',
        "collectives-unplaced.json",
        (FIGURES,),
        needs=COMPILER,
    ),
    "collectives-float16": Job(
        "collectives",
        "--depth 2 --dtype float16 --models --contenders hand amp",
        f"--dtype float16 --models --contenders hand amp {SPLITS} {TOY}",
        "collectives-float16.json",
        (FIGURES,),
        needs=COMPILER,
    ),
    "collectives-8-bits": Job(
        "collectives",
        f'--depth 2 --ways "fully sharded" {SPLITS} --contenders {EIGHT_BITS}',
        f"--models {SPLITS} --contenders {EIGHT_BITS} {TOY}",
        "collectives-8-bits.json",
        ("docs/many_devices.md",),
        needs=COMPILER,
    ),
    "collectives-8-bits-forward": Job(
        "collectives",
        f'--forward --depth 2 --ways "fully sharded" {SPLITS} '
        f"--contenders {EIGHT_BITS}",
        f"--forward --models {SPLITS} --contenders {EIGHT_BITS} {TOY}",
        "collectives-8-bits-forward.json",
        ("docs/many_devices.md",),
        needs=COMPILER,
    ),
    "collectives-8-bits-64": Job(
        "collectives",
        f"--devices 64 --models {SPLITS} --contenders amp float8 mxfp8",
        f"--devices 16 --models {SPLITS} --contenders amp float8 mxfp8 {TOY}",
        "collectives-8-bits-64.json",
        ("docs/many_devices.md",),
        needs=COMPILER,
    ),
    "collectives-64": Job(
        "collectives",
        f'--devices 64 --models {SPLITS} "tensor parallel, shard_map"',
        f"--devices 16 --models {SPLITS} {TOY}",
        "collectives-64.json",
        (FIGURES,),
        needs=COMPILER,
    ),
    "collectives-v5e": Job(
        "collectives",
        '--machine v5e --depth 2 --contenders float32 hand amp "amp again"',
        f"--machine v5e --models {SPLITS} {TOY}",
        "collectives-v5e.json",
        (FIGURES,),
        needs=TPU_COMPILER,
    ),
    "reduction": Job(
        "reduction", "", "--devices 8", "reduction.json", ("docs/many_devices.md",)
    ),
    "inference": Job(
        "inference",
        "",
        TOY,
        "inference-bfloat16.json",
        ("docs/inference.md",),
        needs=COMPILER,
    ),
    "loss_scaling": Job(
        "loss_scaling",
        "--rounds 21",
        f"{TOY} --timed-size toy --rounds 3",
        "loss_scaling.json",
        (FIGURES, "docs/loss_scaling.md"),
        needs=f"{PEERS}; {COMPILER}",
    ),
    "quantised": Job(
        "quantised",
        "",
        "--sizes 1024 4096 --no-blocks",
        "quantised.json",
        (FIGURES, "docs/quantised.md"),
        needs=COMPILER,
    ),
    "block_scaled": Job(
        "block_scaled",
        "",
        "--sizes 4096 --no-blocks",
        "block-scaled.json",
        ("docs/block_scaled.md",),
        needs=COMPILER,
    ),
    "reports": Job(
        "reports",
        '--workloads "GPT unrolled" "GPT scanned"',
        f'{TOY} --depth 2 --repeats 1 --workloads "GPT scanned"',
        "reports.json",
        (FIGURES,),
        needs="extra report",
    ),
    "tracing": Job(
        "tracing",
        "",
        '--largest 24 --repeats 1 --cases "GPT unrolled" "GPT scanned"',
        "tracing.json",
        ("docs/faq.md",),
    ),
    "calibrate": Job(
        "calibrate",
        "models",
        "models --models MLP",
        "calibrate.json",
        ("docs/calibrate.md", "benchmarks/README.md"),
    ),
    "curves": Job(
        "curves",
        "",
        "--steps 20 --seeds 2",
        "curves.json",
        (COMPARISON, FIGURES),
        more=("curves.md", "curves.png"),
    ),
    "curves-long": Job(
        "curves",
        '--steps 2000 --tasks "character GPT" --name curves-long',
        '--steps 40 --seeds 2 --tasks "character GPT" --name curves-long',
        "curves-long.json",
        (COMPARISON, FIGURES),
        more=("curves-long.md", "curves-long.png"),
    ),
    "curves_quantised": Job(
        "curves_quantised",
        "",
        "--steps 20 --seeds 1",
        "curves_quantised.json",
        ("docs/quantised.md", FIGURES),
        more=("curves_quantised.png",),
    ),
    "curves_low_bits": Job(
        "curves_low_bits",
        "--steps 600",
        "--steps 20 --seeds 1",
        "curves_low_bits.json",
        ("docs/low_bit_state.md", FIGURES),
        more=("curves_low_bits.png",),
    ),
    "curves_optimizers": Job(
        "curves_optimizers",
        "",
        "--steps 20 --seeds 1 --optimizers Lion",
        "curves_optimizers.json",
        ("docs/low_bit_state.md", FIGURES),
        more=("curves_optimizers.png",),
    ),
    "curves_gan": Job(
        "curves_low_bits",
        "--steps 2000 --seeds 32 --tasks GAN --name curves_gan",
        "--steps 20 --seeds 2 --tasks GAN --name curves_gan",
        "curves_gan.json",
        ("docs/low_bit_state.md",),
        more=("curves_gan.png",),
    ),
    "step_memory": Job(
        "step_memory",
        "",
        "--depth 2 --dim 256 --vocabulary 1024 --length 128",
        "step-memory.json",
        ("README.md", "docs/low_bit_state.md", FIGURES),
        needs=COMPILER,
    ),
    "residuals": Job(
        "residuals",
        "",
        f"{TOY} --seeds 2 --workloads MLP LSTM",
        "residuals.json",
        ("docs/howto/save_memory.md", FIGURES),
        needs=COMPILER,
    ),
}

# Of the same models and products, but timed.
GPU = {
    "steps": Job(
        "steps",
        "",
        f"{TOY} --rounds 3",
        "steps-gpu.json",
        (FIGURES,),
        needs="a GPU",
    ),
    "inference": Job(
        "inference",
        "--run",
        f"--run --rounds 3 {TOY}",
        "inference-gpu.json",
        ("docs/inference.md",),
        needs="a GPU",
    ),
    "step_memory": Job(
        "step_memory",
        "--run",
        "--run --depth 2 --dim 256 --vocabulary 1024 --length 128 --rounds 2",
        "step-memory-gpu.json",
        (),
        needs="a GPU",
    ),
    "quantised": Job(
        "quantised",
        "--run",
        "--run --sizes 1024 --no-blocks",
        "quantised-gpu.json",
        (),
        needs="a GPU",
    ),
    "curves": Job(
        "curves",
        "",
        "--steps 20 --seeds 2",
        "curves.json",
        (),
        more=("curves.md", "curves.png"),
        needs="a GPU",
    ),
}


def listed(jobs: dict[str, Job]) -> Table:
    table = Table(box=box.SIMPLE)
    for column in ("job", "writes", "shown in", "needs"):
        table.add_column(column, overflow="fold")
    for name, job in jobs.items():
        table.add_row(name, "\n".join(job.files), "\n".join(job.pages), job.needs)
    return table


def run(job: Job, out: Path, quick: bool, gpu: bool = False) -> int:
    """Runs a job, shows what it prints and keeps it if that is asked for."""
    # The records are of a CPU, and of a GPU that is described, also where there is one.
    platform = {} if gpu else {"JAX_PLATFORMS": "cpu"}
    command = [sys.executable, "-m", f"benchmarks.{job.module}"]
    lines = []
    with subprocess.Popen(
        [*command, *job.arguments(out, quick)],
        cwd=ROOT,
        env=os.environ | platform,
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stdout is not None
        for line in process.stdout:
            print(line, end="", flush=True)
            lines.append(line)
    if job.printed and process.returncode == 0:
        (out / job.printed).write_text("".join(lines))
    return process.returncode


def parse_args(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        "python -m benchmarks",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    names = list(dict.fromkeys([*JOBS, *GPU]))
    parser.add_argument("--list", action="store_true", help="run nothing")
    parser.add_argument("--quick", action="store_true", help="at small settings")
    parser.add_argument("--gpu", action="store_true", help="on the GPU that is here")
    parser.add_argument("--only", nargs="+", choices=names, help="these jobs")
    parser.add_argument("--out", type=Path, help="a folder for the records")
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> int:
    args = parse_args(argv)
    console = Console(width=max(Console().width, 100))
    jobs = GPU if args.gpu else JOBS
    if args.only:
        jobs = {name: job for name, job in jobs.items() if name in args.only}
    if args.list:
        console.print(listed(jobs))
        return 0
    aside = ROOT / "build" / "benchmarks" / ("gpu" if args.gpu else "")
    out = args.out or (aside if args.quick or args.gpu else RESULTS)
    out = out.absolute()
    out.mkdir(parents=True, exist_ok=True)
    ended = {}
    for name, job in jobs.items():
        console.rule(name)
        start = time.monotonic()
        code = run(job, out, args.quick, args.gpu)
        minutes = (time.monotonic() - start) / 60
        ended[name] = f"{minutes:.1f} min" if code == 0 else f"FAILED with {code}"
    console.rule(str(out))
    for name, how in ended.items():
        needs = jobs[name].needs
        note = f"; it needs {needs}" if "FAILED" in how and needs else ""
        console.print(f"{name}: {how}{note}", highlight=False)
    return int(any("FAILED" in how for how in ended.values()))


if __name__ == "__main__":
    sys.exit(main())
