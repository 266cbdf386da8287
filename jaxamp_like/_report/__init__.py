"""Reports: what the rewrite did (`explain`), and what became of the numbers."""

from .explain import explain as explain
from .history import ScalerHistory as ScalerHistory
from .numbers import NumericsReport as NumericsReport
from .numerics import trace_numerics as trace_numerics
from .report import Report as Report
