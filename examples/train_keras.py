"""Keras on JAX in float16: BatchNorm, Dropout, and a step that is skipped.

The model stays in Keras' float32: `amp` rewrites the function around its
`stateless_call`. Its non-trainable variables (moving averages, seeds) are part of the
state that goes in and out of a guarded step.

    python examples/train_keras.py
"""

import os

os.environ["KERAS_BACKEND"] = "jax"  # before Keras is imported

import jax
import keras
import optax
from planted_overflow import CLASSES, PIXELS, SCALER, digits, prove

from jaxamp_like import enable_amp, guard_step


def make_net():
    keras.utils.set_random_seed(0)
    return keras.Sequential(
        [
            keras.Input((PIXELS,)),
            keras.layers.Dense(128),
            keras.layers.BatchNormalization(momentum=0.9),
            keras.layers.ReLU(),
            keras.layers.Dropout(0.2),
            keras.layers.Dense(CLASSES),
        ]
    )


net = make_net()


def loss_fn(trainable, non_trainable, x, y):
    logits, non_trainable, *_ = net.stateless_call(
        trainable, non_trainable, x, training=True
    )
    loss = optax.softmax_cross_entropy_with_integer_labels(logits, y).mean()
    return loss, non_trainable


mixed_loss, tx = enable_amp(loss_fn, optax.adamw(1e-3), scaler=SCALER)


@jax.jit
@guard_step
def step(state, x, y):
    trainable, non_trainable, opt_state = state
    value_and_grad = tx.value_and_grad(mixed_loss, opt_state, has_aux=True)
    (loss, non_trainable), grads = value_and_grad(trainable, non_trainable, x, y)
    updates, opt_state = tx.update(grads, opt_state, trainable)
    return (optax.apply_updates(trainable, updates), non_trainable, opt_state), loss


def train(batches):
    trainable = [v.value for v in net.trainable_variables]
    non_trainable = [v.value for v in net.non_trainable_variables]
    state, losses = (trainable, non_trainable, tx.init(trainable)), []
    for x, y in batches:
        state, loss = step(state, x, y)
        losses.append(float(loss))
    logits, *_ = net.stateless_call(*state[:2], digits()[0])
    return state, losses, logits


if __name__ == "__main__":
    prove(train)
