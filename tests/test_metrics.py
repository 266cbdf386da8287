"""Numbers for a logger are floats, and those of the state and the report."""

import json

import jax
import jax.numpy as jnp
import optax
import pytest

from jaxamp_like import DynamicScalerState, amp, enable_amp, explain
from jaxamp_like.reports import amp_metrics

w, x = {"in": jnp.ones((4, 8))}, jnp.ones((2, 4))


def loss(w, x):
    return jnp.mean(jnp.tanh(x @ w["in"]) ** 2)


@pytest.mark.rest
def test_the_state_of_an_optimizer():
    mixed, tx = enable_amp(loss, optax.adam(1e-3))
    opt_state = tx.init(w)
    for batch in (x, x * jnp.inf, x):
        _, grads = tx.value_and_grad(mixed, opt_state)(w, batch)
        _, opt_state = tx.update(grads, opt_state, w)
    found = amp_metrics(opt_state)
    assert found == {
        "amp/loss_scale": 2.0**14,
        "amp/skipped_steps": 1.0,
        "amp/overflows_in_a_row": 0.0,
        "amp/steps_at_this_scale": 1.0,
    }
    assert all(type(value) is float for value in found.values())
    assert json.loads(json.dumps(found)) == found


def test_a_report():
    report = explain(jax.grad(amp(loss, compute_dtype="bfloat16")))(w, x)
    found = amp_metrics(report=report, prefix="")
    assert found["low_share"] == found["share/bfloat16"] == 1.0
    assert found["casts"] == len(report.now.casts) > 0
    assert all(type(value) is float for value in found.values())
    assert amp_metrics(DynamicScalerState(), report=report)["amp/low_share"] == 1.0


def test_states_of_groups_and_of_a_scan():
    scaler = DynamicScalerState(scaler=8)
    found = amp_metrics({"head": scaler, "rest": scaler.update(False)})
    assert found["amp/loss_scale['head']"] == 8.0
    assert found["amp/skipped_steps['rest']"] == 1.0

    def body(scaler, finite):
        scaler = scaler.update(finite)
        return scaler, scaler

    _, stacked = jax.lax.scan(body, scaler, jnp.array([True, False]))
    assert amp_metrics(stacked)["amp/loss_scale"] == 4.0


def test_without_a_scale_there_are_no_numbers():
    _, tx = enable_amp(loss, optax.adam(1e-3), compute_dtype="bfloat16")
    assert amp_metrics(tx.init(w)) == amp_metrics() == {}


def test_what_holds_no_numbers_is_refused():
    with pytest.raises(TypeError, match="No `DynamicScalerState` was found"):
        amp_metrics(w)
    with pytest.raises(TypeError, match=r"Write `explain\(fn\)\(\*args\)`"):
        amp_metrics(report=explain(loss))
    with pytest.raises(TypeError, match="read it outside"):
        jax.jit(amp_metrics)(DynamicScalerState())
