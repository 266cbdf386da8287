"""Packages that only artifacts and the command line need."""

import importlib
from typing import Any

from .._errors import how_to_install


def needed(module: str) -> Any:
    """Imports a package of the extra "convert", or says how to install it."""
    try:
        return importlib.import_module(module)
    except ImportError as e:
        package = module.partition(".")[0]
        raise ImportError(
            "Artifacts hold parameters as safetensors and programs as flatbuffers, and "
            f"{package} is not installed. {how_to_install(package, 'convert')}"
        ) from e
