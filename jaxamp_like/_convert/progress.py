"""Who is told how far a long loop over parameters has come."""

import contextlib
from collections.abc import Callable, Iterator, Sequence
from contextvars import ContextVar
from typing import TypeVar

_T = TypeVar("_T")
Show = Callable[[str, int, int], object]  # what is done, how many are, of how many

_show: ContextVar[Show | None] = ContextVar("progress", default=None)


@contextlib.contextmanager
def showing(show: Show) -> Iterator[None]:
    """Within it, `show` is called before each item and after the last one."""
    token = _show.set(show)
    try:
        yield
    finally:
        _show.reset(token)


def ticked(what: str, items: Sequence[_T]) -> Iterator[_T]:
    """The items, while it is shown how many of them are done."""
    show = _show.get()
    for i, item in enumerate(items):
        if show is not None:
            show(what, i, len(items))
        yield item
    if show is not None:
        show(what, len(items), len(items))
