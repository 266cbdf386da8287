"""Context managers that tell if they are made and never entered."""

import contextlib
import functools
from collections.abc import Callable
from contextvars import ContextVar
from typing import Any, Generic, TypeVar

from ._errors import warn_or_raise

_T = TypeVar("_T")
_F = TypeVar("_F", bound=Callable[..., Any])

# The blocks that were entered in this thread or task, and what each of them entered:
# several threads or tasks may be within one block at the same time.
_Entered = tuple[tuple["Block[Any]", contextlib.AbstractContextManager[Any]], ...]
_entered: ContextVar[_Entered] = ContextVar("jaxamp_like_entered", default=())


class Block(Generic[_T]):
    """A context manager that also decorates functions.

    `disable_amp()` as a statement of its own does nothing, which would go unnoticed:
    an object that is dropped without having been used warns.

    Args:
        written: how a user writes it, such as `disable_amp()`.
        enter: makes the context manager, each time that one is entered.

    Attributes:
        is_used: whether it was entered, or decorates a function."""

    def __init__(
        self, written: str, enter: Callable[[], contextlib.AbstractContextManager[_T]]
    ) -> None:
        self._written, self._enter = written, enter
        self.is_used: bool = False

    def __enter__(self) -> _T:
        self.is_used = True
        made = self._enter()
        out = made.__enter__()
        _entered.set((*_entered.get(), (self, made)))
        return out

    def __exit__(self, *error: Any) -> bool | None:
        entered = _entered.get()
        last = max(i for i, (block, _) in enumerate(entered) if block is self)
        _entered.set(entered[:last] + entered[last + 1 :])
        return entered[last][1].__exit__(*error)

    def __call__(self, fn: _F) -> _F:
        self.is_used = True

        @functools.wraps(fn)
        def within(*args: Any, **kwargs: Any) -> Any:
            with self._enter():
                return fn(*args, **kwargs)

        return within  # type: ignore[return-value]

    def __del__(self) -> None:
        if not self.is_used:
            written = self._written
            warn_or_raise(
                f"`{written}` by itself does nothing. Write `with {written}:` around "
                f"the code that it is for, or `@{written}` above a function.",
                strict=False,
            )
