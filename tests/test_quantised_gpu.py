"""What XLA makes of quantised contractions on a described H200: no GPU is needed."""

import re

import jax
import jax.numpy as jnp
import pytest
from jax import lax

from benchmarks import roofline
from jaxamp_like import amp, amp_with_state, init_amp_state
from jaxamp_like._hlo import text as hlo
from jaxamp_like.presets import quantised
from jaxamp_like.rules import float8, int8

pytestmark = pytest.mark.skipif(
    not roofline.has_plugin(), reason="XLA's compiler for NVIDIA GPUs is not installed"
)

EIGHT = ("f8e4m3fn", "f8e5m2", "s8")
either_compiler = pytest.mark.parametrize("triton", (False, True), ids=("NT", "T"))


@pytest.fixture(scope="module")
def device():
    return roofline.described_device()


def low(fn, rule, argnums=0):
    policy = quantised(rule)
    return amp(fn, compute_dtype="bfloat16", amp_policy=policy, argnums=argnums)


def shaped(device, *shape):
    sharding = jax.sharding.SingleDeviceSharding(device)
    return jax.ShapeDtypeStruct(shape, jnp.float32, sharding=sharding)


def operand_types(fn, args, triton):
    """The types of both operands of each matrix product, in kernels or in calls."""
    options = {"xla_gpu_enable_triton_gemm": triton}
    text = jax.jit(fn).lower(*args).compile(options).as_text()
    module = hlo.parse(text)
    for body in module.computations.values():
        for one in body.values():
            is_call = re.search(r'custom_call_target="__cu(blas|dnn)', one.attributes)
            if one.opcode in ("dot", "convolution") or is_call:
                yield tuple(body[name].shape.dtype for name in one.operands[:2])


def block(x, w):
    """In 3-D, with a bias and an activation."""
    return x + jax.nn.gelu(x @ w[0] + w[1], approximate=True), None


def scanned(ws, x):
    return jnp.mean(jnp.sin(lax.scan(jax.checkpoint(block), x, ws)[0]))


@either_compiler
def test_a_scan_of_checkpoints_in_float8(device, triton):
    """Forward, recomputed, and both gradients."""
    ws = shaped(device, 3, 256, 256), shaped(device, 3, 256)
    x = shaped(device, 2, 128, 256)
    grads = jax.grad(low(scanned, float8(where=None)))
    found = list(operand_types(grads, (ws, x), triton))
    assert len(found) == 4
    assert all(a in EIGHT and b in EIGHT for a, b in found), found
    assert sum("f8e5m2" in pair for pair in found) == 2


@either_compiler
def test_delayed_scaling_in_a_scan_of_checkpoints(device, triton):
    rule = float8(delayed=True, amax_history_length=16, where=None)
    ws = shaped(device, 3, 256, 256), shaped(device, 3, 256)
    x = shaped(device, 2, 128, 256)
    step = amp_with_state(
        jax.grad(scanned), compute_dtype="bfloat16", amp_policy=quantised(rule)
    )
    state = init_amp_state(step, ws, x)
    state = jax.tree.map(lambda leaf: shaped(device, *leaf.shape), state)
    found = list(operand_types(step, (state, ws, x), triton))
    assert len(found) == 4
    assert all(a in EIGHT and b in EIGHT for a, b in found), found
    assert sum("f8e5m2" in pair for pair in found) == 2


@either_compiler
def test_batches_of_products_in_float8(device, triton):
    def loss(w, x):
        return jnp.sum(jnp.sin(jnp.einsum("etk,ekn->etn", jnp.cos(x), w)))

    args = shaped(device, 2, 256, 128), shaped(device, 2, 64, 256)
    grads = jax.grad(low(loss, float8(where=None)), (0, 1))
    found = list(operand_types(grads, args, triton))
    assert len(found) == 3
    assert all(a in EIGHT and b in EIGHT for a, b in found), found


@either_compiler
def test_int8(device, triton):
    def model(w, v, x):
        return jnp.sin(x @ w) @ v

    args = [shaped(device, *size) for size in ((256, 128), (128, 64), (64, 256))]
    found = list(operand_types(low(model, int8(where=None), (0, 1)), args, triton))
    assert found == [("s8", "s8")] * 2


@pytest.mark.parametrize("rule", (float8(where=None), int8(where=None)), ids=repr)
def test_convolutions(device, rule):
    def model(w, x):
        return lax.conv_general_dilated(
            x, w, (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC")
        )

    args = shaped(device, 3, 3, 32, 64), shaped(device, 4, 16, 16, 32)
    (pair,) = operand_types(low(model, rule), args, triton=False)
    assert all(one in EIGHT for one in pair)
