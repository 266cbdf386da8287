"""Dynamic loss scaling: the cure for gradients that underflow in float16.

Begin with `loss_scale_optimizer` (for Optax) or `dynamic_scale_value_and_grad`; the
rest is for looking at a scale, saving it, and steering it."""

from ._loss_scale.arithmetic import all_finite as all_finite
from ._loss_scale.by_hand import (
    scale_loss as scale_loss,
    unscale_grads as unscale_grads,
)
from ._loss_scale.grads import (
    dynamic_scale_grad as dynamic_scale_grad,
    dynamic_scale_tx as dynamic_scale_tx,
    dynamic_scale_value_and_grad as dynamic_scale_value_and_grad,
)
from ._loss_scale.guard import guard_step as guard_step
from ._loss_scale.host import (
    NonFiniteLeaf as NonFiniteLeaf,
    ScalerEvent as ScalerEvent,
    ScalerLog as ScalerLog,
    check_scaler as check_scaler,
    overflowed_leaves as overflowed_leaves,
)
from ._loss_scale.marks import Unscaled as Unscaled
from ._loss_scale.merging import merge_scalers as merge_scalers
from ._loss_scale.optimizer import loss_scale_optimizer as loss_scale_optimizer
from ._loss_scale.optimizer_state import LossScaleState as LossScaleState
from ._loss_scale.restoring import restore_scaler as restore_scaler
from ._loss_scale.state import (
    DynamicScalerState as DynamicScalerState,
    NoScaler as NoScaler,
    static_scaler as static_scaler,
)

__all__ = [
    "DynamicScalerState",
    "LossScaleState",
    "NoScaler",
    "NonFiniteLeaf",
    "ScalerEvent",
    "ScalerLog",
    "Unscaled",
    "all_finite",
    "check_scaler",
    "dynamic_scale_grad",
    "dynamic_scale_tx",
    "dynamic_scale_value_and_grad",
    "guard_step",
    "loss_scale_optimizer",
    "merge_scalers",
    "overflowed_leaves",
    "restore_scaler",
    "scale_loss",
    "static_scaler",
    "unscale_grads",
]
