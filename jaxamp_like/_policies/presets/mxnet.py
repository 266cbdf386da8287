"""MXNet: `amp.init` and `convert_model`."""

from collections.abc import Sequence
from typing import Any

from jax.typing import DTypeLike

from ..._rules import use_compute_precision, use_original_precision
from ..._rules.conditions import param_is, when
from ..dictionary import policy_by_name
from .common import CONTRACTIONS, ListsFor, Op, Promote, by_name, make_table, promote
from .user_lists import check_disjoint, conditions_of, low_dtype, lowerable, names_of

_MXNET_TARGET = CONTRACTIONS

_MXNET_FP32 = {
    "float16": """acos asin atanh cosh sinh tan exp expm1 log log1p log2 pow integer_pow
        square rsqrt erf_inv reduce_sum reduce_prod cumsum digamma lgamma top_k
        approx_top_k""",
    "bfloat16": """acos asin atanh cosh sinh tan expm1 log log1p log2 pow integer_pow
        rsqrt erf_inv reduce_prod cumsum digamma lgamma top_k approx_top_k
        acosh asinh atan atan2 cbrt cos sin erf logistic rem
        abs neg sign ceil floor round clamp max min eq ne lt le gt ge is_finite argmax
        argmin reduce_max reduce_min broadcast_in_dim pad rev squeeze tile
        dynamic_update_slice scatter sort""",
}

_MXNET_WIDEST = {
    "float16": """add add_any sub mul div rem max min eq ne lt le gt ge select_n
        concatenate stack""",
    "bfloat16": "add add_any sub mul div concatenate",
}

# Ops that run in whatever dtype their inputs have.
_MXNET_EITHER = {
    "float16": """tanh logistic erf sin cos sqrt cbrt acosh asinh atan atan2
        reduce_window_sum""",
    "bfloat16": "tanh exp sqrt square reduce_sum reduce_window_sum",
}


def mxnet(
    dtype: DTypeLike = "float16",
    *,
    target: Sequence[Op] = (),
    fp32: Sequence[Op] = (),
    widest: Sequence[Op] = (),
    either: Sequence[Op] = (),
    conditional: Sequence[tuple[Op, str, Sequence[Any]]] = (),
) -> dict[Any, Any]:
    """The op lists of MXNet's AMP: target dtype, float32, widest, either, conditional.

    As `python/mxnet/amp/lists/symbol_fp16.py` and `symbol_bf16.py` of MXNet (commit
    b84609d3). Ops of the *target* list run low and those of the *float32* list in
    float32. Ops of the *widest* list run in the widest dtype among their inputs, ops of
    the *either* list in the dtype that they are given. Ops of the *conditional* list
    run in float32 where one of their parameters has certain values. The float16 lists
    keep the exp and power families, sums and norms in float32. The bfloat16 lists keep
    all but some fifty ops there, movement of data among them, so that casts abound.
    Where JAX forces a difference:

    - FullyConnected, einsum and matmul are on the target list and `dot` on the widest;
      all are `dot_general` here, which runs low. (For bfloat16, einsum and matmul are
      on the float32 list.);
    - a bias is added by `add` here, and inside of the layer there: a parameter that is
      smaller than what it is added to does not make an `add` run in float32;
    - softmax, norms and losses are no ops here: their exp, powers and sums decide. By
      the bfloat16 lists exp and sums run low, as softmax and LayerNorm do there, but
      without the float32 accumulators of MXNet's kernels;
    - MXNet's own conditional list (softplus, elu and selu as activations) is empty
      here, for JAX makes these of exp and log1p. To match `Activation("relu")` of the
      bfloat16 lists, give `either=["max"]`;
    - an op of the either list whose inputs differ runs in the widest of their dtypes;
    - movement that only JAX has is on the either list, other ops on the float32 list;
    - constants don't make an op run in float32, unless the compute dtype can't hold
      them.

    An op that is given leaves the list that it was in; one that is given in two lists
    is an error, as it is there. To take an op from the target, float32 or widest list,
    give it in `either`.

    Args:
        dtype: which lists: "float16" or "bfloat16". `amp` computes in it, unless it is
            given another `compute_dtype`.
        target: primitives, or their names, that run in the compute dtype.
        fp32: those that run in float32.
        widest: those that run in the widest dtype among their inputs.
        either: those that run in the dtype of their inputs.
        conditional: tuples `(op, parameter, values)`: in float32 where the parameter
            has one of the values, and else by the built-in list that the op is in.
    Returns:
        A policy dict.
    Raises:
        TypeError: an argument is no sequence of primitives or names.
        ValueError: there are no lists for `dtype`.
        AmpError: an op is in two lists, is not known, or has no low kernel.

    >>> policy = mxnet("bfloat16", either=["max"], fp32=["exp"])
    >>> policy = mxnet(conditional=[("integer_pow", "y", [3])], either=["integer_pow"])
    Traceback (most recent call last):
        ...
    jaxamp_like._errors.AmpError: `integer_pow` is in two lists: either and conditional.
    """
    name = low_dtype(dtype)
    conditions = conditions_of(conditional)
    given = {
        "target": names_of(target, "target"),
        "fp32": names_of(fp32, "fp32", may_be_fixed=True),
        "widest": names_of(widest, "widest"),
        "either": names_of(either, "either"),
        "conditional": frozenset(op for op, _, _ in conditions),
    }
    check_disjoint(given)
    lists = by_name(
        (_MXNET_TARGET, use_compute_precision),
        (_MXNET_FP32[name], use_original_precision),
        (_MXNET_WIDEST[name], promote),
        (_MXNET_EITHER[name], promote),
        ("add", Promote(bias=True)),
    )
    rules = {
        "target": use_compute_precision,
        "fp32": use_original_precision,
        "widest": promote,
        "either": promote,
    }
    table = make_table(use_original_precision, lists, moving=promote)
    table |= lowerable({op: rule for key, rule in rules.items() for op in given[key]})
    for op, parameter, values in conditions:
        holds = param_is(parameter, *values)
        table[op] = when(holds, use_original_precision, table[op])
    return ListsFor(policy_by_name(table), name)
