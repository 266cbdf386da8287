"""Mixed precision in one call: the loss and the optimizer together."""

import inspect
import warnings
from collections.abc import Callable, Sequence
from typing import Any, NoReturn, ParamSpec, TypeVar

import jax
import jax.numpy as jnp
import optax
from jax.typing import ArrayLike, DTypeLike

from ._amp import amp
from ._errors import AmpWarning
from ._loss_scale.agree import AxisName
from ._loss_scale.calls import SETTINGS, with_call_hints
from ._loss_scale.optimizer import LossScaleOptimizer, loss_scale_optimizer
from ._loss_scale.state import NoScaler, Scaler
from ._never_mixed import Watch
from ._policies.settings import PolicyLike, may_compute_in, settings_of
from ._rewrite.switch import is_amp_disabled, of_a_loss_to_be_scaled

_P = ParamSpec("_P")
_R = TypeVar("_R")

_ELSEWHERE = SETTINGS | {"dtype": "compute_dtype", "policy": "amp_policy"}


@with_call_hints("enable_amp(loss_fn, optimizer, compute_dtype='float16')", _ELSEWHERE)
def enable_amp(
    loss_fn: Callable[_P, _R],
    optimizer: optax.GradientTransformation,
    *,
    compute_dtype: DTypeLike | None = None,
    amp_policy: PolicyLike | None = None,
    argnums: int | Sequence[int] | None = None,
    scaler: str | ArrayLike | Scaler | None = "auto",
    axis_name: AxisName = None,
) -> tuple[Callable[_P, _R], LossScaleOptimizer]:
    """Makes a loss in mixed precision, and an optimizer that computes its gradients.

    In a `disable_amp()` block both compute what they would without this call, and the
    training code around them can stay.

    Args:
        loss_fn: returns a loss, or a loss and more; see `amp`.
        optimizer: any Optax optimizer; see `loss_scale_optimizer`.
        compute_dtype: as for `amp`.
        amp_policy: as for `amp`.
        argnums: as for `amp`.
        scaler: as for `loss_scale_optimizer`; "auto" is "dynamic" if the compute dtype
            is float16, or that of a scope or a rule of the policy, and None otherwise.
        axis_name: as for `loss_scale_optimizer`.
    Returns:
        `amp(loss_fn)` and the wrapped optimizer, whose `value_and_grad` scales the loss
        and unscales the gradients; its `update` takes no others. The optimizer warns if
        it is given a loss without `amp` whose contractions all run in full precision.
    Raises:
        TypeError, ValueError: as for `amp` and `loss_scale_optimizer`.

    >>> mixed, tx = enable_amp(lambda w: jnp.vdot(w, w), optax.sgd(0.5))
    >>> w = jnp.ones(2)
    >>> opt_state = tx.init(w)
    >>> loss, grads = tx.value_and_grad(mixed, opt_state)(w)
    >>> updates, opt_state = tx.update(grads, opt_state, w)
    >>> updates
    Array([-1., -1.], dtype=float32)

    It is modelled on TensorFlow's `enable_mixed_precision_graph_rewrite`."""
    if hasattr(loss_fn, "update") and not hasattr(optimizer, "update"):
        raise TypeError(
            "`loss_fn` is an optimizer. The loss comes first: "
            "`enable_amp(loss_fn, optimizer)`."
        )
    if not callable(loss_fn):
        raise TypeError(
            f"`loss_fn` must be a function, but was given a {type(loss_fn).__name__}. "
            "Give the loss, not what it returns: `enable_amp(loss_fn, optimizer)`."
        )
    settings = settings_of(amp_policy, compute_dtype)
    narrow = may_compute_in(settings, jnp.dtype(jnp.float16))
    if isinstance(scaler, str) and scaler == "auto":
        scaler = "dynamic" if narrow else None
    if is_amp_disabled():
        scaler = None
    elif narrow and (scaler is None or isinstance(scaler, NoScaler)):
        warnings.warn(
            "Loss scaling is off, but the loss is still rewritten to float16: "
            'gradients below 6e-8 become zero. Leave `scaler` at "auto", or compute in '
            "bfloat16.",
            AmpWarning,
            stacklevel=3,  # beyond the decorator
        )
    wrapped = loss_scale_optimizer(optimizer, scaler, axis_name=axis_name)
    if not is_amp_disabled():
        wrapped.watch = Watch(expects_float16=narrow or wrapped.scales)
    with of_a_loss_to_be_scaled():
        mixed = amp(
            loss_fn, compute_dtype=compute_dtype, amp_policy=amp_policy, argnums=argnums
        )
    if mixed is not loss_fn and inspect.isfunction(mixed):
        vars(mixed)["init"] = _of_the_optimizer
    if wrapped.watch is not None:
        wrapped.watch.loss = inspect.unwrap(mixed)
    return Enabled((mixed, wrapped))


@jax.tree_util.register_pytree_with_keys_class
class Enabled(tuple[Any, Any]):
    """What `enable_amp` returns: a pair, which says so if it is called."""

    def __call__(self, *_: Any, **__: Any) -> NoReturn:
        raise TypeError(_TWO)

    def __getattr__(self, name: str) -> NoReturn:
        hint = f" {_TWO}" * (not name.startswith("_"))
        raise AttributeError(f"'tuple' object has no attribute {name!r}.{hint}")

    def tree_flatten_with_keys(self) -> Any:
        return [(jax.tree_util.SequenceKey(i), x) for i, x in enumerate(self)], None

    @classmethod
    def tree_unflatten(cls, _: None, children: Any) -> "Enabled":
        return cls(children)


_TWO = (
    "`enable_amp` returns two things, the loss and the optimizer. Write `mixed, tx = "
    "enable_amp(loss_fn, optimizer)`."
)


def _of_the_optimizer(*_: Any) -> NoReturn:
    raise TypeError(
        "This is the loss, and `init` is of the optimizer: `enable_amp` returns the "
        "loss first. Write `mixed, tx = enable_amp(loss_fn, optimizer)`."
    )
