"""Inference: a trained model is converted once, saved, and loaded without its code."""

from typing import Any

from ._convert.artifact import Artifact as Artifact, load as load
from ._convert.convert import convert as convert
from ._convert.converted import Converted as Converted
from ._convert.folder import ArtifactError as ArtifactError
from ._convert.summary import Summary as Summary

__all__ = ["Artifact", "ArtifactError", "Converted", "Summary", "convert", "load"]


_ELSEWHERE = {
    "export": "`convert(fn, params, x).save(path)` exports a model",
    "save": "write `convert(fn, params, x).save(path)`",
    **dict.fromkeys(
        ("quantize", "quantise"),
        "write `convert(fn, params, x, amp_policy='int8_from_mixed_bfloat16')`",
    ),
}


def __getattr__(name: str) -> Any:
    hint = f": {_ELSEWHERE[name]}." if name in _ELSEWHERE else ""
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}{hint}")
