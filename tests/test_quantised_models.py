"""What int8 costs models: a trained one, and one with outlier channels."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from sklearn.datasets import load_digits

from jaxamp_like import Policy, amp
from jaxamp_like.presets import quantised
from jaxamp_like.rules import int8
from tests.programs import error

WIDTH, LENGTH, HEADS = 256, 128, 4


def low(fn, **options):
    rules = quantised(int8(where=None, **options))
    return amp(fn, amp_policy=Policy("bfloat16", rules=rules))


def classify(params, x):
    for w, b in params[:-1]:
        x = jax.nn.gelu(x @ w + b)
    w, b = params[-1]
    return x @ w + b


@pytest.fixture(scope="module")
def digits():
    """Handwritten digits (scikit-learn's), and a network trained on two thirds."""
    images, labels = load_digits(return_X_y=True)
    images, labels = jnp.asarray(images / 16, jnp.float32), jnp.asarray(labels)
    shapes = (64, 128), (128, 128), (128, 10)
    keys = jax.random.split(jax.random.key(0), len(shapes))
    params = [
        (jax.random.normal(key, shape) * np.sqrt(2 / shape[0]), jnp.zeros(shape[1]))
        for key, shape in zip(keys, shapes, strict=True)
    ]
    optimizer = optax.adam(3e-3)

    def loss(params):
        logits = classify(params, images[:1200])
        named = optax.softmax_cross_entropy_with_integer_labels
        return jnp.mean(named(logits, labels[:1200]))

    def step(state, _):
        params, opt_state = state
        updates, opt_state = optimizer.update(jax.grad(loss)(params), opt_state)
        return (optax.apply_updates(params, updates), opt_state), None

    state = params, optimizer.init(params)
    (params, _), _ = jax.jit(lambda s: jax.lax.scan(step, s, None, 150))(state)
    return params, images[1200:], labels[1200:]


@pytest.mark.rest
@pytest.mark.sample(3)
@pytest.mark.parametrize("options", ({}, {"migration": 0.5}, {"weight_only": True}))
def test_a_trained_model_loses_at_most_half_a_point(digits, options):
    params, images, labels = digits

    def accuracy(model):
        chosen = jnp.argmax(jax.jit(model)(params, images), axis=-1)
        return 100 * float(jnp.mean(chosen == labels))

    assert accuracy(classify) > 92
    assert accuracy(low(classify, **options)) >= accuracy(classify) - 0.5


def outliers(key):
    """Two blocks of a transformer: 3 of 256 channels come out of norms 60 times as
    large, and what reads them is smaller by 8."""
    which = jax.random.choice(jax.random.fold_in(key, 9), WIDTH, (3,), replace=False)
    gain = jnp.ones(WIDTH).at[which].set(60.0)

    def weight(key, rows, columns, reads_norm=False):
        w = jax.random.normal(key, (rows, columns)) / np.sqrt(rows)
        return w.at[which].mul(1 / 8) if reads_norm else w

    blocks = []
    for one in jax.random.split(key, 2):
        qkv, out, up, down = jax.random.split(one, 4)
        blocks.append(
            {
                "qkv": weight(qkv, WIDTH, 3 * WIDTH, reads_norm=True),
                "out": weight(out, WIDTH, WIDTH),
                "up": weight(up, WIDTH, 4 * WIDTH, reads_norm=True),
                "down": weight(down, 4 * WIDTH, WIDTH),
            }
        )
    return gain, blocks


def transform(blocks, gain, x):
    def norm(x):
        x = x - jnp.mean(x, -1, keepdims=True)
        return x * jax.lax.rsqrt(jnp.mean(x**2, -1, keepdims=True)) * gain

    for block in blocks:
        qkv = (norm(x) @ block["qkv"]).reshape(LENGTH, 3, HEADS, -1)
        q, k, v = jnp.moveaxis(qkv, 1, 0)
        scores = jnp.einsum("thd,shd->hts", q, k) / np.sqrt(WIDTH // HEADS)
        seen = jnp.einsum("hts,shd->thd", jax.nn.softmax(scores), v)
        x = x + seen.reshape(LENGTH, WIDTH) @ block["out"]
        x = x + jax.nn.gelu(norm(x) @ block["up"]) @ block["down"]
    return x


@pytest.mark.rest
def test_migration_brings_the_error_of_gradients_to_a_tenth():
    gain, blocks = outliers(jax.random.key(0))
    x, y = jax.random.normal(jax.random.key(1), (2, LENGTH, WIDTH))

    def loss(blocks):
        return jnp.mean((transform(blocks, gain, x) - y) ** 2)

    exact = jax.jit(jax.grad(loss))(blocks)
    plain, moved = (
        error(jax.jit(jax.grad(low(loss, migration=m)))(blocks), exact)
        for m in (None, 0.5)
    )
    assert plain > 0.1
    assert moved < plain / 10
