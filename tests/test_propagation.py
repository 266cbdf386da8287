"""How the default policy decides: the dtype of each op, and the numbers behind it.

Contractions are low, what is between them is computed in full and moved as it is. Lists
of ops are written as in `programs`."""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
import pytest
from jax import lax

from benchmarks import measure
from benchmarks.measure import walk
from jaxamp_like import amp, default_amp_policy
from jaxamp_like.rules import use_compute_precision

from .programs import (
    BIAS,
    FLOAT32_MIN,
    GAIN,
    MASK,
    WS,
    W,
    X,
    between,
    blocks,
    checkpointed,
    cross_entropy,
    dense,
    eps,
    error,
    every_dtype,
    expect,
    layer_norm,
    lstm,
    masked_softmax,
    ops,
    scanned_blocks,
    stream,
    values,
    waves,
)

pytestmark = pytest.mark.sample(6)

SOFTMAX = "F reduce_max max sub exp reduce_sum div"


# Ops between contractions, and what becomes of them in either dtype.

NORM = """F reduce_sum div sub integer_pow reduce_sum div sub add rsqrt mul mul add"""

BETWEEN: dict[str, tuple[Callable[..., Any], str]] = {
    "tanh": (jnp.tanh, "F tanh"),
    "bias": (lambda h: h + BIAS, "F add"),
    "layer norm": (lambda h: layer_norm(h, GAIN, BIAS), NORM),
    "gelu, tanh": (jax.nn.gelu, "F integer_pow mul add mul tanh add mul mul"),
    "sigmoid gate": (jax.nn.silu, "F logistic mul"),
    # What only chooses and moves has no rounding of its own: low, as it is held...
    "relu": (jax.nn.relu, "L max"),
    "softmax": (jax.nn.softmax, SOFTMAX),
    "gelu, erf": (
        functools.partial(jax.nn.gelu, approximate=False),
        "F mul neg mul erfc mul",
    ),
    # It is read twice, so that its cotangents add up in full.
    "concatenated": (lambda h: jnp.concatenate([h, -h]), "L neg F concatenate"),
    "-inf": (lambda h: jnp.maximum(h, -jnp.inf), "L max"),
    # ... and what only contractions read is rounded before it is moved, not after.
    "bias and relu": (lambda h: jax.nn.relu(h + BIAS), "F add L max"),
    # With numbers that 16 bits don't hold, in full.
    "1/3": (lambda h: jnp.maximum(h, 1 / 3), "F max"),
    "beside an input": (lambda h: jnp.maximum(h, GAIN), "F max"),
    # Nothing of a step may be rounded ahead of it.
    "step": (lambda h: jnp.floor(h * 3) / 3, "F mul floor div"),
    "comparison": (lambda h: jnp.where(h * 3 > 1, h, 0.0), "F mul L select_n"),
    # Constants of whatever dtype change nothing.
    "Python scalars": (lambda h: (h * 2.0 + 1.5) * 3, "F mul add mul"),
    "NumPy scalars": (
        lambda h: (h * np.float32(2) + np.float64(1.5)) * np.float64(3),
        "F mul add mul",
    ),
    "NumPy arrays": (
        lambda h: h * np.arange(8, dtype=np.float32) + np.linspace(0, 1, 8),
        "F mul add",
    ),
    "1e-8": (lambda h: h + 1e-8, "F add"),
    "-1e9": (lambda h: h + -1e9, "F add"),
    "0.9999": (lambda h: h * 0.9999, "F mul"),
    "exp": (lambda h: jnp.exp(h) * 2 + h, "F exp mul add"),
    "a sum": (lambda h: h / jnp.sum(h) + h, "F reduce_sum div add"),
}


@every_dtype
@pytest.mark.parametrize("name", BETWEEN)
def test_between_contractions(name, dtype):
    fn, inside = BETWEEN[name]
    expect(between(fn), dtype, f"L dot_general {inside} L dot_general", W, X)


EYE = jnp.eye(8)
STAIRS = jnp.linspace(0, 250, 4096).reshape(512, 8)
PARITY = jnp.arange(4096.0) % 2
CHOICES: dict[str, Callable[..., Any]] = {
    "floor": lambda x: jnp.floor(x),
    "sign": lambda x: jnp.sign(x - 1e-9),
    "comparison": lambda x: jnp.where(x > 100.3, 1.0, 0.0),
    "integers": lambda x: lax.dynamic_slice(PARITY, (x[40, 1].astype(int),), (8,)),
    "argsort": lambda x: PARITY[jnp.argsort(x, axis=None)],
    "top_k": lambda x: lax.top_k(-x, 8)[0],
}


@every_dtype
@pytest.mark.parametrize("name", CHOICES)
def test_nothing_is_rounded_ahead_of_a_choice(name, dtype):
    """Although all that comes of it is only read low."""

    def fn(x):
        return CHOICES[name](jnp.maximum(x * 1.01, -1.0)).reshape(-1, 8) @ EYE

    def exact(x):
        choices = CHOICES[name](jnp.maximum(x * 1.01, -1.0)).reshape(-1, 8)
        return choices.astype(dtype).astype(jnp.float32)

    actual = amp(fn, compute_dtype=dtype)(STAIRS)
    np.testing.assert_array_equal(actual, exact(STAIRS))


@every_dtype
def test_a_constant_array_is_not_rounded_beside_what_is_low(dtype):
    """Not even if the greatest of its numbers could be."""
    table = np.asarray([[32768.0, 0.1, 1e-8, 0, 0, 0, 0, 0]], np.float32)

    def fn(x):
        y = jnp.concatenate([x @ EYE, table])
        return y, y @ EYE

    both, _ = amp(fn, compute_dtype=dtype)(X)
    np.testing.assert_array_equal(both[-1:], table)


@every_dtype
@pytest.mark.parametrize("fill", [-1e9, -np.inf, FLOAT32_MIN])
def test_masks(fill, dtype):
    """A fully masked row comes out as in float32: uniform, or NaN for -inf."""
    probabilities = functools.partial(masked_softmax, fill=fill)
    fn = between(probabilities)
    held = "L" if fill == -np.inf else "F"  # the numbers that 16 bits have, too
    ops = f"L dot_general {held} select_n {SOFTMAX} L dot_general"
    expect(fn, dtype, ops, W, X, MASK)

    def weights(w, x, mask):
        return probabilities(x @ w, mask)

    actual = amp(weights, compute_dtype=dtype)(W, X, MASK)
    expected = weights(W, X, MASK)
    assert np.array_equal(jnp.isfinite(actual), jnp.isfinite(expected))
    assert np.isfinite(actual[1:]).all() and (actual[1:] == 0).sum() > 0
    assert error(actual[1:], expected[1:]) < 4 * eps(dtype)
    if np.isfinite(fill):
        np.testing.assert_allclose(actual[0], 1 / 8)


@every_dtype
@pytest.mark.parametrize("fill", [-1e9, FLOAT32_MIN])
def test_masks_that_are_added_or_read_low(fill, dtype):
    def added(w, x, mask):
        return jax.nn.softmax(x @ w + (1 - mask.astype(jnp.float32)) * fill)

    actual = amp(added, compute_dtype=dtype)(W, X, MASK)
    assert error(actual[1:], added(W, X, MASK)[1:]) < 4 * eps(dtype)
    assert np.isfinite(actual).all()
    low = jax.make_jaxpr(
        amp(between(lambda h, m: jnp.where(m, h, fill)), compute_dtype="float16")
    )(W, X, MASK)
    assert ("select_n", "float32") in ops(low)


@every_dtype
@pytest.mark.parametrize("approximate", [True, False])
def test_gelu_far_out(approximate, dtype):
    """Cubes overflow float16 above 40; gelu and its gradient must not."""
    x = jnp.asarray([-300.0, -50.0, -3.0, 0.5, 3.0, 50.0, 300.0])
    eye = jnp.eye(7)

    def fn(x):
        return jnp.sum(jax.nn.gelu(x @ eye, approximate=approximate) @ eye)

    low = amp(fn, compute_dtype=dtype)
    assert error(low(x), fn(x)) < 4 * eps(dtype)
    assert error(jax.grad(low)(x), jax.grad(fn)(x)) < 4 * eps(dtype)


# Sums: of gradients, of residual streams, in loops.


@every_dtype
def test_residual_streams(dtype):
    block = "L dot_general F tanh L dot_general F add"
    expect(blocks, dtype, f"{block} {block}", X, [W, W])
    expect(scanned_blocks, dtype, block, X, jnp.stack([W, W]))

    ws = jnp.stack([values(8, 8, seed=i, scale=0.1) for i in range(48)])
    exact = scanned_blocks(X, ws)
    scanned = error(amp(scanned_blocks, compute_dtype=dtype)(X, ws), exact)
    unrolled = error(jax.jit(amp(blocks, compute_dtype=dtype))(X, ws), exact)
    assert scanned < eps(dtype) / 2 and unrolled < eps(dtype) / 2


@every_dtype
def test_bias_gradients(dtype):
    w, v, b = values(64, 64, seed=1), values(64, 64, seed=2) + 1, values(64)
    x = values(32, 512, 64)
    cotangent = values(32, 512, 64, seed=3) + 1

    def loss(b):
        return jnp.sum(jnp.maximum(x @ w + b, -1e3) @ v * cotangent)

    actual = jax.grad(amp(loss, compute_dtype=dtype))(b)
    exact = (np.asarray(cotangent, np.float64) @ np.asarray(v, np.float64).T).sum(
        (0, 1)
    )
    assert error(actual, exact) < 1e-3
    # Which numbers are above -1e3 is asked of the sums in full.
    expect(loss, dtype, "L dot_general F add max L dot_general F mul reduce_sum", b)


@every_dtype
def test_embedding_gradients(dtype):
    tokens = np.random.default_rng(0).integers(0, 100, 10_000)
    tokens[::2] = 7
    table, w = values(100, 16), values(16, 16, seed=1) + 1
    cotangent = values(10_000, 16, seed=2) + 1

    def loss(table):
        return jnp.sum(table[jnp.asarray(tokens)] @ w * cotangent)

    actual = jax.grad(amp(loss, compute_dtype=dtype))(table)
    exact = np.zeros((100, 16))
    rows = np.asarray(cotangent, np.float64) @ np.asarray(w, np.float64).T
    np.add.at(exact, tokens, rows)
    assert error(actual, exact) < 1e-3
    expect(loss, dtype, "F gather L dot_general F mul reduce_sum", table)


@every_dtype
@pytest.mark.parametrize(
    ("loss", "target", "inside"),
    [
        (
            cross_entropy,
            jnp.arange(4),
            """F reduce_max max sub exp reduce_sum log sub gather reduce_sum div
            neg""",
        ),
        (
            lambda h, y: jnp.mean((h - y) ** 2),
            X[::-1],
            "F sub integer_pow reduce_sum div",
        ),
    ],
)
def test_losses(loss, target, inside, dtype):
    """All of a loss is in float32: as if it were given the low outputs, cast."""

    def fn(w, x):
        return loss(x @ w, target)

    expect(fn, dtype, f"L dot_general {inside}", W, X)
    logits = (X.astype(dtype) @ W.astype(dtype)).astype(jnp.float32)
    actual = amp(fn, compute_dtype=dtype)(W, X)
    np.testing.assert_allclose(actual, loss(logits, target), rtol=1e-6)


@pytest.mark.rest
def test_inputs_300_times_too_large():
    """A variance that overflows float16 gives zeros, and no NaN that tells of it."""
    ws = [values(32, 32, seed=i, scale=32**-0.5) for i in range(4)]
    x = values(64, 32, scale=300)

    def loss(ws):
        h = x
        for w in ws:
            h = jax.nn.gelu(layer_norm(h @ w))
        return jnp.mean(h**2)

    value, grads = jax.value_and_grad(amp(loss))(ws)
    assert error(value, loss(ws)) < 1e-2
    assert error(grads, jax.grad(loss)(ws)) < 1e-2


# Random numbers.


@every_dtype
def test_random_normal(dtype):
    draw = functools.partial(jr.normal, shape=(10**6,))
    expect(draw, dtype, """F bitcast_convert_type sub sub mul add max erf_inv mul""",
           jr.key(0))  # fmt: skip
    actual = jax.jit(amp(draw, compute_dtype=dtype))(jr.key(0))
    assert np.isfinite(actual).all()
    assert np.array_equal(actual, jax.jit(draw)(jr.key(0)))


@every_dtype
def test_dropout(dtype):
    def dropout(h, key):
        return jnp.where(jr.bernoulli(key, 0.75, h.shape), h / 0.75, 0.0)

    uniform = "F bitcast_convert_type sub sub mul add max"
    expect(
        between(dropout), dtype,
        f"L dot_general {uniform} F div L select_n dot_general", W, X, jr.key(0),
    )  # fmt: skip

    def dropped(w, x, key):
        return dropout(x @ w, key)

    actual = amp(dropped, compute_dtype=dtype)(W, X, jr.key(0))
    assert np.array_equal(actual == 0, dropped(W, X, jr.key(0)) == 0)


# Loops, branches, calls.


@every_dtype
def test_lstm_carries(dtype):
    weights = values(8, 32, scale=0.3), values(8, 32, seed=1, scale=0.3)
    xs = values(200, 4, 8)
    gates = """L dot_general dot_general F add split logistic mul logistic tanh mul add
        logistic tanh mul"""
    expect(lstm, dtype, gates, *weights, xs)
    jaxpr = jax.make_jaxpr(amp(lstm, compute_dtype=dtype))(*weights, xs)
    (scan,) = (eqn for eqn, _ in walk(jaxpr) if eqn.primitive.name == "scan")
    h, c = scan.outvars[:2]
    assert (h.aval.dtype, c.aval.dtype) == (dtype, "float32")
    actual = amp(lstm, compute_dtype=dtype)(*weights, xs)
    assert error(actual, lstm(*weights, xs)) < 4 * eps(dtype)


def test_a_logistic_in_float16_is_rounded_where_it_is_handed_over():
    """Its exponential overflows where it is 1.5e-5 itself; its logarithm needs it."""
    one = jnp.eye(2)
    x = jnp.linspace(-16, 16, 1001)[:, None] * jnp.ones(2)
    gate = amp(lambda x: jax.nn.sigmoid(x @ one) @ one, compute_dtype="float16")
    exact = 1 / (1 + np.exp(-np.asarray(x.astype("float16"), np.float64)))
    np.testing.assert_allclose(gate(x), exact, rtol=2**-11, atol=2**-25)
    slope = jax.vmap(jax.grad(lambda x: gate(x[None])[0, 0]))(x)[:, 0]
    np.testing.assert_allclose(slope, (exact * (1 - exact))[:, 0], atol=2**-11)
    kept = measure.saved(gate, x, argnums=(0,))
    assert [a.dtype for a in kept if a.size == x.size] == ["float16"]

    def both(x):
        y = jax.nn.sigmoid(x @ one)
        return jnp.log(y), y @ one

    log, low = amp(both, compute_dtype="float16")(x)
    np.testing.assert_allclose(log, np.log(exact), rtol=1e-5, atol=2**-23)
    np.testing.assert_allclose(low, exact, rtol=2**-11, atol=2**-25)


@every_dtype
def test_running_sums(dtype):
    def total(w, xs):
        return lax.scan(lambda s, x: (s + x @ w, None), jnp.zeros((1, 8)), xs)[0]

    xs = jnp.full((10_000, 1, 8), 0.125)
    expect(total, dtype, "L dot_general F add", jnp.ones((8, 8)), xs)
    actual = amp(total, compute_dtype=dtype)(jnp.ones((8, 8)), xs)
    np.testing.assert_allclose(actual, 10_000, rtol=1e-5)


@every_dtype
def test_while_loops(dtype):
    def crossed(w, x):  # every path crosses a contraction: the carry is low
        def body(carry):
            return carry[0] + 1, jnp.tanh(carry[1] @ w)

        return lax.while_loop(lambda c: c[0] < 5, body, (0, x))[1] @ w

    def added(w, x):
        def body(carry):
            return carry[0] + 1, carry[1] + jnp.tanh(carry[1] @ w)

        return lax.while_loop(lambda c: c[0] < 5, body, (0, x))[1] @ w

    def threshold(w, x):  # a solver
        def body(x):
            return x + jnp.abs(x @ w) * 0.1

        return lax.while_loop(lambda x: jnp.sum(x) < 1000, body, jnp.abs(x))

    expect(crossed, dtype, "L dot_general F tanh L dot_general", W, X)
    expect(added, dtype, "L dot_general F tanh add L dot_general", W, X)
    expect(threshold, dtype, "F abs reduce_sum dot_general abs mul add", W, X)
    for fn in (crossed, added, threshold):
        assert error(amp(fn, compute_dtype=dtype)(W, X), fn(W, X)) < 8 * eps(dtype)


@every_dtype
def test_branches_join(dtype):
    def fn(other, w, x):
        return lax.cond(x[0, 0] > 0, jnp.tanh, other, x @ w) * 2 @ w

    low = functools.partial(fn, lambda h: h + h)
    expect(low, dtype, "F slice L dot_general F add tanh mul L dot_general", W, X)
    full = functools.partial(fn, jnp.exp)
    expected = "F slice L dot_general F exp tanh mul L dot_general"
    expect(full, dtype, expected, W, X)
    for x in (X, -X):
        exact = full(W, x)
        assert error(amp(full, compute_dtype=dtype)(W, x), exact) < 8 * eps(dtype)


CALLS = {
    "custom_jvp": (between(waves), "L dot_general F sin mul L dot_general", 3),
    "custom_vjp": (
        lambda w, x: dense(x, w) @ w,
        "L dot_general F tanh L dot_general",
        4,
    ),
    "remat": (
        lambda w, x: jax.checkpoint(between(jnp.tanh))(w, x),
        "L dot_general F tanh L dot_general",
        3,
    ),
    "jit": (jax.jit(between(jnp.tanh)), "L dot_general F tanh L dot_general", 3),
}


@every_dtype
@pytest.mark.parametrize("name", CALLS)
def test_calls(name, dtype):
    fn, expected, least = CALLS[name]
    expect(fn, dtype, expected, W, X)

    def loss(w):
        return jnp.sum(fn(w, X) ** 2)

    grad = jax.grad(amp(loss, compute_dtype=dtype))
    made = [made for op, made in ops(jax.make_jaxpr(grad)(W)) if op == "dot_general"]
    assert len(made) > least and set(made) == {dtype}
    assert error(grad(W), jax.grad(loss)(W)) < 8 * eps(dtype)


@every_dtype
@pytest.mark.parametrize("key", ("residual", lax.add_p), ids=("scope", "primitive"))
def test_a_rule_can_ask_for_a_low_carry(key, dtype):
    def fn(ws, x):
        def block(x, w):
            y = jnp.tanh(x @ w)
            with jax.named_scope("residual"):
                return x + y, None

        return lax.scan(block, x, ws)[0]

    def carried(policy):
        mixed = amp(fn, compute_dtype=dtype, amp_policy=policy)
        jaxpr = jax.make_jaxpr(mixed)(jnp.stack([W] * 3), X)
        (scan,) = (eqn for eqn, _ in walk(jaxpr) if eqn.primitive.name == "scan")
        return scan.outvars[0].aval.dtype

    assert carried(default_amp_policy) == jnp.float32
    assert carried(default_amp_policy | {key: use_compute_precision}) == dtype


@every_dtype
@pytest.mark.parametrize(
    "fn",
    [jax.nn.gelu, lambda y: y / (1 + y * y), jnp.square, lambda y: jnp.sin(y) * y],
    ids=("gelu", "ratio", "square", "sine"),
)
def test_what_is_computed_in_full_is_kept_low(fn, dtype):
    """It is computed again, from what a contraction made."""

    def loss(w, x):
        return jnp.sum(fn(x @ w) @ w)

    low = amp(loss, compute_dtype=dtype)
    assert {a.dtype.name for a in measure.saved(low, W, X)} == {dtype}
    ours, true = jax.grad(low)(W, X), jax.grad(loss)(W, X)
    assert error(ours, true) < 8 * eps(dtype)


# Code that is run again: it is run from the carry itself, not from a rounded one.


def kept_by_loop(fn, ws, x):
    """The dtypes of all arrays as large as the carries of all iterations."""
    saved = measure.saved(fn, ws, x)
    return sorted(a.dtype.name for a in saved if a.size == len(ws) * x.size)


@pytest.mark.parametrize("prevent_cse", (True, False))
def test_a_checkpointed_stream_is_kept_in_full(prevent_cse):
    fn = functools.partial(checkpointed, stream, prevent_cse=prevent_cse)
    low = amp(fn, compute_dtype="bfloat16")
    assert kept_by_loop(fn, WS, X) == ["float32"]
    assert kept_by_loop(low, WS, X) == ["float32"]

    # The forward pass is that of the stream in full, to the bit.
    def loop(ws, x):
        return jnp.sum(lax.scan(lambda x, w: (stream(x, w), None), x, ws)[0] ** 2)

    plain = amp(loop, compute_dtype="bfloat16")
    value, grads = jax.jit(jax.value_and_grad(low, argnums=(0, 1)))(WS, X)
    np.testing.assert_array_equal(value, jax.jit(plain)(WS, X))
    for ours, true in zip(grads, jax.grad(fn, argnums=(0, 1))(WS, X), strict=True):
        assert error(ours, true) < 2 * eps("bfloat16")


def test_float16_has_not_the_range_of_a_stream():
    low = amp(functools.partial(checkpointed, stream), compute_dtype="float16")
    assert kept_by_loop(low, WS, X) == ["float32"]
    grads = jax.grad(lambda ws, x: 1e-8 * low(ws, x))(WS, 1e6 * X)
    assert jnp.isfinite(grads).all()


@pytest.mark.parametrize(
    ("block", "options"),
    [
        (lambda x, w: x + 0.1 * jnp.sin(x) + jnp.tanh(x @ w), {}),
        (lambda x, w: x * jnp.tanh(x @ w), {}),
        (stream, {"policy": jax.checkpoint_policies.dots_saveable}),
        (lambda x, w: x + w[jnp.argmax(x @ w, axis=-1)] * jnp.tanh(x @ w), {}),
    ],
    ids=("sin", "gate", "policy", "router"),
)
def test_what_else_a_checkpoint_keeps_is_as_written(block, options):
    """A carry whose own curvature matters, what a policy chose, what chooses."""
    fn = functools.partial(checkpointed, block, **options)
    low = amp(fn, compute_dtype="bfloat16")
    assert "float32" in kept_by_loop(low, WS, X)


@pytest.mark.rest
def test_a_checkpointed_stream_under_other_transformations():
    fn = functools.partial(checkpointed, stream)
    low = amp(fn, compute_dtype="bfloat16")
    limit = 4 * eps("bfloat16")
    xs = jnp.stack([X, 2 * X])
    grad = jax.vmap(jax.grad(low), in_axes=(None, 0))(WS, xs)
    true = jax.vmap(jax.grad(fn), in_axes=(None, 0))(WS, xs)
    assert error(grad, true) < limit
    tangent = jax.jvp(low, (WS, X), (WS, X))[1]
    assert error(tangent, jax.jvp(fn, (WS, X), (WS, X))[1]) < limit

    def curved(fn):
        return jax.jvp(jax.grad(fn), (WS, X), (WS, X))[1]

    assert error(curved(low), curved(fn)) < 2 * limit
    again = jax.grad(jax.checkpoint(low))(WS, X)
    assert error(again, jax.grad(fn)(WS, X)) < limit
