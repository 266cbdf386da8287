"""The casting rules of known systems, as policies: `amp(fn, amp_policy=jmp())`.

Each preset is a function that makes a plain policy dict, to be extended by `|` like
`default_amp_policy`. The lists are written in the names of JAX's primitives. The
sources are those of the systems, by file and commit; where one op of theirs is several
primitives of JAX's (softmax, layer norm), the docstring says what follows.

Common to all of them, and unlike their originals: every equation is reached at any
depth; no equation runs in more bits than its author wrote; what the author asked for
explicitly (`precision=`, an `astype`) wins; casts are made where a value is read, so
that gradients of biases, embeddings and scanned weights add up in float32; and what has
no 16-bit kernel, or carries code that was traced in float32, runs in float32."""

from .full import full_precision as full_precision
from .jaxamp import jaxamp as jaxamp
from .jmp import jmp as jmp
from .mxnet import mxnet as mxnet
from .pytorch import pytorch_autocast as pytorch_autocast
from .tensorflow import tensorflow_graph_rewrite as tensorflow_graph_rewrite
