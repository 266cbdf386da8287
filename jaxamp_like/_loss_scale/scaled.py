"""Remembers what was scaled and unscaled, to raise where that is done twice.

Arrays are remembered by identity: what a function makes of them is not known."""

import contextlib
from collections.abc import Iterator
from contextvars import ContextVar
from typing import Any
from weakref import WeakValueDictionary

import equinox as eqx
import jax

from .._within import within

_misplaced: ContextVar[list[Any] | None] = ContextVar("misplaced", default=None)
_losses: ContextVar[list[Any] | None] = ContextVar("losses", default=None)
_unscaled: WeakValueDictionary[int, Any] = WeakValueDictionary()


def note_update(scales: list[Any], scale: Any) -> None:
    """Takes note of gradients of losses that had `scales`, for a state with `scale`."""
    if (misplaced := _misplaced.get()) is not None:
        misplaced += [one for one in scales if one is not scale]


@contextlib.contextmanager
def recording_misplaced() -> Iterator[list[Any]]:
    """A list of the scales whose gradients another state is given within it."""
    outer, misplaced = _misplaced.get(), []
    with within(_misplaced, misplaced):
        yield misplaced
    if outer is not None:
        outer += misplaced


def note_scaled(loss: Any) -> None:
    """Takes note of a loss that was scaled by hand."""
    if (losses := _losses.get()) is not None:
        losses.append(loss)


@contextlib.contextmanager
def refusing_scaled() -> Iterator[list[Any]]:
    """A list for what a loss returns; it must be none that was scaled within."""
    losses, returned = [], []
    with within(_losses, losses):
        yield returned
    if any(loss is one for loss in returned for one in losses):
        raise TypeError(
            "The loss is scaled already, by `scale` of the state, and would be scaled "
            "a second time: gradients would be too large by the scale. Return the loss "
            "as it is: what computes its gradient scales it."
        )


def note_unscaled(results: Any) -> None:
    """Takes note of gradients that are returned unscaled, as plain arrays."""
    arrays = filter(eqx.is_inexact_array, jax.tree.leaves(results))
    _unscaled.update((id(x), x) for x in arrays)


def refuse_unscaled(grads: Any) -> None:
    """Raises for gradients that were returned unscaled."""
    if any(_unscaled.get(id(x)) is x for x in jax.tree.leaves(grads)):
        raise TypeError(
            "These gradients are unscaled already: `dynamic_scale_grad` and its like "
            "return true gradients. `unscale` is for gradients of a loss that `scale` "
            "has scaled."
        )
