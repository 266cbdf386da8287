"""What `trace_numerics` found, as data, and in words."""

import dataclasses
import json
import math
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any

from ..._suggestions import no_attribute
from .columns import Column
from .elsewhere import OF_NUMERICS
from .heading import heading
from .records import Path, Place, paths_to


@dataclass(frozen=True, slots=True)
class InputRange:
    """The range of an operand's numbers.

    Args:
        dtype: its dtype.
        shape: its shape.
        largest: the largest finite magnitude in it.
        smallest: the smallest magnitude in it that is not zero; 0 if there is none.
        nonfinite: the share of inf and NaN.
        zero: the share of zeros.
        is_literal: whether it is a number written in the code."""

    dtype: str
    shape: tuple[int, ...]
    largest: float
    smallest: float
    nonfinite: float
    zero: float
    is_literal: bool

    def __str__(self) -> str:
        text = f"{self.dtype}{list(self.shape)} in [{self.smallest:.3g}, "
        text += f"{self.largest:.3g}]"
        for share, what in ((self.zero, "zero"), (self.nonfinite, "not finite")):
            text += f", {100 * share:.3g} % {what}" * bool(share)
        return text


@dataclass(frozen=True, slots=True)
class Event:
    """When something went wrong, and what the equation read.

    Args:
        iteration: the iterations of the loops around it, outermost first. For a scan it
            is the index into the scanned arrays, also if that runs in reverse.
        inputs: the float operands at that time."""

    iteration: tuple[int, ...]
    inputs: tuple[InputRange, ...]


Shares = Mapping[str, float]

FORMATS = ("float16", "float8_e4m3fn")
"""The formats whose range the page tells of; the JSON holds more."""


@dataclass(frozen=True, slots=True)
class OpNumerics:
    """Statistics of the results of one equation, over all iterations of its loops.

    Args:
        place: where it stands.
        primitive: its name.
        author: the primitive of the author's equation behind it; see `OpRecord`.
        dtype: the dtype of its result.
        written: the dtype that the result has as written.
        shape: the shape of its first float result.
        runs: how often it ran.
        largest: the largest finite magnitude that it made.
        smallest: the smallest that is not zero; 0 if there is none.
        nonfinite: the share of inf and NaN in what it made.
        lost: the share that underflowed to zero: in the author's dtypes it is not zero,
            but below the normal range of the dtype that it has here.
        clipped: if it rounds an operand of a contraction to 8 bits, the share that is
            beyond the format's largest number, once it is divided by the scale.
        flushed: in the same case, the share that becomes zero.
        written_largest: as `largest`, in the author's dtypes.
        written_smallest: as `smallest`, in the author's dtypes.
        histogram: for each binary exponent, the share of magnitudes (in the author's
            dtypes) that have it; of arrays with more than 32768 elements, a sample.
        overflow: for each format, the share that would be beyond its largest number.
        underflow: for each format, the share that would become zero.
        error: the error of the worst run: the sum of deviations from the values in the
            author's dtypes, divided by the sum of magnitudes of these values. If the
            terms of a sum cancel, and only rounding is left, it is divided by the
            magnitudes of the terms. It is inf if NaN or inf arose.
        read_error: the largest error of an operand in that run.
        worst: the iteration of that run; see `Event`.
        made_nonfinite: the first time that it made inf or NaN of finite operands, or
            NaN of operands without NaN.
        nonfinite_as_written: whether the author's dtypes give inf or NaN here too.
        vanished: the largest share of elements that one run lost (see `lost`), less
            what its inputs had lost before.
        vanished_event: when that was.
        order: sorts equations by when they first made inf or NaN, or else by when
            their worst run was.
    """

    place: Place
    primitive: str
    author: str
    dtype: Annotated[str, Column("dtype", at=40, terminal=True)]
    written: str
    shape: tuple[int, ...]
    runs: int
    largest: Annotated[float, Column("largest", "short", 50, terminal=True)]
    smallest: Annotated[float, Column("smallest", "short", 50, terminal=True)]
    nonfinite: Annotated[float, Column("not finite", "share", 50)]
    lost: float
    clipped: Annotated[float, Column("clipped to 8 bits", "share", 53)]
    flushed: Annotated[float, Column("flushed by 8 bits", "share", 53)]
    written_largest: float
    written_smallest: float
    histogram: Mapping[int, float]
    overflow: Annotated[Shares, Column("beyond {}", "share", 60, keys=FORMATS)]
    underflow: Annotated[Shares, Column("below {}", "share", 60, keys=FORMATS)]
    error: Annotated[float, Column("error", "short", 54, terminal=True)]
    read_error: float
    worst: tuple[int, ...]
    made_nonfinite: Event | None
    nonfinite_as_written: bool
    vanished: Annotated[float, Column("vanished", "share", 52)]
    vanished_event: Event | None
    order: tuple[int, ...]

    @property
    def name(self) -> Annotated[str, Column("primitive", at=20, terminal=True)]:
        """Its primitive, and that of the author's equation if it is another one."""
        is_own = self.author in ("", self.primitive)
        return self.primitive if is_own else f"{self.primitive} (of {self.author})"

    @property
    def worst_iteration(self) -> Annotated[str, Column("worst iteration", at=56)]:
        """The iteration of the worst run."""
        return ", ".join(map(str, self.worst))

    def describe(self) -> str:
        """Its name, its scope and its line, in one line."""
        where = [self.place.scope or "no scope", self.place.phase]
        where += [self.place.source] if self.place.source else []
        return f"{self.name} in {', '.join(where)}"


@dataclass(frozen=True, slots=True)
class ScopeNumerics:
    """Statistics of the equations of one scope, those of its inner scopes included.

    Args:
        scope: its path, as in `Place`; "" is the whole program.
        ops: the number of equations.
        largest: the largest finite magnitude that one of them made.
        smallest: the smallest that is not zero; 0 if there is none.
        nonfinite: how many made inf or NaN; see `made_nonfinite` of `OpNumerics`.
        vanished: the largest share that one of them lost; see `OpNumerics`.
        clipped: the largest share that one of them clipped, rounding to 8 bits.
        flushed: the largest share that one of them made zero there.
        error: the largest error of one of them.
        overflow: for each format, the largest share beyond its largest number.
        underflow: for each format, the largest share that would become zero."""

    scope: str
    ops: Annotated[int, Column("equations", "number", 20)]
    largest: Annotated[float, Column("largest", "short", 50, terminal=True)]
    smallest: Annotated[float, Column("smallest", "short", 50, terminal=True)]
    nonfinite: Annotated[int, Column("made inf or NaN", "number", 51)]
    vanished: Annotated[float, Column("vanished", "share", 52)]
    clipped: Annotated[float, Column("clipped to 8 bits", "share", 53)]
    flushed: Annotated[float, Column("flushed by 8 bits", "share", 53)]
    error: Annotated[float, Column("error", "short", 54, terminal=True)]
    overflow: Annotated[Shares, Column("beyond {}", "share", 60, keys=FORMATS)]
    underflow: Annotated[Shares, Column("below {}", "share", 60, keys=FORMATS)]

    @property
    def name(self) -> Annotated[str, Column("scope", at=10)]:
        """Its path; "(all)" for the whole program."""
        return self.scope or "(all)"


def _scope_numerics(scope: str, ops: list[OpNumerics]) -> ScopeNumerics:
    formats = ops[0].overflow
    maxima = ("largest", "vanished", "clipped", "flushed", "error")
    return ScopeNumerics(
        scope=scope,
        ops=len(ops),
        smallest=min((op.smallest for op in ops if op.smallest), default=0.0),
        nonfinite=sum(op.made_nonfinite is not None for op in ops),
        **{name: max(getattr(op, name) for op in ops) for name in maxima},
        overflow={f: max(op.overflow[f] for op in ops) for f in formats},
        underflow={f: max(op.underflow[f] for op in ops) for f in formats},
    )


@dataclass(frozen=True, repr=False)
class NumericsData:
    """A report of numbers without its views; see `NumericsReport`."""

    name: str
    settings: tuple[str, ...]
    nonfinite_arguments: tuple[str, ...]
    ops: tuple[OpNumerics, ...]
    versions: Mapping[str, str]

    if not TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any:
            raise no_attribute(self, name, OF_NUMERICS.get(name, ""))

    @property
    def first_nonfinite(self) -> OpNumerics | None:
        """The equation that was the first to make inf or NaN; see `made_nonfinite`.

        Equations whose results are finite as written come before all others, whose inf
        and NaN are the author's own (a logarithm of zero)."""
        made = [op for op in self.ops if op.made_nonfinite is not None]
        ours = [op for op in made if not op.nonfinite_as_written]
        return min(ours or made, key=lambda op: op.order, default=None)

    def underflows(self, share: float = 0.01) -> list[OpNumerics]:
        """The equations that turned numbers to zero, worst first.

        Args:
            share: how much of a result must have vanished to be listed."""
        lossy = [op for op in self.ops if op.vanished >= share]
        return sorted(lossy, key=lambda op: (-op.vanished, op.order))

    def by_scope(self) -> list[ScopeNumerics]:
        """What the equations of each scope made, outer scopes first."""
        groups: dict[Path, list[OpNumerics]] = defaultdict(list)
        for op in self.ops:
            for path in paths_to(op.place.scope):
                groups[path].append(op)
        return [
            _scope_numerics("/".join(path), groups[path]) for path in sorted(groups)
        ]

    def worst(self, n: int = 10) -> list[OpNumerics]:
        """The `n` equations with the largest error, worst first.

        Equations whose operands had an error of 0.5 or more come after all others."""
        ranked = sorted(
            self.ops, key=lambda op: (op.read_error >= 0.5, -op.error, op.order)
        )
        return ranked[:n]

    def __str__(self) -> str:
        return "\n".join(self._lines())

    __repr__ = __str__

    def _lines(self) -> list[str]:
        lines = heading(self.name, self.settings, "trace_numerics")
        if not self.ops:
            return [*lines, "  no equations: the function makes no floats"]
        lines += self._first("first inf or NaN", self.first_nonfinite)
        if self.nonfinite_arguments:
            given = ", ".join(self.nonfinite_arguments)
            lines.append(f"    (but there are some in the arguments: {given})")
        lossy = self.underflows()
        for op in lossy[:1]:
            share = f"{100 * op.vanished:.3g} % of the result"
            lines += self._first(f"worst underflow, {share}", op, op.vanished_event)
        if not lossy:
            lines.append("  no underflow of more than 1 % of a result")
        most = max(self.ops, key=lambda op: op.clipped)
        if most.clipped:
            share = f"{100 * most.clipped:.3g} % of an operand"
            lines.append(f"  most clipped to 8 bits, {share}: {most.describe()}")
        (worst,) = self.worst(1)
        return [*lines, f"  largest error: {worst.error:.2g}, {worst.describe()}"]

    def _first(self, what: str, op: OpNumerics | None, event: Any = None) -> list[str]:
        if op is None:
            return [f"  no {what.removeprefix('first ')}"]
        event = event or op.made_nonfinite
        lines = [f"  {what}: {op.describe()}"]
        if op.nonfinite_as_written:
            lines.append("    (in the author's dtypes too)")
        if event.iteration:
            lines.append(f"    iteration {', '.join(map(str, event.iteration))}")
        return lines + [f"    read {one}" for one in event.inputs]

    def to_dict(self) -> dict[str, Any]:
        """Everything as plain dicts and lists."""
        return dataclasses.asdict(self)

    def to_json(self, indent: int | None = None) -> str:
        """Everything as JSON; an infinite error is the string "inf".

        Args:
            indent: as for `json.dumps`."""
        return json.dumps(plain(self.to_dict()), indent=indent, allow_nan=False)


def plain(value: Any) -> Any:
    """A value for JSON, which has no inf and no NaN: they become strings."""
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if isinstance(value, Mapping):
        return {str(k): plain(v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [plain(v) for v in value]
    return value
