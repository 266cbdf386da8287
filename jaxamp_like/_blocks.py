"""Context managers that tell if they are made and never entered."""

import contextlib
import functools
from collections.abc import Callable
from typing import Any, Generic, TypeVar

from ._errors import warn_or_raise

_T = TypeVar("_T")
_F = TypeVar("_F", bound=Callable[..., Any])


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
        self._entered: list[contextlib.AbstractContextManager[_T]] = []

    def __enter__(self) -> _T:
        self.is_used = True
        self._entered.append(self._enter())
        return self._entered[-1].__enter__()

    def __exit__(self, *error: Any) -> bool | None:
        return self._entered.pop().__exit__(*error)

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
