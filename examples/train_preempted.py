"""A training loop for long jobs, which may be stopped at any time and go on exactly.

Grain feeds it. Orbax saves the parameters, the optimizer's state with the loss scale,
and the place in the data, every few steps and when the machine is taken away (SIGTERM).
The same command goes on with what was saved last:

    python examples/train_preempted.py --folder runs/digits --steps 2000

Without a folder it shows that: it trains once through, and once stopped half-way, and
compares the two bit for bit. Needs Orbax and Grain, which the extra `checkpoint`
installs.
"""

import argparse
import contextlib
import signal
import tempfile
from collections.abc import Iterator
from pathlib import Path
from threading import Event
from typing import Any

import grain
import grain.checkpoint
import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
import optax
import orbax.checkpoint as ocp
from sklearn.datasets import load_digits

from jaxamp_like import enable_amp, guard_step
from jaxamp_like.reports import amp_metrics

PIXELS, WIDTH, CLASSES, BATCH = 64, 128, 10, 64
SAVE_EVERY, LOG_EVERY = 100, 100  # steps
KEEP = 0.9


def loss_fn(params, key, x, y):
    x = jax.nn.relu(x @ params["in"])
    x = jnp.where(jr.bernoulli(key, KEEP, x.shape), x / KEEP, 0)
    losses = optax.softmax_cross_entropy_with_integer_labels(x @ params["out"], y)
    return losses.mean()


mixed_loss, tx = enable_amp(loss_fn, optax.adamw(1e-3), compute_dtype="float16")


@jax.jit
@guard_step
def train_step(state, number, batch):
    params, opt_state = state
    key = jr.fold_in(jr.key(1), number)  # of this step: no key has to be saved
    loss, grads = tx.value_and_grad(mixed_loss, opt_state)(params, key, *batch)
    updates, opt_state = tx.update(grads, opt_state, params)
    return (optax.apply_updates(params, updates), opt_state), loss


def initial_state() -> Any:
    keys = jr.split(jr.key(0))
    params = {
        "in": jr.normal(keys[0], (PIXELS, WIDTH)) / PIXELS**0.5,
        "out": jr.normal(keys[1], (WIDTH, CLASSES)) / WIDTH**0.5,
    }
    return params, tx.init(params)


def make_batches() -> grain.DatasetIterator:
    images, labels = load_digits(return_X_y=True)
    records = list(zip((images / 16).astype(np.float32), labels, strict=True))
    shuffled = grain.MapDataset.source(records).shuffle(seed=0).repeat()
    return iter(shuffled.batch(BATCH).to_iter_dataset())


@contextlib.contextmanager
def preemption() -> Iterator[Event]:
    """An event that is set once the machine asks the process to stop.

    On many hosts ask Orbax instead, which lets all of them stop at the same step:
    `manager.reached_preemption(number)`."""
    asked = Event()
    before = signal.signal(signal.SIGTERM, lambda *_: asked.set())
    try:
        yield asked
    finally:
        signal.signal(signal.SIGTERM, before)


def train(folder: Path, steps: int, interrupt_at: int | None = None) -> Any:
    """Trains from what was saved last in the folder, until all steps are done or the
    process is asked to stop.

    Args:
        folder: of the checkpoints.
        steps: of the whole training, those that an earlier run did included.
        interrupt_at: the step after which the process asks itself to stop.

    Returns:
        the state and how many steps it has had."""
    state, batches, done = initial_state(), make_batches(), 0
    options = ocp.CheckpointManagerOptions(
        save_interval_steps=SAVE_EVERY, max_to_keep=2
    )
    manager = ocp.CheckpointManager(folder.absolute(), options=options)

    def save(force: bool = False) -> None:
        saved = ocp.args.Composite(
            state=ocp.args.StandardSave(state),
            data=grain.checkpoint.CheckpointSave(batches),
        )
        manager.save(done, args=saved, force=force)  # at every SAVE_EVERY steps, or now

    with manager, preemption() as asked_to_stop:
        if (last := manager.latest_step()) is not None:
            wanted = ocp.args.Composite(
                state=ocp.args.StandardRestore(state),  # `state` tells the types
                data=grain.checkpoint.CheckpointRestore(batches),
            )
            restored = manager.restore(last, args=wanted)
            state, batches, done = restored["state"], restored["data"], last
        while done < steps and not asked_to_stop.is_set():
            state, loss = train_step(state, done, next(batches))
            done += 1
            if done % LOG_EVERY == 0:
                print(done, {"loss": round(float(loss), 4)} | amp_metrics(state))
            if done == interrupt_at:
                signal.raise_signal(signal.SIGTERM)
            save()
        if manager.latest_step() != done:
            save(force=True)
    return state, done


def show(folder: Path, steps: int) -> None:
    """Compares a run that was stopped half-way with one that was not."""
    through, _ = train(folder / "through", steps)
    _, done = train(folder / "stopped", steps, interrupt_at=steps // 2)
    print(f"stopped after {done} steps, goes on")
    resumed, done = train(folder / "stopped", steps)
    pairs = zip(jax.tree.leaves(through), jax.tree.leaves(resumed), strict=True)
    same = all(np.asarray(a).tobytes() == np.asarray(b).tobytes() for a, b in pairs)
    print(f"{done} steps; bit for bit the same: {same}")
    if not same:
        raise SystemExit("a resumed run must not differ")


def main() -> None:
    parser = argparse.ArgumentParser(description="Train, stop at any time, go on.")
    parser.add_argument("--folder", type=Path, help="of the checkpoints")
    parser.add_argument("--steps", type=int, default=400)
    args = parser.parse_args()
    if args.folder is not None:
        train(args.folder, args.steps)
        return
    with tempfile.TemporaryDirectory() as folder:
        show(Path(folder), args.steps)


if __name__ == "__main__":
    main()
