"""What XLA makes of MXFP8 and NVFP4 on a described B200: no GPU is needed."""

from collections import Counter

import jax
import jax.numpy as jnp
import pytest
from jax import lax

from benchmarks import roofline
from jaxamp_like import amp, certify
from jaxamp_like._certify.drifts import DUPLICATED
from jaxamp_like._hlo import text as hlo
from jaxamp_like._hlo.devices import described, gpus
from jaxamp_like.presets import quantised
from jaxamp_like.rules import mxfp8, nvfp4

pytestmark = [
    pytest.mark.skipif(
        not roofline.has_plugin(),
        reason="XLA's compiler for NVIDIA GPUs is not installed",
    ),
    # JAX itself runs on a CPU here.
    pytest.mark.filterwarnings("ignore:JAX runs on a CPU"),
]
both_formats = pytest.mark.parametrize("make", (mxfp8, nvfp4))
NATIVE = "__cudnn$blockScaledDot"


@pytest.fixture(scope="module")
def device():
    return described("b200")


def compiled(fn, device, *args):
    """How many native contractions there are, by what they read, and how many others.

    Rotations by a matrix of 16 x 16 are part of rounding, and are left out."""
    if device is not None:
        where = jax.sharding.SingleDeviceSharding(device)
        fn = jax.jit(fn, in_shardings=where, out_shardings=where)
    made = jax.jit(fn).lower(*args).compile()
    found: Counter[str] = Counter()
    for body in hlo.parse(made.as_text()).computations.values():
        for one in body.values():
            if NATIVE in one.attributes:
                found[body[one.operands[0]].shape.dtype] += 1
            elif one.opcode in ("dot", "convolution") or "__cublas" in one.attributes:
                sides = [body[name].shape.dims for name in one.operands[:2]]
                found["other"] += (16, 16) not in sides
    return +found


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


def patches(ws, x):
    return jnp.mean(
        jnp.tanh(
            lax.conv_general_dilated(
                x, ws, (8, 8), "VALID", dimension_numbers=("NHWC", "HWIO", "NHWC")
            )
        )
        ** 2
    )


def uneven(ws, x):
    return jnp.mean(jnp.tanh(x @ ws) ** 2)


PROGRAMS = {
    "dense": (dense, ((256, 512), (512, 256)), (2, 128, 256), 5),
    "scan of checkpoints": (scanned, (3, 256, 256), (2, 128, 256), 4),
    "experts": (experts, (4, 256, 256), (4, 128, 256), 2),
    "patches": (patches, (8, 8, 4, 256), (2, 64, 64, 4), 2),
    "no multiples of a block": (uneven, (200, 264), (136, 200), 2),
}


@both_formats
@pytest.mark.parametrize("name", PROGRAMS)
def test_every_contraction_is_native(name, make, device):
    fn, ws, x, contractions = PROGRAMS[name]
    ws = jax.tree.map(
        lambda one: shape(*one), ws, is_leaf=lambda one: isinstance(one[0], int)
    )
    rule = make(where=None)
    found = compiled(jax.grad(low(fn, rule)), device, ws, shape(*x))
    element = {"mxfp8": "f8e4m3fn", "nvfp4": "f4e2m1fn"}[rule.name]
    # The gradient of a first layer's input is not asked for.
    assert found == {element: contractions}


def scanned_transposed(ws, x):
    return scanned(jnp.swapaxes(ws, 1, 2), x)


def scanned_views(ws, x):
    def block(x, w):
        return x + jax.nn.gelu(x @ w.T), None

    return jnp.mean(lax.scan(jax.checkpoint(block), x, ws)[0])


@both_formats
@pytest.mark.parametrize("fn", (scanned, scanned_transposed, scanned_views))
def test_the_backward_loop_reads_no_weight_in_full(fn, make, device):
    """Nor is the stack of gradients transposed after it."""
    where = jax.sharding.SingleDeviceSharding(device)
    step = jax.jit(
        jax.grad(low(fn, make(where=None)), (0, 1)),
        in_shardings=where,
        out_shardings=where,
    )
    text = step.lower(shape(3, 256, 256), shape(4, 128, 256)).compile().as_text()
    found = [
        (one.opcode, one.shape.dtype, tuple(one.shape.dims))
        for body in hlo.parse(text).computations.values()
        for one in body.values()
    ]
    assert ("dynamic-slice", "f32", (1, 256, 256)) not in found
    assert ("transpose", "f32", (3, 256, 256)) not in found


@both_formats
def test_per_example_gradients_are_native(make, device):
    rule = make(where=None)
    fn = jax.vmap(jax.grad(low(dense, rule)), in_axes=(None, 0))
    ws = shape(256, 512), shape(512, 256)
    found = compiled(fn, device, ws, shape(4, 128, 256))
    assert set(found) == {{"mxfp8": "f8e4m3fn", "nvfp4": "f4e2m1fn"}[rule.name]}


P = jax.sharding.PartitionSpec


@both_formats
def test_parts_on_several_devices_are_native(make):
    """Data along one axis of the mesh, and weights along the other."""
    kind = jax.sharding.AxisType.Auto
    mesh = jax.make_mesh(
        (2, 2), ("data", "model"), axis_types=(kind, kind), devices=gpus("b200", 4)
    )

    def put(spec, *lengths):
        where = jax.sharding.NamedSharding(mesh, spec)
        return jax.ShapeDtypeStruct(lengths, jnp.float32, sharding=where)

    ws = put(P(None, "model"), 256, 512), put(P("model"), 512, 256)
    rule = make(where=None)
    grads = jax.grad(low(dense, rule))
    found = compiled(grads, None, ws, put(P("data"), 4, 128, 256))
    assert found == {{"mxfp8": "f8e4m3fn", "nvfp4": "f4e2m1fn"}[rule.name]: 5}


# ---------------------------------------------------------------------- certificates


def layers(ws, x):
    for i, w in enumerate(ws):
        with jax.named_scope(f"layer{i}"):
            x = x + jax.nn.gelu(x @ w)
    return jnp.mean(x**2)


def on_one_line(ws, x):
    return jnp.mean(jnp.tanh(jax.nn.gelu(x @ ws[0]) @ ws[1]) ** 2)


def scoped_scan(ws, x):
    def block(x, w):
        with jax.named_scope("block"):
            return x + jax.nn.gelu(x @ w), None

    return jnp.mean(lax.scan(block, x, ws)[0])


def calls(ws, x):
    layer = jax.jit(lambda w, x: jax.nn.gelu(x @ w))
    for name, w in zip("ab", ws, strict=True):
        with jax.named_scope(name):
            x = layer(w, x)
    return jnp.mean(x**2)


CERTIFIED = {
    "scopes": (layers, ((256, 256),) * 3, (256, 256), ["layer0", "layer1", "layer2"]),
    # XLA pads rows to multiples of 128, so the contractions get more FLOPs.
    "padded": (on_one_line, ((64, 64),) * 2, (64, 64), ["", ""]),
    "scan": (scoped_scan, (3, 256, 256), (2, 128, 256), ["block"]),
    "calls": (calls, ((256, 256),) * 2, (256, 256), ["a", "b"]),
}
"""By name, a program, the shapes of its arguments and the scopes of its products."""


@both_formats
@pytest.mark.parametrize("name", CERTIFIED)
@pytest.mark.usefixtures("device")
def test_small_programs_are_as_decided(name, make):
    fn, ws, x, scopes = CERTIFIED[name]
    ws = shape(*ws) if isinstance(ws[0], int) else [shape(*one) for one in ws]
    rule = make(where=None)
    step = jax.grad(low(fn, rule), argnums=(0, 1))
    certificate = certify(step, ws, shape(*x), device="b200")
    drifts = certificate.drifts
    if make is nvfp4 and jax.__version_info__ >= (0, 12):
        # Its XLA rounds the scales, one for 16 numbers, in two kernels each.
        twice = "float32 -> float8_e4m3fn", (DUPLICATED,)
        drifts = [one for one in drifts if (one.decided, one.drifts) != twice]
    assert not drifts, certificate
    assert certificate.share_tied == 1
    native = [
        one
        for one in certificate.operations
        if one.kind == "contraction" and NATIVE in one.opcodes
    ]
    assert all(len(one.compiled) == 1 for one in native)
    for phase, times in (("forward", 1), ("backward", 2)):
        found = [one.scope for one in native if one.phase == phase]
        assert sorted(found) == sorted(scopes * times)
    assert all(f"computes in {rule.name}" in one.why for one in native)
