"""What only contractions that run as their author wrote them read is never rounded."""

import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
import pytest
from jax import lax

from benchmarks.measure import walk
from benchmarks.workloads import WORKLOADS
from jaxamp_like import amp, default_amp_policy
from jaxamp_like.presets import quantised
from jaxamp_like.rules import (
    float8,
    int8,
    not_divisible_by,
    use_compute_precision,
    when,
)

pytestmark = pytest.mark.sample(14)

enable_x64 = (
    jax.enable_x64 if hasattr(jax, "enable_x64") else jax.experimental.enable_x64
)


def careful(x, w):
    return jnp.matmul(x, w, precision="highest")


def stack(x):
    """What a scan stacks up."""
    return lax.scan(lambda c, x: (c, jnp.sin(x) * 2), 0.0, x)[1]


def by_context(x, w):
    with jax.default_matmul_precision("highest"):
        return stack(x) @ w


def convolution(x, w):
    x = stack(x).transpose(0, 2, 1)
    return lax.conv_general_dilated(x, w[:, :, None], (1,), "SAME", precision="highest")


def indexed(x, w):
    ys = stack(x)
    return lax.fori_loop(0, len(x), lambda i, a: a + careful(ys[i], w), x[0] * 0)


PROGRAMS = {
    "alone": lambda x, w: careful(stack(x), w),
    "transposed": lambda x, w: careful(stack(x).transpose(1, 0, 2), w),
    "by_context": by_context,
    "convolution": convolution,
    "in_jit": lambda x, w: jax.jit(careful)(stack(x), w),
    "in_checkpoint": lambda x, w: jax.checkpoint(careful)(stack(x), w),
    "in_map": lambda x, w: lax.map(lambda y: careful(y, w), stack(x)),
    "in_vmap": lambda x, w: jax.vmap(lambda y: careful(y, w))(stack(x)),
    "in_cond": lambda x, w: lax.cond(
        x[0, 0, 0] > 9, lambda y, w: y, careful, stack(x), w
    ),
    "indexed": indexed,
    "carried": lambda x, w: lax.scan(lambda c, x: (careful(c, w) + x, c), x[0], x),
    "carried_bent": lambda x, w: lax.scan(
        lambda c, x: (jnp.tanh(careful(c, w) + x), c), x[0], x
    ),
    "between": lambda x, w: careful(jax.nn.gelu(careful(x, w)), w),
}

POLICIES = {
    "default": None,
    "when": default_amp_policy
    | dict.fromkeys(
        [lax.dot_general_p, lax.conv_general_dilated_p],
        when(not_divisible_by(), "float32", use_compute_precision),
    ),
    "int8": quantised(int8(where=None)),
    "float8": quantised(float8(where=None)),
}


@pytest.fixture
def x(getkey):
    return jr.normal(getkey(), (6, 8, 16))


@pytest.fixture
def w(getkey):
    return jr.normal(getkey(), (16, 16)) / 4


def value_and_grads(fn, *args):
    def loss(*args):
        return sum(jnp.sum(jnp.sin(y)) for y in jax.tree.leaves(fn(*args)))

    return fn(*args), jax.grad(loss, tuple(range(len(args))))(*args)


@pytest.mark.sample(48)
@pytest.mark.filterwarnings("ignore::jaxamp_like.AmpWarning")
@pytest.mark.parametrize("lean", [False, True])
@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("name", PROGRAMS)
def test_the_authors_precision(name, dtype, policy, lean, x, w):
    fn = PROGRAMS[name]
    low = amp(fn, compute_dtype=dtype, amp_policy=POLICIES[policy], lean=lean)
    got, plain = value_and_grads(low, x, w), value_and_grads(fn, x, w)
    same = jax.tree.map(np.array_equal, got, plain)
    assert all(jax.tree.leaves(same))


@pytest.mark.filterwarnings("ignore::jaxamp_like.AmpWarning")
@pytest.mark.parametrize("lean", [False, True])
@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("wide", ["float64", "complex64"])
def test_beside_a_wide_operand(wide, dtype, policy, lean, x, w):
    numbers = (((2,), (0,)), ((), ()))

    def fn(x, w):
        y = lax.dot_general(stack(x), w, numbers)
        return jnp.abs(y)

    with enable_x64(True):
        x, w = x.astype("float32"), w.astype(wide)
        low = amp(fn, compute_dtype=dtype, amp_policy=POLICIES[policy], lean=lean)
        assert np.array_equal(jax.jit(low)(x, w), jax.jit(fn)(x, w))


# Where no contraction can be lowered, as here, `amp` says so.
@pytest.mark.filterwarnings("ignore:.*16 changes nothing")
@pytest.mark.parametrize("lean", [False, True])
@pytest.mark.parametrize("name", ["GPT scanned", "LSTM", "CNN", "ViT"])
def test_a_model_that_asks_for_precision_throughout(name, lean):
    model = WORKLOADS[name]

    def loss(params, batch):
        with jax.default_matmul_precision("highest"):
            return model.loss(params, batch)

    low = amp(loss, compute_dtype="bfloat16", lean=lean)
    jaxpr = jax.make_jaxpr(jax.grad(low))(*model.shapes("toy"))
    dtypes = {v.aval.dtype.name for eqn, _ in walk(jaxpr) for v in eqn.outvars}
    assert "float32" in dtypes and "bfloat16" not in dtypes
