"""Gradient accumulation in float16: many microbatches, one optimizer step, one scale.

The microbatches run in a scan. Each is scaled by the state that the step began with;
their gradients are added up, and `merge_scalers` makes one state of theirs: the scale
changes once a step, and an overflow in any of them skips the whole step.

    python examples/scaled_accumulation.py --steps 20
"""

import argparse

import jax
import jax.numpy as jnp
import jax.random as jr
import optax
from jax import lax

from jaxamp_like import DynamicScalerState, amp, dynamic_scale_value_and_grad
from jaxamp_like.scaling import ScalerLog, merge_scalers

MICROBATCHES, ROWS, WIDTH = 4, 32, 16


@amp  # float16
def loss_fn(params, x, y):
    hidden = jnp.tanh(x @ params["in"])
    return jnp.mean((hidden @ params["out"] - y) ** 2)


def make_step(tx):
    value_and_grad = dynamic_scale_value_and_grad(loss_fn)

    @jax.jit
    def step(params, opt_state, scaler, xs, ys):
        def microbatch(total, batch):
            following, (loss, grads) = value_and_grad(
                params, *batch, dynamic_scaler_state=scaler
            )
            total = jax.tree.map(lambda a, g: a + g / MICROBATCHES, total, grads)
            return total, (following, loss)

        zeros = jax.tree.map(jnp.zeros_like, params)
        grads, (states, losses) = lax.scan(microbatch, zeros, (xs, ys))
        scaler = merge_scalers(states)
        updates, new_state = tx.update(grads, opt_state, params)
        new = optax.apply_updates(params, updates), new_state
        return *scaler.accept(new, (params, opt_state)), scaler, losses.mean()

    return step


def main() -> None:
    parser = argparse.ArgumentParser(description="Accumulation with one loss scale.")
    parser.add_argument("--steps", type=int, default=200)
    steps = parser.parse_args().steps

    keys = jr.split(jr.key(0), 3)
    params = {
        "in": jr.normal(keys[0], (WIDTH, WIDTH)) / 4,
        "out": jr.normal(keys[1], (WIDTH, 1)) / 4,
    }
    tx = optax.adam(1e-2)
    # It begins far too high, and comes down by one step for each step that overflows.
    opt_state, scaler = tx.init(params), DynamicScalerState(scaler=2**22, patience=50)
    log, step, loss = ScalerLog(scaler), make_step(tx), jnp.nan
    for i in range(steps):
        xs = jr.normal(jr.fold_in(keys[2], i), (MICROBATCHES, ROWS, WIDTH))
        ys = jnp.sin(xs.sum(axis=-1, keepdims=True))
        params, opt_state, scaler, loss = step(params, opt_state, scaler, xs, ys)
        for event in log.record(scaler):
            print(f"step {event.step}: scale {event.kind}, now {event.after:g}")
    print(f"loss {loss:.4f}, scale {float(scaler.scaler):g}")


if __name__ == "__main__":
    main()
