"""Plain JAX in float16: BatchNorm, Dropout, and a step that overflows and is skipped.

No framework: parameters, statistics, the optimizer's state and the PRNG key are a tuple
that goes in and out of a guarded step.

    python examples/train_plain.py
"""

import jax
import jax.numpy as jnp
import jax.random as jr
import optax
from planted_overflow import CLASSES, PIXELS, SCALER, digits, prove

from jaxamp_like import enable_amp, guard_step

WIDTH, KEEP, MOMENTUM = 128, 0.8, 0.9


def init(key):
    keys = jr.split(key)
    params = {
        "first": jr.normal(keys[0], (PIXELS, WIDTH)) / PIXELS**0.5,
        "scale": jnp.ones(WIDTH),
        "offset": jnp.zeros(WIDTH),
        "second": jr.normal(keys[1], (WIDTH, CLASSES)) / WIDTH**0.5,
    }
    return params, {"mean": jnp.zeros(WIDTH), "var": jnp.ones(WIDTH)}


def net(params, stats, x, key=None):
    """The scores of each class; and, given a key to train with, the new statistics."""
    with jax.named_scope("first"):
        x = x @ params["first"]
    with jax.named_scope("norm"):
        now = stats
        if key is not None:
            now = {"mean": x.mean(axis=0), "var": x.var(axis=0)}
            mix = lambda old, new: MOMENTUM * old + (1 - MOMENTUM) * new  # noqa: E731
            stats = jax.tree.map(mix, stats, now)
        x = (x - now["mean"]) * jax.lax.rsqrt(now["var"] + 1e-5)
        x = jax.nn.relu(x * params["scale"] + params["offset"])
    if key is not None:
        x = jnp.where(jr.bernoulli(key, KEEP, x.shape), x / KEEP, 0)
    with jax.named_scope("second"):
        return x @ params["second"], stats


def loss_fn(params, stats, x, y, key):
    logits, stats = net(params, stats, x, key)
    loss = optax.softmax_cross_entropy_with_integer_labels(logits, y).mean()
    return loss, stats


mixed_loss, tx = enable_amp(loss_fn, optax.adamw(1e-3), scaler=SCALER)


@jax.jit
@guard_step
def step(state, x, y):
    params, stats, opt_state, key = state
    key, dropout_key = jr.split(key)
    value_and_grad = tx.value_and_grad(mixed_loss, opt_state, has_aux=True)
    (loss, stats), grads = value_and_grad(params, stats, x, y, dropout_key)
    updates, opt_state = tx.update(grads, opt_state, params)
    return (optax.apply_updates(params, updates), stats, opt_state, key), loss


def train(batches):
    params, stats = init(jr.key(0))
    state, losses = (params, stats, tx.init(params), jr.key(1)), []
    for x, y in batches:
        state, loss = step(state, x, y)
        losses.append(float(loss))
    logits, _ = net(state[0], state[1], digits()[0])
    return state, losses, logits


if __name__ == "__main__":
    prove(train)
