"""Makes the first state of an optimizer, and checks the parameters it is made of."""

from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import optax

from .._errors import warn_or_raise


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
    if low := _float16_in(params) and _float16_in(state):
        warn_or_raise(
            f"The optimizer keeps float16 numbers (`{low[0]}`) for float16 parameters: "
            "squares of small gradients and an epsilon of 1e-8 are zero there, and "
            "updates infinite. Train float32 parameters, which `amp` casts where they "
            "are read: leave `param_dtype` alone, or take "
            '`Policy(param_dtype="float32").cast_to_param(params)`.',
            strict=False,
        )
    return state


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


def _float16_in(tree: Any) -> list[str]:
    return [
        jax.tree_util.keystr(path)
        for path, x in jax.tree_util.tree_leaves_with_path(tree)
        if getattr(x, "dtype", None) == jnp.float16
    ]
