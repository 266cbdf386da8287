"""Loss scaling as a wrapper around an Optax optimizer."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax import Array
from jax.typing import ArrayLike

from ._agree import AxisName, agreed
from ._numbers import all_finite, checked_loss, select
from ._state import (
    DynamicScalerState,
    NoScaler,
    Scaler,
    is_scaler,
    static_scaler,
)


class LossScaleState(NamedTuple):
    """The state of a `loss_scale_optimizer`.

    Args:
        scaler: the scale and what it remembers.
        inner_state: the wrapped optimizer's."""

    scaler: Scaler
    inner_state: Any


class LossScaleOptimizer(optax.GradientTransformationExtraArgs):
    """What `loss_scale_optimizer` makes: known by its type, so as not to wrap twice."""

    __slots__ = ()


def loss_scale_optimizer(
    optimizer: optax.GradientTransformation,
    scaler: str | ArrayLike | Scaler | None = "dynamic",
    *,
    axis_name: AxisName = None,
) -> LossScaleOptimizer:
    """Wraps an optimizer so that it takes the gradients of a scaled loss.

    It unscales them, and adapts the scale. Where they are not finite it skips the step:
    updates are zero, and the wrapped optimizer's state (moments, step count) stays as
    it is, bit for bit. Scale the loss by `scale_loss(loss, opt_state)`.

    What needs true gradients stands within: `loss_scale_optimizer(optax.chain(
    optax.clip_by_global_norm(1.0), optax.adam(1e-3)))`. So do `optax.apply_if_finite`
    and `optax.MultiSteps`, which would otherwise hide overflows or keep a NaN. Around
    `MultiSteps` each microbatch is unscaled by the scale that it was made with: one
    that overflows is dropped and lowers the scale at once; otherwise the scale changes
    at the end of an optimizer step only.

    Args:
        optimizer: any Optax optimizer; extra arguments of `update` are handed on.
        scaler: "dynamic"; a number, for a scale that never changes; a state, which may
            be dynamic with settings of your own; or None to scale and skip nothing.
        axis_name: axes of `jax.shard_map` or `jax.pmap` whose devices hold different
            gradients, so that all of them skip a step, or none. Where `shard_map` keeps
            track of what varies (`check_vma=True`), they need not be named.
    Returns:
        An optimizer whose state is a `LossScaleState`.
    Raises:
        TypeError: an argument is of another kind.
        ValueError: the optimizer already scales, itself or (found by `init`) within.

    >>> tx = loss_scale_optimizer(optax.sgd(0.5), scaler=1024)
    >>> w = jnp.array(3.0)
    >>> opt_state = tx.init(w)
    >>> grads = jax.grad(lambda w: scale_loss(w**2, opt_state))(w)
    >>> updates, opt_state = tx.update(grads, opt_state, w)
    >>> float(grads), float(updates)
    (6144.0, -3.0)

    After Keras' `LossScaleOptimizer` and Micikevicius et al., arXiv:1710.03740."""
    if isinstance(optimizer, LossScaleOptimizer):
        raise ValueError(_TWICE)
    if not (hasattr(optimizer, "init") and hasattr(optimizer, "update")):
        raise TypeError(
            "`optimizer` must be an Optax optimizer (a `GradientTransformation`), but "
            f"was given {type(optimizer).__name__}.\nFor example, "
            "`loss_scale_optimizer(optax.adam(1e-3))`."
        )
    first = _first_state(scaler)
    inner_update = optax.with_extra_args_support(
        optax.GradientTransformationExtraArgs(optimizer.init, optimizer.update)
        if not isinstance(optimizer, optax.GradientTransformation)
        else optimizer
    ).update

    def init(params: Any) -> LossScaleState:
        inner_state = optimizer.init(params)
        if _scale_states(inner_state):
            raise ValueError(_TWICE)
        return LossScaleState(first, inner_state)

    def update(
        grads: Any, state: Any, params: Any = None, **extra: Any
    ) -> tuple[Any, LossScaleState]:
        scaler, inner_state = _checked_state(state)
        grads = scaler.unscale(grads)
        updates, new_inner = inner_update(grads, inner_state, params, **extra)
        if isinstance(scaler, NoScaler):
            return updates, LossScaleState(scaler, new_inner)
        finite = agreed(all_finite(grads), axis_name, like=scaler.scaler)
        following = scaler.update(finite)
        # Selected and not branched: a branch would have to wait with all gradients
        # written out, while these selections are part of the update itself. They ask
        # the state, for the flag itself is an `and` over all leaves, which XLA would
        # copy into each of them. A zero that is negative leaves even -0.0 as it is.
        zeros = jax.tree.map(lambda u: jnp.full_like(u, -0.0), updates)
        updates = following.accept(updates, zeros)
        new_inner = following.accept(new_inner, inner_state)
        is_due = (following.overflows > 0) | _is_step(new_inner)
        following = select(is_due, following, scaler)
        return updates, LossScaleState(following, new_inner)

    return LossScaleOptimizer(init, update)  # pyright: ignore


def scale_loss(loss: ArrayLike, opt_state: Any) -> Array:
    """A loss times the scale that an optimizer's state holds.

    Args:
        loss: a floating-point scalar. Several losses may be scaled by one state, and
            their gradients added up or handed over together.
        opt_state: the state of a `loss_scale_optimizer`, or any tree that holds one.
    Returns:
        The scaled loss in float32 (float64 for a float64 loss).
    Raises:
        TypeError: `loss` is no such scalar.
        ValueError: `opt_state` holds no scale, several, or one in the wrong place.

    >>> opt_state = loss_scale_optimizer(optax.sgd(0.1), 1024).init(jnp.ones(2))
    >>> float(scale_loss(jnp.float16(2), opt_state))
    2048.0
    """
    found = _scale_states(opt_state)
    if len(found) != 1:
        raise ValueError(
            f"`opt_state` must hold one loss scale, but holds {len(found)}.\nGive the "
            "state of the optimizer that `loss_scale_optimizer` made."
        )
    for wrapper, name in _OUTSIDE.items():
        if any(_scale_states(one) for one in _instances(opt_state, wrapper)):
            raise ValueError(
                f"`optax.{name}` is around `loss_scale_optimizer`, and would keep "
                "overflows from it, or a NaN in its own state for good.\nPut it "
                f"within: `loss_scale_optimizer(optax.{name}(...))`."
            )
    return found[0].scaler.scale(checked_loss(loss))


_TWICE = (
    "`optimizer` already scales the loss: a second `loss_scale_optimizer` would "
    "unscale the gradients twice.\nWrap the outermost optimizer only, and once."
)
_OUTSIDE = {
    optax.ApplyIfFiniteState: "apply_if_finite",
    optax.MultiStepsState: "MultiSteps",
}


def _instances(tree: Any, cls: type) -> list[Any]:
    leaves = jax.tree.leaves(tree, is_leaf=lambda x: isinstance(x, cls))
    return [leaf for leaf in leaves if isinstance(leaf, cls)]


def _scale_states(tree: Any) -> list[LossScaleState]:
    return _instances(tree, LossScaleState)


def _is_step(inner_state: Any) -> Array:
    """Whether a step of the optimizer is complete, as `optax.MultiSteps` counts."""
    done = jnp.array(True)
    for one in _instances(inner_state, optax.MultiStepsState):
        done &= one.mini_step == 0
    return done


def _first_state(scaler: Any) -> Scaler:
    if is_scaler(scaler):
        return scaler
    if scaler is None:
        return NoScaler()
    if isinstance(scaler, str):
        if scaler == "dynamic":
            return DynamicScalerState()
        raise ValueError(
            f'`scaler` must be "dynamic", a number, a state or None, but was given '
            f"{scaler!r}."
        )
    if isinstance(scaler, dict | list | tuple):
        raise TypeError(
            f"`scaler` must be one state, but was given a {type(scaler).__name__}.\n"
            "An optimizer sees gradients of one scaled loss; scales by group are for "
            "`dynamic_scale_grad`."
        )
    return static_scaler(scaler)


def _checked_state(state: Any) -> LossScaleState:
    if not isinstance(state, LossScaleState):
        raise TypeError(
            "`update` of a `loss_scale_optimizer` was given a state of type "
            f"{type(state).__name__}, and needs the `LossScaleState` that its `init` "
            "or its last `update` returned.\nTo go on from a checkpoint without one, "
            "take `init(params)._replace(inner_state=...)`."
        )
    return state
