"""What the examples named after frameworks share: digits, a bad batch, and the proof.

In mid-training one batch overflows float16, and its step is skipped. `prove` trains
twice, with that batch and without it, and compares bit for bit all that training
changes: the batch must have left no trace. For that, the first overflow in a row may
not lower the scale (`hysteresis=2`): at another scale the smallest gradients are
rounded otherwise.

Data: the 1,797 handwritten digits (8 x 8 pixels) that scikit-learn ships."""

import argparse
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
from sklearn.datasets import load_digits

from jaxamp_like import DynamicScalerState

PIXELS, CLASSES, BATCH = 64, 10, 64
SCALER = DynamicScalerState(hysteresis=2)

Batch = tuple[np.ndarray, np.ndarray]


def digits() -> Batch:
    images, labels = load_digits(return_X_y=True)
    images = (images - images.mean()) / images.std()
    return images.astype(np.float32), labels.astype(np.int32)


def batches(steps: int) -> list[Batch]:
    """Random batches, of which the middle one is far beyond the range of float16."""
    images, labels = digits()
    rng = np.random.default_rng(0)
    picks = [rng.integers(1500, size=BATCH) for _ in range(steps)]
    chosen = [(images[pick], labels[pick]) for pick in picks]
    chosen[steps // 2] = (1e6 * chosen[steps // 2][0], chosen[steps // 2][1])
    return chosen


def bits(state: Any) -> list[bytes]:
    leaves = jax.tree.leaves(state, is_leaf=lambda x: isinstance(x, type(SCALER)))
    arrays = [x for x in leaves if isinstance(x, jax.Array)]
    keys = [jnp.issubdtype(x.dtype, jax.dtypes.prng_key) for x in arrays]
    return [
        np.asarray(jr.key_data(x) if is_key else x).tobytes()
        for x, is_key in zip(arrays, keys, strict=True)
    ]


def prove(train: Callable[[list[Batch]], tuple[Any, list[Any], Any]]) -> None:
    """Trains with and without the batch that overflows, and asserts that both agree.

    Args:
        train: of batches makes all that training has changed, the losses, and the
            predictions for all digits. The loss scale is not compared: it knows."""
    parser = argparse.ArgumentParser(description="An overflow that leaves no trace.")
    parser.add_argument("--steps", type=int, default=100)
    steps = parser.parse_args().steps

    data, bad = batches(steps), steps // 2
    state, losses, logits = train(data)
    spared, _, _ = train(data[:bad] + data[bad + 1 :])
    assert bits(state) == bits(spared), "a trace was left"
    assert not np.isfinite(losses[bad]), "the batch should have overflowed"

    right = np.argmax(np.asarray(logits), axis=-1)[1500:] == digits()[1][1500:]
    print(
        f"loss {losses[0]:.3f} to {losses[-1]:.3f}, at step {bad} {losses[bad]:.3f}: "
        f"skipped, and bit for bit without a trace in {len(bits(state))} "
        f"arrays; {right.mean():.1%} of the other digits are read right"
    )
