"""The command that draws training curves in float8, at the smallest size."""

import json

import jax
import numpy as np
import pytest

from benchmarks import curves, curves_float8


def run(final):
    return [
        curves.Run(np.full(30, final + shift), 0, 1.0) for shift in (-1.0, 0.0, 1.0)
    ]


@pytest.mark.parametrize(("shift", "missed"), ((0.9, 0), (1.1, 1), (-1.1, 1)))
def test_what_is_missed(shift, missed):
    runs = {"bfloat16": run(2.0), "float8, current": run(2.0 + shift)}
    results = {k: curves.figures(v, runs["bfloat16"]) for k, v in runs.items()}
    assert len(list(curves_float8.misses(results))) == missed


@pytest.mark.rest
def test_the_command(tmp_path, monkeypatch):
    monkeypatch.setattr(curves, "DEPTH", 1)
    curves_float8.main(["--steps", "3", "--seeds", "1", "--out", str(tmp_path)])
    assert (tmp_path / "curves_float8.png").read_bytes().startswith(b"\x89PNG")
    record = json.loads((tmp_path / "curves_float8.json").read_text())
    assert record["versions"]["jax"] == jax.__version__
    means = [one["mean"] for one in record["results"].values()]
    # Close, as weights and batches are the same; not equal, or nothing was float8.
    assert len(set(means)) == 3
    np.testing.assert_allclose(means, means[0], rtol=1e-2)
