"""What `explain` found, as data, and in words."""

import dataclasses
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ..._rules.low_bits import COPIES
from ..._suggestions import no_attribute
from .elsewhere import OF_EXPLAIN
from .heading import heading
from .memory import ArgumentRecord, MemoryRecord, memory
from .records import Program, RuleRecord, ScopeNode, scope_tree
from .units import human_bytes


@dataclass(frozen=True, repr=False)
class ReportData:
    """A report without its views; see `Report`."""

    name: str
    settings: tuple[str, ...]
    now: Program
    written: Program
    rules: tuple[RuleRecord, ...]
    versions: Mapping[str, str]
    arguments: tuple[ArgumentRecord, ...] = ()
    notes: tuple[str, ...] = ()

    if not TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any:
            raise no_attribute(self, name, OF_EXPLAIN.get(name, ""))

    @property
    def memory(self) -> tuple[MemoryRecord, ...]:
        """What takes memory, and how many bytes, as written and now."""
        return tuple(memory(self.arguments, self.written, self.now))

    def scopes(self, depth: int | None = None) -> ScopeNode:
        """The tree of `jax.named_scope`s, each with FLOPs, saved bytes and casts.

        Args:
            depth: how many levels to go down; all if not given.
        Returns:
            The root, which stands for the whole program."""
        return scope_tree(self.now, depth)

    def __str__(self) -> str:
        return "\n".join(summary(self))

    __repr__ = __str__

    def to_dict(self) -> dict[str, Any]:
        """Everything as plain dicts and lists, totals included."""
        data = dataclasses.asdict(self)
        for key in ("now", "written"):
            program: Program = getattr(self, key)
            data[key]["totals"] = dataclasses.asdict(program.totals)
        data["memory"] = [dataclasses.asdict(row) for row in self.memory]
        return data

    def to_json(self, indent: int | None = None) -> str:
        """Everything as JSON.

        Args:
            indent: as for `json.dumps`.
        Returns:
            The text, one object.

        >>> import json
        >>> import jax.numpy as jnp
        >>> from jaxamp_like import explain
        >>> x, w = jnp.ones(3), jnp.ones((3, 2))
        >>> report = explain(jnp.dot, compute_dtype="bfloat16")(x, w)
        >>> json.loads(report.to_json())["now"]["totals"]["flops"]
        {'forward': {'bfloat16': 12}}
        """
        return json.dumps(self.to_dict(), indent=indent)


def summary(report: ReportData) -> list[str]:
    """The totals in a few lines."""
    now, written = report.now.totals, report.written.totals
    lines = heading(report.name, report.settings, "explain")
    if not report.now.ops:
        return [*lines, "  no equations: the function computes nothing with arrays"]
    if now.saved_bytes is None or written.saved_bytes is None:
        why = report.now.why_unknown or report.written.why_unknown
        saved = f"unknown, there is no derivative: {why}"
    else:
        saved = f"{human_bytes(now.saved_bytes)}"
        if in_8_bits := bytes_in_8_bits(report.now):
            saved += f", of which {human_bytes(in_8_bits)} in 8 bits"
        saved += f" (as written: {human_bytes(written.saved_bytes)})"
    return [
        *lines,
        f"  contractions: {shares(now.flops_by_dtype)}"
        f" (as written: {shares(written.flops_by_dtype)})",
        *_outside_of_amp(report),
        *_where_formats_run(report.now),
        f"  casts: {now.casts}, of which {report.now.num_inserted} inserted"
        f" (as written: {written.casts})",
        f"  saved for backward: {saved}",
        *_memory(report),
        *(f"  {note}" for note in report.notes),
    ]


def _outside_of_amp(report: ReportData) -> Iterator[str]:
    """What to say where `amp` is inside, but no contraction is inside of that."""
    contractions = [op for op in report.now.ops if op.flops]
    if report.settings and contractions and not any(op.author for op in contractions):
        yield (
            "    none is in a function that `amp` has wrapped: put `amp` around what "
            "computes them"
        )


def _memory(report: ReportData) -> Iterator[str]:
    """The table of memory, of a whole training step and of what was compiled."""
    compiled = report.now.compiled
    is_step = any(one.kind == "optimizer state" for one in report.arguments)
    if compiled is None and not is_step:
        return
    rows = [
        ("  memory", "as written", "now"),
        *((f"    {x.what}", x.bytes_written, x.bytes_now) for x in report.memory),
    ]
    width, *others = (max(map(len, column)) for column in zip(*rows, strict=True))
    for what, *sizes in rows:
        cells = (size.rjust(n) for size, n in zip(sizes, others, strict=True))
        yield "  ".join((what.ljust(width), *cells))
    yield f"    ({about_memory(report)})"


def about_memory(report: ReportData) -> str:
    """What the rows of the table of memory come from, in a sentence."""
    compiled = report.now.compiled
    if compiled is None:
        return "temporaries are XLA's: `explain(fn, compile=True)` asks it"
    where, n = compiled.device, compiled.num_devices
    if n > 1:
        where = f"{n} devices ({where}), of which each needs so much"
    return (
        f"compiled for {where}: in all are arguments, results and temporaries, among "
        "them gradients and as much of what is saved as XLA keeps"
    )


def bytes_in_8_bits(program: Program) -> int:
    """What the rule `saving_low` and the option `lean` keep as codes and scales."""
    kept = (one for one in program.saved or () if one.primitive in COPIES)
    return sum(one.num_bytes for one in kept)


def _where_formats_run(program: Program) -> list[str]:
    """A line for each format that not every device has kernels for, and what runs
    instead: a report may be read on another machine than the one that runs."""
    found = dict.fromkeys((op.dtype, op.runs) for op in program.ops if op.runs)
    return [f"    {format}: {runs}" for format, runs in found]


def shares(count: Mapping[str, int]) -> str:
    """The share of each name as text, largest first: "75.0 % bfloat16, ..."."""
    total = sum(count.values())
    if not total:
        return "none"
    ranked = sorted(count.items(), key=lambda item: -item[1])
    return ", ".join(f"{100 * n / total:.1f} % {name}" for name, n in ranked)
