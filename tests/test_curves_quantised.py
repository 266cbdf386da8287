"""The command that draws training curves in few bits, at the smallest size."""

import json

import jax
import numpy as np
import pytest

from benchmarks import curves, curves_quantised


def run(final):
    return [
        curves.Run(np.full(30, final + shift), 0, 1.0) for shift in (-1.0, 0.0, 1.0)
    ]


@pytest.mark.parametrize(("shift", "missed"), ((0.9, 0), (1.1, 1), (-1.1, 1)))
def test_what_is_missed(shift, missed):
    runs = {"bfloat16": run(2.0), "float8, current": run(2.0 + shift)}
    results = {k: curves.figures(v, runs["bfloat16"]) for k, v in runs.items()}
    assert len(list(curves_quantised.misses(results))) == missed


def test_nvfp4_may_end_a_share_above():
    def missed(name, final):
        runs = {"bfloat16": run(2.0), name: run(final)}
        results = {k: curves.figures(v, runs["bfloat16"]) for k, v in runs.items()}
        return len(list(curves_quantised.misses(results)))

    assert missed("NVFP4", 2.02) == 0 and missed("NVFP4", 2.04) == 1
    assert missed("NVFP4, not rotated", 3.0) == 0  # only compares


@pytest.mark.nightly
def test_the_command(tmp_path, monkeypatch):
    monkeypatch.setattr(curves, "DEPTH", 1)
    kinds = ["bfloat16", "float8, current", "float8, delayed", "MXFP8", "NVFP4"]
    kinds += ["NVFP4, then bfloat16", "NVFP4, weights alone"]
    arguments = ["--steps", "5", "--seeds", "2", "--out", str(tmp_path)]
    assert curves_quantised.main([*arguments, "--kinds", *kinds]) in (0, 1)
    assert (tmp_path / "curves_quantised.png").read_bytes().startswith(b"\x89PNG")
    record = json.loads((tmp_path / "curves_quantised.json").read_text())
    assert record["versions"]["jax"] == jax.__version__
    means = [one["mean"] for one in record["results"].values()]
    # Close, as weights and batches are the same; not equal, or nothing was float8.
    assert len(set(means)) == len(kinds)
    np.testing.assert_allclose(means, means[0], rtol=1e-2)
