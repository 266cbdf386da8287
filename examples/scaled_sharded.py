"""float16 training over eight devices, of which one overflows: all of them agree.

The same training three ways: `jax.jit` over sharded arrays, where there is nothing
to do; `jax.shard_map` with a collective in the loss, where the step is told over which
axis to agree; and `loss_scale_optimizer`. One row of one batch has a gradient that is
too large for float16. All devices repeat that step together, or skip it together.

    python examples/scaled_sharded.py --steps 10

On a machine with fewer devices it makes eight out of the CPU."""

import os

if "XLA_FLAGS" not in os.environ:
    os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=8"

import argparse

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax
from jax.sharding import NamedSharding, PartitionSpec as P

from jaxamp_like import (
    DynamicScalerState,
    amp,
    dynamic_scale_value_and_grad,
    loss_scale_optimizer,
)

N = jax.device_count()
MESH = jax.sharding.Mesh(np.array(jax.devices()), ("data",))
ROWS, WIDTH = 8 * N, 16
BAD_STEP = 4
TX = optax.adam(1e-2)


def batch(step):
    x = np.random.default_rng(step).normal(size=(ROWS, WIDTH)).astype(np.float32)
    y = np.tanh(x.sum(axis=1, keepdims=True))
    if step == BAD_STEP:
        y[-1] = 1e4
    return jax.device_put((x, y), NamedSharding(MESH, P("data")))


@amp
def loss_fn(w, x, y):
    return jnp.mean((jnp.tanh(x @ w["in"]) @ w["out"] - y) ** 2)


def start():
    rng = np.random.default_rng(0)
    w = {"in": rng.normal(size=(WIDTH, WIDTH)), "out": rng.normal(size=(WIDTH, 1))}
    w = jax.tree.map(lambda x: jnp.asarray(x, jnp.float32) / 4, w)
    return w, TX.init(w), DynamicScalerState(scaler=2**12)


def update(w, opt_state, scaler, grads):
    updates, new_state = TX.update(grads, opt_state, w)
    new = optax.apply_updates(w, updates), new_state
    return *scaler.accept(new, (w, opt_state)), scaler


@jax.jit
def jit_step(w, opt_state, scaler, x, y):
    step = dynamic_scale_value_and_grad(loss_fn, redo_on_nan=8)
    scaler, (loss, grads) = step(w, x, y, dynamic_scaler_state=scaler)
    return update(w, opt_state, scaler, grads), loss


def mean_loss(w, x, y):
    """What one device computes: a mean over all of them."""
    return lax.pmean(loss_fn(w, x, y), "data")


def shard_map_body(w, opt_state, scaler, x, y):
    step = dynamic_scale_value_and_grad(mean_loss, redo_on_nan=8, axis_name="data")
    scaler, (loss, grads) = step(w, x, y, dynamic_scaler_state=scaler)
    return update(w, opt_state, scaler, grads), loss


shard_map_step = jax.jit(
    jax.shard_map(
        shard_map_body,
        mesh=MESH,
        in_specs=(P(), P(), P(), P("data"), P("data")),
        out_specs=P(),
    )
)
scaled_tx = loss_scale_optimizer(TX, DynamicScalerState(scaler=2**12))


@jax.jit
def optimizer_step(w, opt_state, x, y):
    loss, grads = scaled_tx.value_and_grad(loss_fn, opt_state)(w, x, y)
    updates, opt_state = scaled_tx.update(grads, opt_state, w)
    return (optax.apply_updates(w, updates), opt_state), loss


def main() -> None:
    parser = argparse.ArgumentParser(description="Devices agree on the loss scale.")
    parser.add_argument("--steps", type=int, default=50)
    steps = parser.parse_args().steps

    w, opt_state, scaler = start()
    runs = {
        "jit": (jit_step, (w, opt_state, scaler), lambda carry: carry[2]),
        "shard_map": (shard_map_step, (w, opt_state, scaler), lambda carry: carry[2]),
        "optimizer": (
            optimizer_step,
            (w, scaled_tx.init(w)),
            lambda carry: carry[1].scaler,
        ),
    }
    print(f"{N} devices")
    for name, (step, carry, scaler_of) in runs.items():
        loss = jnp.nan
        for i in range(steps):
            carry, loss = step(*carry, *batch(i))
        scaler = scaler_of(carry)
        print(
            f"{name:>10}: loss {float(loss):.4f}, scale {float(scaler.scaler):g}, "
            f"lowered {int(scaler.total_resets)} times"
        )


if __name__ == "__main__":
    main()
