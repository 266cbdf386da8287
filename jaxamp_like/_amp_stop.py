"""`amp_stop`, which keeps `amp` away from a function or a block."""

import functools
from collections.abc import Callable
from typing import Any, TypeVar, overload

from ._amp_mistakes import refuse_results_of_later, refuse_what_cannot_be_stopped
from ._blocks import Block
from ._errors import hiding_frames, showing_call
from ._frameworks.mixed import is_model, mixed_model
from ._frameworks.modules import warn_if_untracked
from ._rewrite.switch import stopping

_F = TypeVar("_F", bound=Callable[..., Any])


@overload
def amp_stop(fn: _F) -> _F: ...
@overload
def amp_stop(fn: None = None) -> Any: ...
@showing_call("amp_stop(fn)")
def amp_stop(fn: Any = None) -> Any:
    """Keeps what is inside in the dtypes that its author wrote, backward pass included.

    A decorator, with or without parentheses, and a context manager. Values that come
    in low are cast back to the author's dtypes.

    Args:
        fn: a function to keep; none to get a decorator and context manager.
    Returns:
        The function, in a `jax.named_scope` called "amp_stop"; or that scope. A model
        of Equinox or NNX stays one, with the same parameters.
    Raises:
        TypeError: `fn` is not callable, or computes after it has returned (a generator,
            an async function, a class). It is raised when the function is called if
            the result of that computes later.

    >>> @amp_stop
    ... def norm(x):
    ...     return x / jnp.sqrt(jnp.sum(x * x))
    >>> def model(w, x):
    ...     x = norm(x @ w)
    ...     with amp_stop():
    ...         return x @ w.T
    """
    return _Stop() if fn is None else _stopped(fn)


class _Stop(Block[None]):
    """The scope, for `with`, and to decorate a function."""

    def __init__(self) -> None:
        super().__init__("amp_stop()", stopping)

    def __call__(self, fn: _F) -> _F:
        self.is_used = True
        return _stopped(fn)


def _stopped(fn: Any) -> Any:
    refuse_what_cannot_be_stopped(fn)
    if is_model(fn):
        return mixed_model(fn, "amp_stop", _stopped, _stopped, kind="Stopped")

    @functools.wraps(fn, assigned=names_of(fn))
    def stopped(*args: Any, **kwargs: Any) -> Any:
        with hiding_frames:
            warn_if_untracked(fn, "amp_stop")
            with stopping():
                out = fn(*args, **kwargs)
            refuse_results_of_later(fn, out)
            return out

    return stopped


def names_of(fn: Callable[..., Any]) -> list[str]:
    """What a wrapper takes over; some callables have names that are no strings."""
    known = (*functools.WRAPPER_ASSIGNMENTS,)
    odd = ("__name__", "__qualname__")
    return [n for n in known if n not in odd or isinstance(getattr(fn, n, None), str)]
