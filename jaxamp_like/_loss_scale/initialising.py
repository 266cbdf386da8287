"""Makes the first state of an optimizer, and checks the parameters it is made of."""

from collections.abc import Container, Iterator
from contextlib import contextmanager
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import optax
from jax.tree_util import keystr

from .._errors import warn_or_raise
from .._frameworks.nnx import instances_in
from .._storage.optimizer import LowBitState, to_full_state
from .._storage.rounded_updates import KEEP_FLOAT32, warn_of_rounded_updates
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
    is_low = instances_in(state, LowBitState)
    full = jax.eval_shape(to_full_state, state) if is_low else state
    low = _float16_in(full, shapes - {()})
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
            f"updates infinite. {KEEP_FLOAT32}",
            strict=False,
        )
    else:
        warn_of_rounded_updates(optimizer, params, state)
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
