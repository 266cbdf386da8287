"""Interrupted, saved by Orbax, restored: training goes on as if never interrupted."""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
import pytest

from jaxamp_like import (
    DynamicScalerState,
    amp,
    dynamic_scale_value_and_grad,
    loss_scale_optimizer,
)
from jaxamp_like.scaling import NoScaler, restore_scaler

# What overflows lies before and behind the interruption, at 4.
BATCHES = np.random.default_rng(0).normal(size=(10, 8, 4)).astype(np.float32)
BATCHES[2, 0] = np.inf
BATCHES[6, 0] *= 1000
BATCHES[8, 0] = np.nan


@amp
def loss(w, x):
    return jnp.mean((x @ w - 1) ** 2)


def by_optimizer(scaler):
    tx = loss_scale_optimizer(optax.adam(0.1), scaler)

    @jax.jit
    def step(state, x):
        w, opt_state = state
        grads = tx.grad(loss, opt_state)(w, x)
        updates, opt_state = tx.update(grads, opt_state, w)
        return optax.apply_updates(w, updates), opt_state

    w = jnp.linspace(-1.0, 1.0, 4)
    return step, (w, tx.init(w))


def by_transform(scaler):
    tx = optax.apply_if_finite(optax.adam(0.1), 100)
    scaled = dynamic_scale_value_and_grad(loss, redo_on_nan=2)

    @jax.jit
    def step(state, x):
        w, opt_state, scaler = state
        scaler, (_, grads) = scaled(w, x, dynamic_scaler_state=scaler)
        updates, opt_state = tx.update(grads, opt_state, w)
        return optax.apply_updates(w, updates), opt_state, scaler

    w = jnp.linspace(-1.0, 1.0, 4)
    return step, (w, tx.init(w), scaler)


SCALERS = {
    "dynamic": DynamicScalerState(patience=1, hysteresis=2),
    "none": NoScaler(),
}


@pytest.mark.parametrize("make", [by_optimizer, by_transform])
@pytest.mark.parametrize("scaler", SCALERS.values(), ids=SCALERS)
def test_resumed_training_is_that_without_interruption(make, scaler, tmp_path):
    step, start = make(scaler)
    state = start
    for x in BATCHES[:4]:
        state = step(state, x)
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(tmp_path / "4", state)
        checkpointer.wait_until_finished()
        resumed = checkpointer.restore(tmp_path / "4", start)
    for x in BATCHES[4:]:
        state, resumed = step(state, x), step(resumed, x)
    assert jax.tree.structure(resumed) == jax.tree.structure(state)
    for a, b in zip(jax.tree.leaves(state), jax.tree.leaves(resumed), strict=True):
        assert (a.dtype, a.weak_type) == (b.dtype, b.weak_type)
        assert np.asarray(a).tobytes() == np.asarray(b).tobytes()


def test_restored_without_a_target(tmp_path):
    """Orbax then gives mappings; so it does for what an older version saved."""
    state = DynamicScalerState(scaler=1024, count=7)
    older = {k: v for k, v in state._asdict().items() if k not in ("hysteresis",)}
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(tmp_path / "new", {"scaler": state})
        checkpointer.save(tmp_path / "old", {"scaler": older})
        checkpointer.wait_until_finished()
        for name in ("new", "old"):
            saved = checkpointer.restore(tmp_path / name)
            assert eqx.tree_equal(restore_scaler(saved["scaler"]), state)
