"""What XLA makes of MXFP8 and NVFP4 on a described B200: no GPU is needed."""

from collections import Counter

import jax
import jax.numpy as jnp
import pytest
from jax import lax
from jax.experimental import topologies

from benchmarks import roofline
from jaxamp_like import amp
from jaxamp_like._hlo import text as hlo
from jaxamp_like.presets import quantised
from jaxamp_like.rules import mxfp8, nvfp4

pytestmark = pytest.mark.skipif(
    not roofline.has_plugin(), reason="XLA's compiler for NVIDIA GPUs is not installed"
)
both_formats = pytest.mark.parametrize("make", (mxfp8, nvfp4))
NATIVE = "__cudnn$blockScaledDot"


@pytest.fixture(scope="module")
def device():
    return roofline.described_device()


def compiled(fn, device, *args):
    """The numbers of native and of other contractions, by what they read."""
    where = jax.sharding.SingleDeviceSharding(device)
    made = jax.jit(fn, in_shardings=where, out_shardings=where).lower(*args).compile()
    found: Counter[str] = Counter()
    for body in hlo.parse(made.as_text()).computations.values():
        for one in body.values():
            if NATIVE in one.attributes:
                found[body[one.operands[0]].shape.dtype] += 1
            elif one.opcode in ("dot", "convolution") or "__cublas" in one.attributes:
                found["other"] += 1
    return found


def shape(*lengths):
    return jax.ShapeDtypeStruct(lengths, jnp.float32)


def low(fn, rule, argnums=0):
    policy = quantised(rule)
    return amp(fn, compute_dtype="bfloat16", amp_policy=policy, argnums=argnums)


def dense(ws, x):
    return jnp.mean(jnp.tanh(jax.nn.gelu(x @ ws[0]) @ ws[1]) ** 2)


def scanned(ws, x):
    def block(x, w):
        return x + jax.nn.gelu(x @ w), None

    return jnp.mean(lax.scan(jax.checkpoint(block), x, ws)[0])


def experts(ws, x):
    return jnp.mean(jnp.tanh(jnp.einsum("ebk,ekn->ebn", x, ws)) ** 2)


def uneven(ws, x):
    return jnp.mean(jnp.tanh(x @ ws) ** 2)


PROGRAMS = {
    "dense": (dense, ((256, 512), (512, 256)), (2, 128, 256), 5),
    "scan of checkpoints": (scanned, (3, 256, 256), (2, 128, 256), 4),
    "experts": (experts, (4, 256, 256), (4, 128, 256), 2),
    "no multiples of a block": (uneven, (200, 264), (136, 200), 2),
}


@both_formats
@pytest.mark.parametrize("name", PROGRAMS)
def test_every_contraction_is_native(name, make, device):
    fn, ws, x, contractions = PROGRAMS[name]
    ws = jax.tree.map(lambda one: shape(*one), ws, is_leaf=lambda one: isinstance(one[0], int))
    rule = make(where=None)
    found = compiled(jax.grad(low(fn, rule)), device, ws, shape(*x))
    element = {"mxfp8": "f8e4m3fn", "nvfp4": "f4e2m1fn"}[rule.name]
    # The gradient of a first layer's input is not asked for.
    assert found == {element: contractions}


@both_formats
def test_per_example_gradients_are_native(make, device):
    rule = make(where=None)
    fn = jax.vmap(jax.grad(low(dense, rule)), in_axes=(None, 0))
    ws = shape(256, 512), shape(512, 256)
    found = compiled(fn, device, ws, shape(4, 128, 256))
    assert set(found) == {{"mxfp8": "f8e4m3fn", "nvfp4": "f4e2m1fn"}[rule.name]}


@both_formats
def test_tensors_over_devices(make):
    """Split over devices, each multiplies its own part natively."""
