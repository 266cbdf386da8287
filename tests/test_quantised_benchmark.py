"""The benchmark of quantised contractions: that it calls slow what is."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from benchmarks import quantised


def times(**seconds):
    return {who.replace("_", " "): {"step_seconds": s} for who, s in seconds.items()}


@pytest.mark.parametrize(
    ("name", "found", "missed"),
    (
        ("1024", times(bfloat16=1.0, float8=1.0), []),
        ("1024", times(bfloat16=1.0, float8=1.01), ["time of bfloat16"]),
        ("GPT blocks", times(bfloat16=1.5, float8=1.0, float8_by_hand=0.99), []),
        ("GPT blocks", times(bfloat16=1.3, float8=1.0), ["times as fast"]),
        ("GPT blocks", times(bfloat16=1.5, float8=1.0, by_hand=0.97), ["best by hand"]),
        ("GPT blocks", times(bfloat16=1.5), []),
    ),
)
def test_what_is_missed(name, found, missed):
    said = list(quantised.misses({name: found}))
    assert len(said) == len(missed)
    assert all(part in text for part, text in zip(missed, said, strict=True))


@pytest.mark.rest
def test_contenders_by_hand_compute_the_same(monkeypatch):
    for name, value in {"TOKENS": 16, "WIDTH": 8, "LAYERS": 2}.items():
        monkeypatch.setattr(quantised, name, value)
    shapes = quantised.shapes_of_blocks(
        lambda *shape: jax.ShapeDtypeStruct(shape, jnp.float32)
    )
    args = jax.tree.map(lambda x: jax.random.normal(jax.random.key(0), x.shape), shapes)
    plain, ahead = (
        jax.jit(jax.value_and_grad(quantised.CONTENDERS[who](quantised.blocks)))(*args)
        for who in ("float8 by hand", quantised.OF_BLOCKS)
    )
    jax.tree.map(np.testing.assert_array_equal, plain, ahead)


def test_the_command_on_the_device_here(tmp_path):
    file = tmp_path / "found.json"
    options = "--run --no-blocks --sizes 32 --contenders bfloat16 --json".split()
    assert quantised.main([*options, str(file)]) == 0
    record = json.loads(file.read_text())
    assert record["work"]["32 x 32 x 32"]["bfloat16"]["step_seconds"] > 0
    assert record["versions"]["jax"] == jax.__version__
