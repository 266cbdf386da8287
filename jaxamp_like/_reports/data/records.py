"""The data of a report: frozen records, from which every view is made."""

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Annotated, Literal

import jax.numpy as jnp

from ..._quantised import FORMATS
from .columns import Column

Phase = Literal["forward", "backward", "recomputed"]
PHASES: tuple[Phase, ...] = ("forward", "backward", "recomputed")


@dataclass(frozen=True, slots=True)
class Place:
    """Where an equation of the program stands, and how often it runs.

    Args:
        scope: names of `jax.named_scope`s, outermost first, joined by "/".
        inside: the programs around it ("jit", "scan", ...), outermost first.
        phase: "forward", "backward", or "recomputed" if `jax.checkpoint` makes it again
            for the backward pass.
        source: "file:line (function)", or "" if nobody wrote a line for it.
        times: how often it runs: scans multiply it by their length; a while loop and
            each branch of a cond count once."""

    scope: Annotated[str, Column("scope", at=10)]
    inside: tuple[str, ...]
    phase: Annotated[Phase, Column("phase", at=30, terminal=True)]
    source: Annotated[str, Column("source", "line", at=80)]
    times: int


@dataclass(frozen=True, slots=True)
class OpRecord:
    """One equation of the rewritten program, and the decision that it comes from.

    Args:
        place: where it stands.
        primitive: its name.
        author: the primitive of the author's equation that it was made for; in the
            backward pass, of the one that it differentiates. "" outside of `amp`.
        written: the dtypes of that equation's float operands and results, as written.
        reads: the dtypes of the float operands, as they are now.
        makes: the dtypes of the float results, as they are now.
        shape: the shape of the first result.
        key: the key of the policy that decided; under a `PolicyMap` or a limit, the
            keys that led there, as in "encoder/attention: dot_general".
        rule: the rule found under it.
        why: the rule's reason.
        flops: multiply-adds of a contraction, times two, of one run; else 0.
        operands: the dtypes of both operands of a contraction that reads 8 bits.
        scales: what shares a scale in its left and its right operand.
        runs: where there are kernels for it, and what runs elsewhere."""

    place: Place
    primitive: Annotated[str, Column("primitive", at=20)]
    author: str
    written: tuple[str, ...]
    reads: tuple[str, ...]
    makes: tuple[str, ...]
    shape: tuple[int, ...]
    key: Annotated[str, Column("key", at=60)]
    rule: Annotated[str, Column("rule", at=60)]
    why: Annotated[str, Column("why", at=60)]
    flops: int
    operands: tuple[str, ...] = ()
    scales: str = ""
    runs: str = ""

    @property
    def dtypes_written(self) -> Annotated[str, Column("written", at=40)]:
        """The dtypes as written, each once."""
        return "/".join(dict.fromkeys(self.written))

    @property
    def dtype(self) -> Annotated[str, Column("now", at=50)]:
        """The dtype that it computes in: the widest that it reads, or makes."""
        return widest(self.reads or self.makes)

    @property
    def count(self) -> Annotated[int, Column("count", "number", at=90, adds=True)]:
        """How many equations it stands for."""
        return 1

    @property
    def total_flops(self) -> Annotated[int, Column("FLOPs", "flops", 95, adds=True)]:
        """FLOPs of all its runs."""
        return self.flops * self.place.times


@dataclass(frozen=True, slots=True)
class ContractionRecord:
    """A contraction of a program in which some contractions read 8 bits.

    Args:
        operands: the dtypes that it reads.
        scales: what shares a scale in its left and its right operand.
        runs: where there are kernels for it; why it was left alone, if it was.
        phase: as of its place.
        count: how many equations it stands for."""

    operands: Annotated[str, Column("operands", terminal=True)]
    scales: Annotated[str, Column("a scale for each", terminal=True)]
    runs: Annotated[str, Column("runs, or why not", terminal=True)]
    phase: Annotated[Phase, Column("phase", terminal=True)]
    count: Annotated[int, Column("count", "number", adds=True, terminal=True)] = 1


def quantised_contractions(ops: Iterable[OpRecord]) -> list[ContractionRecord]:
    """The contractions, if any of them reads 8 bits: which do, and why others don't."""
    found = [op for op in ops if op.flops]
    if not any(op.operands for op in found):
        return []
    return [
        ContractionRecord(
            " x ".join(op.operands or op.reads),
            op.scales,
            op.runs or op.why,
            op.place.phase,
        )
        for op in found
    ]


@dataclass(frozen=True, slots=True)
class CastRecord:
    """One cast between floating dtypes in the rewritten program.

    Args:
        place: where it stands.
        source_dtype: the dtype before.
        target_dtype: the dtype after.
        shape: the shape of the array.
        inserted: whether `amp` put it there, rather than the author.
        why: the reason for it."""

    place: Place
    source_dtype: Annotated[str, Column("from", at=20, terminal=True)]
    target_dtype: Annotated[str, Column("to", at=20, terminal=True)]
    shape: tuple[int, ...]
    inserted: bool
    why: Annotated[str, Column("why", at=60, terminal=True)]

    @property
    def by(self) -> Annotated[str, Column("by", at=50)]:
        """Who put it there."""
        return "amp" if self.inserted else "author"

    @property
    def count(
        self,
    ) -> Annotated[int, Column("count", "number", 90, adds=True, terminal=True)]:
        """How many casts it stands for."""
        return 1


@dataclass(frozen=True, slots=True)
class SavedRecord:
    """One array that is kept for the backward pass, or that it makes.

    Args:
        scope: where it is made.
        primitive: the primitive that makes it.
        dtype: its dtype.
        shape: its shape.
        num_bytes: its size."""

    scope: str
    primitive: str
    dtype: str
    shape: tuple[int, ...]
    num_bytes: int


@dataclass(frozen=True, slots=True)
class RuleRecord:
    """One key of a policy, and what came of it.

    Args:
        key: a primitive, a scope, a path, a regular expression or "amp_default".
        rule: what stands under it: a rule, a policy, or the kind of a limit.
        count: how many equations of the author's it decided, alone or with another key
            (an entry of a `PolicyMap`, say, with a key of its policy).
        own: whether the user added it to the policy that was extended."""

    key: Annotated[str, Column("key", terminal=True)]
    rule: Annotated[str, Column("rule", terminal=True)]
    count: Annotated[int, Column("equations", "number", terminal=True)]
    own: Annotated[bool, Column("yours", "flag")]


@dataclass(frozen=True, slots=True)
class Difference:
    """Equations that two programs compute in different dtypes.

    Args:
        scope, primitive, phase, source: where they stand.
        ours: how many there are by dtype, in the one.
        theirs: the same, in the other."""

    scope: Annotated[str, Column("scope")]
    primitive: Annotated[str, Column("primitive")]
    phase: Annotated[Phase, Column("phase")]
    source: Annotated[str, Column("source", "line")]
    ours: Annotated[str, Column("this policy")]
    theirs: Annotated[str, Column("the other")]


@dataclass(frozen=True, slots=True)
class CompiledMemory:
    """What a program needs on one device, by the account of XLA, which compiled it.

    Args:
        device: the kind of the device.
        num_devices: how many such devices the program is for.
        arguments: bytes of the arguments.
        results: bytes of the results, but those in the place of donated arguments.
        temporaries: bytes of all else. Gradients and what is saved for the backward
            pass are in it, unless they are results."""

    device: str
    num_devices: int
    arguments: int
    results: int
    temporaries: int

    @property
    def total(self) -> int:
        """The bytes of all of it."""
        return self.arguments + self.results + self.temporaries


@dataclass(frozen=True)
class Totals:
    """The totals of a program.

    Args:
        flops: FLOPs of contractions, by phase and by the dtype that they compute in.
        casts: the number of casts between floating dtypes, as written (a loop's body
            once).
        saved: bytes kept for the backward pass, by dtype; `None` if the program has no
            backward pass."""

    flops: Mapping[str, Mapping[str, int]]
    casts: int
    saved: Mapping[str, int] | None

    @property
    def flops_by_dtype(self) -> dict[str, int]:
        return dict(sum(map(Counter, self.flops.values()), Counter()))

    @property
    def low_share(self) -> float:
        """Share of the contraction FLOPs that run in fewer than 32 bits."""
        return share_low(self.flops_by_dtype)

    @property
    def saved_bytes(self) -> int | None:
        return None if self.saved is None else sum(self.saved.values())


@dataclass(frozen=True)
class Program:
    """What a traced program holds: the function as written, or as rewritten.

    Args:
        ops: its equations.
        casts: those of its equations that are casts between floating dtypes.
        saved: what is kept for the backward pass; of a function without one, what its
            derivative would keep. `None` if that can't be known.
        why_unknown: the reason, if `saved` is `None`.
        gradients: what the backward pass makes and the rest of the program reads or
            returns; `None` if there is no backward pass.
        compiled: what XLA says that it needs, if it was asked."""

    ops: tuple[OpRecord, ...]
    casts: tuple[CastRecord, ...]
    saved: tuple[SavedRecord, ...] | None
    why_unknown: str = ""
    gradients: tuple[SavedRecord, ...] | None = None
    compiled: CompiledMemory | None = None

    @property
    def gradient_bytes(self) -> int | None:
        """The size of the gradients; `None` if there is no backward pass."""
        if self.gradients is None:
            return None
        return sum(one.num_bytes for one in self.gradients)

    @property
    def num_inserted(self) -> int:
        """The number of casts that `amp` put there."""
        return sum(cast.inserted for cast in self.casts)

    @property
    def totals(self) -> Totals:
        flops: dict[str, Counter[str]] = {phase: Counter() for phase in PHASES}
        for op in self.ops:
            if op.flops:
                flops[op.place.phase][op.dtype] += op.total_flops
        saved: Counter[str] = Counter()
        for one in self.saved or ():
            saved[one.dtype] += one.num_bytes
        return Totals(
            {phase: dict(count) for phase, count in flops.items() if count},
            len(self.casts),
            None if self.saved is None else dict(saved),
        )


@dataclass(frozen=True)
class ScopeNode:
    """A scope with all that is in it, its inner scopes included."""

    name: Annotated[str, Column("scope", at=10, terminal=True)]
    path: str
    ops: Annotated[int, Column("equations", "number", at=60, terminal=True)]
    casts: Annotated[int, Column("casts", "number", at=50, terminal=True)]
    flops: Annotated[Mapping[str, int], Column("FLOPs", "flops", 20, terminal=True)]
    saved: Annotated[Mapping[str, int], Column("saved", "bytes", 30, terminal=True)]
    children: tuple["ScopeNode", ...] = field(default=(), repr=False)

    def walk(self, level: int = 0) -> Iterator[tuple[int, "ScopeNode"]]:
        """This scope and all that are in it, each with how deep it lies."""
        yield level, self
        for child in self.children:
            yield from child.walk(level + 1)


def scope_tree(program: Program, depth: int | None = None) -> ScopeNode:
    """The scopes of a program as a tree, to `depth` levels if that is given."""
    amounts: Counter[tuple[str, str, str]] = Counter()  # by scope, kind and dtype
    for op in program.ops:
        amounts[op.place.scope, "ops", ""] += 1
        if op.flops:
            amounts[op.place.scope, "flops", op.dtype] += op.total_flops
    for cast in program.casts:
        amounts[cast.place.scope, "casts", ""] += 1
    for one in program.saved or ():
        amounts[one.scope, "saved", one.dtype] += one.num_bytes
    totals: dict[Path, Counter[tuple[str, str]]] = {(): Counter()}
    for (scope, kind, dtype), n in amounts.items():
        for path in paths_to(scope):
            totals.setdefault(path, Counter())[kind, dtype] += n
    children: dict[Path, list[Path]] = defaultdict(list)
    for path in totals:
        if path:
            children[path[:-1]].append(path)

    def node(path: Path) -> ScopeNode:
        def by_dtype(wanted: str) -> dict[str, int]:
            found = totals[path].items()
            return {dtype: n for (kind, dtype), n in found if kind == wanted}

        is_last = depth is not None and len(path) >= depth
        return ScopeNode(
            name=path[-1] if path else "",
            path="/".join(path),
            ops=totals[path]["ops", ""],
            casts=totals[path]["casts", ""],
            flops=by_dtype("flops"),
            saved=by_dtype("saved"),
            children=() if is_last else tuple(map(node, children[path])),
        )

    return node(())


Path = tuple[str, ...]  # of scopes


def paths_to(scope: str) -> list[Path]:
    """The paths of the scopes around a scope and of itself, the outermost first.

    The first is `()`, the whole program."""
    names = tuple(scope.split("/")) if scope else ()
    return [names[:depth] for depth in range(len(names) + 1)]


def widest(names: Iterable[str]) -> str:
    """The widest of some dtypes' names, the first among equals; "" of none."""
    return max(names, key=_bits, default="")


def share_low(count: Mapping[str, int]) -> float:
    low = sum(n for name, n in count.items() if _bits(name) < 32)
    return low / max(sum(count.values()), 1)


def _bits(name: str) -> int:
    """Of a number in a dtype, or in a format of numbers with scales."""
    return FORMATS[name].bits if name in FORMATS else 8 * jnp.dtype(name).itemsize
