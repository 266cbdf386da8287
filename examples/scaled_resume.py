"""Training that is interrupted and resumed from a checkpoint, bit for bit the same.

The loss scale is part of the optimizer's state, so saving that saves it all. Needs
Orbax: pip install 'jaxamp_like[checkpoint]'

    python examples/scaled_resume.py --steps 20
"""

import argparse
import pathlib
import tempfile
from typing import Any

import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
import optax
import orbax.checkpoint as ocp

from jaxamp_like import DynamicScalerState, enable_amp
from jaxamp_like.scaling import overflowed_leaves

ROWS, WIDTH = 32, 16


def loss_fn(w, x):
    return jnp.mean((jnp.tanh(x @ w["in"]) @ w["out"] - jnp.sin(x[:, :1])) ** 2)


# The loss in float16, and an optimizer that scales, unscales, skips and adapts.
loss, tx = enable_amp(
    loss_fn,
    optax.chain(optax.clip_by_global_norm(1.0), optax.adam(1e-2)),
    scaler=DynamicScalerState(scaler=2**20, patience=10),
)


@jax.jit
def step(w, opt_state, x):
    grads = tx.grad(loss, opt_state)(w, x)
    updates, opt_state = tx.update(grads, opt_state, w)
    return (optax.apply_updates(w, updates), opt_state), grads


def train(state: Any, steps: range) -> Any:
    for i in steps:
        state, grads = step(*state, jr.normal(jr.key(i), (ROWS, WIDTH)))
        if state[1].scaler.overflows:
            paths = ", ".join(leaf.path for leaf in overflowed_leaves(grads))
            print(f"step {i}: overflow in {paths}; skipped")
    return state


def main() -> None:
    parser = argparse.ArgumentParser(description="Stop, save, restore, go on.")
    parser.add_argument("--steps", type=int, default=100)
    steps = parser.parse_args().steps

    keys = jr.split(jr.key(0))
    w = {
        "in": jr.normal(keys[0], (WIDTH, WIDTH)) / 4,
        "out": jr.normal(keys[1], (WIDTH, 1)) / 4,
    }
    start = w, tx.init(w)
    half = train(start, range(steps // 2))
    with tempfile.TemporaryDirectory() as folder, ocp.StandardCheckpointer() as saver:
        path = pathlib.Path(folder) / "half"
        saver.save(path, half)
        saver.wait_until_finished()
        restored = saver.restore(path, start)  # `start` tells the types
    through, resumed = (train(s, range(steps // 2, steps)) for s in (half, restored))
    pairs = zip(jax.tree.leaves(through), jax.tree.leaves(resumed), strict=True)
    same = all(np.asarray(a).tobytes() == np.asarray(b).tobytes() for a, b in pairs)
    print(f"scale {float(resumed[1].scaler.scaler):g}; bit for bit the same: {same}")
    if not same:
        raise SystemExit("a resumed run must not differ")


if __name__ == "__main__":
    main()
