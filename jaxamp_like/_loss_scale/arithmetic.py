"""Scaling and unscaling of numbers, and whether they are finite."""

import functools
import operator
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from .._dtypes import in_words
from .._errors import showing_call
from .agree import AxisName, all_agree


def times(x: Array, factor: Array) -> Array:
    """`x * factor` in float32, or in float64 where `x` has that."""
    x = x if jnp.finfo(x.dtype).bits >= 32 else x.astype(jnp.float32)
    factor = factor.astype(x.real.dtype)
    if jnp.iscomplexobj(x):  # as a complex product, inf * (s + 0i) would be NaN
        return lax.complex(x.real * factor, x.imag * factor)
    return x * factor


def unscaled(tree: Any, scaler: Array) -> Any:
    """Every floating-point or complex array over `scaler`, in its own dtype."""

    def unscale(g: Any) -> Any:
        # The gradient of an integer is a float0 array: nothing to unscale.
        return times(g, 1 / scaler).astype(g.dtype) if eqx.is_inexact_array(g) else g

    return jax.tree.map(unscale, tree)


def chosen(pred: Array, new: Any, old: Any) -> Any:
    """`new` where `pred` holds, else `old`: pytrees of the same structure and types.

    Leaves that are no arrays are taken from `new`."""
    return jax.tree.map(
        lambda x, y: jnp.where(pred, x, y) if isinstance(x, Array | np.ndarray) else x,
        new,
        old,
    )


@showing_call("all_finite((loss, grads))")
def all_finite(tree: Any, *, axis_name: AxisName = None) -> Array:
    """Whether every floating-point or complex number in a pytree is finite.

    If you select by it between a new and an old state yourself, leave out the loss
    scale, and an optimizer's state that holds one: from a step that overflowed, the
    old scale would come back and overflow again. `scaler.accept(new, old)` and
    `guard_step` see to that.

    Args:
        tree: any pytree; leaves of other types are ignored.
        axis_name: axes of `jax.shard_map`, `jax.pmap` or `jax.vmap`, one or several,
            over which the answer is shared: true if it is true everywhere.
    Returns:
        A boolean scalar, true for a tree without any such number.
    Raises:
        TypeError: `tree` is one leaf that is no number.
        ValueError: `axis_name` is not bound.

    >>> bool(all_finite({"w": jnp.ones(3), "step": 7, "name": "mlp"}))
    True
    >>> bool(all_finite([jnp.ones(3), float("inf")]))
    False
    """
    leaves = jax.tree.leaves(tree)
    if len(leaves) == 1 and leaves[0] is tree and not eqx.is_array_like(tree):
        raise TypeError(
            f"`tree` must hold numbers, but was given {_shown(tree)}.\nGive what a "
            "gradient transform returned: `all_finite((loss, grads))`."
        )
    numbers = [x for x in leaves if eqx.is_inexact_array(x) or _is_python_inexact(x)]
    finite = (jnp.isfinite(x).all() for x in numbers)
    return all_agree(
        functools.reduce(operator.and_, finite, jnp.array(True)), axis_name
    )


def _is_python_inexact(x: Any) -> bool:
    return isinstance(x, float | complex)


def checked_loss(loss: Any, name: str | None = None, instead: str = "") -> Array:
    """`loss` as an array, or an error that says what it should have been.

    Args:
        loss: what is to be a loss.
        name: of the function that returned it, if one did.
        instead: what to write, if that is known better than by default."""
    if not _is_scalar(loss, jnp.inexact):
        wanted = (
            f"`{name}` must return a floating-point scalar as its loss, but returned "
            if name
            else "`loss` must be a floating-point scalar, but was given "
        )
        raise TypeError(f"{wanted}{_shown(loss)}.\n{instead or _REDUCE}")
    return jnp.asarray(loss)


_REDUCE = (
    "Reduce an array to one number, for example by `.mean()`; for a function that "
    "returns `(loss, aux)`, pass `has_aux=True`."
)


def checked_finite(finite: Any) -> Array:
    """`finite` as a boolean scalar, or an error that says how to come by one.

    Without this, a dict of gradients or a NaN would count as true, as in Python."""
    if not _is_scalar(finite, jnp.bool_):
        raise TypeError(
            "`finite` must be a boolean scalar, whether the gradients of the step are "
            f"all finite, but was given {_shown(finite)}.\nWrite "
            "`scaler.update(all_finite(grads))`."
        )
    return jnp.asarray(finite)


def _is_scalar(x: Any, kind: Any) -> bool:
    """Whether `x` is one number whose dtype is of a kind."""
    is_number = eqx.is_array_like(x) and jnp.shape(x) == ()
    return is_number and jnp.issubdtype(jnp.result_type(x), kind)


def _shown(x: Any) -> str:
    """An argument in words; a number of Python's as the array that JAX makes of it."""
    return in_words(jax.eval_shape(lambda: x) if eqx.is_array_like(x) else x)
