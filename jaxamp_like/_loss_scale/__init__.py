"""Dynamic loss scaling: the cure for gradients that underflow in float16.

The loss is multiplied by a scale before differentiation, and the gradients are divided
by it afterwards, both in float32. The scale is a small state that goes in and out of
each step: it falls when gradients overflow, and creeps up while they don't. A step is a
pure function of the state and keeps its types, so a jitted step compiles once.

The scheme is that of Micikevicius et al., "Mixed Precision Training"
(arXiv:1710.03740), section 3.2."""

from .grads import (
    dynamic_scale_grad as dynamic_scale_grad,
    dynamic_scale_tx as dynamic_scale_tx,
    dynamic_scale_value_and_grad as dynamic_scale_value_and_grad,
)
from .guard import guard_step as guard_step
from .host import (
    NonFiniteLeaf as NonFiniteLeaf,
    ScalerEvent as ScalerEvent,
    ScalerLog as ScalerLog,
    check_scaler as check_scaler,
    overflowed_leaves as overflowed_leaves,
)
from .marks import Unscaled as Unscaled
from .merging import merge_scalers as merge_scalers
from .numbers import all_finite as all_finite
from .optimizer import (
    LossScaleState as LossScaleState,
    loss_scale_optimizer as loss_scale_optimizer,
    scale_loss as scale_loss,
    unscale_grads as unscale_grads,
)
from .restoring import restore_scaler as restore_scaler
from .state import (
    DynamicScalerState as DynamicScalerState,
    NoScaler as NoScaler,
    static_scaler as static_scaler,
)
