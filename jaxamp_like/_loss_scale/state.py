"""The scale and what it remembers, and the rule by which it changes."""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Self

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.typing import ArrayLike

from .._jax import is_tracer
from .numbers import checked_loss, chosen, times, unscaled

# Beyond these, the scale or its reciprocal is subnormal in float32, which XLA flushes
# to zero: the gradients would vanish, and still be called finite.
SMALLEST, LARGEST = 2.0**-126, 2.0**126
_COUNTS = {"patience", "count", "total_resets", "stuck", "hysteresis", "overflows"}
_MOST = np.iinfo(np.int32).max


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


class DynamicScalerState(_Fields):
    r"""The loss scale and what it remembers: a named tuple of scalar arrays.

    Python numbers become arrays at once, so the first jitted step compiles for the very
    types of all later ones. Fields that are known (not traced) are checked.

    Args:
        patience: finite steps that must have gone by before the scale may grow; 1 or
            more.
        adjust_factor: what the scale is multiplied or divided by, above 1.
        scaler: the scale itself, above 0. One that is out of bounds is moved to the
            nearest.
        count: finite steps since the scale last changed or a step overflowed.
        total_resets: how many steps, or attempts at one, called for a lower scale.
        min_scaler: the scale never falls below this, nor below $2^{-126}$.
        max_scaler: the scale never grows above this, nor above $2^{126}$.
        stuck: latest non-finite steps in a row that began at the minimum.
        hysteresis: the scale falls at the `hysteresis`th non-finite step in a row, and
            at each one after it; those before are skipped and forgiven.
        overflows: latest non-finite steps in a row.
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
    ) -> Self:
        moving = scaler, count, total_resets, min_scaler, max_scaler, stuck
        fields = patience, adjust_factor, *moving, hysteresis, overflows
        state = super().__new__(cls, *map(_canonical, cls._fields, fields))
        _check_values(state)
        return state

    @classmethod
    def _make(cls, iterable: Iterable[Any]) -> Self:  # pyright: ignore
        return cls(*iterable)  # so that `_replace` makes arrays of numbers too

    def _with(self, **fields: Any) -> Self:
        """Like `_replace`, but asks for no value: a step must not wait for the last."""
        values = (self._asdict() | fields).items()
        return tuple.__new__(type(self), (_canonical(k, x) for k, x in values))

    @property
    def bounds(self) -> tuple[Array, Array]:
        """The least and the greatest scale that this state can reach."""
        least = _within(self.min_scaler, SMALLEST, LARGEST)
        return least, _within(self.max_scaler, least, LARGEST)

    def clipped(self) -> Self:
        """The state with its scale within its bounds."""
        return self._with(scaler=_within(self.scaler, *self.bounds))

    def scale(self, loss: ArrayLike) -> Array:
        """The loss times the scale, in float32 (float64 for a float64 loss).

        Args:
            loss: a floating-point scalar.
        Raises:
            TypeError: it is none.

        >>> DynamicScalerState(scaler=8).scale(jnp.float16(3))
        Array(24., dtype=float32)
        """
        return times(checked_loss(loss), self.clipped().scaler)

    def unscale(self, grads: Any) -> Any:
        """Gradients of the scaled loss, over the scale.

        Args:
            grads: any pytree. Leaves that are no floating-point or complex arrays are
                left alone.
        Returns:
            The same, each array in its own dtype.

        >>> DynamicScalerState(scaler=8).unscale({"w": jnp.float16(24)})
        {'w': Array(3., dtype=float16)}
        """
        return unscaled(grads, self.clipped().scaler)

    def update(self, finite: ArrayLike) -> Self:
        """The state after a step whose gradients were all finite, or were not.

        Args:
            finite: a boolean scalar.
        Returns:
            The next state, of the same types.

        >>> int(DynamicScalerState(count=7).update(True).count)
        8
        """
        finite = jnp.asarray(finite, bool)
        grow = finite & (self.count >= self.patience)
        overflows = jnp.where(finite, 0, _one_more(self.overflows))
        fall = ~finite & (overflows >= self.hysteresis)
        in_vain = ~finite & (self.scaler <= self.bounds[0])
        lower = self.lower()
        same = self.clipped().scaler
        higher = _within(same * self.adjust_factor, *self.bounds)
        return self._with(
            scaler=jnp.where(grow, higher, jnp.where(fall, lower.scaler, same)),
            count=jnp.where(finite & ~grow, _one_more(self.count), 0),
            total_resets=jnp.where(fall, lower.total_resets, self.total_resets),
            stuck=jnp.where(in_vain, _one_more(self.stuck), 0),
            overflows=overflows,
        )

    def accept(self, new: Any, old: Any) -> Any:
        """What the step that led to this state made, or if it was skipped, what was.

        Args:
            new: parameters, an optimizer's state or any pytree, after the step.
            old: the same before it. Where leaves are no arrays, `new` has its way.
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
            scaler=_within(self.clipped().scaler / self.adjust_factor, *self.bounds),
            total_resets=_one_more(self.total_resets),
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


@jax.tree_util.register_static
@dataclass(frozen=True)
class NoScaler:
    """Loss scaling turned off, in the place of a state: no cost, and nothing is tested.

    >>> NoScaler().scale(jnp.float16(3))
    Array(3., dtype=float16)
    """

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
        """What is new: no step is skipped."""
        return new

    def lower(self) -> Self:
        """The same again: there is nothing to lower."""
        return self


Scaler = DynamicScalerState | NoScaler


def is_scaler(x: Any) -> bool:
    return isinstance(x, Scaler)


def static_scaler(scaler: ArrayLike) -> DynamicScalerState:
    """A state whose scale never changes. Steps that overflow are still counted.

    Args:
        scaler: the scale, between $2^{-126}$ and $2^{126}$.
    Raises:
        TypeError, ValueError: as of `DynamicScalerState`, or it is out of range.

    >>> state = static_scaler(1024).update(False)
    >>> float(state.scaler), int(state.stuck)
    (1024.0, 1)
    """
    state = DynamicScalerState(scaler=scaler, min_scaler=scaler, max_scaler=scaler)
    value = _known(state.scaler)
    if value is not None and not SMALLEST <= value <= LARGEST:
        raise ValueError(
            "`scaler` of `static_scaler` must be between 2**-126 and 2**126, but was "
            f"given {value}.\nTo scale nothing, use `NoScaler()`."
        )
    return state


def merge_scalers(*states: Any) -> Any:
    """The state after one step that was made of several parts.

    Parts may be several losses, or microbatches whose gradients are added up. Begin
    each with the same state, and merge what they return: the scale changes once.

    Args:
        states: the next states of the parts, or one whose fields are stacked along a
            leading axis, as `jax.lax.scan` returns them. Trees of states (scales by
            group) will do.
    Returns:
        The state that follows. If any part overflowed, the step did.
    Raises:
        TypeError: no state was given, or something else.

    >>> state = DynamicScalerState(scaler=1024)
    >>> float(merge_scalers(state.update(True), state.update(False)).scaler)
    512.0
    """
    leaves = jax.tree.leaves(states, is_leaf=is_scaler)
    if len(states) == 1 and isinstance(states[0], list | tuple) and len(leaves) > 1:
        if all(
            isinstance(x, DynamicScalerState) and x.scaler.ndim == 0 for x in leaves
        ):
            raise TypeError(
                "`merge_scalers` was given one sequence of states, and would merge "
                "nothing.\nPass them as arguments: `merge_scalers(*states)`."
            )
    if not states or not all(map(is_scaler, leaves)):
        raise TypeError(
            "`merge_scalers` takes the next states of the parts of a step, but was "
            f"given {', '.join(type(x).__name__ for x in states) or 'nothing'}.\n"
            "A step returns `(next_state, results)`: pass its first part."
        )
    return jax.tree.map(_merged, *states, is_leaf=is_scaler)


def _merged(*states: Scaler) -> Scaler:
    first = states[0]
    if not isinstance(first, DynamicScalerState):
        return first
    lowest = {"scaler", "count"}  # what a part that overflowed has less of
    return first._with(
        **{
            name: (jnp.min if name in lowest else jnp.max)(jnp.stack(values))
            for name, values in zip(
                first._fields, zip(*states, strict=True), strict=True
            )
        }
    )


def restore_scaler(saved: Any) -> DynamicScalerState:
    """A state out of what an older version saved, or in another container or dtype.

    Args:
        saved: a mapping by field names, as checkpoints are read back without a target;
            or the fields in order, such as a named tuple. Fields that an older version
            did not have get their defaults.
    Raises:
        TypeError, ValueError: it is no state, or fields are unknown or out of range.

    >>> saved = {"scaler": np.float64(1024), "count": np.int64(7)}
    >>> restore_scaler(saved).scaler, int(restore_scaler([2000, 2.0, 1024.0]).patience)
    (Array(1024., dtype=float32), 2000)
    """
    names = DynamicScalerState._fields
    if isinstance(saved, tuple) and hasattr(saved, "_asdict"):
        saved = saved._asdict()  # pyright: ignore[reportAttributeAccessIssue]
    if isinstance(saved, Sequence) and not isinstance(saved, str):
        extra = (f"number {i}" for i in range(len(names), len(saved)))
        saved = dict(zip((*names, *extra), saved, strict=False))
    if not isinstance(saved, Mapping) or "scaler" not in saved:
        raise TypeError(
            "`saved` must hold the fields of a `DynamicScalerState`, by name or in "
            f"order, `scaler` among them, but was given {saved!r}."
        )
    if unknown := [str(name) for name in saved if name not in names]:
        raise ValueError(
            f"`saved` has fields that a `DynamicScalerState` has not: "
            f"{', '.join(unknown)}.\nIt may be from a newer version; known are "
            f"{', '.join(names)}."
        )
    return DynamicScalerState(**saved)


def _canonical(name: str, x: ArrayLike) -> Array:
    """The field `name` as a strongly typed scalar, or an error that names it."""
    kinds, kind, dtype = (jnp.integer,), "an integer", jnp.int32
    if name not in _COUNTS:
        kinds, kind, dtype = (jnp.integer, jnp.floating), "a real", jnp.float32
        # `2**126` is a fair way to write a bound, but too large for an integer array.
        x = float(x) if isinstance(x, int) and not isinstance(x, bool) else x
    elif isinstance(x, int) and not -_MOST <= x <= _MOST:
        raise ValueError(
            f"`{name}` of a `DynamicScalerState` must fit into int32, but was given "
            f"{x}.\nThe largest is {_MOST}."
        )
    given = jnp.result_type(x) if eqx.is_array_like(x) else object
    if not any(jnp.issubdtype(given, k) for k in kinds):
        raise TypeError(
            f"`{name}` of a `DynamicScalerState` must be {kind} scalar, but was given "
            f"{x!r}.\nGive a Python number or an array of shape ()."
        )
    if jnp.shape(x) != ():
        raise ValueError(
            f"`{name}` of a `DynamicScalerState` must be a scalar, but was given shape "
            f"{jnp.shape(x)}.\nTo take a step with several states, `jax.vmap` the step."
        )
    return jnp.asarray(x, dtype)


def _check_values(state: DynamicScalerState) -> None:
    values = {name: _known(x) for name, x in state._asdict().items()}

    def require(name: str, is_right: Any, wanted: str) -> None:
        value = values[name]
        if value is not None and not is_right(value):
            raise ValueError(
                f"`{name}` of a `DynamicScalerState` must be {wanted}, but was given "
                f"{value}."
            )

    numbers = "finite and above 0, such as 2.0**15 (to scale nothing: `NoScaler()`)"
    require("scaler", lambda x: 0 < x < math.inf, numbers)
    for name in sorted(_COUNTS - {"hysteresis", "patience"}):
        require(name, lambda x: x >= 0, "0 or more")
    require("patience", lambda x: x >= 1, "1 or more (1 grows at every other step)")
    require("hysteresis", lambda x: x >= 1, "1 or more (1 lowers the scale at once)")
    factors = "a finite number above 1 (2 keeps scales powers of two)"
    require("adjust_factor", lambda x: 1 < x < math.inf, factors)
    require("min_scaler", lambda x: 0 <= x < math.inf, "finite, and 0 or more")
    least = values["min_scaler"] or 0
    greatest = f"above 0, and no less than `min_scaler`, {least}"
    require("max_scaler", lambda x: x > 0 and x >= least, greatest)


def _known(x: Array) -> float | None:
    """The value of a scalar, unless it is traced or on another host only."""
    if is_tracer(x) or not (x.is_fully_addressable or x.is_fully_replicated):
        return None
    return np.asarray(x).item()


def _within(x: ArrayLike, least: ArrayLike, greatest: ArrayLike) -> Array:
    # NaN compares false, and becomes the least.
    return jnp.where(x >= least, jnp.minimum(x, greatest), least)  # pyright: ignore


def _one_more(count: Array) -> Array:
    return jnp.minimum(count, _MOST - 1) + 1
