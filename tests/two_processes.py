"""One of the processes that `test_scale_processes.py` starts: see there.

    python tests/two_processes.py PORT PROCESS NUM_PROCESSES SAID FOLDER

It writes one JSON object to the file `SAID`. Every process trains the same model on its
own data, over Gloo, and what overflows does so in the last process only."""
# ruff: noqa: E402  (JAX's platform and XLA's flags must be set before they are imported)

import json
import os
import pathlib
import sys

port, index, count, said, folder = sys.argv[1:]
index, count = int(index), int(count)
os.environ["JAX_PLATFORMS"] = "cpu"
os.environ["XLA_FLAGS"] = f"--xla_force_host_platform_device_count={8 // count}"

import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
from jax import lax
from jax.sharding import NamedSharding, PartitionSpec as P

from jaxamp_like import (
    DynamicScalerState,
    amp,
    dynamic_scale_value_and_grad,
    loss_scale_optimizer,
)

if count > 1:
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    jax.distributed.initialize(f"127.0.0.1:{port}", count, index)
assert jax.device_count() == 8 and jax.process_count() == count

MESH = jax.sharding.Mesh(np.array(jax.devices()), ("d",))
SHARDED, SAME = NamedSharding(MESH, P("d")), NamedSharding(MESH, P())
PLAN = [1.0, 1.0, np.inf, 1.0, 256.0, np.nan, 1.0, 1.0]
TX = optax.sgd(0.01, momentum=0.9)


def batch(step):
    """Sixteen rows, two a device; the last one, of the last process, is spoilt."""
    x = np.random.default_rng(step).normal(size=(16, 4)).astype(np.float32)
    x[-1] *= PLAN[step]
    mine = x[index * (16 // count) : (index + 1) * (16 // count)]
    return jax.make_array_from_process_local_data(SHARDED, mine)


def replicated(tree):
    return jax.tree.map(
        lambda x: jax.make_array_from_process_local_data(SAME, np.asarray(x)), tree
    )


@amp
def plain_loss(w, x):
    return jnp.mean((x @ w - 1) ** 2)


def collective_loss(w, x):
    return lax.pmean(plain_loss(w, x), "d")


def jit_step(redo):
    """Global arrays: the compiler shares out the work."""
    step = dynamic_scale_value_and_grad(plain_loss, redo_on_nan=redo)

    @jax.jit
    def train(w, opt_state, state, x):
        state, (loss, grads) = step(w, x, dynamic_scaler_state=state)
        updates, new = TX.update(grads, opt_state, w)
        w, opt_state = state.accept(
            (optax.apply_updates(w, updates), new), (w, opt_state)
        )
        return w, opt_state, state, loss

    return train


def shard_map_step(redo, check_vma):
    """Each device on its own rows, with collectives in the loss."""
    step = dynamic_scale_value_and_grad(
        collective_loss, redo_on_nan=redo, axis_name="d"
    )

    def body(w, opt_state, state, x):
        state, (loss, grads) = step(w, x, dynamic_scaler_state=state)
        grads = lax.pmean(grads, "d")
        updates, new = TX.update(grads, opt_state, w)
        w, opt_state = state.accept(
            (optax.apply_updates(w, updates), new), (w, opt_state)
        )
        return w, opt_state, state, loss

    specs = dict(in_specs=(P(), P(), P(), P("d")), out_specs=P())
    return jax.jit(jax.shard_map(body, mesh=MESH, check_vma=check_vma, **specs))


def optimizer_step():
    tx = loss_scale_optimizer(TX, DynamicScalerState(scaler=2**8, patience=1))

    @jax.jit
    def train(w, opt_state, x):
        grads = tx.grad(plain_loss, opt_state)(w, x)
        updates, opt_state = tx.update(grads, opt_state, w)
        return optax.apply_updates(w, updates), opt_state

    return tx, train


def run(train, start, steps, tell):
    carry, scales = start, []
    for i in steps:
        carry = train(*carry[: len(start)], batch(i))
        scales.append(float(tell(carry).scaler))
    return carry[: len(start)], scales


def digest(tree):
    return [np.asarray(x).tobytes().hex() for x in jax.tree.leaves(tree)]


def save_and_restore(name, tree):
    path = pathlib.Path(folder) / name
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(path, tree)
        checkpointer.wait_until_finished()
        return checkpointer.restore(path, tree)


w = np.linspace(-1, 1, 4, dtype=np.float32)
scaler = DynamicScalerState(scaler=2**8, patience=1)
first = replicated((w, TX.init(w), scaler))
steps = range(len(PLAN))
variants = {f"jit, redo {n}": jit_step(n) for n in (0, 20)}
for n in (0, 20):
    for vma in (True, False):
        variants[f"shard_map, redo {n}, vma {vma}"] = shard_map_step(n, vma)
results = {}
for name, train in variants.items():
    end, scales = run(train, first, steps, lambda carry: carry[2])
    results[name] = {"scales": scales, "digest": digest(end)}

# Interrupted after an overflow, saved, restored, and gone on with.
name = "shard_map, redo 20, vma True"
middle, before = run(variants[name], first, steps[:4], lambda carry: carry[2])
middle = save_and_restore("middle", middle)
end, after = run(variants[name], middle, steps[4:], lambda carry: carry[2])
results["resumed"] = {"scales": before + after, "digest": digest(end)}

tx, train = optimizer_step()
start = replicated((w, tx.init(w)))
end, scales = run(train, start, steps, lambda carry: carry[1].scaler)
results["optimizer"] = {"scales": scales, "digest": digest(end)}
pathlib.Path(said).write_text(json.dumps(results))
if count > 1:
    jax.distributed.shutdown()
