"""Ragged contractions in blocks, as for experts: forward and both gradients."""

from itertools import pairwise

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from jaxamp_like import AmpWarning, amp, explain
from jaxamp_like.presets import quantised
from jaxamp_like.rules import mxfp8, nvfp4
from tests import blocks_in_numpy as reference
from tests.programs import error, values

pytestmark = [
    pytest.mark.rest,
    pytest.mark.skipif(
        not hasattr(lax, "ragged_dot_general"),
        reason="this JAX has another ragged product",
    ),
]

MX, NV = mxfp8(where=None, emulate=True), nvfp4(where=None, emulate=True)
PLAIN_NV = nvfp4(
    where=None, emulate=True, square_weights=False, rotate=False, stochastic=False
)
both_formats = pytest.mark.parametrize("rule", (MX, NV), ids=("mxfp8", "nvfp4"))

GROUPS = {
    "empty ones": (80, [37, 0, 33, 10, 0]),
    "one": (50, [50]),
    "rows in none": (70, [20, 1, 16]),
    "whole blocks": (96, [32, 64]),
    "no rows": (40, [0, 0]),
}


def low(fn, rule, dtype="bfloat16", **options):
    return amp(fn, compute_dtype=dtype, amp_policy=quantised(rule), **options)


def restored(rows, rule):
    """What rows stand for that are rounded in blocks along their second axis."""
    rows = np.asarray(rows, np.float32)
    if rule is MX:
        return reference.restored(*reference.mxfp8(rows), length=rows.shape[1])
    return reference.restored(*reference.nvfp4(rows), length=rows.shape[1])


def in_groups(x, sizes, rule):
    """The rows of each group, rounded along them in blocks that begin anew with it."""
    size = 32 if rule is MX else 16
    starts = np.cumsum([0, *sizes])
    parts = [np.asarray(x)[a:b] for a, b in pairwise(starts)]
    padded = [np.pad(part, [(0, -len(part) % size), (0, 0)]) for part in parts]
    if not sum(map(len, padded)):
        return parts
    made = restored(np.concatenate(padded).T, rule).T
    starts = np.cumsum([0, *map(len, padded)])
    return [made[a : a + n] for a, n in zip(starts, sizes, strict=False)]


def contractions(x, w, ct, sizes, rule):
    """The result and the gradients of `x` and `w`, in float64."""
    used = (np.arange(len(x)) < sum(sizes))[:, None]
    groups, summed, columns = w.shape
    starts = np.cumsum([0, *sizes])
    slices = [slice(a, b) for a, b in pairwise(starts)]
    by_input = restored(np.swapaxes(w, 1, 2).reshape(-1, summed), rule)
    by_input = by_input.reshape(groups, columns, summed)
    by_output = restored(np.reshape(w, (-1, columns)), rule).reshape(w.shape)
    rows, cts = (
        restored(np.where(used, x, 0), rule),
        restored(np.where(used, ct, 0), rule),
    )
    out, dx = np.zeros(ct.shape), np.zeros(x.shape)
    for one, forward, back in zip(slices, by_input, by_output, strict=True):
        out[one] = rows[one] @ forward.T
        dx[one] = cts[one] @ back.T
    pairs = zip(in_groups(x, sizes, rule), in_groups(ct, sizes, rule), strict=True)
    return out, dx, np.stack([one.T @ other for one, other in pairs])


@pytest.mark.sample(5)
@pytest.mark.parametrize("outermost", ("amp", "grad"))
@pytest.mark.parametrize("rule", (MX, PLAIN_NV), ids=("mxfp8", "nvfp4"))
@pytest.mark.parametrize("rows, sizes", GROUPS.values(), ids=GROUPS)
def test_contractions_of_the_restored_numbers(rows, sizes, rule, outermost):
    x, w = values(rows, 40), values(len(sizes), 40, 24, seed=1)
    ct = values(rows, 24, seed=2)
    x = x.at[sum(sizes) :].multiply(1e4)  # no scale follows from what no group has
    groups = jnp.array(sizes, jnp.int32)

    def product(w, x):
        return lax.ragged_dot(x, w, groups)

    def both(w, x):
        fn = low(product, rule, "float32") if outermost == "grad" else product
        out, back = jax.vjp(fn, w, x)
        return out, *reversed(back(ct))

    made = both if outermost == "grad" else low(both, rule, "float32")
    for one, expected in zip(
        jax.jit(made)(w, x), contractions(x, w, ct, sizes, rule), strict=True
    ):
        bound = 2**-20 * abs(expected).max(initial=0)
        assert (abs(np.asarray(one, np.float64) - expected) <= bound).all()


def experts(w, x):
    h = jax.nn.gelu(lax.ragged_dot(x, w[0], jnp.array([30, 0, 18], jnp.int32)))
    return jnp.mean(lax.ragged_dot(h, w[1], jnp.array([30, 0, 18], jnp.int32)) ** 2)


def scanned(w, x):
    def body(x, w):
        h = lax.ragged_dot(x, w[0], jnp.array([30, 0, 18], jnp.int32))
        return lax.ragged_dot(h, w[1], jnp.array([30, 0, 18], jnp.int32)), None

    many = jax.tree.map(lambda one: jnp.stack([one, one * 0.9]), w)
    return jnp.mean(lax.scan(jax.checkpoint(body), x, many)[0] ** 2)


def weights():
    return values(3, 40, 56, seed=1) / 6, values(3, 56, 40, seed=2) / 7


@pytest.mark.sample(4)
@both_formats
@pytest.mark.parametrize("fn", (experts, scanned))
@pytest.mark.parametrize("dtype", ("bfloat16", "float16"))
def test_programs(fn, rule, dtype):
    w, x = weights(), values(48, 40)
    made = jax.jit(jax.grad(low(fn, rule, dtype), (0, 1)))(w, x)
    inside = jax.jit(low(jax.grad(fn, (0, 1)), rule, dtype, argnums=0))(w, x)
    exact = jax.jit(jax.grad(fn, (0, 1)))(w, x)
    most = 0.12 if rule is MX else 0.6
    for some in (made, inside):
        for one, other in zip(*map(jax.tree.leaves, (some, exact)), strict=True):
            assert 2**-7 < error(one, other) < most


@pytest.mark.sample(2)
@both_formats
def test_forward_mode_and_transposes(rule):
    w, x = weights()[0], values(48, 40)
    groups = jnp.array([30, 0, 18], jnp.int32)
    fn = low(lambda w, x: lax.ragged_dot(x, w, groups), rule)
    out, tangent = jax.jvp(jax.jit(fn), (w, x), (w, x))
    assert error(tangent, 2 * out) < (0.1 if rule is MX else 0.5)
    (made,) = jax.jit(jax.linear_transpose(lambda x: fn(w, x), x))(out)
    exact = jax.linear_transpose(lambda x: lax.ragged_dot(x, w, groups), x)
    (exact,) = jax.jit(exact)(out)
    assert error(made, exact) < 2**-6


@pytest.mark.sample(2)
@both_formats
def test_a_nan_stays_in_its_group(rule):
    w, x = weights()[0], values(48, 40).at[3, 5].set(jnp.nan)
    groups = jnp.array([30, 0, 10], jnp.int32)
    fn = low(lambda w, x: lax.ragged_dot(x, w, groups), rule)
    out, back = jax.vjp(jax.jit(fn), w, x.at[45].set(jnp.inf))
    assert jnp.isnan(out[3]).all()
    assert jnp.isfinite(jnp.delete(out, 3, axis=0)).all()
    dw, _ = back(jnp.ones_like(out))
    assert jnp.isnan(dw[0]).any()
    assert jnp.isfinite(dw[1:]).all()


@pytest.mark.parametrize("make", (mxfp8, nvfp4))
def test_without_emulation_the_compute_dtype_is_taken_and_told(make):
    w, x = weights(), values(48, 40)
    step = jax.value_and_grad(low(experts, make(where=None)))
    with pytest.warns(AmpWarning, match="no device has a native ragged_dot_general"):
        made = step(w, x)
    expected = jax.value_and_grad(amp(experts, compute_dtype="bfloat16"))(w, x)
    jax.tree.map(np.testing.assert_array_equal, made, expected)
    report = explain(step)(w, x)
    whys = {op.why for op in report.now.ops if op.primitive == "ragged_dot_general"}
    assert len(whys) == 1
    assert "`emulate=True` computes with its numbers" in whys.pop()


@pytest.mark.sample(2)
@both_formats
def test_the_gradient_of_weights_may_be_left(rule):
    w, x = weights(), values(48, 40)
    make = type(rule)(where=None, emulate=True, weight_gradient="compute")
    step = jax.grad(low(lambda w, x: experts(w, x), make))
    assert error(step(w, x)[1], jax.grad(experts)(w, x)[1]) > 2**-7
    report = explain(step)(w, x)
    whys = {op.why for op in report.now.ops if op.primitive == "ragged_dot_general"}
    assert any("the gradient of the right operand in bfloat16" in why for why in whys)
