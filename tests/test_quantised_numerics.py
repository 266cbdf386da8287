"""`trace_numerics` of quantised contractions: what rounding clips and flushes."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxamp_like import amp, amp_with_state, init_amp_state, trace_numerics
from jaxamp_like.presets import quantised
from jaxamp_like.rules import float8, int8
from tests.programs import values

pytestmark = pytest.mark.sample(3)


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


@pytest.mark.parametrize("rule", (float8(where=None), int8(where=None)), ids=repr)
def test_nothing_is_clipped_and_flushed_is_what_is_small(rule):
    x = jnp.ones((8, 16)).at[:, :4].set(1e-6).at[:, 4:6].set(0.0)
    clipped, flushed = shares(rule, product, jnp.ones((16, 16)), x)
    assert clipped == 0
    np.testing.assert_allclose(flushed, 4 / 16)


def test_what_is_beyond_a_fixed_scale_is_clipped():
    x = jnp.ones((8, 16)).at[:, :2].set(7.0)
    rule = int8(where=None, activation_max=6.0)
    clipped, flushed = shares(rule, product, jnp.ones((16, 16)), x)
    np.testing.assert_allclose(clipped, 2 / 16)
    assert flushed == 0


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


def test_weights_that_are_rounded_before_a_loop_are_told_of():
    def fn(w, x):
        return jax.lax.fori_loop(0, 3, lambda _, x: jnp.tanh(product(w, x)), x)

    w = jnp.eye(16) + 1e-6
    low = amp(fn, compute_dtype="float32", amp_policy=quantised(float8(where=None)))
    report = trace_numerics(low)(w, values(8, 16))
    (op,) = [op for op in report.ops if op.flushed and op.runs == 1]
    np.testing.assert_allclose(op.flushed, 15 / 16)
    assert op.place.scope == "mlp" and op.error > 0
