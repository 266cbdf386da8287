"""Flax Linen in float16: BatchNorm, Dropout, and a step that overflows and is skipped.

A `TrainState` with the mutable collection and the key goes in and out of a guarded
step. A skipped step does not count, so that even the next dropout mask is the same.

    python examples/train_linen.py
"""

from typing import Any

import jax
import jax.random as jr
import optax
from flax import linen as nn
from flax.training import train_state
from planted_overflow import CLASSES, SCALER, digits, prove

from jaxamp_like import enable_amp, guard_step


class Net(nn.Module):
    @nn.compact
    def __call__(self, x, training=False):
        x = nn.Dense(128)(x)
        x = nn.BatchNorm(use_running_average=not training, momentum=0.9)(x)
        x = nn.Dropout(0.2, deterministic=not training)(nn.relu(x))
        return nn.Dense(CLASSES)(x)


class TrainState(train_state.TrainState):
    batch_stats: Any
    key: jax.Array


net = Net()


def loss_fn(params, batch_stats, x, y, key):
    logits, updated = net.apply(
        {"params": params, "batch_stats": batch_stats},
        x,
        training=True,
        mutable=["batch_stats"],
        rngs={"dropout": key},
    )
    loss = optax.softmax_cross_entropy_with_integer_labels(logits, y).mean()
    return loss, updated["batch_stats"]


mixed_loss, tx = enable_amp(loss_fn, optax.adamw(1e-3), scaler=SCALER)


@jax.jit
@guard_step
def step(state, x, y):
    key = jr.fold_in(state.key, state.step)
    value_and_grad = tx.value_and_grad(mixed_loss, state, has_aux=True)
    (loss, stats), grads = value_and_grad(state.params, state.batch_stats, x, y, key)
    return state.apply_gradients(grads=grads, batch_stats=stats), loss


def train(batches):
    images, _ = digits()
    variables = net.init(jr.key(0), images)
    state = TrainState.create(
        apply_fn=net.apply,
        params=variables["params"],
        tx=tx,
        batch_stats=variables["batch_stats"],
        key=jr.key(1),
    )
    losses = []
    for x, y in batches:
        state, loss = step(state, x, y)
        losses.append(float(loss))
    trained = {"params": state.params, "batch_stats": state.batch_stats}
    return state, losses, net.apply(trained, images)


if __name__ == "__main__":
    prove(train)
