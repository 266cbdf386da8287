"""Dynamic loss scaling: the cure for gradients that underflow in float16.

Begin with `loss_scale_optimizer` (for Optax) or `dynamic_scale_value_and_grad`; the
rest is for looking at a scale, saving it, and steering it."""

from ._loss_scale import (
    DynamicScalerState as DynamicScalerState,
    LossScaleState as LossScaleState,
    NonFiniteLeaf as NonFiniteLeaf,
    NoScaler as NoScaler,
    ScalerEvent as ScalerEvent,
    ScalerLog as ScalerLog,
    Unscaled as Unscaled,
    all_finite as all_finite,
    check_scaler as check_scaler,
    dynamic_scale_grad as dynamic_scale_grad,
    dynamic_scale_tx as dynamic_scale_tx,
    dynamic_scale_value_and_grad as dynamic_scale_value_and_grad,
    guard_step as guard_step,
    loss_scale_optimizer as loss_scale_optimizer,
    merge_scalers as merge_scalers,
    overflowed_leaves as overflowed_leaves,
    restore_scaler as restore_scaler,
    scale_loss as scale_loss,
    static_scaler as static_scaler,
    unscale_grads as unscale_grads,
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
