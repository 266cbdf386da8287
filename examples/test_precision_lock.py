"""A test that fails when the precision of a training step changes.

Run by pytest, it compares the compiled step with the lock file beside it, and prints
what differs. Run as a script, `python examples/test_precision_lock.py`, it writes the
lock file: do so once, and whenever you mean to change the precision."""

from pathlib import Path

import jax
import jax.numpy as jnp
import optax

from jaxamp_like import amp, certify

LOCK = Path(__file__).with_name("precision.lock")


def loss(params, x, y):
    with jax.named_scope("hidden"):
        x = jax.nn.relu(x @ params["hidden"])
    with jax.named_scope("head"):
        logits = x @ params["head"]
    return optax.softmax_cross_entropy_with_integer_labels(logits, y).mean()


optimizer = optax.adamw(1e-3)


def train_step(params, opt_state, x, y):
    grads = jax.grad(amp(loss, compute_dtype="bfloat16"))(params, x, y)
    updates, opt_state = optimizer.update(grads, opt_state, params)
    return optax.apply_updates(params, updates), opt_state


def arguments():
    params = {"hidden": jnp.zeros((64, 128)), "head": jnp.zeros((128, 10))}
    x, y = jnp.zeros((32, 64)), jnp.zeros(32, jnp.int32)
    return params, optimizer.init(params), x, y


def test_the_precision_is_that_of_the_lock():
    certificate = certify(train_step, *arguments(), lock=LOCK)
    assert certificate.is_as_decided


if __name__ == "__main__":
    print(certify(train_step, *arguments()))
    print("Wrote", certify(train_step, *arguments()).save(LOCK).name)
