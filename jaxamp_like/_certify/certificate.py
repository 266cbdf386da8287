"""A certificate: what every operation was decided to be, and what was compiled."""

import json
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, get_args

from .._errors import AmpError
from .._files import write_text
from . import lock as locks
from .arithmetic import OF_UNITS, Arithmetic, Platform
from .drifts import GONE, MEANINGS, UNDECIDED
from .operations import Kind
from .records import Certified, StoredArray


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
        arrays: those of a MiB or more that the compiled program writes to memory, but
            results of contractions only if they are kept for the backward pass.
        kept: how many bytes the decided program keeps for the backward pass in such
            arrays, by dtype. XLA may keep others, and compute them again.
        versions: of the packages.
        has_amp: whether `amp` is in the program; without it, what was decided is what
            the code as written says."""

    name: str
    platform: Platform
    device: str
    arguments: tuple[str, ...]
    operations: tuple[Certified, ...]
    arrays: tuple[StoredArray, ...]
    kept: Mapping[str, int]
    versions: Mapping[str, str]
    has_amp: bool = True

    @property
    def is_as_decided(self) -> bool:
        """Whether nothing runs otherwise than decided."""
        return all(one.is_as_decided for one in (*self.operations, *self.arrays))

    @property
    def drifts(self) -> tuple[Certified, ...]:
        """The operations that do not run as decided."""
        return tuple(one for one in self.operations if not one.is_as_decided)

    @property
    def kept_compiled(self) -> dict[str, int]:
        """How many bytes the compiled program keeps in large arrays, by dtype."""
        found: Counter[str] = Counter()
        for one in self.arrays:
            if one.is_kept:
                found[one.stored] += one.size
        return dict(found)

    @property
    def float32_runs_in(self) -> str:
        """What contractions of float32 multiply in if no `precision` asks for more."""
        return OF_UNITS[self.platform].get("default", Arithmetic()).name or "float32"

    @property
    def share_tied(self) -> float:
        """The share of the contractions' FLOPs whose equations are known."""
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
        """Writes a lock file: sorted lines, without versions, paths or source lines.

        Args:
            path: where to; parent folders are made.
        Returns:
            The path.
        Raises:
            TypeError: it is no path.
            OSError: the path can't be written to."""
        text = locks.written(self._head(), self.operations)
        return write_text(path, text, "lock file")

    def _head(self) -> dict[str, str]:
        """The program that a lock file describes."""
        return {
            "function": self.name,
            "platform": self.platform,
            "arguments": ", ".join(self.arguments),
        }

    def check(self, path: str | Path) -> None:
        """Compares with a lock file that `save` wrote.

        Args:
            path: of the file.
        Raises:
            AmpError: something runs in another precision than the file says; the
                message is a diff.
            TypeError: `path` is no path.
            ValueError: the file is no lock file, or one of another program.
            OSError: it can't be read."""
        path = locks.as_path(path, "path")
        if difference := locks.difference(self._head(), self.operations, path):
            raise AmpError(difference)


def _summary(certificate: Certificate) -> Iterator[str]:
    ops = certificate.operations
    yield f"certificate of {certificate.name} on {certificate.device}"
    if not certificate.has_amp:
        yield "  no `amp` was found in it: what was decided is the code as written"
    for kind in get_args(Kind):
        mine = [one for one in ops if one.kind == kind and UNDECIDED not in one.drifts]
        if not mine:
            continue
        wrong = [one for one in mine if not one.is_as_decided]
        gone = sum(GONE in one.drifts for one in mine)
        text = f"  {len(mine) - len(wrong)} of {len(mine)} {kind}s run as decided"
        text += f", {gone} of them gone" if gone else ""
        if kind == "contraction":
            decided = Counter(one.decided for one in mine).most_common()
            text += ": " + ", ".join(f"{n} {dtypes}" for dtypes, n in decided)
        yield text
    yield from _of_arrays(certificate)
    by_kind = Counter(drift for one in ops for drift in one.drifts)
    by_kind.update(one.drift for one in certificate.arrays if one.drift)
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
    for one in certificate.arrays:
        if not one.is_as_decided or one.drift == UNDECIDED:
            yield f"  {one}"


def _of_arrays(certificate: Certificate) -> Iterator[str]:
    arrays = certificate.arrays
    if not arrays:
        return
    right = sum(one.is_as_decided and one.drift != UNDECIDED for one in arrays)
    yield f"  {right} of {len(arrays)} large arrays are stored as decided"
    now, decided = certificate.kept_compiled, certificate.kept
    if now or decided:
        text = f"{_bytes(now)} (decided: {_bytes(decided)})"
        yield f"  kept for the backward pass: {text}"


def _bytes(by_dtype: Mapping[str, int]) -> str:
    found = sorted(by_dtype.items(), key=lambda item: -item[1])
    return ", ".join(f"{size / 1e6:.1f} MB {name}" for name, size in found) or "none"
