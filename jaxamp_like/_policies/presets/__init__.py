"""The casting rules of known systems, as policies: `amp(fn, amp_policy=jmp())`.

Each preset is a function that makes a plain policy dict, to be extended by `|` like
`default_amp_policy`. The lists hold the names of JAX's primitives. Docstrings name the
source of each list, by file and commit. Where one op of a system is several primitives
of JAX's (softmax, layer norm), they say which precision follows for it.

All of them differ from their originals in the same ways. Every equation is reached at
any depth. No equation runs in more bits than its author wrote. What the author asked
for explicitly (`precision=`, an `astype`) wins. Casts are made where a value is read,
so that gradients of biases, embeddings and scanned weights add up in float32. Ops that
have no 16-bit kernel, or carry code that was traced in float32, run in float32."""

from .full import full_precision as full_precision
from .jaxamp import jaxamp as jaxamp
from .jmp import jmp as jmp
from .mxnet import mxnet as mxnet
from .pytorch import pytorch_autocast as pytorch_autocast
from .tensorflow import tensorflow_graph_rewrite as tensorflow_graph_rewrite
