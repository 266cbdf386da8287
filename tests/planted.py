"""Models in which one scope must not be low in float16, and all others may be.

Each is a sum of branches that read the same input, so that what one rounds does not
reach the others. A branch is one scope with one contraction. In the planted one,
ordinary numbers leave what float16 can tell apart; the reason stands beside each."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

ROWS, DIM = 6, 8


def exp_of_large_logits(p, x):
    # Near 2000, float16 has steps of 1.
    return jnp.mean(jnp.exp(x @ (p["w"] / 20 + 250.0) - 2000.0))


def variance_by_subtraction(p, x):
    # A mean of 40 beside a deviation of about 0.05: steps of 1/32.
    deviations = jnp.concatenate([1e3 * (x - 1), jnp.ones((len(x), 1))], 1)
    y = deviations @ jnp.concatenate([p["w"] / 60, jnp.full((1, DIM), 40.0)])
    return 20 * jnp.mean(jnp.mean(y * y, 0) - jnp.mean(y, 0) ** 2)


def long_sum(p, x):
    # 1e5 and more, beyond 65504.
    return jnp.mean(jnp.tanh(x @ (p["w"] * 100 + 1.5e4) / 1e5 - 1.2))


def tiny_gradients(p, x):
    # Cotangents of about 1e-9; the least float16 is 6e-8.
    return 1e-8 * jnp.mean((x @ p["w"]) ** 2)


def gate_near_one(p, x):
    # 0.9997 is 0.9995 or 1, and this to the power of 2000.
    decay = x @ (0.125 * (1 - 1e-4 * (3 + jnp.tanh(p["w"]))))
    return jnp.mean(decay**2000)


def tolerance(p, x):
    # What is left of 8 beside 8 is compared with 0.003: steps of 1/128.
    left = x @ (1 + 5e-4 * p["w"]) - 8.0
    return jnp.mean(jax.nn.softplus((left - 3e-3) / 3e-3))


def phase(p, x):
    # Radians with an error of 1.
    return jnp.mean(jnp.sin(1000 * (x @ (p["w"] / 10 + 0.5))))


KINDS: list[Callable[..., Any]] = [
    exp_of_large_logits,
    variance_by_subtraction,
    long_sum,
    tiny_gradients,
    gate_near_one,
    tolerance,
    phase,
]


def _dense(p, x):
    return jnp.mean(jnp.tanh(x @ p["w"] / 3) ** 2)


def _softmax(p, x):
    return jnp.mean(jax.nn.logsumexp(x @ p["w"], axis=-1)) / 4


def _gelu(p, x):
    return jnp.mean(jax.nn.gelu(x @ p["w"]) + (x @ p["w"]) ** 2 / 8)


def _normed(p, x):
    y = x @ p["w"]
    y = (y - y.mean(-1, keepdims=True)) / jnp.sqrt(y.var(-1, keepdims=True) + 1e-3)
    return jnp.mean(jax.nn.sigmoid(y + p["w"][0]))


ORDINARY: list[Callable[..., Any]] = [_dense, _softmax, _gelu, _normed]


class Planted(NamedTuple):
    loss: Callable[..., Any]
    batches: list[Any]
    answer: str  # the scope that has to stay as written


def planted(seed: int) -> Planted:
    """A model with one to three ordinary branches, in random order, perhaps scanned."""
    rng = np.random.default_rng(seed)
    kind = KINDS[seed % len(KINDS)]
    others = [ORDINARY[i] for i in rng.permutation(len(ORDINARY))[: rng.integers(1, 4)]]
    branches = [(f"part_{i}", fn) for i, fn in enumerate([*others, kind])]
    branches = [branches[i] for i in rng.permutation(len(branches))]
    answer = f"part_{len(others)}"
    in_scan = bool(rng.integers(2))

    def loss(params, x):
        def one(x):
            total = jnp.float32(0)
            for name, fn in branches:
                with jax.named_scope(name):
                    total = total + fn(params[name], x)
            return total

        if in_scan:
            total, _ = jax.lax.scan(lambda c, x: (c + one(x), None), 0.0, x)
            return total
        return one(x[0])

    params = {
        name: {"w": rng.normal(size=(DIM, DIM)).astype("float32")}
        for name, _ in branches
    }
    # Rows of ones, about: what a contraction sums is then known.
    batches = [
        (params, (1 + 1e-3 * rng.normal(size=(2, ROWS, DIM))).astype("float32"))
        for _ in range(2)
    ]
    return Planted(loss, batches, answer)
