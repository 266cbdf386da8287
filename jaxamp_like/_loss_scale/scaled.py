"""Which scales losses were multiplied by, as far as a check asks."""

import contextlib
import threading
from collections.abc import Iterator
from contextvars import ContextVar
from typing import Any

_any_loss = threading.Event()
_recorded: ContextVar[list[Any] | None] = ContextVar("scaled", default=None)


def note_scaled(scale: Any) -> None:
    """Takes note that a loss is multiplied by a scale, an array."""
    _any_loss.set()
    if (scales := _recorded.get()) is not None:
        scales.append(scale)


def was_any_loss_scaled() -> bool:
    """Whether any loss was scaled in this process."""
    return _any_loss.is_set()


@contextlib.contextmanager
def recording_scales() -> Iterator[list[Any]]:
    """A list of the scales that losses are multiplied by within it."""
    outer, scales = _recorded.get(), []
    token = _recorded.set(scales)
    try:
        yield scales
    finally:
        _recorded.reset(token)
        if outer is not None:
            outer += scales
