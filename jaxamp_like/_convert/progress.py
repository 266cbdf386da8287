"""A bar that shows how far a long loop over parameters has come."""

from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from contextvars import ContextVar
from typing import Any, Protocol, TypeVar

from .._within import within

_T = TypeVar("_T")
_SHOWN = 64  # a bar is shown for at least this many parameters


class Bar(Protocol):
    """An object that shows progress, such as a `rich.progress.Progress`."""

    def start(self) -> None: ...

    def track(self, sequence: Any, *, description: str) -> Iterable[Any]:
        """Yields the items of a sequence, and shows how many of them are done."""
        ...


_bar: ContextVar[Bar | None] = ContextVar("progress", default=None)


def showing(bar: Bar) -> AbstractContextManager[None]:
    """Within it, `bar` shows long loops; the first of them starts it."""
    return within(_bar, bar)


def ticked(what: str, items: Sequence[_T]) -> Iterator[_T]:
    """Yields the items; the bar shows how many are done, if there are many."""
    bar = _bar.get()
    if bar is None or len(items) < _SHOWN:
        yield from items
        return
    bar.start()
    yield from bar.track(items, description=what)
