"""Saves an artifact on one version of JAX, to be loaded on another.

    python -m tests.across save FOLDER      # on the lowest JAX
    python -m tests.across load FOLDER      # on a later one

`.ci/across` makes an environment for each and runs both. tests/artifacts holds what the
lowest JAX saved, and `test_artifact.py` loads."""

import collections
import sys
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import export, lax

from jaxamp_like import convert, default_amp_policy, load
from jaxamp_like.rules import int8

Answer = collections.namedtuple("Answer", "scores best")
POLICY = default_amp_policy | {"eight": int8(weight_only=True, where=None)}


def model(params: Any, tokens: jax.Array, shift: jax.Array) -> dict[str, Any]:
    """Of most kinds of code: a table, a scan, norms, a branch, int8, random numbers."""
    x = params["table"][tokens] + shift[:, None]

    def layer(x, w):
        x = x + jax.nn.gelu(x @ w)
        return x * lax.rsqrt(jnp.mean(x * x, -1, keepdims=True) + 1e-6), None

    x, _ = lax.scan(layer, x, params["layers"])
    with jax.named_scope("eight"):
        x = x @ params["eight"]
    noise = jax.random.normal(params["key"], (8,))
    x = lax.cond(shift.sum() > 0, lambda x: x + noise, lambda x: x, x)
    scores = jax.nn.softmax(x @ params["head"])
    return {"answer": Answer(scores, jnp.argmax(scores, -1)), "note": "none"}


def params_and_inputs() -> tuple[dict[str, Any], tuple[Any, ...]]:
    rng = np.random.default_rng(0)

    def normal(*shape):
        return jnp.asarray(rng.normal(size=shape) / shape[-1] ** 0.5, "float32")

    params = {"table": normal(11, 8), "layers": normal(3, 8, 8), "eight": normal(8, 8)}
    params |= {"head": normal(8, 8), "key": jax.random.key(1)}
    tokens = rng.integers(0, 11, (5, 4)).astype("int32")
    return params, (tokens, normal(5, 8))


def save(folder: Path) -> None:
    params, inputs = params_and_inputs()
    b, n = export.symbolic_shape("b, n")
    examples = [
        jax.ShapeDtypeStruct((b, n), "int32"),
        jax.ShapeDtypeStruct((b, 8), "float32"),
    ]
    low = convert(model, params, *examples, compute_dtype="bfloat16", amp_policy=POLICY)
    low.save(folder / "model", platforms=["cpu", "cuda"])
    answer = low(*inputs)["answer"]._asdict()
    np.savez(folder / "expected.npz", **answer)


def check(folder: Path) -> str:
    """Loads an artifact, and sees that it computes what it did where it was saved."""
    loaded = load(folder / "model")
    with np.load(folder / "expected.npz") as held:
        expected = dict(held)
    _, inputs = params_and_inputs()
    made = loaded(*inputs)
    assert type(made["answer"]).__name__ == "Answer" and made["note"] == "none"
    assert {str(x.dtype) for x in loaded.params.values()} == {
        "bfloat16", "float32", "int8", "key<fry>",
    }  # fmt: skip
    assert (made["answer"].best == expected["best"]).all()
    # Another XLA may round a function otherwise, and so a bfloat16 next to the other.
    np.testing.assert_allclose(made["answer"].scores, expected["scores"], rtol=2**-7)
    same = (np.asarray(made["answer"].scores) == expected["scores"]).mean()
    jaxs = f"JAX {loaded.versions['jax']} saved, {jax.__version__} loaded"
    return f"{jaxs}: {100 * same:.0f} % of the numbers are the same to the bit"


if __name__ == "__main__":
    command, folder = sys.argv[1:]
    print(check(Path(folder)) if command == "load" else save(Path(folder)) or "saved")
