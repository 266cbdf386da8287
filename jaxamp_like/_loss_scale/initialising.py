"""Makes the first state of an optimizer, and checks the parameters it is made of."""

import functools
import operator
from collections.abc import Container, Iterator
from contextlib import contextmanager
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import optax
from jax.tree_util import keystr

from .._dtypes import bits, is_float
from .._errors import warn_or_raise
from .._frameworks.nnx import instances_in
from .._jax import Literal, is_tracer, raw
from .._storage.updates import Float32UpdateState
from .calls import difference


def initialised(optimizer: optax.GradientTransformation, params: Any) -> Any:
    """The first state of `optimizer`, or an error that says what `params` should be."""
    try:
        state = optimizer.init(params)
    except (TypeError, ValueError) as e:
        if not (wrong := _no_arrays(params)):
            raise
        path, leaf = wrong[0]
        raise TypeError(
            f"`params` must hold arrays alone, but `params{path}` is a "
            f"{type(leaf).__name__}.\n{_instead(leaf)}"
        ) from e
    shapes = {jnp.shape(x) for x in jax.tree.leaves(params) if eqx.is_array_like(x)}
    low = _float16_in(state, shapes - {()})
    if low and not _float16_in(params):
        warn_or_raise(
            f"The optimizer keeps float16 numbers (`{low[0]}`) for wider parameters: "
            "gradients below 6e-8, and their squares, are zero there. Leave its dtype "
            "out, or take bfloat16, as `mu_dtype`.",
            strict=False,
        )
    elif low:
        warn_or_raise(
            f"The optimizer keeps float16 numbers (`{low[0]}`) for float16 parameters: "
            "squares of small gradients and an epsilon of 1e-8 are zero there, and "
            f"updates infinite. {_KEEP_FLOAT32}",
            strict=False,
        )
    elif not instances_in(state, Float32UpdateState) and (
        without_copy := _low_without_copy(params, state)
    ):
        if named := without_copy.keys() & _updated(optimizer, params, state):
            path = next(path for path in without_copy if path in named)
            dtype = jnp.dtype(without_copy[path])
            share = round(2 / float(jnp.finfo(dtype).eps))
            warn_or_raise(
                f"The optimizer updates {dtype.name} parameters (`params{path}`), and "
                "its state holds no float32 copy of them: an update below about "
                f"1/{share} of its parameter is rounded away, and training stands "
                f"still without an error. {_KEEP_FLOAT32} Or take "
                "`update_in_float32` and `apply_updates` of `jaxamp_like.storage`, "
                "which round by chance.",
                strict=False,
            )
    return state


def warn_of_float16(grads: Any, params: Any) -> None:
    """Warns of gradients that were cast to float16 after they were unscaled."""
    dtypes = [
        [getattr(x, "dtype", None) for x in jax.tree.leaves(tree)]
        for tree in (grads, params)
    ]
    pairs = zip(*dtypes, strict=False) if len({*map(len, dtypes)}) == 1 else ()
    if any(g == jnp.float16 and p == jnp.float32 for g, p in pairs):
        warn_or_raise(
            "`tx.update` was given float16 gradients of float32 parameters, in which "
            "those below 6e-8 are zero: they were cast, or taken by float16 copies of "
            "the parameters. `tx.value_and_grad` by the float32 parameters gives "
            "float32 gradients.",
            strict=False,
        )


@contextmanager
def explaining_other_parameters(
    optimizer: optax.GradientTransformation, grads: Any, state: Any, params: Any
) -> Iterator[None]:
    """Explains the error of an update whose trees don't match.

    Args:
        optimizer: what is updated.
        grads, state, params: what its `update` is given."""
    try:
        yield
    except (TypeError, ValueError, AttributeError) as e:
        params = grads if params is None else params
        told = difference("`grads`", grads, "`params`", params)
        if not told:
            try:
                made = jax.eval_shape(optimizer.init, params)
            except Exception:  # the parameters aren't arrays alone
                raise e from None
            again = "`tx.init(params).inner_state`"
            told = difference("`opt_state.inner_state`", state, again, made)
        if not told:
            raise
        raise ValueError(
            f"{told}\nGive `tx.init` the parameters that the gradients are taken by, "
            "and `tx.update` the same: of an Equinox model, `eqx.filter(model, "
            "eqx.is_inexact_array)` in both. `tx.value_and_grad` takes gradients by "
            "the first argument of the loss, so let that be the model or the "
            "parameters; `tx.value_and_grad(loss_fn, opt_state, filter=False, "
            "argnums=...)` takes them by another, of arrays alone."
        ) from e


_KEEP_FLOAT32 = (
    "Train float32 parameters, which `amp` casts where they are read: leave "
    '`param_dtype` alone, or take `Policy(param_dtype="float32").cast_to_param('
    "params)`."
)


def _no_arrays(tree: Any) -> list[tuple[str, Any]]:
    return [
        (jax.tree_util.keystr(path), x)
        for path, x in jax.tree_util.tree_leaves_with_path(tree)
        if _is_variable(x) or not (eqx.is_array_like(x) or hasattr(x, "dtype"))
    ]


def _is_variable(x: Any) -> bool:
    """Whether `x` is a variable of Keras."""
    return hasattr(x, "assign") and hasattr(x, "value")


def _instead(leaf: Any) -> str:
    if _is_variable(leaf):
        return "Give its value: `[v.value for v in model.trainable_variables]`."
    return "Of an Equinox model, give `eqx.filter(model, eqx.is_inexact_array)`."


def _float16_in(tree: Any, shapes: Container[Any] | None = None) -> list[str]:
    """The paths of float16 arrays, of any of the shapes that are given."""
    return [
        keystr(path)
        for path, x in jax.tree_util.tree_leaves_with_path(tree)
        if getattr(x, "dtype", None) == jnp.float16
        and (shapes is None or jnp.shape(x) in shapes)
    ]


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
        if is_tracer(one) or not getattr(one, "is_fully_addressable", True):
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
