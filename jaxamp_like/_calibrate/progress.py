"""How far a calibration is, told while it runs."""

import contextlib
import sys
from collections.abc import Callable, Iterator
from importlib.util import find_spec

from .._reports.extras import need


@contextlib.contextmanager
def telling(progress: bool | None) -> Iterator[Callable[[str], None]]:
    """A function that is told what each pass is, and shows it.

    Nothing is shown if `progress` is false; if it is `None`, something is on a terminal
    that rich is installed for.

    Raises:
        ImportError: `progress` is true and rich is not installed."""
    if progress is None:
        progress = sys.stderr.isatty() and find_spec("rich") is not None
    if not progress:
        yield lambda what: None
        return
    rich, console = need("rich.progress", "rich"), need("rich.console", "rich")
    columns = (
        rich.SpinnerColumn(),
        rich.TextColumn("calibrate: pass {task.completed}, {task.description}"),
        rich.TimeElapsedColumn(),
    )
    with rich.Progress(*columns, console=console.Console(stderr=True)) as bar:
        task = bar.add_task("tracing", total=None)

        def tell(what: str) -> None:
            bar.update(task, advance=1, description=what, refresh=True)

        yield tell
