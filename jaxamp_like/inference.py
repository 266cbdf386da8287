"""Inference: a trained model is converted once, saved, and loaded without its code."""

from ._convert.artifact import Artifact as Artifact, load as load
from ._convert.convert import convert as convert
from ._convert.converted import Converted as Converted
from ._convert.folder import ArtifactError as ArtifactError
from ._convert.summary import Summary as Summary
from ._errors import no_name_in

__all__ = ["Artifact", "ArtifactError", "Converted", "Summary", "convert", "load"]


def __getattr__(name: str) -> object:
    eight_bits = "`convert(fn, params, x, amp_policy='int8_from_mixed_bfloat16')`"
    elsewhere = {
        "export": "`convert(fn, params, x).save(path)` exports a model.",
        "save": "Write `convert(fn, params, x).save(path)`.",
        **dict.fromkeys(("quantize", "quantise"), f"Write {eight_bits}."),
    }
    raise no_name_in(__name__, name, elsewhere.get(name, ""))
