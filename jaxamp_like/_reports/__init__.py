"""Reports: what the rewrite did (`explain`), and what became of the numbers.

`data` holds records, `page` makes views of them, and `report` joins both. `explain` and
`numerics` fill in the records; they read the program by `walk`."""

from .explain import explain as explain
from .history import ScalerHistory as ScalerHistory
from .metrics import amp_metrics as amp_metrics
from .numerics import trace_numerics as trace_numerics
from .report import NumericsReport as NumericsReport, Report as Report
