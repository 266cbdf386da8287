"""A bar that shows how far a long loop over parameters has come."""

import contextlib
from collections.abc import Iterable, Iterator, Sequence
from contextvars import ContextVar
from typing import Any, Protocol, TypeVar

_T = TypeVar("_T")
_SHOWN = 64  # the number of parameters from which on a bar is worth its line


class Bar(Protocol):
    """What shows progress, such as a `rich.progress.Progress`."""

    def start(self) -> None: ...

    def track(self, sequence: Any, *, description: str) -> Iterable[Any]:
        """The items of a sequence, while it is shown how many of them are done."""
        ...


_bar: ContextVar[Bar | None] = ContextVar("progress", default=None)


@contextlib.contextmanager
def showing(bar: Bar) -> Iterator[None]:
    """Within it, `bar` shows long loops; the first of them starts it."""
    token = _bar.set(bar)
    try:
        yield
    finally:
        _bar.reset(token)


def ticked(what: str, items: Sequence[_T]) -> Iterator[_T]:
    """The items, while it is shown how many of them are done."""
    bar = _bar.get()
    if bar is None or len(items) < _SHOWN:
        yield from items
        return
    bar.start()
    yield from bar.track(items, description=what)
