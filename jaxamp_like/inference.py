"""Inference: a trained model is converted once, saved, and loaded without its code."""

from ._convert.artifact import Artifact as Artifact, load as load
from ._convert.convert import convert as convert
from ._convert.converted import Converted as Converted
from ._convert.folder import ArtifactError as ArtifactError
from ._convert.summary import Summary as Summary

__all__ = ["Artifact", "ArtifactError", "Converted", "Summary", "convert", "load"]


def __getattr__(name: str) -> object:
    eight_bits = "`convert(fn, params, x, amp_policy='int8_from_mixed_bfloat16')`"
    elsewhere = {
        "export": "`convert(fn, params, x).save(path)` exports a model",
        "save": "write `convert(fn, params, x).save(path)`",
        **dict.fromkeys(("quantize", "quantise"), f"write {eight_bits}"),
    }
    hint = f": {elsewhere[name]}." if name in elsewhere else ""
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}{hint}")
