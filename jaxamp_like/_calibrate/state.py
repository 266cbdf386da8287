"""What was measured so far, on disk: a small JSON file that a kill can't spoil."""

import json
import os
from dataclasses import asdict
from pathlib import Path
from typing import Any

from .._errors import AmpError
from .budget import Errors


class State:
    """Measurements by what was measured, in memory and in a file if there is a path.

    Args:
        path: the file, or `None`.
        of: what is measured: of another calibration, a file is refused.
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
        """Remembers a measurement; the file is either as before or as after."""
        self.measured[key] = errors
        if self.path is None:
            return
        rows = {key: asdict(one) for key, one in self.measured.items()}
        text = json.dumps({"of": self.of, "measured": rows}, indent=1)
        self.path.parent.mkdir(parents=True, exist_ok=True)
        beside = self.path.with_name(f".{self.path.name}.{os.getpid()}")
        try:
            beside.write_text(text, "utf-8")
            os.replace(beside, self.path)
        finally:
            beside.unlink(missing_ok=True)
