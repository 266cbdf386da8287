"""Lock files of training steps, which hold on every machine and every JAX.

`python -m tests.locks` writes them anew: the difference is what has changed."""

from pathlib import Path

import jax

from benchmarks.workloads import WORKLOADS
from jaxamp_like import amp
from jaxamp_like.reports import certify

FOLDER = Path(__file__).parent
MODELS = ("MLP", "GPT unrolled", "GPT scanned remat", "ViT", "CNN", "LSTM")


def path_of(name):
    return FOLDER / f"{name.replace(' ', '_')}.lock"


def certificate_of(name):
    model = WORKLOADS[name]
    step = jax.grad(amp(model.loss, compute_dtype="bfloat16"))
    return certify(step, *model.shapes("toy"))
