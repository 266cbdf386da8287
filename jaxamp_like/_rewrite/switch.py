"""Turning amp off: for tests and comparisons, or for a part of a function."""

import contextlib
from collections.abc import Iterator
from contextvars import ContextVar
from functools import partial

import jax

from .._blocks import Block
from .._errors import explaining_misfits
from .._policies.dictionary import AMP_STOP
from .._within import within

_disabled = ContextVar("jaxamp_like_disabled", default=False)


def is_amp_disabled() -> bool:
    return _disabled.get()


_tracing = ContextVar("jaxamp_like_tracing", default=False)


def is_traced_by_amp() -> bool:
    """Whether what runs is being traced by an `amp` around it."""
    return _tracing.get()


def tracing_by_amp() -> contextlib.AbstractContextManager[None]:
    return within(_tracing, True)


_scaled = ContextVar("jaxamp_like_scaled", default=False)


def is_in_scaled_loss() -> bool:
    """Whether what runs is a loss that is scaled before it is differentiated."""
    return _scaled.get()


_losses_scaled: ContextVar[int] = ContextVar("jaxamp_like_losses_scaled", default=0)


def losses_scaled() -> int:
    """How many losses were scaled so far, in this thread or task."""
    return _losses_scaled.get()


def of_a_loss_to_be_scaled() -> contextlib.AbstractContextManager[None]:
    """What is wrapped within it is a loss that an optimizer will scale."""
    return within(_scaled, True)


def scaling_loss() -> contextlib.AbstractContextManager[None]:
    _losses_scaled.set(losses_scaled() + 1)
    return of_a_loss_to_be_scaled()


@explaining_misfits("disable_amp", lambda *_: ["Write `with disable_amp():`."])
def disable_amp() -> Block[None]:
    """Within it, `amp(fn)` returns `fn` as it is; also a decorator.

    It is asked when `amp` is called to wrap, never later, so that no cache of `jax.jit`
    can hold a stale answer. What was wrapped before it was entered is still rewritten,
    and says so by an `AmpWarning` when it is traced; what `jax.jit` has compiled before
    runs as it was compiled. Other threads are not affected.

    >>> from jaxamp_like import amp
    >>> with disable_amp():
    ...     amp(abs) is abs
    True
    """
    return Block("disable_amp()", partial(within, _disabled, True))


_stopped = ContextVar("jaxamp_like_stopped", default=False)


def is_in_amp_stop() -> bool:
    return _stopped.get()


@contextlib.contextmanager
def stopping() -> Iterator[None]:
    """What is traced within it is kept as its author wrote it."""
    with within(_stopped, True), jax.named_scope(AMP_STOP[0]):
        yield
