"""The state of the loss scale, and the rule by which it changes."""

import functools
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple, ParamSpec, Self, TypeVar
from weakref import WeakValueDictionary

import jax
import jax.numpy as jnp
from jax import Array
from jax.typing import ArrayLike

from .._dropped import warns_if_dropped
from .._jax import is_tracer
from .._suggestions import no_attribute
from .arithmetic import checked_finite, checked_loss, chosen, times, unscaled
from .calls import BY_HAND, SETTINGS, with_call_hints
from .fields import (
    LARGEST,
    SMALLEST,
    canonical,
    check,
    known,
    one_more,
    warn_of_a_scale,
    within,
)
from .marks import refuse_marked
from .scaled import note_scaled, refuse_unscaled

_P = ParamSpec("_P")
_R = TypeVar("_R")


class _Fields(NamedTuple):
    patience: Array
    adjust_factor: Array
    scaler: Array
    count: Array  # pyright: ignore[reportIncompatibleMethodOverride]
    total_resets: Array
    min_scaler: Array
    max_scaler: Array
    stuck: Array
    hysteresis: Array
    overflows: Array
    skipped: Array


def _looking_for_a_scale(make: Callable[_P, _R]) -> Callable[_P, _R]:
    """`make(cls, ...)`, with a warning if a scale is given as the patience."""

    @functools.wraps(make)
    def made(*args: _P.args, **kwargs: _P.kwargs) -> _R:
        _, *given = args
        if given:
            warn_of_a_scale(*given[:2])
        return make(*args, **kwargs)

    return made


# Scales that were given as numbers while a program was traced, by their identity.
_begun_in_trace: WeakValueDictionary[int, Array] = WeakValueDictionary()


def _note_if_traced(scaler: Array) -> None:
    """Notes a scale whose value is known, if it is a part of a traced program."""
    if is_tracer(scaler):
        _begun_in_trace[id(scaler)] = scaler


_KEPT_BY_OPTIMIZER = "What the optimizer keeps is in `opt_state.inner_state`."
_SCALE = "`jaxamp_like.reports.amp_metrics(opt_state)` tells the scale."
_ELSEWHERE = BY_HAND | {
    **dict.fromkeys("mu nu trace hyperparams".split(), _KEPT_BY_OPTIMIZER),
    **dict.fromkeys(("get_scale", "item"), _SCALE),
    "adjust": "Write `scaler.update(finite)`, which returns the next state.",  # of jmp
}


class DynamicScalerState(_Fields):
    r"""The loss scale and its counters: a named tuple of scalar arrays.

    Python numbers become arrays at once, so all jitted steps see the same types, and
    the step compiles once. Fields whose values are known (not traced) are checked.

    Args:
        patience: finite steps that must have gone by before the scale may grow; 1 or
            more.
        adjust_factor: what the scale is multiplied or divided by, above 1.
        scaler: the scale itself, above 0. If it is out of bounds, the nearest bound is
            used.
        count: finite steps since the scale last changed or a step overflowed.
        total_resets: how many steps, or attempts at one, called for a lower scale.
        min_scaler: the scale never falls below this, nor below `2**-126`.
        max_scaler: the scale never grows above this, nor above `2**126`.
        stuck: how many of the latest steps in a row began at the minimum, and were not
            finite.
        hysteresis: the scale falls at the `hysteresis`th non-finite step in a row, and
            at each one after it; those before are skipped and forgiven.
        overflows: how many of the latest steps in a row were not finite.
        skipped: how many steps were not finite in all.
    Raises:
        TypeError: a field is not a number, or a count is not an integer.
        ValueError: a field is not a scalar, or out of its range.

    >>> state = DynamicScalerState(patience=1, scaler=1024)
    >>> float(state.update(False).scaler)
    512.0
    >>> float(state.update(True).update(True).scaler)
    2048.0

    See Micikevicius et al., "Mixed Precision Training" (arXiv:1710.03740); hysteresis
    is DeepSpeed's."""

    __slots__ = ()

    if not TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any:
            hint = f"Did you mean `{SETTINGS[name]}`?" if name in SETTINGS else ""
            raise no_attribute(self, name, hint or _ELSEWHERE.get(name, ""))

    @_looking_for_a_scale
    @with_call_hints("DynamicScalerState(scaler=2.0**15, patience=2000)")
    def __new__(
        cls,
        patience: ArrayLike = 2000,
        adjust_factor: ArrayLike = 2.0,
        scaler: ArrayLike = 2.0**15,
        count: ArrayLike = 0,
        total_resets: ArrayLike = 0,
        min_scaler: ArrayLike = SMALLEST,
        max_scaler: ArrayLike = LARGEST,
        stuck: ArrayLike = 0,
        hysteresis: ArrayLike = 1,
        overflows: ArrayLike = 0,
        skipped: ArrayLike = 0,
    ) -> Self:
        moving = scaler, count, total_resets, min_scaler, max_scaler, stuck
        fields = patience, adjust_factor, *moving, hysteresis, overflows, skipped
        state = super().__new__(cls, *map(canonical, cls._fields, fields))
        check(state._asdict())
        if not is_tracer(scaler) and min_scaler is not max_scaler:
            _note_if_traced(state.scaler)
        return state

    @classmethod
    def _make(cls, iterable: Iterable[Any]) -> Self:  # pyright: ignore
        return cls(*iterable)  # so that `_replace` makes arrays of numbers too

    def _with(self, **fields: Any) -> Self:
        """Like `_replace`, but reads no values, so that it waits for no computation."""
        values = (self._asdict() | fields).items()
        return tuple.__new__(type(self), (canonical(k, x) for k, x in values))

    @property
    def is_begun_in_trace(self) -> bool:
        """Whether this scale was given as a number to the program being traced."""
        return _begun_in_trace.get(id(self.scaler)) is self.scaler

    @property
    def bounds(self) -> tuple[Array, Array]:
        """The least and the greatest scale that this state can reach."""
        least = within(self.min_scaler, SMALLEST, LARGEST)
        return least, within(self.max_scaler, least, LARGEST)

    def clipped(self) -> Self:
        """The state with its scale within its bounds."""
        return self._with(scaler=within(self.scaler, *self.bounds))

    def scale(self, loss: ArrayLike) -> Array:
        """The loss times the scale, in float32 (float64 for a float64 loss).

        Args:
            loss: a floating-point scalar.
        Raises:
            TypeError: it is none.

        >>> DynamicScalerState(scaler=8).scale(jnp.float16(3))
        Array(24., dtype=float32)
        """
        scaled = times(checked_loss(loss), self.clipped().scaler)
        note_scaled(scaled)
        return scaled

    def unscale(self, grads: Any) -> Any:
        """Gradients of the scaled loss, over the scale.

        Args:
            grads: any pytree. Leaves that are no floating-point or complex arrays are
                left alone.
        Returns:
            The same, each array in its own dtype.
        Raises:
            TypeError: gradients are marked as unscaled.

        >>> DynamicScalerState(scaler=8).unscale({"w": jnp.float16(24)})
        {'w': Array(3., dtype=float16)}
        """
        refuse_marked(grads)
        refuse_unscaled(grads)
        return unscaled(grads, self.clipped().scaler)

    @warns_if_dropped("scaler = scaler.update(all_finite(grads))")
    @with_call_hints("scaler.update(all_finite(grads))")
    def update(self, finite: ArrayLike) -> Self:
        """The state that follows after a step.

        Args:
            finite: a boolean scalar, whether all gradients of the step were finite.
        Returns:
            The next state, of the same types.
        Raises:
            TypeError: `finite` is something else, such as the gradients or a loss.

        >>> int(DynamicScalerState(count=7).update(True).count)
        8
        """
        finite = checked_finite(finite)
        grow = finite & (self.count >= self.patience)
        overflows = jnp.where(finite, 0, one_more(self.overflows))
        fall = ~finite & (overflows >= self.hysteresis)
        in_vain = ~finite & (self.scaler <= self.bounds[0])
        lower = self.lower()
        same = self.clipped().scaler
        higher = within(same * self.adjust_factor, *self.bounds)
        return self._with(
            scaler=jnp.where(grow, higher, jnp.where(fall, lower.scaler, same)),
            count=jnp.where(finite & ~grow, one_more(self.count), 0),
            total_resets=jnp.where(fall, lower.total_resets, self.total_resets),
            stuck=jnp.where(in_vain, one_more(self.stuck), 0),
            overflows=overflows,
            skipped=jnp.where(finite, self.skipped, one_more(self.skipped)),
        )

    def accept(self, new: Any, old: Any) -> Any:
        """Chooses `new`, or `old` if the step that led to this state was skipped.

        Args:
            new: parameters, an optimizer's state or any pytree, after the step.
            old: the same before it. Leaves that are no arrays are taken from `new`.
        Returns:
            `new` if the gradients were finite, else `old`.

        >>> state = DynamicScalerState().update(False)
        >>> state.accept({"w": jnp.nan * jnp.ones(2)}, {"w": jnp.ones(2)})
        {'w': Array([1., 1.], dtype=float32)}
        """
        return chosen(self.overflows == 0, new, old)

    def lower(self) -> Self:
        """The state with a scale one step down, as a retry tries it."""
        return self._with(
            scaler=within(self.clipped().scaler / self.adjust_factor, *self.bounds),
            total_resets=one_more(self.total_resets),
            count=0,
        )


# By itself JAX rebuilds a named tuple through its constructor, and this one would try
# to make arrays of whatever a tree of this shape holds: axes, specs, None.
jax.tree_util.register_pytree_with_keys(
    DynamicScalerState,
    lambda s: ([(jax.tree_util.GetAttrKey(k), getattr(s, k)) for k in s._fields], None),
    lambda _, leaves: tuple.__new__(DynamicScalerState, leaves),
    lambda s: (tuple(s), None),
)


_NOTHING_TO_READ = (
    "Loss scaling is off, as `enable_amp` leaves it in bfloat16. "
    "`amp_metrics(opt_state)` reads what there is, with a scale and without."
)


@jax.tree_util.register_static
@dataclass(frozen=True)
class NoScaler:
    """Stands for a state where loss scaling is off: it costs and tests nothing.

    >>> NoScaler().scale(jnp.float16(3))
    Array(3., dtype=float16)
    """

    if not TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any:
            is_field = name in DynamicScalerState._fields or name in SETTINGS
            raise no_attribute(self, name, _NOTHING_TO_READ * is_field)

    def scale(self, loss: ArrayLike) -> Array:
        """The loss as it is."""
        return checked_loss(loss)

    def unscale(self, grads: Any) -> Any:
        """The gradients as they are."""
        return grads

    def update(self, finite: ArrayLike) -> Self:
        """The same again."""
        return self

    def accept(self, new: Any, old: Any) -> Any:
        """`new`, since no step is skipped."""
        return new

    def lower(self) -> Self:
        """The same again: there is nothing to lower."""
        return self


Scaler = DynamicScalerState | NoScaler


def begun(first: Scaler) -> Scaler:
    """The state `first` in new arrays, for a run of training that begins with it."""
    if isinstance(first, NoScaler):
        return first
    made = jax.tree.map(jnp.copy, first)
    least, most = known(first.min_scaler), known(first.max_scaler)
    if known(first.scaler) is not None and least != most:
        _note_if_traced(made.scaler)
    return made


def is_scaler(x: Any) -> bool:
    return isinstance(x, Scaler)


def static_scaler(scaler: ArrayLike) -> DynamicScalerState:
    """A state whose scale never changes. Steps that overflow are still counted.

    Args:
        scaler: the scale, between `2**-126` and `2**126`.
    Raises:
        TypeError, ValueError: as for `DynamicScalerState`, or it is out of range.

    >>> state = static_scaler(1024).update(False)
    >>> float(state.scaler), int(state.stuck)
    (1024.0, 1)
    """
    # Three arrays, so that a step may have the state donated.
    least, most = (
        jnp.copy(scaler) if isinstance(scaler, Array) else scaler for _ in range(2)
    )
    state = DynamicScalerState(scaler=scaler, min_scaler=least, max_scaler=most)
    value = known(state.scaler)
    if value is not None and not SMALLEST <= value <= LARGEST:
        raise ValueError(
            "`scaler` of `static_scaler` must be between 2**-126 and 2**126, but was "
            f"given {value}.\nTo scale nothing, use `NoScaler()`."
        )
    return state
