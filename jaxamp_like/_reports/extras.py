"""Imports packages that only views of reports need, or raises a clear error."""

import importlib
from typing import Any


def need(module: str, package: str | None = None) -> Any:
    """Imports a package of the extra "report", or says how to install it."""
    try:
        return importlib.import_module(module)
    except ImportError as e:
        raise ImportError(
            f"This view of a report needs {package or module}, which is not installed. "
            "Run `pip install 'jaxamp_like[report]'`; the data, `to_json` and "
            "`print(report)` need nothing."
        ) from e
