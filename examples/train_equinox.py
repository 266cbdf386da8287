"""Equinox in float16: BatchNorm, Dropout, and a step that overflows and is skipped.

The model, its `eqx.nn.State`, the optimizer's state and the PRNG key are one state that
goes in and out of a guarded step.

    python examples/train_equinox.py
"""

import equinox as eqx
import jax
import jax.random as jr
import optax
from planted_overflow import CLASSES, PIXELS, SCALER, digits, prove

from jaxamp_like import enable_amp, guard_step

WIDTH = 128


class Net(eqx.Module):
    first: eqx.nn.Linear
    norm: eqx.nn.BatchNorm
    dropout: eqx.nn.Dropout
    second: eqx.nn.Linear

    def __init__(self, key):
        keys = jr.split(key)
        self.first = eqx.nn.Linear(PIXELS, WIDTH, key=keys[0])
        self.norm = eqx.nn.BatchNorm(WIDTH, axis_name="batch", mode="batch")
        self.dropout = eqx.nn.Dropout(0.2)
        self.second = eqx.nn.Linear(WIDTH, CLASSES, key=keys[1])

    def __call__(self, x, state, key=None):
        x, state = self.norm(self.first(x), state)
        return self.second(self.dropout(jax.nn.relu(x), key=key)), state


def loss_fn(model, model_state, x, y, key):
    predict = jax.vmap(model, (0, None, 0), (0, None), axis_name="batch")
    logits, model_state = predict(x, model_state, jr.split(key, len(x)))
    loss = optax.softmax_cross_entropy_with_integer_labels(logits, y).mean()
    return loss, model_state


mixed_loss, tx = enable_amp(loss_fn, optax.adamw(1e-3), scaler=SCALER)


@eqx.filter_jit
@guard_step
def step(state, x, y):
    model, model_state, opt_state, key = state
    key, dropout_key = jr.split(key)
    value_and_grad = tx.value_and_grad(mixed_loss, opt_state, has_aux=True)
    (loss, model_state), grads = value_and_grad(model, model_state, x, y, dropout_key)
    updates, opt_state = tx.update(grads, opt_state, eqx.filter(model, eqx.is_array))
    return (eqx.apply_updates(model, updates), model_state, opt_state, key), loss


def train(batches):
    model, model_state = eqx.nn.make_with_state(Net)(jr.key(0))
    opt_state = tx.init(eqx.filter(model, eqx.is_array))
    state, losses = (model, model_state, opt_state, jr.key(1)), []
    for x, y in batches:
        state, loss = step(state, x, y)
        losses.append(float(loss))
    infer = eqx.nn.inference_mode(state[0])
    predict = jax.vmap(infer, (0, None), (0, None), axis_name="batch")
    logits, _ = predict(digits()[0], state[1])
    return state, losses, logits


if __name__ == "__main__":
    prove(train)
