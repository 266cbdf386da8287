"""The policies of other mixed-precision systems, op by op.

Each is a function that returns a policy: `amp(fn, amp_policy=pytorch_autocast())`."""

from ._policies.presets import (
    full_precision as full_precision,
    jaxamp as jaxamp,
    jmp as jmp,
    mxnet as mxnet,
    pytorch_autocast as pytorch_autocast,
    tensorflow_graph_rewrite as tensorflow_graph_rewrite,
)

__all__ = [
    "full_precision",
    "jaxamp",
    "jmp",
    "mxnet",
    "pytorch_autocast",
    "tensorflow_graph_rewrite",
]
