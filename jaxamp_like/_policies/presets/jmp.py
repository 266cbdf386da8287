"""jmp: inputs are cast beforehand."""

from typing import Any

from ..._errors import explaining_misfits
from ..._rules import use_compute_precision, use_original_precision_locally
from ..dictionary import policy_by_name
from .common import CONTRACTIONS, ComputeUnlessFull, by_name, make_table

_OF_AMP = (
    "The dtype is an argument of `amp`: `amp(fn, compute_dtype='bfloat16', "
    "amp_policy=jmp())`."
)


@explaining_misfits("jmp", lambda *_: [_OF_AMP])
def jmp() -> dict[Any, Any]:
    """Everything in the compute dtype, as if all inputs were cast to it beforehand.

    As `jmp.Policy(param_dtype=float32, compute_dtype=..., output_dtype=float32)` of
    google-deepmind/jmp (`jmp/_src/policy.py`, commit 9c1cdbb) around a function: its
    `cast_to_compute` casts parameters and inputs, and JAX's type promotion does the
    rest. Thus exp, powers, norms and softmax run low. What `jax.numpy` does by itself
    with 16-bit inputs is done here too: `reduce_sum` and `reduce_prod` add up in
    float32 and give a low result. Values that start inside (random numbers, integers
    made floats) are float32 and promote what they meet. Where this differs from jmp:

    - contractions always run low, also where promotion had made an input float32;
    - a constant that 16 bits can't hold (a mask of -1e9, an epsilon of 1e-8) keeps its
      op in float32; constant arrays of the function are cast as inputs are;
    - the carries of loops stay float32 unless a contraction makes them.

    Returns:
        A policy dict.

    >>> policy = jmp() | {"head": "float32"}
    """
    sums = "reduce_sum reduce_prod"
    lists = by_name(
        (f"{CONTRACTIONS} ragged_dot_general ragged_dot", use_compute_precision),
        (sums, use_original_precision_locally),
    )
    return policy_by_name(make_table(ComputeUnlessFull(), lists))
