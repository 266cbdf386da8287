"""What a calibration found: a policy, with the evidence for it."""

from dataclasses import dataclass
from pathlib import Path

from .._reports.page.page import write_page
from .findings import Findings
from .page import page
from .views import print_tables


@dataclass(frozen=True)
class Calibration(Findings):
    """A policy found by measurement, and the evidence for it.

    Args:
        policy: to be passed to `amp`; equal to one that is written by hand.
        budget: what was allowed.
        held_out: the worst errors of the policy on the batches that were held out.
        met: whether these are within the budget.
        low_share: the share of the contractions' FLOPs that run low.
        groups: what was decided together, in the order of the program.
        tried: the sets that were measured, from which the front is drawn.
        objective: what was to be saved.
        granularity: what was decided together.
        candidates: the low dtypes.
        notes: what the user should know.
        passes: how often the function was run.
        compilations: how many programs were compiled for that.
        versions: of packages, and the device.
        seconds: what the passes took, compilation aside. Not compared."""

    def print(self) -> None:
        """Prints a table of all groups (needs rich, of the extra "report")."""
        print_tables(self)

    def save_html(self, path: str | Path) -> Path:
        """Writes a page: error against cost, what was kept and why, the policy.

        Args:
            path: where to, a file that is made or written over.
        Returns:
            The path.
        Raises:
            ImportError: the extra "report" is not installed.
            OSError: the file can't be written."""
        return write_page(path, page(self))
