"""Reports: what the rewrite did (`explain`), and what became of the numbers.

Data below (`data`), views above (`page`), joined in `report`; what fills them in is in
`explain` and `numerics`, which read the program by `walk`."""

from .explain import explain as explain
from .history import ScalerHistory as ScalerHistory
from .numerics import trace_numerics as trace_numerics
from .report import NumericsReport as NumericsReport, Report as Report
