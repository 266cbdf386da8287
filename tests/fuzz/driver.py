"""Runs many cases, in processes of their own, and tells what came of them."""

import collections
import contextlib
import gc
import multiprocessing
import re
import resource
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import jax
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeRemainingColumn,
)

from . import planted, planted_gradients  # noqa: F401  (it adds to the faults)
from .cases import SHARED, Case, make_case
from .checks import Outcome, check, forget
from .shrink import shrink

MEMORY = 5 * 2**29  # bytes of a process, after which JAX's caches are emptied

SHRUNK = 3  # cases of a kind, in a process; more of it are printed as found


@dataclass(frozen=True)
class Options:
    cases: int = 1000
    seed: int = 0
    jobs: int = 1
    log: Path | None = None
    out: Path | None = None
    compiled: float = 0.005
    no_shrink: bool = False
    planted: str | None = None
    stop: bool = False
    every: int = 0
    resume: bool = False
    kind: str | None = None


@dataclass(frozen=True)
class Finding:
    seed: int
    what: str
    check: str
    file: str


@dataclass(frozen=True)
class Told:
    """What a process says of a case."""

    seed: int
    kind: str  # "passed", "types only", "discarded", "failed"
    detail: str = ""
    finding: Finding | None = None


def run(options: Options) -> int:
    if options.planted is not None:
        return _planted(options)
    end = options.seed + options.cases
    first = _next_seed(options) if options.resume else options.seed
    found = 0
    with _progress() as progress, _workers(options) as stream:
        task = progress.add_task("cases", total=options.cases)
        progress.update(task, advance=first - options.seed)
        step = options.every or options.cases
        for start in range(first, end, step):
            tally = Tally(range(start, min(start + step, end)))
            for told in stream(tally.seeds):
                tally.add(told)
                if told.finding is not None:
                    found += 1
                    _report(told.finding, options, progress)
                progress.update(task, advance=1, description=f"{found} failed")
                if found and options.stop:
                    break
            progress.console.print(str(tally), markup=False, highlight=False)
            _log(options, str(tally))
            if found and options.stop:
                break
    return 1 if found else 0


class Tally:
    """What came of the cases of some seeds, as a line of a log."""

    def __init__(self, seeds: range):
        self.seeds = seeds
        self.counts: collections.Counter[str] = collections.Counter()
        self.began = time.monotonic()

    def add(self, told: Told) -> None:
        self.counts[told.kind] += 1

    def __str__(self) -> str:
        took = time.monotonic() - self.began
        return (
            f"seeds {self.seeds[0]}..{self.seeds[-1]}, jax {jax.__version__}: "
            f"{self.counts.total()} cases in {took:.0f} s: "
            + ", ".join(f"{self.counts[k]} {k}" for k in sorted(self.counts))
        )


def _next_seed(options: Options) -> int:
    """The seed after those that a log says were run, one line after the other."""
    seed = options.seed
    if options.log is None or not options.log.exists():
        return seed
    for line in options.log.read_text().splitlines():
        found = re.match(
            rf"seeds (\d+)\.\.(\d+), jax {re.escape(jax.__version__)}:", line
        )
        if found and int(found[1]) <= seed:
            seed = max(seed, int(found[2]) + 1)
    return seed


def _planted(options: Options) -> int:
    """Says after how many cases a fault is found; 1 if it is not."""
    if options.planted == "list":
        print(*planted.FAULTS, sep="\n")
        return 0
    found = planted.find(options.planted or "", options.seed, options.cases)
    if found is None:
        print(f"{options.planted}: not found by {options.cases} cases")
        return 1
    count, failure = found
    print(f"{options.planted}: found by case {count}. {failure}")
    return 0


def _progress() -> Progress:
    return Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeRemainingColumn(),
        disable=not sys.stderr.isatty(),
    )


def _report(finding: Finding, options: Options, progress: Progress) -> None:
    line = f"seed {finding.seed}: {finding.what}"
    progress.console.print(line, markup=False, highlight=False)
    if options.out is None:
        progress.console.print(
            finding.file, markup=False, highlight=False, soft_wrap=True
        )
    else:
        options.out.mkdir(parents=True, exist_ok=True)
        (
            options.out / f"{finding.check.replace(' ', '_')}_{finding.seed}.py"
        ).write_text(finding.file)
    _log(options, line)


def _log(options: Options, line: str) -> None:
    if options.log is not None:
        with options.log.open("a") as log:
            log.write(line + "\n")


@contextlib.contextmanager
def _workers(options: Options) -> Iterator[Callable[[range], Iterator[Told]]]:
    """What runs the cases of seeds, here or in processes of their own."""
    if options.jobs == 1:
        _begin()
        yield lambda seeds: (_one(seed, options) for seed in seeds)
        return
    context = multiprocessing.get_context("spawn")
    with context.Pool(options.jobs, _begin) as pool:
        # Those that share a program in one piece.
        yield lambda seeds: pool.imap_unordered(
            _one_of, ((seed, options) for seed in seeds), chunksize=SHARED
        )


def _begin() -> None:
    """Programs are made by the million and most of them die young: look less often."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(50_000, 20, 50)


def _one_of(given: tuple[int, Options]) -> Told:
    return _one(*given)


def _one(seed: int, options: Options) -> Told:
    case = make_case(seed, options.kind)
    compiled = (seed * 2654435761 % 10_000) < 10_000 * options.compiled
    outcome = check(case, compiled=compiled)
    if seed % SHARED == SHARED - 1:
        _bound_memory()
    if outcome.discarded is not None:
        return Told(seed, "discarded", outcome.discarded)
    if outcome.failure is None:
        return Told(seed, "passed" if outcome.numbers else "types only")
    return Told(
        seed,
        "failed",
        str(outcome.failure),
        _finding(seed, case, compiled, outcome, options),
    )


def _finding(
    seed: int, case: Case, compiled: bool, outcome: Outcome, options: Options
) -> Finding:
    failure = outcome.failure
    assert failure is not None
    _seen[failure.kind] += 1
    if not options.no_shrink and _seen[failure.kind] <= SHRUNK:

        def fails(smaller: Case) -> bool:
            forget()
            found = check(smaller, compiled=compiled).failure
            return found is not None and found.kind == failure.kind

        case = shrink(case, fails)
        failure = check(case, compiled=compiled).failure or failure
    what = f"Seed {seed}, jax {jax.__version__}. Breaks a check: {failure}"
    return Finding(seed, str(failure), failure.check, case.file(what))


def _bound_memory() -> None:
    if _resident() > MEMORY:
        forget()
        jax.clear_caches()
        gc.collect()


def _resident() -> int:
    """Bytes that this process has in memory; at most, where the system says no more."""
    try:
        pages = int(Path("/proc/self/statm").read_text().split()[1])
        return pages * resource.getpagesize()
    except OSError:
        return 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


_seen: collections.Counter[str] = collections.Counter()
