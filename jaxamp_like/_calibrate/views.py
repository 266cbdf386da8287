"""A calibration in the terminal, by rich."""

from .._reports.extras import need
from .._reports.page.table import record_table
from .evidence import Decided, Evidence, lines


def print_tables(one: Evidence) -> None:
    """Prints the summary, and a table of all groups."""
    console = need("rich.console", "rich").Console()
    *summary, policy = lines(one)
    console.print("\n".join(summary), highlight=False)
    console.print(record_table("", Decided, one.groups))
    console.print(policy, highlight=False)
