"""Gradients that are given to the `update` of another state than scaled their loss."""

import contextlib
from collections.abc import Iterator
from contextvars import ContextVar
from typing import Any

from .._within import within

_recorded: ContextVar[list[Any] | None] = ContextVar("misplaced", default=None)


def note_update(scales: list[Any], scale: Any) -> None:
    """Takes note of gradients of losses that had `scales`, for a state with `scale`."""
    if (misplaced := _recorded.get()) is not None:
        misplaced += [one for one in scales if one is not scale]


@contextlib.contextmanager
def recording_misplaced() -> Iterator[list[Any]]:
    """A list of the scales whose gradients another state is given within it."""
    outer, misplaced = _recorded.get(), []
    with within(_recorded, misplaced):
        yield misplaced
    if outer is not None:
        outer += misplaced
