"""Keeps what was measured so far in a small JSON file that a kill can't spoil.

Until the calibration is done, files beside it hold the results of the function as
written, with which all others are compared. They are as large as the parameters."""

import itertools
import json
import os
from collections.abc import Callable, Collection, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np

from .._errors import AmpError
from .budget import Errors

Arrays = list[list[Any]]


class MeasurementStore:
    """Measurements by a key, in memory, and in a file if there is a path.

    Args:
        path: the file, or `None`.
        of: what tells the calibration from others, whose files are refused.
    Raises:
        AmpError: the file can't be read, or is of another calibration."""

    def __init__(self, path: str | Path | None, of: dict[str, Any]):
        self.path = None if path is None else Path(path)
        self.of = of
        self.measured: dict[str, Errors] = {}
        if self.path is not None and self.path.exists():
            self.measured = self._read(self.path)

    def _read(self, path: Path) -> dict[str, Errors]:
        try:
            data = json.loads(path.read_text("utf-8"))
            of, rows = data["of"], data["measured"]
            measured = {key: Errors(**row) for key, row in rows.items()}
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as e:
            raise AmpError(
                f"`state` is {str(path)!r}, which is no state of a calibration: {e}. "
                "Give another path, or remove the file."
            ) from e
        if of != self.of:
            other = sorted(k for k in {*of, *self.of} if of.get(k) != self.of.get(k))
            raise AmpError(
                f"`state` is {str(path)!r}, which is of another calibration: it "
                f"differs in {', '.join(other)}. Give another path, or remove the file."
            )
        return measured

    def add(self, key: str, errors: Errors) -> None:
        """Remembers a measurement; a kill leaves the file as before or as after."""
        self.measured[key] = errors
        if self.path is None:
            return
        rows = {key: asdict(one) for key, one in self.measured.items()}
        text = json.dumps({"of": self.of, "measured": rows}, indent=1)
        _write(self.path, lambda beside: beside.write_text(text, "utf-8"))

    def keep(self, number: int, arrays: Arrays, beside: Collection[int]) -> None:
        """Keeps the results of a point on disk, if there is a path.

        What is kept of other points is removed, but for those numbered in `beside`."""
        if self.path is None:
            return
        self.clear({number, *beside})
        head = [[(x.dtype.name, x.shape) for x in some] for some in arrays]
        text = json.dumps({"of": self.of, "arrays": head}).encode()

        def save(beside: Path) -> None:
            with beside.open("wb") as file:
                file.write(len(text).to_bytes(8, "little") + text)
                for x in itertools.chain(*arrays):
                    file.write(np.asarray(x).tobytes())

        _write(self._beside(number), save)

    def kept(self, number: int) -> Arrays | None:
        """What was kept of a point, by this calibration; `None` if there is nothing."""
        if self.path is None or not self._beside(number).exists():
            return None
        data = self._beside(number).read_bytes()
        at = 8 + int.from_bytes(data[:8], "little")
        try:
            head = json.loads(data[8:at])
            if head["of"] == self.of:
                return _read_arrays(head["arrays"], memoryview(data)[at:])
        except (ValueError, KeyError, TypeError):
            pass
        # A file of another calibration, or a damaged one, will be written over.
        return None

    def clear(self, but: Collection[int] = ()) -> None:
        """Removes what was kept of points, `but` for these numbers.

        Only a calibration that is started again would read it."""
        if self.path is None or not self.path.parent.exists():
            return
        start = f"{self.path.name}."
        for file in self.path.parent.iterdir():
            number = file.name.removeprefix(start)
            if number != file.name and number.isdigit() and int(number) not in but:
                file.unlink(missing_ok=True)

    def _beside(self, number: int) -> Path:
        assert self.path is not None
        return self.path.with_name(f"{self.path.name}.{number}")


def _read_arrays(head: Sequence[Any], data: memoryview) -> Arrays:
    found: Arrays = []
    for some in head:
        found.append([])
        for name, shape in some:
            dtype = np.dtype(name)
            size = dtype.itemsize * int(np.prod(shape))
            found[-1].append(np.frombuffer(data[:size], dtype).reshape(shape))
            data = data[size:]
    return found


def _write(path: Path, write: Callable[[Path], Any]) -> None:
    """Writes a file in one step, so that a kill leaves it as before or as after."""
    path.parent.mkdir(parents=True, exist_ok=True)
    beside = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        write(beside)
        os.replace(beside, path)
    finally:
        beside.unlink(missing_ok=True)
