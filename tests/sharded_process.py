"""One of the processes that `test_sharded_resume.py` starts: see there.

    python tests/sharded_process.py PORT PROCESS NUM_PROCESSES SAID FOLDER KILLED_AT

Trains a model whose parameters, moments and batch lie in parts on the devices of all
processes, from the last checkpoint in the folder on, and writes the loss of each step
to the file `SAID`. Before the step `KILLED_AT` the last process is killed."""
# ruff: noqa: E402  (JAX's platform and XLA's flags must be set before they are imported)

import os
import pathlib
import signal
import sys

port, index, count, said, folder, killed_at = sys.argv[1:]
index, count, killed_at = int(index), int(count), int(killed_at)
folder = pathlib.Path(folder)
os.environ["JAX_PLATFORMS"] = "cpu"
os.environ["XLA_FLAGS"] = f"--xla_force_host_platform_device_count={8 // count}"

import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
from jax.sharding import NamedSharding, PartitionSpec as P

from jaxamp_like import DynamicScalerState, amp, dynamic_scale_value_and_grad

jax.config.update("jax_cpu_collectives_implementation", "gloo")
jax.distributed.initialize(f"127.0.0.1:{port}", count, index)
assert jax.device_count() == 8 and jax.process_count() == count

MESH = jax.sharding.Mesh(np.array(jax.devices()), ("d",))
STEPS, EVERY = 8, 2
TX = optax.adam(0.01)


def placed(x):
    """A global array, split along its longest axis; each process makes its parts."""
    x = np.asarray(x)
    axis = int(np.argmax(x.shape)) if x.ndim else None
    split = P(*("d" if i == axis else None for i in range(x.ndim)))
    where = NamedSharding(MESH, split)
    return jax.make_array_from_callback(x.shape, where, lambda part: x[part])


def batch(step):
    """One in the middle is large."""
    x = np.random.default_rng(step).normal(size=(64, 8)).astype(np.float32)
    return placed(x * (1e4 if step == 3 else 1.0))


@amp  # float16
def loss_fn(w, x):
    hidden = jnp.tanh(x @ w["up"] + w["bias"])
    return jnp.mean((hidden @ w["down"] - jnp.sin(x)) ** 2)


scaled = dynamic_scale_value_and_grad(loss_fn, redo_on_nan=2)


@jax.jit
def train(w, opt_state, state, x):
    state, (loss, grads) = scaled(w, x, dynamic_scaler_state=state)
    updates, new = TX.update(grads, opt_state, w)
    w, opt_state = state.accept((optax.apply_updates(w, updates), new), (w, opt_state))
    return (w, opt_state, state), loss


def start():
    draw = np.random.default_rng(100)
    shapes = {"up": (8, 32), "bias": (32,), "down": (32, 8)}
    w = {k: draw.normal(size=s).astype(np.float32) for k, s in shapes.items()}
    return jax.tree.map(placed, (w, TX.init(w), DynamicScalerState(patience=3)))


def last_step():
    saved = [int(path.name) for path in folder.iterdir() if path.name.isdigit()]
    return max(saved, default=0)


def say(line):
    with open(said, "a") as file:
        print(line, file=file)


carry, first = start(), last_step()
where = jax.tree.map(lambda x: x.sharding, carry)
with ocp.StandardCheckpointer() as checkpointer:
    if first:
        carry = checkpointer.restore(folder / str(first), carry)
    say(f"from {first}")
    for step in range(first, STEPS):
        if step == killed_at and index == count - 1:
            os.kill(os.getpid(), signal.SIGKILL)
        carry, loss = train(*carry, batch(step))
        carry = jax.device_put(carry, where)
        say(f"{step} {float(loss).hex()} {float(carry[2].scaler)}")
        if (step + 1) % EVERY == 0:
            checkpointer.save(folder / str(step + 1), carry)
            checkpointer.wait_until_finished()
jax.distributed.shutdown()
