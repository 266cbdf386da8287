"""Values of context variables that hold within a block."""

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import TypeVar

_T = TypeVar("_T")


@contextmanager
def within(variable: ContextVar[_T], value: _T) -> Iterator[None]:
    """Within it, a variable has a value, in this thread or task."""
    token = variable.set(value)
    try:
        yield
    finally:
        variable.reset(token)
