"""`scale_loss` and `unscale_grads`: the parts of `value_and_grad` of an optimizer.

They are for transforms that differentiate in another way."""

from contextlib import AbstractContextManager
from contextvars import ContextVar
from typing import Any

from jax import Array
from jax.typing import ArrayLike

from .._errors import hiding_frames
from .._within import within
from .agree import AxisName, all_agree
from .arithmetic import all_finite, checked_loss
from .marks import Verdict, marked, refuse_marked
from .optimizer_state import scale_states, scaler_of
from .state import NoScaler, Scaler


@hiding_frames
def scale_loss(loss: ArrayLike, opt_state: Any) -> Array:
    """A loss times the scale that an optimizer's state holds.

    Args:
        loss: a floating-point scalar. Several losses may be scaled by one state, and
            their gradients added up or handed over together.
        opt_state: the state of a `loss_scale_optimizer`, or any tree that holds one.
    Returns:
        The scaled loss in float32 (float64 for a float64 loss).
    Raises:
        TypeError: `loss` is no such scalar, or it stands in a function whose loss is
            scaled by this state anyway.
        ValueError: `opt_state` holds no scale, several, or one in the wrong place.

    >>> import jax, jax.numpy as jnp, optax
    >>> from jaxamp_like import loss_scale_optimizer
    >>> opt_state = loss_scale_optimizer(optax.sgd(0.1), 1024).init(jnp.ones(2))
    >>> float(scale_loss(jnp.float16(2), opt_state))
    2048.0
    """
    _refuse_changed_places("scale_loss(loss, opt_state)", loss, opt_state)
    scaler = scaler_of(opt_state)
    scale = getattr(scaler, "scaler", None)
    if scale is not None and any(scale is one for one in _scales.get()):
        raise TypeError(_SCALED_TWICE)
    return scaler.scale(checked_loss(loss))


# The scales of the losses that are running in calls of `value_and_grad` or `grad`.
_scales: ContextVar[tuple[Any, ...]] = ContextVar("scales", default=())


def scaling_by(scaler: Scaler) -> AbstractContextManager[None]:
    """A context for a loss that is scaled by `scaler` already."""
    return within(_scales, (*_scales.get(), getattr(scaler, "scaler", None)))


@hiding_frames
def unscale_grads(grads: Any, opt_state: Any) -> Any:
    """Unscales gradients of a loss that `scale_loss` has scaled, for `update`.

    `scale_loss` and this function are for other transforms than `value_and_grad` and
    `grad` of the optimizer, which scale and unscale by themselves.

    Args:
        grads: any pytree.
        opt_state: the state that the loss was scaled by.
    Returns:
        The gradients over the scale, each in its own dtype, marked as `Unscaled`. If
        any is not finite, all are NaN.
    Raises:
        TypeError: gradients are unscaled already.
        ValueError: `opt_state` holds no scale, several, or one in the wrong place.

    >>> import jax, jax.numpy as jnp, optax
    >>> from jaxamp_like import loss_scale_optimizer
    >>> tx = loss_scale_optimizer(optax.sgd(0.5))
    >>> opt_state = tx.init(w := jnp.array(3.0))
    >>> grads = jax.jacrev(lambda w: scale_loss(w**2, opt_state))(w)
    >>> unscale_grads(grads, opt_state)
    Unscaled(6.0)
    """
    _refuse_changed_places("unscale_grads(grads, opt_state)", grads, opt_state)
    scaler = scaler_of(opt_state)
    refuse_marked(grads)
    grads = scaler.unscale(grads)
    if isinstance(scaler, NoScaler):
        return marked(grads, None)
    finite = all_agree(all_finite(grads), like=scaler.scaler)
    return marked(grads, verdict_on(scaler, scaler.update(finite), None))


def _refuse_changed_places(call: str, first: Any, opt_state: Any) -> None:
    if scale_states(first) and not scale_states(opt_state):
        raise TypeError(f"The two arguments have changed places. Write `{call}`.")


def verdict_on(
    scaler: Scaler, following: Scaler, axis_name: AxisName
) -> Verdict | None:
    """The verdict on gradients, from the states before and after a step.

    It is `None` for `NoScaler`."""
    if isinstance(following, NoScaler) or isinstance(scaler, NoScaler):
        return None
    # Not the flag itself, for the reason that `update` gives.
    return Verdict(following.overflows == 0, axis_name, scaler.scaler)


_SCALED_TWICE = (
    "`scale_loss` was called in a function whose loss `tx.value_and_grad` or `tx.grad` "
    "scales by the same state: gradients would be too large by the scale.\nReturn the "
    "loss as it is. For a gradient within the loss, scale by `opt_state.scaler.scale` "
    "and unscale by `opt_state.scaler.unscale`."
)
