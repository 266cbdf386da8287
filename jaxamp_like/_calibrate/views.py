"""A calibration in the terminal, by rich."""

from .._reports.data.explained import human_bytes, human_flops
from .._reports.extras import need
from .evidence import Evidence, lines, show_error


def print_tables(one: Evidence) -> None:
    """Prints the summary, and a table of all groups."""
    console = need("rich.console", "rich").Console()
    *summary, policy = lines(one)
    console.print("\n".join(summary), highlight=False)
    table = need("rich.table", "rich").Table(box=need("rich.box", "rich").SIMPLE_HEAD)
    for title in ("group", "dtype", "FLOPs", "kept", "alone", "why"):
        right = title in ("FLOPs", "kept", "alone")
        table.add_column(title, justify="right" if right else "left")
    for group in one.groups:
        alone = min((group.sensitivity or {}).values(), default=None)
        table.add_row(
            group.name,
            group.dtype,
            human_flops(group.flops),
            human_bytes(group.kept),
            "" if alone is None else show_error(alone),
            group.why,
        )
    console.print(table)
    console.print(policy, highlight=False)
