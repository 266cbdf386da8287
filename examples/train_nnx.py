"""Flax NNX in float16: BatchNorm, Dropout, and a step that overflows and is skipped.

Model, optimizer and metrics are changed in place by a guarded step, or left as they
were: the counts of `nnx.Rngs` and of the optimizer's steps too.

    python examples/train_nnx.py
"""

import optax
from flax import nnx
from planted_overflow import CLASSES, PIXELS, SCALER, digits, prove

from jaxamp_like import enable_amp, guard_step


class Net(nnx.Module):
    def __init__(self, rngs):
        self.first = nnx.Linear(PIXELS, 128, rngs=rngs)
        self.norm = nnx.BatchNorm(128, momentum=0.9, rngs=rngs)
        self.dropout = nnx.Dropout(0.2, rngs=rngs)
        self.second = nnx.Linear(128, CLASSES, rngs=rngs)

    def __call__(self, x):
        return self.second(self.dropout(nnx.relu(self.norm(self.first(x)))))


def loss_fn(model, x, y):
    return optax.softmax_cross_entropy_with_integer_labels(model(x), y).mean()


mixed_loss, tx = enable_amp(loss_fn, optax.adamw(1e-3), scaler=SCALER)


@nnx.jit
@guard_step
def step(model, optimizer, metrics, x, y):
    loss, grads = tx.value_and_grad(mixed_loss, optimizer)(model, x, y)
    optimizer.update(model, grads)
    metrics.update(loss=loss)
    return loss


def train(batches):
    model = Net(nnx.Rngs(0))
    optimizer = nnx.Optimizer(model, tx, wrt=nnx.Param)
    metrics = nnx.MultiMetric(loss=nnx.metrics.Average("loss"))
    losses = [float(step(model, optimizer, metrics, x, y)) for x, y in batches]
    model.eval()
    return (model, optimizer, metrics), losses, model(digits()[0])


if __name__ == "__main__":
    prove(train)
