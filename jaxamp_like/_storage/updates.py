"""Parameters without a float32 copy: updated in float32, and rounded by chance."""

import itertools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import Array

from .._dtypes import is_float
from .._errors import hiding_frames, showing_call
from .._jax import is_array_or_shape
from .._random_rounding import chances, mixed, rounded_by
from .optimizer import Rounding, check_rounding, checked_optimizer
from .rounded_updates import Float32UpdateState


def update_in_float32(
    optimizer: optax.GradientTransformation,
) -> optax.GradientTransformationExtraArgs:
    """Wraps an optimizer so that it computes and keeps its state in float32.

    It sees parameters and gradients of 16 bits as float32 numbers, and returns float32
    updates. For bfloat16 parameters, Optax alone keeps moments in bfloat16, in which a
    mean of squares that decays by 0.999 stands still.

    Args:
        optimizer: any Optax optimizer; extra arguments of `update` are handed on.
    Returns:
        An optimizer for parameters of any floating dtype. Add its updates to them by
        `jaxamp_like.storage.apply_updates`, which rounds by chance: by
        `optax.apply_updates`, small updates of bfloat16 parameters are lost.
    Raises:
        TypeError: `optimizer` is none.

    >>> tx = update_in_float32(optax.adam(1e-3))
    >>> tx.init(jnp.ones(4, jnp.bfloat16)).inner_state[0].mu.dtype.name
    'float32'
    """
    inner = checked_optimizer(optimizer, "update_in_float32")

    @hiding_frames
    def init(params: Any) -> Float32UpdateState:
        return Float32UpdateState(inner.init(_in_float32(params)))

    @hiding_frames
    def update(updates: Any, state: Any, params: Any = None, **extra: Any) -> Any:
        updates, params = _in_float32(updates), _in_float32(params)
        updates, new = inner.update(updates, state.inner_state, params, **extra)
        return updates, Float32UpdateState(new)

    return optax.GradientTransformationExtraArgs(init, update)  # pyright: ignore


@showing_call("apply_updates(params, updates, key=key)")
@hiding_frames
def apply_updates(
    params: Any,
    updates: Any,
    *,
    rounding: Rounding = "stochastic",
    key: Array | None = None,
) -> Any:
    """Adds updates to parameters; those of 16 bits are rounded by chance.

    A bfloat16 parameter that is rounded to the nearest loses each update below 1/512 of
    it, which late in training are all of them. Rounded up or down by chances that keep
    the mean, it moves as its updates say. So bfloat16 parameters train without a
    float32 copy: 2 bytes for each instead of 6.

    Args:
        params: a pytree of arrays. Those of 32 bits and more, and integers, are added
            to as `optax.apply_updates` does.
        updates: of the same structure, or with `None` for what stays. They are best in
            float32, as `update_in_float32` makes them.
        rounding: "stochastic", or "nearest". By chance, what is finite stays finite: a
            sum above the largest number of a dtype becomes that number, and no inf.
        key: of the stochastic rounding, a new one for each step. It decides the same
            however `jit` lays parameters over devices.
    Returns:
        The parameters, each in its dtype.
    Raises:
        TypeError: `rounding` is "stochastic" and `key` is no key.
        ValueError: `rounding` is unknown, or the two trees differ.

    >>> params = {"w": jnp.ones(10_000, jnp.bfloat16)}
    >>> updates = {"w": jnp.full(10_000, 1e-3)}
    >>> new = apply_updates(params, updates, key=jax.random.key(0))
    >>> round(float(new["w"].astype("float32").mean()), 3)
    1.001
    >>> new = apply_updates(params, updates, rounding="nearest")
    >>> float(new["w"].astype("float32").mean())
    1.0

    Stochastic rounding of bfloat16 parameters is that of Zamirai et al.
    (arXiv:2010.06192)."""
    check_rounding(rounding)
    seed = _seed(key) if rounding == "stochastic" else None
    numbers = itertools.count()

    def new(path: Any, p: Any, u: Any) -> Any:
        if p is None or u is None:
            return p
        if jnp.shape(p) != jnp.shape(u):
            name = jax.tree_util.keystr(path)
            raise ValueError(
                f"`updates{name}` has the shape {jnp.shape(u)}, but `params{name}` the "
                f"shape {jnp.shape(p)}.\nGive the updates that `tx.update` returned "
                "for these parameters."
            )
        number = next(numbers)
        dtype = jnp.asarray(p).dtype
        if not (is_float(dtype) and dtype.itemsize < 4):
            return jnp.asarray(p + u).astype(dtype)
        full, u = (jnp.asarray(x).astype(jnp.float32) for x in (p, u))
        total = full + u
        if seed is None:
            return total.astype(dtype)
        # A sum of bfloat16's largest numbers may be beyond float32's.
        is_finite = jnp.isfinite(full) & jnp.isfinite(u)
        total = jnp.where(is_finite, jnp.nan_to_num(total), total)
        chance = chances(total.shape, mixed(seed + np.uint32(number)))
        return rounded_by(total, dtype, chance)

    def is_leaf(x: Any) -> bool:
        return x is None

    return jax.tree_util.tree_map_with_path(new, params, updates, is_leaf=is_leaf)


def _seed(key: Any) -> Any:
    is_key = is_array_or_shape(key) and (
        key.ndim == 0
        if jnp.issubdtype(key.dtype, jax.dtypes.prng_key)
        else key.dtype == jnp.uint32 and key.ndim == 1
    )
    if not is_key:
        raise TypeError(
            "`key` must be a single PRNG key, a new one for each step, but was given "
            f"{key!r}.\nWrite `key=jax.random.fold_in(key, step)`, or "
            '`rounding="nearest"`.'
        )
    return jax.random.bits(key, (), jnp.uint32)


def _in_float32(tree: Any) -> Any:
    def wide(x: Any) -> Any:
        is_low = is_array_or_shape(x) and is_float(x.dtype) and x.dtype.itemsize < 4
        return x.astype(jnp.float32) if is_low else x

    return jax.tree.map(wide, tree)
