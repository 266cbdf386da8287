"""Finds out which parts of a model may be bfloat16, and shows why.

    python examples/calibrate_policy.py

A transformer block on Fourier features of coordinates, which are sines of large angles:
no table of ops knows that this one product must stay float32. Writes a page to
examples/out/calibration.html.
"""

import argparse
from pathlib import Path

import jax
import jax.numpy as jnp
import jax.random as jr

from jaxamp_like import Budget, amp, calibrate

DIM, LENGTH, BATCH = 32, 16, 8


def init(key):
    keys = jr.split(key, 5)
    shapes = {
        "qkv": (DIM, 3 * DIM),
        "up": (DIM, 4 * DIM),
        "down": (4 * DIM, DIM),
        "angles": (3, DIM),
        "head": (DIM, 1),
    }
    return {
        name: jr.normal(k, shape) / shape[0] ** 0.5
        for k, (name, shape) in zip(keys, shapes.items(), strict=True)
    }


def loss(params, x, y):
    with jax.named_scope("features"):
        x = jnp.sin(30 * x @ params["angles"])
    with jax.named_scope("attention"):
        q, k, v = jnp.split(x @ params["qkv"], 3, axis=-1)
        x = x + jax.nn.softmax(q @ k.swapaxes(1, 2) / DIM**0.5) @ v
    with jax.named_scope("mlp"):
        x = x + jax.nn.gelu(x @ params["up"]) @ params["down"]
    with jax.named_scope("head"):
        return jnp.mean((x @ params["head"] - y) ** 2)


def main(out):
    params = init(jr.key(0))
    keys = jr.split(jr.key(1), 4)
    batches = [
        (params, jr.normal(key, (BATCH, LENGTH, 3)), jnp.ones((BATCH, LENGTH, 1)))
        for key in keys
    ]
    found = calibrate(loss, batches, budget=Budget(gradients=0.02))
    found.print()
    page = found.save_html(out / "calibration.html")
    print(f"error against cost: {page}")

    grads = jax.grad(amp(loss, amp_policy=found.policy))(*batches[0])
    assert all(g.dtype == jnp.float32 for g in grads.values())


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "out")
    main(parser.parse_args().out)
