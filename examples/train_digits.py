"""Trains one small vision transformer three times: float32, float16, bfloat16.

The model and its loss are plain float32 code that knows nothing of precision. The
training step wraps the loss in `amp`, and for float16 it scales the loss, since small
gradients would otherwise become zero. The three runs start from the same weights and
see the same batches, so their loss curves should lie on top of one another.

Data: the 1,797 handwritten digits (8 x 8 pixels) that scikit-learn ships.

    python examples/train_digits.py
    python examples/train_digits.py --steps 20 --out /tmp/digits    # a quick look
"""

import argparse
import pathlib
from typing import NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
import optax
from jax import Array
from matplotlib.figure import Figure
from rich.console import Console
from rich.progress import Progress
from rich.table import Table
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split

from jaxamp_like import DynamicScalerState, amp, dynamic_scale_value_and_grad

PRECISIONS = ("float32", "float16", "bfloat16")
WIDTH, HEADS, DEPTH, PATCH, PIXELS, CLASSES = 64, 4, 2, 2, 8, 10
BATCH = 64
SMOOTHING = 25  # steps averaged before curves are drawn or compared


class Block(eqx.Module):
    norm1: eqx.nn.LayerNorm
    attention: eqx.nn.MultiheadAttention
    norm2: eqx.nn.LayerNorm
    mlp: eqx.nn.MLP

    def __init__(self, key: Array):
        key1, key2 = jr.split(key)
        self.norm1 = eqx.nn.LayerNorm(WIDTH)
        self.attention = eqx.nn.MultiheadAttention(HEADS, WIDTH, key=key1)
        self.norm2 = eqx.nn.LayerNorm(WIDTH)
        self.mlp = eqx.nn.MLP(WIDTH, WIDTH, 4 * WIDTH, 1, jax.nn.gelu, key=key2)

    def __call__(self, tokens: Array) -> Array:
        normed = jax.vmap(self.norm1)(tokens)
        tokens = tokens + self.attention(normed, normed, normed)
        return tokens + jax.vmap(self.mlp)(jax.vmap(self.norm2)(tokens))


class VisionTransformer(eqx.Module):
    embed: eqx.nn.Linear
    position: Array
    blocks: list[Block]
    norm: eqx.nn.LayerNorm
    head: eqx.nn.Linear

    def __init__(self, key: Array):
        key1, key2, key3, *keys = jr.split(key, 3 + DEPTH)
        self.embed = eqx.nn.Linear(PATCH**2, WIDTH, key=key1)
        self.position = 0.02 * jr.normal(key2, ((PIXELS // PATCH) ** 2, WIDTH))
        self.blocks = [Block(key) for key in keys]
        self.norm = eqx.nn.LayerNorm(WIDTH)
        self.head = eqx.nn.Linear(WIDTH, CLASSES, key=key3)

    def __call__(self, image: Array) -> Array:
        side = PIXELS // PATCH
        patches = image.reshape(side, PATCH, side, PATCH).swapaxes(1, 2)
        tokens = jax.vmap(self.embed)(patches.reshape(side**2, PATCH**2))
        tokens = tokens + self.position
        for block in self.blocks:
            tokens = block(tokens)
        return self.head(self.norm(tokens.mean(axis=0)))


def predict(model: VisionTransformer, images: Array) -> Array:
    return jax.vmap(model)(images)


def cross_entropy(model: VisionTransformer, images: Array, labels: Array) -> Array:
    logits = predict(model, images)
    return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()


class TrainState(NamedTuple):
    model: VisionTransformer
    opt_state: optax.OptState
    scaler: DynamicScalerState  # used by float16 only


def make_train_step(precision: str, tx: optax.GradientTransformation):
    """One jitted step; all that depends on the precision is its `match`."""

    @eqx.filter_jit
    def train_step(state: TrainState, images: Array, labels: Array):
        model, opt_state, scaler = state
        batch = (images, labels)
        match precision:
            case "float32":
                loss, grads = eqx.filter_value_and_grad(cross_entropy)(model, *batch)
            case "bfloat16":  # the range of float32: no loss scaling
                mixed = amp(cross_entropy, compute_dtype="bfloat16")
                loss, grads = eqx.filter_value_and_grad(mixed)(model, *batch)
            case _:
                mixed = amp(cross_entropy, compute_dtype="float16")
                # Where gradients overflow, the same batch is tried at smaller scales.
                scaled = dynamic_scale_value_and_grad(mixed, redo_on_nan=2)
                scaler, (loss, grads) = scaled(
                    model, *batch, dynamic_scaler_state=scaler
                )
        # If they overflow still, `tx` returns zero updates and keeps its own state.
        params = eqx.filter(model, eqx.is_array)
        updates, opt_state = tx.update(grads, opt_state, params)
        return TrainState(eqx.apply_updates(model, updates), opt_state, scaler), loss

    return train_step


@eqx.filter_jit
def accuracy(
    model: VisionTransformer, images: Array, labels: Array, precision: str
) -> Array:
    logits = amp(predict, compute_dtype=precision)(model, images)
    return jnp.mean(jnp.argmax(logits, axis=-1) == labels)


class Digits(NamedTuple):
    train_images: Array
    test_images: Array
    train_labels: Array
    test_labels: Array


def load_data() -> Digits:
    images, labels = load_digits(return_X_y=True)
    images = np.asarray(images, np.float32).reshape(-1, PIXELS, PIXELS)
    images = (images - images.mean()) / images.std()
    labels = np.asarray(labels, np.int32)
    split = train_test_split(images, labels, test_size=0.2, random_state=0)
    return Digits(*map(jnp.asarray, split))


class Result(NamedTuple):
    losses: np.ndarray
    test_accuracy: float
    overflows: int  # each halved the loss scale
    skipped: int  # steps that left the model as it was
    final_scale: float | None


def train(
    precision: str, data: Digits, steps: int, seed: int, progress: Progress
) -> Result:
    model = VisionTransformer(jr.key(seed))
    schedule = optax.warmup_cosine_decay_schedule(0.0, 3e-3, steps // 10, steps)
    # A long run of overflows is what finding the scale looks like: never give up on it.
    tx = optax.apply_if_finite(optax.adamw(schedule), max_consecutive_errors=steps)
    state = TrainState(
        model,
        tx.init(eqx.filter(model, eqx.is_array)),
        # A patience this short lets even a short run find out where float16 overflows.
        DynamicScalerState(patience=50),
    )
    train_step = make_train_step(precision, tx)
    rng = np.random.default_rng(seed)
    losses = []
    for _ in progress.track(range(steps), description=f"{precision:>8}"):
        batch = rng.integers(len(data.train_labels), size=BATCH)
        state, loss = train_step(
            state, data.train_images[batch], data.train_labels[batch]
        )
        losses.append(float(loss))
    test_accuracy = accuracy(state.model, data.test_images, data.test_labels, precision)
    return Result(
        np.array(losses),
        float(test_accuracy),
        int(state.scaler.total_resets),
        int(optax.tree_utils.tree_get(state.opt_state, "total_notfinite")),
        float(state.scaler.scaler) if precision == "float16" else None,
    )


def smooth(losses: np.ndarray) -> np.ndarray:
    window = min(SMOOTHING, len(losses))
    return np.convolve(losses, np.ones(window) / window, mode="valid")


def summary(results: dict[str, Result]) -> Table:
    table = Table(title="Digits in three precisions")
    for heading in (
        *("precision", "final loss", "gap", "test accuracy"),
        *("overflows", "skips", "scale"),
    ):
        table.add_column(heading, justify="right")
    reference = smooth(results["float32"].losses)
    for precision, result in results.items():
        losses = smooth(result.losses)
        table.add_row(
            precision,
            f"{losses[-1]:.4f}",
            f"{np.abs(losses - reference).max():.4f}",
            f"{result.test_accuracy:.2%}",
            str(result.overflows),
            str(result.skipped),
            "-" if result.final_scale is None else f"2^{np.log2(result.final_scale):g}",
        )
    return table


def plot(results: dict[str, Result], path: pathlib.Path) -> None:
    figure = Figure(figsize=(8, 5), layout="constrained")
    axes = figure.subplots()
    # Wide below narrow, solid below dashed: the curves overlap and all must show.
    styles = (("#bbbbbb", 6.0, "-"), ("#0072b2", 2.0, "-"), ("#d55e00", 2.0, "--"))
    for (precision, result), (colour, width, line) in zip(
        results.items(), styles, strict=True
    ):
        losses = smooth(result.losses)
        steps = np.arange(len(result.losses) - len(losses), len(result.losses)) + 1
        axes.plot(
            steps,
            losses,
            line,
            color=colour,
            linewidth=width,
            label=f"{precision} (test accuracy {result.test_accuracy:.1%})",
        )
    axes.set_yscale("log")
    axes.set_xlabel("training step")
    axes.set_ylabel(f"cross entropy (mean of the last {SMOOTHING} steps)")
    axes.set_title("One float32 vision transformer on digits in three precisions")
    axes.grid(alpha=0.3, which="both")
    axes.legend()
    figure.savefig(path, dpi=150)


def main() -> None:
    parser = argparse.ArgumentParser(description="One model, three precisions.")
    parser.add_argument("--steps", type=int, default=400, help="for each precision")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--out", type=pathlib.Path, default=pathlib.Path(__file__).parent / "out"
    )
    options = parser.parse_args()

    data = load_data()
    console = Console()
    with Progress(console=console) as progress:
        results = {
            precision: train(precision, data, options.steps, options.seed, progress)
            for precision in PRECISIONS
        }
    options.out.mkdir(parents=True, exist_ok=True)
    path = options.out / "train_digits.png"
    plot(results, path)
    console.print(summary(results))
    console.print(
        f"gap: the largest to the float32 curve, of means over {SMOOTHING} steps\n"
        "overflows: batches whose gradients overflowed, which halves the loss scale\n"
        "skips: steps that left the model as it was"
    )
    console.print(f"Loss curves: {path}", soft_wrap=True)


if __name__ == "__main__":
    main()
