"""Inference: a trained model is converted once, saved, and loaded without its code."""

from ._convert.artifact import Artifact as Artifact, load as load
from ._convert.convert import convert as convert
from ._convert.converted import Converted as Converted
from ._convert.folder import ArtifactError as ArtifactError
from ._convert.summary import Summary as Summary

__all__ = ["Artifact", "ArtifactError", "Converted", "Summary", "convert", "load"]
