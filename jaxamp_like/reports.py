"""Reports: which precision ran where and why, and what became of the numbers."""

from ._calibrate import Budget as Budget, Calibration as Calibration, Device as Device
from ._certify.certificate import Certificate as Certificate
from ._certify.certify import certify as certify
from ._certify.records import Certified as Certified, StoredArray as StoredArray
from ._reports import (
    NumericsReport as NumericsReport,
    Report as Report,
    ScalerHistory as ScalerHistory,
    amp_metrics as amp_metrics,
    explain as explain,
    trace_numerics as trace_numerics,
)

__all__ = [
    "Budget",
    "Calibration",
    "Certificate",
    "Certified",
    "Device",
    "NumericsReport",
    "Report",
    "ScalerHistory",
    "StoredArray",
    "amp_metrics",
    "certify",
    "explain",
    "trace_numerics",
]
