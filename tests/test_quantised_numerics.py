"""`trace_numerics` of quantised contractions: what rounding clips and flushes."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxamp_like import amp, amp_with_state, init_amp_state, trace_numerics
from jaxamp_like._quantised.int8 import Int8
from jaxamp_like.presets import quantised
from jaxamp_like.rules import float8, int8
from tests.programs import values

pytestmark = pytest.mark.sample(5)


def product(w, x):
    with jax.named_scope("mlp"):
        return x @ w


def shares(rule, fn, *args):
    """The largest shares clipped and flushed, as the report of the scope tells them."""
    policy = quantised(rule)
    report = trace_numerics(fn, compute_dtype="float32", amp_policy=policy)(*args)
    (one,) = [scope for scope in report.by_scope() if scope.scope == "mlp"]
    return one.clipped, one.flushed


W = values(16, 16)


@pytest.mark.sample(6)
@pytest.mark.parametrize("rule", (float8(where=None), int8(where=None)), ids=repr)
def test_nothing_is_clipped_and_flushed_is_what_is_small(rule):
    x = jnp.ones((8, 16)).at[:, :4].set(1e-6).at[:, 4:6].set(0.0)
    clipped, flushed = shares(rule, product, jnp.ones((16, 16)), x)
    assert clipped == 0
    np.testing.assert_allclose(flushed, 4 / 16)


@pytest.mark.rest
def test_what_is_beyond_a_fixed_scale_is_clipped():
    x = jnp.ones((8, 16)).at[:, :2].set(7.0)
    rule = int8(where=None, activation_max=6.0)
    clipped, flushed = shares(rule, product, jnp.ones((16, 16)), x)
    np.testing.assert_allclose(clipped, 2 / 16)
    assert flushed == 0


def true_error(fn, low, w, x):
    """As the report has it: the sum of deviations by that of magnitudes."""
    exact = np.asarray(fn(w, x), "float64")
    return np.abs(np.asarray(low(w, x), "float64") - exact).sum() / np.abs(exact).sum()


COARSE = (
    int8(where=None),
    int8(where=None, epsilon=0.0, weight_only=True),
    int8(where=None, activation_max=0.5),
    int8(where=None, migration=0.5),
    float8(where=None),
    float8(where=None, granularity="row", power_of_two=False),
)


def in_a_scan(ws, x):
    """By slices of a stack of weights, which are rounded before the loop."""
    return jax.lax.scan(lambda x, w: (product(w, x), None), x, ws)[0]


def in_a_while(w, x):
    """By one weight, rounded before the loop, which is compiled as a whole."""

    def body(state):
        return state[0] + 1, product(w, state[1])

    return jax.lax.while_loop(lambda state: state[0] < 1, body, (0, x))[1]


@pytest.mark.rest
@pytest.mark.sample(8)
@pytest.mark.cross("rule", fn=3)
@pytest.mark.parametrize("rule", COARSE, ids=repr)
@pytest.mark.parametrize("fn", (product, in_a_scan, in_a_while))
def test_errors_are_those_against_operands_that_are_not_rounded(fn, rule):
    x = values(8, 16).at[:, 0].set(50.0)
    low = amp(fn, compute_dtype="float32", amp_policy=quantised(rule))
    w = W[None] if fn is in_a_scan else W
    report = trace_numerics(low)(w, x)
    made = [op for op in report.ops if op.shape == (8, 16) and op.author]
    expected = true_error(fn, low, w, x)
    np.testing.assert_allclose(made[-1].error, expected, rtol=0.01)
    (contraction,) = [op for op in made if op.primitive == "dot_general"]
    if isinstance(rule, Int8) and not rule.weight_only:
        assert contraction.dtype == "int32"
    assert expected / 3 < contraction.error < 3 * expected  # its rows have no scale yet


@pytest.mark.rest
def test_what_is_flushed_and_clipped_is_printed():
    x = jnp.ones((8, 16)).at[:, 0].set(1e3)
    policy = quantised(int8(where=None))
    flushed = trace_numerics(product, compute_dtype="float32", amp_policy=policy)(W, x)
    assert "worst underflow, 93.8 % of the result: round (of dot_g" in str(flushed)
    assert "clipped" not in str(flushed)
    policy = quantised(int8(where=None, activation_max=0.5))
    clipped = trace_numerics(product, compute_dtype="float32", amp_policy=policy)(W, x)
    said = "most clipped to 8 bits, 100 % of an operand: clamp (of dot_general) in mlp"
    assert said in str(clipped)
    assert "largest error: 0.99, clamp (of dot_general) in mlp" in str(clipped)


@pytest.mark.rest
def test_the_first_step_by_delayed_scales_is_scaled_by_what_it_measures():
    policy = quantised(float8(where=None, delayed=True, amax_history_length=2))
    step = amp_with_state(product, compute_dtype="float32", amp_policy=policy)
    x = 1e3 * values(8, 16)
    state = init_amp_state(step, W, x)
    report = trace_numerics(step)(state, W, x)
    expected = true_error(product, lambda w, x: step(state, w, x)[0], W, x)
    assert expected < 0.1 and "most clipped to 8 bits" not in str(report)
    (op,) = [op for op in report.ops if op.primitive == "dot_general"]
    np.testing.assert_allclose(op.error, expected, rtol=0.01)


@pytest.mark.rest
def test_another_power_of_two_is_no_error_of_a_delayed_scale():
    """The largest cotangent lies so near one that rounding takes it to the next."""
    policy = quantised(float8(where=None, delayed=True, amax_history_length=2))
    gradient = jax.grad(lambda w, x: jnp.sum((jnp.tanh(x @ w) @ w) ** 2))
    step = amp_with_state(gradient, compute_dtype="bfloat16", amp_policy=policy)
    rows = np.random.RandomState(2).randn(8, 16)
    w = jnp.asarray(np.random.RandomState(0).randn(16, 16) / 4, jnp.float32)
    x = jnp.asarray(rows, jnp.float32)
    state = init_amp_state(step, w, x)
    for _ in range(2):
        report = trace_numerics(step)(state, w, x)
        assert report.ops and max(op.error for op in report.ops) < 0.2
        _, state = step(state, w, x)


@pytest.mark.rest
def test_in_a_loop_shares_are_those_of_all_iterations():
    def fn(w, x):
        return jax.lax.scan(lambda _, x: (None, product(w, x)), None, x)[1]

    x = jnp.ones((4, 8, 16)).at[0, :, :4].set(1e-6)
    np.testing.assert_allclose(
        shares(float8(where=None), fn, jnp.ones((16, 16)), x), (0, 1 / 16)
    )


@pytest.mark.rest
def test_a_delayed_scale_clips_what_has_grown():
    policy = quantised(float8(where=None, delayed=True, amax_history_length=2))
    step = amp_with_state(product, compute_dtype="bfloat16", amp_policy=policy)
    x = jnp.ones((8, 16))
    _, state = step(init_amp_state(step, W, x), W, x)
    report = trace_numerics(step)(state, W, x.at[:, :4].set(64.0))
    found = {op.clipped for op in report.ops if op.primitive == "clamp"}
    assert 4 / 16 in found


@pytest.mark.rest
def test_weights_that_are_rounded_before_a_loop_are_told_of():
    def fn(w, x):
        return jax.lax.fori_loop(0, 3, lambda _, x: jnp.tanh(product(w, x)), x)

    w = jnp.eye(16) + 1e-6
    low = amp(fn, compute_dtype="float32", amp_policy=quantised(float8(where=None)))
    report = trace_numerics(low)(w, values(8, 16))
    (op,) = [op for op in report.ops if op.flushed and op.runs == 1]
    np.testing.assert_allclose(op.flushed, 15 / 16)
    assert op.place.scope == "mlp" and op.error > 0


@pytest.mark.parametrize("is_derived", [False, True])
def test_the_choice_of_a_power_of_two_is_no_error(is_derived):
    """A maximum that rounds down to the largest number of a scale gets that scale."""
    x = jnp.clip(values(32, 16, seed=1), -3, 3).at[0, 0].set(3.505)
    assert x.max() > 448 / 128 == jnp.bfloat16(x.max())

    def loss(w):
        return jnp.mean(product(w, x) ** 2)

    fn = jax.value_and_grad(loss) if is_derived else loss
    policy = quantised(float8(where=None))
    report = trace_numerics(fn, compute_dtype="bfloat16", amp_policy=policy)(W)
    assert max(op.error for op in report.ops) < 0.1
