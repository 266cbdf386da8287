"""Warns of parameters in 16 bits whose updates would be rounded away."""

import functools
import operator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax.tree_util import keystr

from .._dtypes import bits, is_float
from .._errors import warn_or_raise
from .._frameworks.nnx import instances_in
from .._jax import Literal, is_array, is_tracer, raw


class Float32UpdateState(NamedTuple):
    """The state of what `update_in_float32` returns: that of the wrapped optimizer."""

    inner_state: Any


def warn_of_rounded_updates(
    optimizer: optax.GradientTransformation, params: Any, state: Any
) -> None:
    """Warns if parameters of 16 bits have no copy in the `state` of their optimizer."""
    if instances_in(state, Float32UpdateState):
        return
    without_copy = _low_without_copy(params, state)
    named = without_copy and without_copy.keys() & _updated(optimizer, params, state)
    if not named:
        return
    path = next(path for path in without_copy if path in named)
    dtype = jnp.dtype(without_copy[path])
    share = round(2 / float(jnp.finfo(dtype).eps))
    warn_or_raise(
        f"The optimizer updates {dtype.name} parameters (`params{path}`), and "
        "its state holds no float32 copy of them: an update below about "
        f"1/{share} of its parameter is rounded away, and training stands "
        f"still without an error. {KEEP_FLOAT32} Or take "
        "`update_in_float32` and `apply_updates` of `jaxamp_like.storage`, "
        "which round by chance.",
        strict=False,
    )


KEEP_FLOAT32 = (
    "Train float32 parameters, which `amp` casts where they are read: leave "
    '`param_dtype` alone, or take `Policy(param_dtype="float32").cast_to_param('
    "params)`."
)


def _low_without_copy(params: Any, state: Any) -> dict[str, Any]:
    """The dtypes, by path, of parameters that have no copy in 32 bits or more."""
    wide = [x for x in jax.tree.leaves(state) if _bits(x) >= 32]
    return {
        keystr(path): x.dtype
        for path, x in jax.tree_util.tree_leaves_with_path(params)
        if 0 < _bits(x) < 32 and not any(_may_be_copy(one, x) for one in wide)
    }


def _bits(x: Any) -> int:
    """The bits of a floating-point array; 0 for anything else."""
    dtype = getattr(x, "dtype", None)
    return bits(dtype) if dtype is not None and is_float(dtype) else 0


def _may_be_copy(x: Any, parameter: Any) -> bool:
    """Whether `x` holds the numbers of a parameter, as far as values are known.

    Moments in float32 (`mu_dtype`) have the shape of the parameter, but begin at 0."""
    if x.shape != parameter.shape:
        return False
    for one in (x, parameter):
        is_known = is_array(one) and not is_tracer(one)
        if not is_known or not getattr(one, "is_fully_addressable", True):
            return True
    return bool(jnp.array_equal(x.astype(parameter.dtype), parameter))


def _updated(optimizer: optax.GradientTransformation, params: Any, state: Any) -> Any:
    """The paths of parameters whose updates depend on their own gradients.

    Those of parameters that are frozen (`optax.set_to_zero`) are constant zeros."""
    paths = [keystr(path) for path, _ in jax.tree_util.tree_leaves_with_path(params)]
    try:
        program = raw(
            jax.make_jaxpr(lambda *args: optimizer.update(*args)[0])(
                params, state, params
            )
        )
    except Exception:  # such as a line search, whose `update` needs more arguments
        return {*paths}
    # The gradients that each value depends on, as bits.
    reach = {program.invars[i]: 1 << i for i in range(len(paths))}
    for eqn in program.eqns:
        read = [reach.get(x, 0) for x in eqn.invars if not isinstance(x, Literal)]
        reach |= dict.fromkeys(eqn.outvars, functools.reduce(operator.or_, read, 0))
    return {
        path
        for i, (path, x) in enumerate(zip(paths, program.outvars, strict=True))
        if not isinstance(x, Literal) and reach.get(x, 0) >> i & 1
    }
