"""Imports packages that only views of reports need, or raises a clear error."""

import importlib
import sys
from importlib.util import find_spec
from typing import Any

from .._errors import how_to_install


def shows_progress(wanted: bool | None) -> bool:
    """Whether to show progress; `None` asks for it if rich and a terminal are there."""
    if wanted is None:
        return sys.stderr.isatty() and find_spec("rich") is not None
    return wanted


def need(module: str, package: str | None = None) -> Any:
    """Imports a package of the extra "report", or says how to install it."""
    try:
        return importlib.import_module(module)
    except ImportError as e:
        missing = package or module
        raise ImportError(
            f"This view of a report needs {missing}, which is not installed. "
            f"{how_to_install(missing, 'report')} The data, `to_json` and "
            "`print(report)` need nothing."
        ) from e
