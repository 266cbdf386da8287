"""Each preset against what its original has published, op by op.

The tables below are facts about other systems: the name of an op there, and the
primitive of JAX that does the same. What is checked is the dtype in which the primitive
runs in the rewritten jaxpr, for several origins of its operands. Nothing is run."""

from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax import lax
from jax.extend.core import Primitive

from benchmarks.measure import walk
from jaxamp_like import AmpError, amp, default_amp_policy
from jaxamp_like._policies.presets import (
    full_precision,
    jaxamp,
    jmp,
    mxnet,
    pytorch_autocast,
    tensorflow_graph_rewrite,
)
from jaxamp_like.rules import follow_inputs

pytestmark = pytest.mark.quick

SIZE = 8
F32 = "float32"

Array = jax.Array
Op = Callable[[Array, Array], Array]


def _unary(name: str) -> Op:
    return lambda x, y: getattr(lax, name)(x)


def _conv(x: Array, y: Array) -> Array:
    return lax.conv(x[None, None], y[None, None], (1, 1), "SAME")


# What binds each primitive, given two float arrays of (8, 8).
OPS: dict[str, Op] = {
    name: _unary(name)
    for name in """abs acos acosh asin asinh atan atanh cbrt ceil cos cosh digamma erf
        erf_inv erfc exp exp2 expm1 floor is_finite lgamma log log1p log2 logistic neg
        round rsqrt sign sin sinh sort sqrt square tan tanh""".split()
    if hasattr(lax, name)  # some came with a later JAX
} | {
    name: getattr(lax, name)
    for name in "add atan2 div eq ge gt le lt max min mul ne pow rem sub".split()
}
OPS |= {
    "dot_general": lambda x, y: x @ y,
    "conv_general_dilated": _conv,
    "integer_pow": lambda x, y: lax.integer_pow(x, 3),
    "reduce_sum": lambda x, y: jnp.sum(x, 0),
    "reduce_prod": lambda x, y: jnp.prod(x, 0),
    "reduce_max": lambda x, y: jnp.max(x, 0),
    "reduce_min": lambda x, y: jnp.min(x, 0),
    "argmax": lambda x, y: jnp.argmax(x, 0),
    "argmin": lambda x, y: jnp.argmin(x, 0),
    "cumsum": lambda x, y: lax.cumsum(x),
    "cumprod": lambda x, y: lax.cumprod(x),
    "cumlogsumexp": lambda x, y: lax.cumlogsumexp(x),
    "reduce_window_sum": lambda x, y: lax.reduce_window(
        x, 0.0, lax.add, (2, 2), (1, 1), "SAME"
    ),
    "reduce_window_max": lambda x, y: lax.reduce_window(
        x, -jnp.inf, lax.max, (2, 2), (1, 1), "SAME"
    ),
    "top_k": lambda x, y: lax.top_k(x, 4)[0],
    "approx_top_k": lambda x, y: lax.approx_max_k(x, 4)[0],
    "clamp": lambda x, y: lax.clamp(0.25, x, 0.75),
    "select_n": lambda x, y: lax.select(jnp.ones(x.shape, bool), x, y),
    "concatenate": lambda x, y: lax.concatenate([x, y], 0),
    "pad": lambda x, y: lax.pad(x, 0.0, [(0, 1, 0), (0, 0, 0)]),
    "reshape": lambda x, y: lax.reshape(x, (4, 2, SIZE)),
    "squeeze": lambda x, y: lax.squeeze(lax.slice(x, (0, 0), (1, SIZE)), (0,)),
    "transpose": lambda x, y: lax.transpose(x, (1, 0)),
    "broadcast_in_dim": lambda x, y: lax.broadcast(x, (2,)),
    "rev": lambda x, y: lax.rev(x, (0,)),
    "slice": lambda x, y: lax.slice(x, (0, 0), (4, SIZE)),
    "split": lambda x, y: lax.split(x, (4, 4))[0],
    "dynamic_slice": lambda x, y: lax.dynamic_slice(x, (0, 0), (4, SIZE)),
    "dynamic_update_slice": lambda x, y: lax.dynamic_update_slice(x, y, (0, 0)),
    "gather": lambda x, y: jnp.take(x, jnp.arange(4), axis=0, mode="clip"),
    "scatter": lambda x, y: x.at[jnp.arange(SIZE)].set(y),
}


# Where the operands come from: `x`, `w`, `p` are inputs of the function.
ORIGINS: dict[str, Callable[[Array, Array, Array], tuple[Array, Array]]] = {
    "low": lambda x, w, p: (x @ w, w @ x),  # two contractions
    "mixed": lambda x, w, p: (x @ w, p),  # a contraction and an input
    "inputs": lambda x, w, p: (x, p),
    "exp": lambda x, w, p: (lax.exp(x @ w), w @ x),
    "sin": lambda x, w, p: (x @ w, lax.sin(w @ x)),
}


def trace(policy: dict[Any, Any], fn: Callable[..., Any], dtype: str) -> Any:
    arrays = [jax.ShapeDtypeStruct((SIZE, SIZE), jnp.float32)] * 3
    return jax.make_jaxpr(amp(fn, compute_dtype=dtype, amp_policy=policy))(*arrays)


def dtypes_of(jaxpr: Any, primitive: str) -> set[str]:
    """The dtypes of the float operands and results of a primitive's equations."""

    def found() -> Iterator[str]:
        for eqn, _ in walk(jaxpr):
            if eqn.primitive.name == primitive:
                avals = [v.aval for v in (*eqn.invars, *eqn.outvars)]
                yield from (a.dtype.name for a in avals if is_float(a))

    return set(found())


def is_float(aval: Any) -> bool:
    return jnp.issubdtype(getattr(aval, "dtype", jnp.int32), jnp.floating)


def chosen(
    policy: dict[Any, Any],
    primitive: str,
    origin: str = "low",
    dtype: str = "float16",
    read_low: bool = True,
) -> set[str]:
    """The dtypes in which `primitive` runs, on operands of some origin.

    Its result is read by a contraction, or else returned."""

    def fn(x, w, p):
        out = OPS[primitive](*ORIGINS[origin](x, w, p))
        if read_low and is_float(out):
            return out @ w[: out.shape[-1]]
        return out

    dtypes = dtypes_of(trace(policy, fn, dtype), primitive)
    assert dtypes, f"{primitive} is not in the jaxpr"
    return dtypes


def rows(*tables: tuple[str, str, dict[str, str]]) -> Any:
    """Parameters `(dtype, list, primitive)`, for the primitives that this JAX has."""
    return [
        pytest.param(dtype, key, primitive, id=f"{dtype}-{key}-{op}")
        for dtype, key, table in tables
        for op, primitive in table.items()
        if primitive in OPS
    ]


# TensorFlow: tensorflow/core/grappler/optimizers/auto_mixed_precision_lists.h, commit
# e1c1b297 (class AutoMixedPrecisionListsCuda for float16, ...ListsMkl for bfloat16).

TF_ALLOW = {"MatMul": "dot_general", "Conv2D": "conv_general_dilated"}
TF_INFER = {
    "AddV2": "add", "AvgPool": "reduce_window_sum", "Erf": "erf", "Erfc": "erfc",
    "Log": "log", "Log1p": "log1p", "Mul": "mul", "Prod": "reduce_prod",
    "RealDiv": "div", "Sigmoid": "logistic", "Sqrt": "sqrt", "Sub": "sub",
    "Tanh": "tanh",
}  # fmt: skip
TF_DENY = {"Exp": "exp", "Expm1": "expm1", "Pow": "pow", "Pow (y=3)": "integer_pow"}
TF_CLEAR = {
    "Abs": "abs", "ArgMax": "argmax", "ArgMin": "argmin",
    "BroadcastTo": "broadcast_in_dim", "Ceil": "ceil", "ClipByValue": "clamp",
    "ConcatV2": "concatenate", "Equal": "eq",
    "Floor": "floor", "GatherV2": "gather", "Greater": "gt", "GreaterEqual": "ge",
    "IsFinite": "is_finite", "Less": "lt", "LessEqual": "le", "Max": "reduce_max",
    "MaxPool": "reduce_window_max", "Maximum": "max", "Min": "reduce_min",
    "Minimum": "min", "Neg": "neg", "NotEqual": "ne", "Pad": "pad",
    "Reshape": "reshape", "ReverseV2": "rev", "Round": "round", "SelectV2": "select_n",
    "Sign": "sign", "Slice": "slice", "Split": "split", "Squeeze": "squeeze",
    "StridedSlice": "dynamic_slice", "TopKV2": "top_k", "Transpose": "transpose",
}  # fmt: skip
TF_UNLISTED = {
    "Acos": "acos", "Asin": "asin", "Atan": "atan", "Atan2": "atan2", "Cos": "cos",
    "Cosh": "cosh", "Cumsum": "cumsum", "Cumprod": "cumprod", "Digamma": "digamma",
    "Erfinv": "erf_inv", "Lgamma": "lgamma", "Mod": "rem", "Sin": "sin", "Sinh": "sinh",
    "Tan": "tan",
}  # fmt: skip
TF_SUMS = {"Sum": "reduce_sum"}
TF_POWERS = {"Rsqrt": "rsqrt", "Square": "square"}
TF_SCATTER = {"ScatterNd": "scatter"}

TF = [
    *((dtype, "allow", TF_ALLOW) for dtype in ("float16", "bfloat16")),
    *((dtype, "infer", TF_INFER) for dtype in ("float16", "bfloat16")),
    *((dtype, "deny", TF_DENY) for dtype in ("float16", "bfloat16")),
    *((dtype, "clear", TF_CLEAR) for dtype in ("float16", "bfloat16")),
    *((dtype, "unlisted", TF_UNLISTED) for dtype in ("float16", "bfloat16")),
    ("float16", "deny", TF_SUMS),
    ("float16", "unlisted", TF_POWERS),
    ("float16", "unlisted", TF_SCATTER),
    # oneDNN adds up in float32 inside of its bfloat16 kernels.
    ("bfloat16", "infer", TF_SUMS),
    ("bfloat16", "infer", TF_POWERS),
    ("bfloat16", "clear", TF_SCATTER),
]
# Read by one op only, these keep nothing low: no contraction reads what they make.
NO_FLOAT_RESULT = set("argmax argmin eq ne lt le gt ge is_finite".split())


@pytest.mark.parametrize(("dtype", "key", "primitive"), rows(*TF))
def test_tensorflow_lists(dtype, key, primitive):
    """auto_mixed_precision.cc, commit 0059df75, on a node between two allow nodes."""
    policy = tensorflow_graph_rewrite(dtype)
    low = key in ("allow", "infer", "clear")
    if primitive not in NO_FLOAT_RESULT:
        assert chosen(policy, primitive, "low", dtype) == {dtype if low else F32}
    # Inputs are float32, and stay it without an allow node before.
    is_allow = key == "allow"
    assert chosen(policy, primitive, "inputs", dtype) == {dtype if is_allow else F32}


@pytest.mark.parametrize("primitive", [*TF_INFER.values(), *TF_CLEAR.values()])
def test_tensorflow_denies_what_follows_a_denied_node(primitive):
    # Pass 2: deny spreads forward through infer and clear nodes.
    assert chosen(tensorflow_graph_rewrite(), primitive, "exp") == {F32}


@pytest.mark.parametrize("primitive", TF_INFER.values())
def test_tensorflow_infers_low_only_between_allow_nodes(primitive):
    # Pass 3: an infer node is low if it is reached from an allow node and reaches one.
    assert chosen(tensorflow_graph_rewrite(), primitive, read_low=False) == {F32}


@pytest.mark.parametrize("primitive", ["add", "sub", "mul", "div"])
def test_tensorflow_unlisted_nodes_do_not_spread(primitive):
    # Pass 2 stops at unlisted nodes; Pass 3 reaches the node from its other input.
    policy = tensorflow_graph_rewrite()
    assert chosen(policy, primitive, "sin") == {"float16"}
    # A variable that joins in is cast.
    assert chosen(policy, primitive, "mixed") == {"float16"}


def test_tensorflow_statistics_do_not_spread():
    """The mean is denied, its subtraction too; then low values are low again."""

    def fn(x, w, p):
        y = x @ w
        z = y - jnp.mean(y, axis=0)
        return jnp.tanh(z + y) @ w

    jaxpr = trace(tensorflow_graph_rewrite(), fn, "float16")
    assert dtypes_of(jaxpr, "sub") == {F32}
    assert dtypes_of(jaxpr, "tanh") == {"float16"}


# The user's lists of the TensorFlow preset.


@pytest.mark.parametrize(
    ("lists", "primitive", "expected"),
    [
        (dict(remove=["tanh"]), "tanh", F32),
        (dict(remove=[lax.tanh_p], deny=[lax.tanh_p]), "tanh", F32),
        (dict(remove=["exp"], infer=["exp"]), "exp", "float16"),
        (dict(infer=["sin"]), "sin", "float16"),
        (dict(clear=["sort"]), "sort", "float16"),
        (dict(allow=["sin"]), "sin", "float16"),
        (dict(remove=["dot_general"]), "dot_general", F32),
        (dict(infer=["tanh"], deny=["cumsum"]), "tanh", "float16"),  # no news
        (dict(remove=["sin"]), "sin", F32),  # it is in no list
    ],
)
def test_tensorflow_lists_can_be_changed(lists, primitive, expected):
    origin = "inputs" if "allow" in lists else "low"
    policy = tensorflow_graph_rewrite(**lists)
    assert chosen(policy, primitive, origin) == {expected}


def test_tensorflow_takes_primitives_of_ones_own():
    twice = Primitive("twice")
    twice.def_abstract_eval(lambda x: x)

    def fn(x, w, p):
        return twice.bind(x @ w) @ w

    policy = tensorflow_graph_rewrite(clear=[twice])
    assert dtypes_of(trace(policy, fn, "float16"), "twice") == {"float16"}


# PyTorch: aten/src/ATen/autocast_mode.h, commit d70fe7f3, and autocast_mode.cpp, commit
# 008ec6b1.

TORCH_LOW = {"matmul": "dot_general", "conv2d": "conv_general_dilated"}
TORCH_FP32 = {
    "acos": "acos", "asin": "asin", "cosh": "cosh", "erfinv": "erf_inv", "exp": "exp",
    "expm1": "expm1", "log": "log", "log1p": "log1p", "log2": "log2",
    "logcumsumexp": "cumlogsumexp", "pow": "pow", "pow (scalar)": "integer_pow",
    "rsqrt": "rsqrt", "sinh": "sinh", "square": "square", "tan": "tan",
    # Float32 results, unless told otherwise.
    "cumprod": "cumprod", "cumsum": "cumsum", "sum": "reduce_sum",
}  # fmt: skip
TORCH_PROD = {"prod": "reduce_prod"}
# In no list: these run in the dtype of their inputs.
TORCH_OTHER = {
    "abs": "abs", "acosh": "acosh", "amax": "reduce_max", "argmax": "argmax",
    "asinh": "asinh", "atan": "atan", "atanh": "atanh",
    "avg_pool2d": "reduce_window_sum", "ceil": "ceil", "clamp": "clamp", "cos": "cos",
    "digamma": "digamma", "erf": "erf",
    "erfc": "erfc", "exp2": "exp2", "expand": "broadcast_in_dim", "flip": "rev",
    "floor": "floor", "gather": "gather", "isfinite": "is_finite", "lgamma": "lgamma",
    "max_pool2d": "reduce_window_max", "narrow": "slice", "neg": "neg",
    "permute": "transpose", "reshape": "reshape", "round": "round",
    "sigmoid": "logistic", "sign": "sign", "sin": "sin", "sort": "sort", "split":
    "split", "sqrt": "sqrt",
    "squeeze": "squeeze", "tanh": "tanh", "topk": "top_k",
}  # fmt: skip
# Several inputs: the widest type, be it by the list (atan2) or by type promotion.
TORCH_PROMOTE = {
    "add": "add", "atan2": "atan2", "cat": "concatenate", "div": "div", "eq": "eq",
    "ge": "ge", "gt": "gt", "le": "le", "lt": "lt", "maximum": "max", "minimum": "min",
    "mul": "mul", "ne": "ne", "remainder": "rem", "sub": "sub", "where": "select_n",
}  # fmt: skip

TORCH = [
    *((device, "low", TORCH_LOW) for device in ("cuda", "cpu")),
    ("cuda", "fp32", TORCH_FP32),
    *((device, "fp32", TORCH_PROD) for device in ("cuda", "cpu")),
    *((device, "other", TORCH_OTHER) for device in ("cuda", "cpu")),
    *((device, "other", TORCH_PROMOTE) for device in ("cuda", "cpu")),
    # The list for CPUs names what has no bfloat16 kernel, and these have one.
    ("cpu", "other", TORCH_FP32),
]


@pytest.mark.parametrize(("device", "key", "primitive"), rows(*TORCH))
def test_pytorch_lists(device, key, primitive):
    policy = pytorch_autocast(device)
    for dtype in ("float16", "bfloat16"):  # one list for both
        low = {dtype if key != "fp32" else F32}
        assert chosen(policy, primitive, "low", dtype) == low
    low = {"bfloat16" if key == "low" else F32}
    assert chosen(policy, primitive, "inputs", "bfloat16") == low


@pytest.mark.parametrize("primitive", TORCH_PROMOTE.values())
def test_pytorch_promotes(primitive):
    assert chosen(pytorch_autocast(), primitive, "mixed") == {F32}
    assert chosen(pytorch_autocast(), primitive, "exp") == {F32}


def test_pytorch_linear_with_bias_is_low():
    """`linear` adds its bias inside; softmax gives float32, and so does layer_norm."""

    def fn(x, w, p):
        y = x @ w + p[0]
        return jax.nn.softmax(jnp.tanh(y * 2.0))

    jaxpr = trace(pytorch_autocast(), fn, "float16")
    for primitive in ("add", "mul", "tanh"):
        assert dtypes_of(jaxpr, primitive) == {"float16"}
    for primitive in ("exp", "reduce_sum", "div"):
        assert dtypes_of(jaxpr, primitive) == {F32}


def test_constants_do_not_vote_unless_they_would_break():
    def fn(x, w, p):
        y = x @ w
        masked = jnp.where(p > 0, y, -1e9)
        return (y + 1e-8), (y - 0.5), masked

    jaxpr = trace(pytorch_autocast(), fn, "float16")
    assert dtypes_of(jaxpr, "sub") == {"float16"}
    assert dtypes_of(jaxpr, "add") == {F32}  # 1e-8 is 0 in float16
    assert dtypes_of(jaxpr, "select_n") == {F32}  # -1e9 is -inf in float16


@pytest.mark.parametrize("device", ["float16", "gpu", None])
def test_pytorch_device_types(device):
    with pytest.raises(ValueError, match=r"`device_type` must be 'cuda' or 'cpu'"):
        pytorch_autocast(device)


# MXNet: python/mxnet/amp/lists/symbol_fp16.py and symbol_bf16.py, commit b84609d3. The
# names are those of its NumPy interface where it has them.

MXNET_TARGET = {"FullyConnected": "dot_general", "Convolution": "conv_general_dilated"}
MXNET_FP32 = {
    "arccos": "acos", "arcsin": "asin", "arctanh": "atanh", "cosh": "cosh",
    "cumsum": "cumsum", "digamma": "digamma", "erfinv": "erf_inv", "expm1": "expm1",
    "gammaln": "lgamma", "log": "log", "log1p": "log1p", "log2": "log2", "power": "pow",
    "power_scalar": "integer_pow", "prod": "reduce_prod", "rsqrt": "rsqrt",
    "sinh": "sinh", "tan": "tan", "topk": "top_k",
}  # fmt: skip
# Float32 in the float16 lists, either in the bfloat16 lists.
MXNET_FP32_OR_EITHER = {"exp": "exp", "square": "square", "sum": "reduce_sum"}
MXNET_WIDEST = {
    "add": "add", "subtract": "sub", "multiply": "mul", "true_divide": "div",
    "concatenate": "concatenate",
}  # fmt: skip
# Widest in the float16 lists, float32 in the bfloat16 lists.
MXNET_WIDEST_OR_FP32 = {
    "equal": "eq", "greater": "gt", "greater_equal": "ge", "less": "lt",
    "less_equal": "le", "maximum": "max", "minimum": "min", "mod": "rem",
    "not_equal": "ne",
}  # fmt: skip
MXNET_WIDEST_OR_EITHER = {"where": "select_n"}
MXNET_EITHER = {
    "Pooling": "reduce_window_sum", "Pooling (max)": "reduce_window_max",
    "reshape": "reshape", "slice": "slice", "split": "split", "sqrt": "sqrt",
    "take": "gather", "tanh": "tanh", "transpose": "transpose",
}  # fmt: skip
# Either in the float16 lists, float32 in the bfloat16 lists.
MXNET_EITHER_OR_FP32 = {
    "absolute": "abs", "arccosh": "acosh", "arcsinh": "asinh", "arctan": "atan",
    "arctan2": "atan2", "argmax": "argmax", "argmin": "argmin",
    "broadcast_to": "broadcast_in_dim", "cbrt": "cbrt", "ceil": "ceil", "clip": "clamp",
    "cos": "cos", "erf": "erf", "flip": "rev", "floor": "floor",
    "isfinite": "is_finite", "max": "reduce_max", "min": "reduce_min", "negative":
    "neg", "pad": "pad",
    "round": "round", "scatter_nd": "scatter", "sigmoid": "logistic", "sign": "sign",
    "sin": "sin", "sort": "sort", "squeeze": "squeeze",
}  # fmt: skip

MXNET = [
    *((dtype, "target", MXNET_TARGET) for dtype in ("float16", "bfloat16")),
    *((dtype, "fp32", MXNET_FP32) for dtype in ("float16", "bfloat16")),
    *((dtype, "widest", MXNET_WIDEST) for dtype in ("float16", "bfloat16")),
    *((dtype, "either", MXNET_EITHER) for dtype in ("float16", "bfloat16")),
    ("float16", "fp32", MXNET_FP32_OR_EITHER),
    ("bfloat16", "either", MXNET_FP32_OR_EITHER),
    ("float16", "widest", MXNET_WIDEST_OR_FP32),
    ("bfloat16", "fp32", MXNET_WIDEST_OR_FP32),
    ("float16", "widest", MXNET_WIDEST_OR_EITHER),
    ("bfloat16", "either", MXNET_WIDEST_OR_EITHER),
    ("float16", "either", MXNET_EITHER_OR_FP32),
    ("bfloat16", "fp32", MXNET_EITHER_OR_FP32),
]


@pytest.mark.parametrize(("dtype", "key", "primitive"), rows(*MXNET))
def test_mxnet_lists(dtype, key, primitive):
    policy = mxnet(dtype)
    low = {dtype if key != "fp32" else F32}
    assert chosen(policy, primitive, "low", dtype) == low
    low = {dtype if key == "target" else F32}
    assert chosen(policy, primitive, "inputs", dtype) == low
    if key == "widest":
        assert chosen(policy, primitive, "mixed", dtype) == {F32}


@pytest.mark.parametrize(
    ("lists", "primitive", "expected"),
    [
        (dict(fp32=["tanh"]), "tanh", F32),
        (dict(either=[lax.exp_p]), "exp", "float16"),
        (dict(widest=["square"]), "square", "float16"),
        (dict(target=["sin"]), "sin", "float16"),
        (dict(fp32=["dot_general"]), "dot_general", F32),
        (dict(conditional=[("reduce_max", "axes", [(0,)])]), "reduce_max", F32),
        (dict(conditional=[("reduce_max", "axes", [(1,)])]), "reduce_max", "float16"),
    ],
)
def test_mxnet_lists_can_be_changed(lists, primitive, expected):
    assert chosen(mxnet(**lists), primitive) == {expected}


def test_mxnet_conditions_add_up():
    conditions = [("reduce_max", "axes", [(1,)]), ("reduce_max", "axes", [(0,), (2,)])]
    assert chosen(mxnet(conditional=conditions), "reduce_max") == {F32}


def test_mxnet_condition_on_a_parameter_that_is_not_there():
    policy = mxnet(conditional=[("reduce_max", "axis", [0])])
    with pytest.raises(AmpError, match=r"no parameter 'axis'.*Did you mean 'axes'"):
        chosen(policy, "reduce_max")


# jaxamp: src/jaxamp/_amp.py, commit 36f958f. Two lists; every other equation is cast
# back to the dtypes that it was traced with.

JAXAMP_LOW = ["add", "sub", "dot_general", "conv_general_dilated"]


@pytest.mark.parametrize("primitive", OPS)
@pytest.mark.parametrize("origin", ["low", "inputs"])
def test_jaxamp_lists(primitive, origin):
    expected = "float16" if primitive in JAXAMP_LOW else F32
    assert chosen(jaxamp(), primitive, origin) == {expected}


# jmp: jmp/_src/policy.py, commit 9c1cdbb: inputs are cast, and type promotion does the
# rest. jax.numpy adds up 16-bit values in float32 by itself.

JMP_FULL = ["reduce_sum", "reduce_prod"]


@pytest.mark.parametrize("primitive", OPS)
def test_jmp_runs_everything_low(primitive):
    if primitive not in NO_FLOAT_RESULT:
        expected = F32 if primitive in JMP_FULL else "float16"
        assert chosen(jmp(), primitive, "low") == {expected}


def test_jmp_casts_inputs():
    def fn(x, w, p):
        return jnp.exp(x) * p

    jaxpr = trace(jmp(), fn, "bfloat16")
    assert dtypes_of(jaxpr, "exp") == {"bfloat16"}
    assert dtypes_of(jaxpr, "mul") == {"bfloat16"}


def test_jmp_sums_are_low_again():
    jaxpr = trace(jmp(), lambda x, w, p: jnp.exp(x) / jnp.sum(x, 0), "float16")
    assert dtypes_of(jaxpr, "reduce_sum") == {F32}
    assert dtypes_of(jaxpr, "div") == {"float16"}


def test_jmp_what_starts_inside_is_float32_and_promotes():
    def fn(x, w, p):
        noise = jax.random.normal(jax.random.key(0), x.shape)
        return (x + noise) @ w

    jaxpr = trace(jmp(), fn, "float16")
    assert dtypes_of(jaxpr, "erf_inv") == {F32}
    assert dtypes_of(jaxpr, "add") == {F32}
    assert dtypes_of(jaxpr, "dot_general") == {"float16"}


# full_precision: nothing changes.


@pytest.mark.parametrize("primitive", OPS)
def test_full_precision_changes_nothing(primitive):
    def fn(x, w, p):
        return OPS[primitive](x @ w, p)

    jaxpr = trace(full_precision(), fn, "float16")
    avals = [v.aval for eqn, _ in walk(jaxpr) for v in eqn.outvars]
    assert {aval.dtype.name for aval in avals if is_float(aval)} <= {F32}


# All of them.

PRESETS: dict[str, Callable[[], dict[Any, Any]]] = {
    "jaxamp": jaxamp,
    "jmp": jmp,
    "full_precision": full_precision,
    "torch-cuda": pytorch_autocast,
    "torch-cpu": lambda: pytorch_autocast("cpu"),
    "tf-float16": tensorflow_graph_rewrite,
    "tf-bfloat16": lambda: tensorflow_graph_rewrite("bfloat16"),
    "mxnet-float16": mxnet,
    "mxnet-bfloat16": lambda: mxnet("bfloat16"),
}
each_preset = pytest.mark.parametrize("preset", PRESETS.values(), ids=PRESETS)


@each_preset
def test_a_preset_covers_every_primitive_of_the_default_policy(preset):
    policy = preset()
    assert policy.keys() == default_amp_policy.keys()
    assert policy == preset()


@each_preset
def test_keys_of_presets_are_not_reported_as_unused(preset):
    # Strict: a key that matched nothing raises.
    fn = amp(lambda x: jnp.tanh(x @ x), amp_policy=preset(), strict=True)
    assert fn(jnp.ones((2, 2))).dtype == jnp.float32


@each_preset
def test_presets_are_extended_like_any_dict(preset):
    def fn(x, w, p):
        with jax.named_scope("head"):
            head = jnp.cos(x @ w)
        return head + jnp.exp(x @ w)

    policy = preset() | {"head": "float32", lax.exp_p: "float16"}
    jaxpr = trace(policy, fn, "float16")
    assert dtypes_of(jaxpr, "cos") == {F32}
    assert dtypes_of(jaxpr, "exp") == {"float16"}


@each_preset
def test_added_keys_are_reported_as_unused(preset):
    for key in (lax.conv_general_dilated_p, "nowhere"):
        policy = preset() | {key: "bfloat16"}
        with pytest.raises(AmpError, match="matched nothing"):
            amp(jnp.tanh, amp_policy=policy, strict=True)(1.0 + jnp.ones(2))


@pytest.mark.sample(3)
@each_preset
def test_presets_run_and_differentiate(preset):
    def loss(w, x):
        def step(carry, _):
            return jax.nn.gelu(carry @ w), None

        y, _ = jax.lax.scan(step, x, length=2)
        noise = jax.random.normal(jax.random.key(0), y.shape)
        logits = jax.nn.log_softmax(y + 0.1 * noise)
        return -jnp.mean(jnp.sort(logits)[:, -1])

    w, x = 0.1 * jnp.eye(4), jnp.linspace(-1, 1, 8).reshape(2, 4)
    grad = jax.value_and_grad(amp(loss, amp_policy=preset()))
    value, grads = jax.jit(grad)(w, x)
    assert value.dtype == grads.dtype == jnp.float32
    assert jnp.isfinite(value)
    assert jnp.all(jnp.isfinite(grads))
    # A dozen roundings of values below 4.
    assert abs(value - loss(w, x)) < 12 * 4 * float(jnp.finfo(jnp.float16).eps)


def test_a_preset_changes_nothing_else():
    policy = pytorch_autocast() | {lax.mul_p: follow_inputs}
    assert chosen(policy, "mul", "mixed") == {"float16"}
    assert chosen(pytorch_autocast(), "mul", "mixed") == {F32}


# Bad input.

TF_PRESET = tensorflow_graph_rewrite


@pytest.mark.parametrize(
    ("preset", "lists", "message"),
    [
        (TF_PRESET, dict(deny=["tanh"]), "`tanh` is in two lists: infer"),
        (TF_PRESET, dict(deny=["sin"], allow=[lax.sin_p]), "`sin` is in two"),
        (TF_PRESET, dict(clear=["dot_general"]), "allow and clear"),
        (mxnet, dict(target=["tanh"], fp32=["tanh"]), "`tanh` is in two lists: target"),
        (mxnet, dict(widest=["tanh"], either=["tanh"]), "widest and either"),
        (
            mxnet,
            dict(fp32=["tanh"], conditional=[("tanh", "accuracy", [None])]),
            "`tanh` is in two lists: fp32 and conditional",
        ),
        (TF_PRESET, dict(allow=["tahn"]), "called 'tahn'.*Did you mean 'tan"),
        (TF_PRESET, dict(remove=["MatMul"]), "called 'MatMul'"),
        (mxnet, dict(fp32=["softmax"]), "called 'softmax', which `fp32` holds"),
        (mxnet, dict(conditional=[("tahn", "y", [1])]), "'tahn', which `conditional`"),
        (TF_PRESET, dict(deny=["scan"]), "`scan` of `deny` holds a whole"),
        (TF_PRESET, dict(allow=["cholesky"]), "`cholesky` of `allow` only"),
        (mxnet, dict(either=[lax.iota_p]), "`iota` of `either` only exists"),
    ],
)  # fmt: skip
def test_bad_lists(preset, lists, message):
    with pytest.raises(AmpError, match=message):
        preset(**lists)


def test_the_overlap_error_says_what_to_do():
    with pytest.raises(AmpError, match="by `remove`"):
        tensorflow_graph_rewrite(infer=["exp"])


@pytest.mark.parametrize(
    ("preset", "lists", "message"),
    [
        (TF_PRESET, dict(deny="tanh"), r"such as \['tanh'\], but got 'tanh'"),
        (TF_PRESET, dict(deny=lax.tanh_p), "must be a sequence"),
        (TF_PRESET, dict(deny=3), "must be a sequence"),
        (mxnet, dict(target=[jnp.tanh]), "`target` must hold primitives"),
        (mxnet, dict(conditional=["tanh"]), "`conditional` must hold tuples"),
        (mxnet, dict(conditional=[("tanh", "accuracy", "abc")]), "must hold tuples"),
    ],
)  # fmt: skip
def test_arguments_of_the_wrong_kind(preset, lists, message):
    with pytest.raises(TypeError, match=message):
        preset(**lists)


@pytest.mark.parametrize("preset", [tensorflow_graph_rewrite, mxnet])
def test_dtypes_without_lists(preset):
    with pytest.raises(ValueError, match="lists for 'float16' and 'bfloat16'"):
        preset("float32")
    with pytest.raises(TypeError, match="`dtype` must be a floating dtype"):
        preset("int8")
    assert preset(jnp.bfloat16) == preset("bfloat16")


def test_fixed_primitives_may_be_denied():
    assert tensorflow_graph_rewrite(deny=["cholesky"]) == tensorflow_graph_rewrite()
