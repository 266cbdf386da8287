"""`ScalerHistory`: what it keeps of a training loop."""

import json
import xml.etree.ElementTree as ElementTree

import jax
import jax.numpy as jnp
import optax
import pytest

from jaxamp_like import DynamicScalerState, loss_scale_optimizer
from jaxamp_like.reports import ScalerHistory
from jaxamp_like.scaling import NoScaler, Unscaled


def recorded(finite, every=1):
    history = ScalerHistory(every=every)
    scaler = DynamicScalerState(scaler=1024, patience=1)
    for i, ok in enumerate(finite):
        scaler = scaler.update(ok)
        history.record(scaler, jnp.float32(1 / (i + 1)) if ok else jnp.nan)
    return history


def test_rows_tell_scales_overflows_and_losses():
    rows = recorded([True, False, True, True, False]).rows()
    assert [row["overflows"] for row in rows] == [0, 1, 0, 0, 1]
    assert [row["scale"] for row in rows] == [1024, 512, 512, 1024, 512]
    assert rows[2] == {
        "step": 2,
        "scale": 512,
        "overflows": 0,
        "loss": pytest.approx(1 / 3),
    }


def test_no_overflow_is_lost_between_recorded_steps():
    rows = recorded([False, False, False, True, False], every=3).rows()
    assert [row["step"] for row in rows] == [0, 3]
    assert [row["overflows"] for row in rows] == [1, 2]


def test_states_of_every_kind():
    state = DynamicScalerState(scaler=1024)
    tx = optax.chain(loss_scale_optimizer(optax.sgd(0.1), state))
    history, opt_state = ScalerHistory(), tx.init(w := jnp.ones(2))
    history.record(opt_state)
    opt_state = tx.update(Unscaled(w * jnp.nan), opt_state, w)[1]
    history.record(opt_state, 0.5)
    assert [row["scale"] for row in history.rows()] == [1024, 512]
    assert history.rows()[1]["overflows"] == 1

    plain = ScalerHistory()
    plain.record(NoScaler(), 1.0)
    assert plain.rows()[0]["scale"] == 1 and plain.plot()

    groups, both = ScalerHistory(), {"a": state, "b": state}
    for finite in (True, False):
        both["b"] = both["b"].update(finite)
        groups.record(both)
    assert groups.rows()[1]["scale"] == {"['a']": 1024, "['b']": 512}
    assert json.loads(groups.to_json())[1]["overflows"] == {"['a']": 0, "['b']": 1}
    assert "scale of ['b'] 1024 to 512, 1 overflows" in repr(groups)
    labels = [line.get_label() for line in groups.plot().axes[0].lines]
    assert "loss scale ['a']" in labels
    with pytest.raises(ValueError, match=r"at its root, but the steps before .*'a'"):
        groups.record(state)


def test_views(tmp_path):
    history = recorded([True, False, True])
    assert repr(history) == "ScalerHistory of 3 steps: scale 1024 to 512, 1 overflows"
    assert json.loads(history.to_json())[1]["loss"] is None
    figure = history.plot()
    scale, loss = figure.axes
    assert scale.get_yscale() == "log" and loss.get_ylabel() == "loss"
    path = history.save_plot(tmp_path / "plots" / "scaler.svg")
    assert ElementTree.parse(path).getroot().tag.endswith("svg")


def test_bad_input(tmp_path):
    with pytest.raises(TypeError, match="DynamicScalerState"):
        ScalerHistory().record(1024.0)
    with pytest.raises(TypeError, match="read it outside"):
        jax.jit(ScalerHistory().record)(DynamicScalerState())
    for every, error in ((0, ValueError), (1.5, TypeError), (True, TypeError)):
        with pytest.raises(error, match="every"):
            ScalerHistory(every=every)
    with pytest.raises(ValueError, match="nothing to plot"):
        ScalerHistory().plot()
    assert repr(ScalerHistory()) == "ScalerHistory of no steps"
    (tmp_path / "file").write_text("")
    with pytest.raises(OSError):
        recorded([True]).save_plot(tmp_path / "file" / "scaler.png")
