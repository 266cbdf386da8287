"""What the host is told of a scale: which leaves overflowed, and what happened when."""

import json
import logging

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jaxamp_like import DynamicScalerState, dynamic_scale_grad, loss_scale_optimizer
from jaxamp_like.scaling import (
    NoScaler,
    ScalerLog,
    Unscaled,
    check_scaler,
    overflowed_leaves,
)

STATE = DynamicScalerState(scaler=64, min_scaler=16, patience=1, hysteresis=2)
EVENTS = [True, False, False, False, False, False, True, True, True]
WANTED = [
    (2, "skipped", 64, 64, 1),
    (3, "lowered", 64, 32, 2),
    (4, "lowered", 32, 16, 3),
    (5, "stuck", 16, 16, 4),
    (6, "stuck", 16, 16, 5),
    (8, "grew", 16, 32, 0),
]


def history(state, events):
    states = []
    for finite in events:
        state = state.update(finite)
        states.append(state)
    return states


def test_events_step_by_step():
    log = ScalerLog(STATE)
    for state in history(STATE, EVENTS):
        log.record(state)
    assert [event[:5] for event in log.events] == WANTED
    assert json.loads(json.dumps([e._asdict() for e in log.events]))[0]["step"] == 2


def test_events_of_a_scan():
    log = ScalerLog(STATE)

    def body(state, finite):
        return state.update(finite), state.update(finite)

    events = np.array(EVENTS)
    state, first = jax.lax.scan(body, STATE, events[:5])
    _, second = jax.lax.scan(body, state, events[5:])
    found = [*log.record(first), *log.record(second)]
    assert [event[:5] for event in found] == WANTED and log.step == len(EVENTS)


def test_events_now_and_then():
    log = ScalerLog(STATE)
    states = history(STATE, EVENTS)
    assert log.record(states[0], step=100) == []
    (event,) = log.record(states[3], step=400)
    assert event[:5] == (400, "lowered", 64, 16, 3)
    (event,) = log.record(states[-1]._replace(scaler=16))
    assert event[:5] == (401, "lowered", 16, 16, 0)  # twice in vain, then it grew


def test_events_of_groups_and_optimizers_name_their_leaves(caplog):
    state = {"a": DynamicScalerState(), "b": NoScaler(), "c": DynamicScalerState()}
    log = ScalerLog(state)
    step = dynamic_scale_grad(lambda w: w["a"] * jnp.inf + w["b"] + w["c"])
    state, grads = step(
        dict.fromkeys("abc", jnp.array(1.0)), dynamic_scaler_state=state
    )
    (event,) = log.record(state, grads=grads)
    assert event.group == "['a']" and event.leaves == ("['a']",)
    tx = optax.chain(loss_scale_optimizer(optax.sgd(0.1)))
    w = jnp.ones(2)
    opt_state = tx.init(w)
    log = ScalerLog(opt_state)
    opt_state = tx.update(Unscaled(w * jnp.nan), opt_state, w)[1]
    with caplog.at_level(logging.WARNING):
        for event in log.record(opt_state):
            logging.getLogger("training").warning("%s", event)
    assert "kind='lowered', before=32768.0, after=16384.0" in caplog.text
    assert log.events[-1].group == "[0].scaler"


def test_a_log_forgets_the_oldest():
    log = ScalerLog(STATE, capacity=2)
    log.record(jax.tree.map(lambda *x: jnp.stack(x), *history(STATE, EVENTS)))
    assert [event[:5] for event in log.events] == WANTED[-2:]


def test_overflowed_leaves():
    grads = {
        "f": jnp.array([1.0, jnp.inf, -jnp.inf]),
        "h": [jnp.ones(2, jnp.bfloat16), np.array([np.nan])],
        "i": jnp.arange(3),
        "z": jnp.array([complex(0, np.inf)]),
        "n": None,
        "t": "text",
    }
    wanted = [("['f']", 0, 2, 3), ("['h'][1]", 1, 0, 1), ("['z']", 0, 1, 1)]
    assert [tuple(leaf) for leaf in overflowed_leaves(grads)] == wanted
    assert overflowed_leaves({}) == []


def test_check_scaler_finds_states_anywhere():
    stuck = DynamicScalerState(scaler=1, min_scaler=1).update(False)
    check_scaler({"a": DynamicScalerState(), "b": NoScaler()})
    with pytest.raises(FloatingPointError, match=r"loss scale of \['a'\]\[1\] is at"):
        check_scaler({"a": [DynamicScalerState(), stuck]})


def test_a_log_of_other_states():
    with pytest.raises(ValueError, match=r"scales at \['a'\], but .* at its root"):
        ScalerLog(STATE).record({"a": STATE})


@pytest.mark.parametrize("call", [check_scaler, ScalerLog, ScalerLog(STATE).record])
def test_where_there_is_no_state(call):
    with pytest.raises(
        TypeError, match="No `DynamicScalerState` was found in the given"
    ):
        call({"w": jnp.ones(2)})
