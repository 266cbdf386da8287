"""A certificate: what every operation was decided to be, and what was compiled."""

import json
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, get_args

from .._errors import AmpError
from .._reports.data.records import Phase
from . import lock as locks
from .drifts import EMULATED, GONE, MEANINGS, NOT_DRIFTS, UNDECIDED, WIDE
from .operations import Kind


@dataclass(frozen=True, slots=True)
class Certified:
    """One operation of the program, as decided and as compiled.

    Args:
        kind: "contraction", "reduction", "collective", "quantisation" or "kernel".
        scope: names of `jax.named_scope`s, outermost first, joined by "/".
        phase: "forward", "backward" or "recomputed".
        primitive: of the equation.
        source: "file:line" of the author's, "" where none is known.
        decided: what it reads and makes in the program that JAX hands to XLA, as in
            "bfloat16 x bfloat16 -> float32"; "" if it is undecided.
        compiled: the same in the compiled program, for each way in which it runs there.
        stored: the dtypes in which the compiled program keeps its operands.
        arithmetic: what float32 operands are rounded to as they are multiplied.
        opcodes: what XLA calls it.
        drifts: how these differ, in the words of `MEANINGS`.
        work: FLOPs of all runs of a contraction.
        times: how often it runs, as decided.
        why: the reason of the rule that decided, if it is known."""

    kind: Kind
    scope: str
    phase: Phase
    primitive: str
    source: str
    decided: str
    compiled: tuple[str, ...]
    stored: tuple[str, ...]
    arithmetic: str
    opcodes: tuple[str, ...]
    drifts: tuple[str, ...]
    work: int
    times: int
    why: str = ""

    @property
    def is_as_decided(self) -> bool:
        return not self.real_drifts

    @property
    def real_drifts(self) -> tuple[str, ...]:
        """The drifts that change numbers, or cost bytes or runs."""
        return tuple(drift for drift in self.drifts if drift not in NOT_DRIFTS)

    def __str__(self) -> str:
        where = f" in {self.scope}" if self.scope else ""
        line = f" ({self.source})" if self.source else ""
        decided = f"decided {self.decided}, " if self.decided else ""
        compiled = "; ".join(self.compiled) or "nothing"
        kinds = ", ".join(self.drifts) or "as decided"
        text = f"{kinds}: {self.primitive}{where}, {self.phase}{line}: "
        text += f"{decided}compiled {compiled}"
        if {WIDE, EMULATED} & {*self.drifts}:
            text += f", stored as {' and '.join(self.stored)}"
        return f"{text} [{self.why}]" if self.why else text


@dataclass(frozen=True, repr=False)
class Certificate:
    """Whether a compiled program runs in the precision that was decided.

    `print(certificate)` gives the verdict and every drift; `certificate.is_as_decided`
    says it in a word; `to_json` gives everything; `save` writes a lock file.

    Args:
        name: of the function.
        platform: "cpu", "gpu" or "tpu".
        device: the kind of device that it was compiled for.
        arguments: the shapes and dtypes of the compiled program's arguments.
        operations: those that were decided, and those that XLA added.
        versions: of the packages."""

    name: str
    platform: str
    device: str
    arguments: tuple[str, ...]
    operations: tuple[Certified, ...]
    versions: Mapping[str, str]

    @property
    def is_as_decided(self) -> bool:
        """Whether nothing runs otherwise than decided."""
        return all(one.is_as_decided for one in self.operations)

    @property
    def drifts(self) -> tuple[Certified, ...]:
        """The operations that do not run as decided."""
        return tuple(one for one in self.operations if not one.is_as_decided)

    @property
    def share_tied(self) -> float:
        """The share of the compiled contractions' FLOPs whose equations are known."""
        work: Counter[bool] = Counter()
        for one in self.operations:
            if one.kind == "contraction" and one.compiled:
                work[UNDECIDED not in one.drifts] += one.work
        return work[True] / max(sum(work.values()), 1) if work else 1.0

    def __str__(self) -> str:
        return "\n".join(_summary(self))

    __repr__ = __str__

    def to_dict(self) -> dict[str, Any]:
        """Everything as plain dicts and lists."""
        return asdict(self) | {"is_as_decided": self.is_as_decided}

    def to_json(self, indent: int | None = None) -> str:
        """Everything as JSON.

        Args:
            indent: as for `json.dumps`.
        Returns:
            The text, one object."""
        return json.dumps(self.to_dict(), indent=indent)

    def save(self, path: str | Path) -> Path:
        """Writes a lock file: readable, sorted, the same wherever it is made.

        Args:
            path: where to; parent folders are made.
        Returns:
            The path.
        Raises:
            OSError: the path can't be written to."""
        path = Path(path)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(locks.written(self), encoding="utf-8")
        return path

    def check(self, path: str | Path) -> None:
        """Compares with a lock file that `save` wrote.

        Args:
            path: of the file.
        Raises:
            AmpError: something runs in another precision than the file says; the
                message is a diff.
            ValueError: the file is no lock file, or one of another program.
            OSError: it can't be read."""
        if difference := locks.difference(self, Path(path)):
            raise AmpError(difference)


def _summary(certificate: Certificate) -> Iterator[str]:
    ops = certificate.operations
    yield f"certificate of {certificate.name} on {certificate.device}"
    for kind in get_args(Kind):
        mine = [one for one in ops if one.kind == kind and UNDECIDED not in one.drifts]
        if not mine:
            continue
        wrong = [one for one in mine if not one.is_as_decided]
        gone = sum(GONE in one.drifts for one in mine)
        text = f"  {len(mine) - len(wrong)} of {len(mine)} {kind}s run as decided"
        yield text + (f", of which {gone} are gone" if gone else "")
    by_kind = Counter(drift for one in ops for drift in one.drifts)
    for drift, count in by_kind.items():
        yield f"  {count} x {drift}: {MEANINGS[drift]}"
    if certificate.share_tied < 1:
        share = 100 * (1 - certificate.share_tied)
        yield f"  {share:.1f} % of the FLOPs belong to no known equation"
    passes = Counter(one.arithmetic for one in ops if one.arithmetic)
    for arithmetic, count in passes.items():
        yield f"  {count} contractions of float32 multiply in {arithmetic}"
    for one in certificate.drifts:
        yield f"  {one}"
