"""Whether functions are traced for a report, and which recorder listens."""

from contextvars import ContextVar
from typing import Any

recorder_in_force: ContextVar[Any] = ContextVar("recorder", default=None)
"""The `Recorder` of the report that is being made in this thread, or `None`."""


def is_recorded() -> bool:
    """Whether a function is traced for a report, and not run.

    A report may take a derivative that nobody else takes."""
    return recorder_in_force.get() is not None
