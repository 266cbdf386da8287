"""Checks the types and ranges of the fields of a scaler's state."""

import math
from collections.abc import Mapping
from typing import Any

import equinox as eqx
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.typing import ArrayLike

from .._errors import warn_or_raise
from .._jax import is_tracer

# Beyond these, the scale or its reciprocal is subnormal in float32, which XLA flushes
# to zero: the gradients would vanish, and still be called finite.
SMALLEST, LARGEST = 2.0**-126, 2.0**126
_COUNTS = frozenset(
    "patience count total_resets stuck hysteresis overflows skipped".split()
)
_MOST = np.iinfo(np.int32).max


def canonical(name: str, x: ArrayLike) -> Array:
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
            f"{x!r}.\n{_hint(name, given)}"
        )
    if jnp.shape(x) != ():
        raise ValueError(
            f"`{name}` of a `DynamicScalerState` must be a scalar, but was given shape "
            f"{jnp.shape(x)}.\nTo take a step with several states, `jax.vmap` the step."
        )
    return jnp.asarray(x, dtype)


def _hint(name: str, given: Any) -> str:
    if name == "patience" and jnp.issubdtype(given, jnp.floating):
        return "It comes first. To give the scale, name it: `scaler=2.0**15`."
    return "Give a Python number or an array of shape ()."


def warn_of_a_scale(patience: Any, factor: Any = None) -> None:
    """Warns of a first positional number that looks like a scale, not a patience.

    A second one looks like a patience if it is large for a factor."""
    is_integer = isinstance(patience, int) and not isinstance(patience, bool)
    is_factor = isinstance(factor, int | float) and factor < 100
    if is_integer and patience >= 256 and patience.bit_count() == 1 and not is_factor:
        warn_or_raise(
            f"`DynamicScalerState({patience})` sets the patience, which comes first, "
            f"and looks like a scale. Write `DynamicScalerState(scaler={patience})`, "
            f"or `patience={patience}` if that is meant.",
            strict=False,
        )


def check(fields: Mapping[str, Array]) -> None:
    """Raises if a field whose value is known is out of its range."""
    values = {name: known(x) for name, x in fields.items()}

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


def known(x: Array) -> float | None:
    """The value of a scalar; `None` if it is traced, or spread over several hosts."""
    if is_tracer(x) or not (x.is_fully_addressable or x.is_fully_replicated):
        return None
    return np.asarray(x).item()


def within(x: ArrayLike, least: ArrayLike, greatest: ArrayLike) -> Array:
    # NaN compares false, and becomes the least.
    return jnp.where(x >= least, jnp.minimum(x, greatest), least)  # pyright: ignore


def one_more(count: Array) -> Array:
    return jnp.minimum(count, _MOST - 1) + 1
