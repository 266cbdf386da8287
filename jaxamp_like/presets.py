"""The policies of other mixed-precision systems, op by op; and variants of the default:
8-bit contractions, full sums over devices.

Each is a function that returns a policy: `amp(fn, amp_policy=pytorch_autocast())`."""

from ._policies.over_devices import full_sums_over_devices as full_sums_over_devices
from ._policies.presets import (
    full_precision as full_precision,
    jaxamp as jaxamp,
    jmp as jmp,
    mxnet as mxnet,
    pytorch_autocast as pytorch_autocast,
    tensorflow_graph_rewrite as tensorflow_graph_rewrite,
)
from ._policies.quantised import quantised as quantised

__all__ = [
    "full_precision",
    "full_sums_over_devices",
    "jaxamp",
    "jmp",
    "mxnet",
    "pytorch_autocast",
    "quantised",
    "tensorflow_graph_rewrite",
]
