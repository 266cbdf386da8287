"""Convolutions in blocks that are products of matrices, and those that are none."""

from itertools import product as every

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from jaxamp_like import amp, calibrate, explain
from jaxamp_like.presets import quantised
from jaxamp_like.rules import mxfp8, nvfp4
from tests import blocks_in_numpy as reference
from tests.programs import error, values

pytestmark = pytest.mark.rest

MX, NV = mxfp8(where=None, emulate=True), nvfp4(where=None, emulate=True)
PLAIN_NV = nvfp4(
    where=None, emulate=True, square_weights=False, rotate=False, stochastic=False
)
both_formats = pytest.mark.parametrize("rule", (MX, NV), ids=("mxfp8", "nvfp4"))
LAST = "NHWC", "HWIO", "NHWC"
FIRST = "NCHW", "OIHW", "NCHW"

# Shapes with channels last, and strides.
CASES = {
    "one position": ((2, 5, 6, 40), (1, 1, 40, 24), (1, 1)),
    "strides of one position": ((2, 7, 6, 40), (1, 1, 40, 24), (2, 3)),
    "patches": ((2, 8, 12, 3), (4, 4, 3, 24), (4, 4)),
    "patches that leave a rest": ((2, 9, 11, 3), (4, 4, 3, 24), (4, 4)),
    "one patch": ((3, 5, 4, 7), (5, 4, 7, 24), (2, 1)),
    "patches along one axis": ((2, 8, 6, 5), (4, 1, 5, 24), (4, 2)),
}
all_cases = pytest.mark.parametrize("x, w, strides", CASES.values(), ids=CASES)


def low(fn, rule, dtype="bfloat16", **options):
    return amp(fn, compute_dtype=dtype, amp_policy=quantised(rule), **options)


def conv(w, x, strides, layout=LAST, padding="VALID", **options):
    return lax.conv_general_dilated(
        x, w, strides, padding, dimension_numbers=layout, **options
    )


def restored(rows, rule):
    """What rows stand for that are rounded in blocks along their second axis."""
    rows = np.asarray(rows, np.float32)
    if rule is MX:
        return reference.restored(*reference.mxfp8(rows), length=rows.shape[1])
    return reference.restored(*reference.nvfp4(rows), length=rows.shape[1])


@pytest.mark.sample(5)
@pytest.mark.parametrize("rule", (MX, PLAIN_NV), ids=("mxfp8", "nvfp4"))
@pytest.mark.parametrize("layout", (LAST, FIRST), ids=("channels last", "first"))
@all_cases
def test_contractions_of_the_restored_windows(x, w, strides, layout, rule):
    x, w = values(*x), values(*w, seed=1)
    height, width, channels, features = w.shape
    rows, columns = ((n - k) // s + 1 for n, k, s in zip(
        x.shape[1:3], (height, width), strides, strict=True
    ))  # fmt: skip
    ct = values(len(x), rows, columns, features, seed=2)
    order = (0, 1, 2) if layout is LAST else (2, 0, 1)  # of a kernel's numbers

    def flat(window):
        return np.asarray(window).transpose(order).reshape(-1)

    places = [
        (n, slice(i * strides[0], i * strides[0] + height),
         slice(j * strides[1], j * strides[1] + width))
        for n, i, j in every(range(len(x)), range(rows), range(columns))
    ]  # fmt: skip
    windows = np.stack([flat(x[place]) for place in places])
    matrix = np.stack([flat(w[..., k]) for k in range(features)])
    cts = np.asarray(ct).reshape(-1, features)
    out = restored(windows, rule) @ restored(matrix, rule).T
    back = restored(cts, rule) @ restored(matrix.T, rule).T
    dx = np.zeros(x.shape)
    for place, one in zip(places, back, strict=True):
        shape = np.array([height, width, channels])[list(order)]
        dx[place] = one.reshape(shape).transpose(np.argsort(order))
    dw = restored(windows.T, rule) @ restored(cts.T, rule).T
    shape = np.array([height, width, channels])[list(order)]
    dw = dw.reshape(*shape, features).transpose(*np.argsort(order), 3)

    def to(array, spec):
        return jnp.transpose(array, [LAST[spec].index(c) for c in layout[spec]])

    fn = low(lambda w, x: conv(w, x, strides, layout), rule, "float32")
    made, pull = jax.vjp(jax.jit(fn), to(w, 1), to(x, 0))
    back_w, back_x = pull(to(ct, 2))
    for one, expected in (
        (made, to(out.reshape(ct.shape), 2)),
        (back_w, to(dw, 1)),
        (back_x, to(dx, 0)),
    ):
        bound = 2**-20 * abs(expected).max()
        assert (abs(np.asarray(one, np.float64) - expected) <= bound).all()


def loss(strides):
    return lambda w, x: jnp.mean(jnp.tanh(conv(w, x, strides)) ** 2)


@pytest.mark.sample(4)
@both_formats
@all_cases
def test_inside_of_amp_too(x, w, strides, rule):
    """A backward pass of JAX's own: gradients are quantised where they are products."""
    x, w = values(*x), values(*w, seed=1) / np.sqrt(np.prod(w[:3]))
    exact = jax.grad(loss(strides), (0, 1))(w, x)
    outside = jax.grad(low(loss(strides), rule), (0, 1))
    inside = low(jax.grad(loss(strides), (0, 1)), rule, argnums=0)
    by_example = jax.vmap(outside, (None, 0))
    made = jax.jit(outside)(w, x), jax.jit(inside)(w, x)
    many = jax.jit(by_example)(w, jnp.stack([x, 2 * x]))
    made = *made, [one[0] for one in many]
    for one, other in (pair for some in made for pair in zip(some, exact, strict=True)):
        assert 2**-9 < error(one, other) < 0.6


OTHERS = {
    "pads its input": ((3, 3, 40, 24), {"padding": "SAME"}),
    "windows that overlap": ((3, 3, 40, 24), {}),
    "or have gaps": ((2, 2, 40, 24), {"strides": (3, 3)}),
    "overlap or have gaps": (
        (2, 2, 40, 24),
        {"strides": (2, 2), "rhs_dilation": (2, 2)},
    ),
    "in groups": ((1, 1, 20, 24), {"feature_group_count": 2}),
    "with holes": (
        (1, 1, 40, 24),
        {"lhs_dilation": (2, 2), "padding": ((0, 0), (0, 0))},
    ),
}


@pytest.mark.filterwarnings("ignore:No contraction is quantised")
@pytest.mark.parametrize("make", (mxfp8, nvfp4))
@pytest.mark.parametrize("told", OTHERS)
def test_others_are_left_and_why_is_told(told, make):
    kernel, options = OTHERS[told]
    x, w = values(2, 6, 6, 40), values(*kernel, seed=1)

    def plain(w, x):
        return conv(w, x, **{"strides": (1, 1)} | options)

    fn = low(plain, make(where=None, emulate=True))
    np.testing.assert_array_equal(fn(w, x), amp(plain, compute_dtype="bfloat16")(w, x))
    ops = explain(fn)(w, x).now.ops
    (why,) = {op.why for op in ops if op.primitive == "conv_general_dilated"}
    assert told in why


@pytest.mark.filterwarnings("ignore:No contraction is quantised")
def test_symbolic_lengths_are_left():
    (n,) = jax.export.symbolic_shape("n")
    fn = jax.jit(low(lambda w, x: conv(w, x, (4, 4)), MX))
    shapes = (4, 4, 3, 24), (n, 8, 8, 3)
    made = jax.export.export(fn)(
        *(jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes)
    )
    x, w = values(2, 8, 8, 3), values(*shapes[0], seed=1)
    np.testing.assert_allclose(
        made.call(w, x), amp(conv, compute_dtype="bfloat16")(w, x, (4, 4)), rtol=1e-2
    )


@pytest.mark.sample(2)
@pytest.mark.parametrize("rule", (MX, PLAIN_NV), ids=("mxfp8", "nvfp4"))
def test_calibrate_measures_what_the_rule_rounds(rule):
    x, w = values(2, 9, 11, 3), values(4, 4, 3, 24, seed=1) / 7
    found = calibrate(
        loss((4, 4)), [(w, x)], budget=0.9, candidates=("bfloat16", rule.name)
    )
    ops = explain(amp(loss((4, 4)), amp_policy=found.policy))(w, x).now.ops
    assert any(f"computes in {rule.name}" in op.why for op in ops)
