"""Reports: which precision ran where and why, and what became of the numbers."""

from ._reports import (
    NumericsReport as NumericsReport,
    Report as Report,
    ScalerHistory as ScalerHistory,
    explain as explain,
    trace_numerics as trace_numerics,
)

__all__ = ["NumericsReport", "Report", "ScalerHistory", "explain", "trace_numerics"]
