"""PyTorch: `torch.autocast`."""

from typing import Any

from ..._rules import use_compute_precision, use_original_precision
from ..dictionary import policy_by_name
from .common import CONTRACTIONS, Promote, by_name, make_table, promote

# Run in float32: `AT_FORALL_FP32`; and `AT_FORALL_FP32_SET_OPT_DTYPE`, the sums and
# products that give float32 results unless told otherwise.
_TORCH_FP32 = """acos asin cosh cumlogsumexp erf_inv exp expm1 integer_pow log log1p
    log2 pow rsqrt sinh square tan
    cumprod cumsum reduce_prod reduce_sum"""

# These ops have no bfloat16 kernel on CPUs. The rest of PyTorch's list (linear algebra,
# fft) has none in JAX either.
_TORCH_CPU_FP32 = "reduce_prod"


def pytorch_autocast(device_type: str = "cuda") -> dict[Any, Any]:
    """The op lists of `torch.autocast`: low, float32, and promotion for all else.

    As `aten/src/ATen/autocast_mode.h` (commit d70fe7f3) and `autocast_mode.cpp` (commit
    008ec6b1) of PyTorch. For "cuda" matrix products and convolutions run low; the exp,
    log and power families, sums and cumulative sums, and norms and losses run in
    float32. This list is the same for float16 and bfloat16. For "cpu", made for
    bfloat16, only what lacks a kernel runs in float32: exp, sums and softmax do not.
    Every other op runs in the dtype that its inputs promote to, so that one float32
    input makes the result float32. Where JAX forces a difference:

    - a bias is added by `add` here and inside of linear and convolution layers there: a
      parameter smaller than what it is added to does not promote. A parameter in any
      other op (a scale, a gate) does, as in PyTorch;
    - softmax, norms and losses are no ops here. On "cuda" their exp, rsqrt and sums run
      in float32, and so does what promotion reaches from there; the subtraction of a
      softmax's maximum and what comes before a norm's first sum do not;
    - `reciprocal` (float32 there) is `div` here, which promotes, and `addcmul`, `cross`
      and their like (promoted) are made of what promotes;
    - `bernoulli`, dropout and random numbers are float32 where they are drawn;
    - constants don't promote, like Python numbers there, unless the compute dtype can't
      hold them; JAX broadcasts a 0-dimensional array before it is combined with another
      array, so it promotes like any array.

    Args:
        device_type: "cuda" (XPU and MPS are alike) or "cpu".
    Returns:
        A policy dict. Pass the low dtype as `compute_dtype` to `amp`: PyTorch's own
        defaults are float16 for "cuda" and bfloat16 for "cpu".
    Raises:
        ValueError: no such device type is known.

    >>> from jax import lax
    >>> policy = pytorch_autocast("cpu") | {lax.exp_p: "float32"}
    """
    full = {"cuda": _TORCH_FP32, "cpu": _TORCH_CPU_FP32}
    if device_type not in full:
        raise ValueError(
            f"`device_type` must be 'cuda' or 'cpu', but got {device_type!r}. The "
            "lists are the same for float16 and bfloat16: give `amp` the one that you "
            "want as `compute_dtype`."
        )
    lists = by_name(
        (CONTRACTIONS, use_compute_precision),
        (full[device_type], use_original_precision),
        ("add", Promote(bias=True)),
    )
    return policy_by_name(make_table(promote, lists, moving=promote))
