"""What the rules of the library do to an equation, forward and backward."""

import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
import pytest
from jax import lax

from benchmarks.measure import CONTRACTIONS, walk
from jaxamp_like import amp, default_amp_policy
from jaxamp_like.rules import (
    follow_inputs,
    keep_inputs,
    use_compute_precision,
    use_compute_precision_wide_result,
    use_original_precision,
    use_precision,
    use_widest_precision,
)

pytestmark = pytest.mark.quick

DOT, CONV = lax.dot_general_p, lax.conv_general_dilated_p
F8, BF16, F16, F32, F64 = "float8_e4m3fn", "bfloat16", "float16", "float32", "float64"


@pytest.fixture
def w(getkey):
    return jr.normal(getkey(), (4, 4)) / 2


def table(names, fn, *args):
    """`(dtypes of the operands, dtype of the result)` of the equations named."""
    return [
        (tuple(v.aval.dtype.name for v in eqn.invars), eqn.outvars[0].aval.dtype.name)
        for eqn, _ in walk(jax.make_jaxpr(fn)(*args))
        if eqn.primitive.name in names
    ]


def assert_near(actual, expected, dtype, roundings=32):
    bound = roundings * float(jnp.finfo(dtype).eps) / 2
    pairs = zip(jax.tree.leaves(actual), jax.tree.leaves(expected), strict=True)
    for a, b in pairs:
        assert a.dtype == b.dtype
        np.testing.assert_allclose(a, b, atol=bound * max(1, np.max(np.abs(b))))


def test_use_widest_precision(w):
    """Of the inputs as they are now, not of the author's."""
    policy = {DOT: use_compute_precision, "amp_default": use_widest_precision}

    def fn(w):
        low = w @ w
        low = low * low + 2.0
        mixed = low * lax.sin(w)
        return low @ w, mixed @ w, mixed

    low = amp(fn, amp_policy=policy)
    assert table(["mul"], low, w) == [((F16, F16), F16), ((F32, F32), F32)]
    assert table(["add"], low, w) == [((F16, F16), F16)]
    assert table(CONTRACTIONS, low, w) == [((F16, F16), F16)] * 3
    assert_near(low(w), fn(w), F16)


def conv(x, w):
    return lax.conv_general_dilated(x[None, None], w[None, None], (1, 1), "SAME")[0, 0]


@pytest.mark.parametrize(
    "op, primitive", ((jnp.matmul, DOT), (conv, CONV)), ids=("dot", "conv")
)
def test_use_compute_precision_wide_result(op, primitive, w):
    policy = default_amp_policy | {primitive: use_compute_precision_wide_result}
    low, narrow = amp(op, amp_policy=policy), amp(op)
    assert table(CONTRACTIONS, low, w, w) == [((F16, F16), F32)]
    big = jnp.full((4, 4), 200.0)  # 4 * 200 * 200 is beyond the range of float16
    np.testing.assert_array_equal(low(big, big), op(big, big))
    assert np.isinf(narrow(big, big)).any()

    def loss(fn):
        return lambda x, w: jnp.sum(jnp.sin(fn(x, w)) * x)

    def both(jvp):
        return lambda a, b: jax.jvp(jvp, (a, b), (b, a))

    for differentiate in (
        lambda f: jax.grad(loss(f), (0, 1)),
        both,  # forward mode
        lambda f: both(jax.grad(loss(f), (0, 1))),
        lambda f: jax.vmap(jax.grad(loss(f)), (None, None), axis_size=2),
    ):
        # All are low: those of the backward pass read low cotangents.
        found = table(CONTRACTIONS, differentiate(low), w, w.T)
        assert {ins for ins, _ in found} == {(F16, F16)}
        assert len(found) >= 2
        assert_near(differentiate(low)(w, w.T), differentiate(op)(w, w.T), F16)


@pytest.mark.parametrize("rule", (BF16, F32, F64, use_precision(F32)), ids=str)
@pytest.mark.parametrize("author", (F8, BF16, F16, F32, F64))
@pytest.mark.filterwarnings("ignore:.*lowers nothing")  # which is what is tested
@pytest.mark.filterwarnings("ignore:The key .* asks for float32")
def test_use_precision_is_never_above_the_authors(rule, author, w):
    jax.config.update("jax_enable_x64", True)
    try:
        if isinstance(rule, str):
            rule = use_precision(rule)
        asked = rule.dtype.name
        author = jnp.dtype(author)
        lower = author == F32 and asked == BF16
        expected = asked if lower else author.name  # float64 is never lowered
        for policy in ({DOT: rule}, {"mine": rule}, {"amp_default": rule}):
            low = amp(jax.named_scope("mine")(lax.dot), amp_policy=policy)
            found = table(CONTRACTIONS, low, w.astype(author), w.astype(author))
            assert found == [((expected, expected), expected)]
            assert low(w.astype(author), w.astype(author)).dtype == author
    finally:
        jax.config.update("jax_enable_x64", False)


def test_follow_inputs_and_keep_inputs(w):
    """As rules of the user, where all else runs as written."""
    policy = {
        DOT: use_compute_precision,
        lax.sin_p: follow_inputs,
        lax.add_p: follow_inputs,
        lax.transpose_p: keep_inputs,
        lax.broadcast_in_dim_p: keep_inputs,
        "amp_default": use_original_precision,
    }

    def fn(w, b):
        low = jnp.sin(w @ w).T + b  # the smaller input doesn't decide
        full = jnp.sin(jnp.exp(w)).T + low  # one of the result's size does
        unread = jnp.sin(w @ w)  # read by nothing that computes low
        return low @ w, full @ w, unread

    low = amp(fn, amp_policy=policy)
    args = w, w[0]
    assert table(["sin"], low, *args) == [((F16,), F16), ((F32,), F32), ((F32,), F32)]
    assert table(["add"], low, *args) == [((F16, F16), F16), ((F32, F32), F32)]
    assert table(["transpose"], low, *args) == [((F16,), F16), ((F32,), F32)]
    assert_near(low(*args), fn(*args), F16)


@pytest.mark.parametrize("constant, dtype", ((0.5, F16), (1e-8, F32), (0.9999, F32)))
def test_follow_inputs_keeps_constants_alive(constant, dtype, w):
    policy = {DOT: use_compute_precision, lax.mul_p: follow_inputs}
    low = amp(lambda w: (constant * (w @ w)) @ w, amp_policy=policy)
    assert table(["mul"], low, w) == [((dtype, dtype), dtype)]


@pytest.mark.parametrize("author", (F32, BF16))
@pytest.mark.filterwarnings("ignore:float16 changes nothing")
def test_float8_contractions(author, w):
    """On CPUs these run by way of wider dtypes: slow, but the numbers are float8's."""
    w = w.astype(author)
    low = amp(jnp.matmul, amp_policy=default_amp_policy | {DOT: use_precision(F8)})
    assert table(CONTRACTIONS, low, w, w) == [((F8, F8), F8)]
    rounded = w.astype(F8).astype(F32)
    expected = (rounded @ rounded).astype(F8).astype(author)
    np.testing.assert_array_equal(jax.jit(low)(w, w), expected)
    loss = lambda w: jnp.sum(jnp.tanh(low(w, w)).astype(F32))  # noqa: E731
    grad, plain = jax.grad(loss)(w), jax.grad(lambda w: jnp.tanh(w @ w).sum())(w)
    assert grad.dtype == w.dtype
    assert_near(grad, plain, F8, 4)
    mixed = amp(lambda w: low(w, w) @ w, compute_dtype=F16)
    inputs = {ins for ins, _ in table(CONTRACTIONS, mixed, w)}
    assert inputs == {(F8, F8), (BF16, BF16) if author == BF16 else (F16, F16)}


def test_float32_beside_an_operand_that_is_low_by_hand(w):
    """It takes the other's dtype: float16 would overflow where bfloat16 does not."""

    def product(a, b):
        return lax.dot(a, b, preferred_element_type=jnp.float32)

    a, b = jnp.full((2, w.shape[0]), 1e5), jnp.ones(w.shape, jnp.bfloat16)
    assert jnp.isfinite(amp(product, compute_dtype="float16")(a, b)).all()


@pytest.mark.parametrize(
    ("compute", "original"),
    [
        ("bfloat16", "float32"),
        (jnp.bfloat16, jnp.float32),
        (jnp.dtype("bfloat16"), jnp.dtype("float32")),
    ],
)
def test_a_rule_takes_dtypes_by_any_of_their_names(compute, original):
    (x,), params = use_compute_precision(compute, [original], jnp.ones(3), axis=0)
    assert x.dtype == jnp.bfloat16 and params == {"axis": 0}
