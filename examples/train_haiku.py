"""Haiku in float16: BatchNorm, Dropout, and a step that overflows and is skipped.

The loss scale is carried beside parameters and state, by `dynamic_scale_value_and_grad`
in the place of the optimizer, and a batch that overflows is first tried again at two
smaller scales.

    python examples/train_haiku.py
"""

import haiku as hk
import jax
import jax.random as jr
import optax
from planted_overflow import CLASSES, SCALER, digits, prove

from jaxamp_like import amp, dynamic_scale_value_and_grad, guard_step


@hk.transform_with_state
def net(x, training):
    x = hk.Linear(128)(x)
    x = hk.BatchNorm(create_scale=True, create_offset=True, decay_rate=0.9)(x, training)
    x = jax.nn.relu(x)
    if training:
        x = hk.dropout(hk.next_rng_key(), 0.2, x)
    return hk.Linear(CLASSES)(x)


@amp  # float16
def loss_fn(params, net_state, key, x, y):
    logits, net_state = net.apply(params, net_state, key, x, training=True)
    loss = optax.softmax_cross_entropy_with_integer_labels(logits, y).mean()
    return loss, net_state


tx = optax.adamw(1e-3)
value_and_grad = dynamic_scale_value_and_grad(loss_fn, has_aux=True, redo_on_nan=2)


@jax.jit
@guard_step
def step(state, x, y):
    params, net_state, opt_state, scaler, key = state
    key, dropout_key = jr.split(key)
    scaler, ((loss, net_state), grads) = value_and_grad(
        params, net_state, dropout_key, x, y, dynamic_scaler_state=scaler
    )
    updates, opt_state = tx.update(grads, opt_state, params)
    return (
        optax.apply_updates(params, updates),
        net_state,
        opt_state,
        scaler,
        key,
    ), loss


def train(batches):
    images, _ = digits()
    params, net_state = net.init(jr.key(0), images, training=True)
    state = params, net_state, tx.init(params), SCALER, jr.PRNGKey(1)
    losses = []
    for x, y in batches:
        state, loss = step(state, x, y)
        losses.append(float(loss))
    logits, _ = net.apply(*state[:2], None, images, training=False)
    return state, losses, logits


if __name__ == "__main__":
    prove(train)
