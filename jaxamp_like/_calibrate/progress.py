"""Shows how far a calibration has come while it runs."""

import contextlib
from collections.abc import Callable, Iterator

from .._reports.extras import need, shows_progress


@contextlib.contextmanager
def with_progress(progress: bool | None) -> Iterator[Callable[[str], None]]:
    """A function that is called with the name of each pass, and shows it.

    Passes are shown if `progress` is true, or if it is `None`, stderr is a terminal and
    rich is installed.

    Raises:
        ImportError: `progress` is true and rich is not installed."""
    if not shows_progress(progress):
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
