"""Numbers in few bits between the steps of a training run, and between devices.

`low_bit_state` stores an optimizer's moments in 8 or 4 bits. `apply_updates` trains
bfloat16 parameters that have no float32 copy. `low_bit_mean` averages gradients over
devices in 8 or 4 bits."""

from ._storage.codes import LowBitArray as LowBitArray
from ._storage.mean import (
    LowBitMeanState as LowBitMeanState,
    low_bit_mean as low_bit_mean,
)
from ._storage.optimizer import (
    LowBitState as LowBitState,
    low_bit_state as low_bit_state,
    to_full_state as to_full_state,
    to_low_bit_state as to_low_bit_state,
)
from ._storage.updates import (
    Float32UpdateState as Float32UpdateState,
    apply_updates as apply_updates,
    update_in_float32 as update_in_float32,
)

__all__ = [
    "Float32UpdateState",
    "LowBitArray",
    "LowBitMeanState",
    "LowBitState",
    "apply_updates",
    "low_bit_mean",
    "low_bit_state",
    "to_full_state",
    "to_low_bit_state",
    "update_in_float32",
]
