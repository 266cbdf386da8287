"""The command that draws training curves in few bits, at the smallest size."""

import json

import jax
import numpy as np
import pytest

from benchmarks import curves, curves_quantised
from benchmarks.seeds import write_record
from jaxamp_like import PolicyMap, get_policy


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
def test_the_command(tmp_path):
    def record_of(kinds):
        arguments = "--steps 5 --seeds 2 --depth 1".split()
        call = [*arguments, "--out", str(tmp_path), "--kinds", *kinds]
        assert curves_quantised.main(call) in (0, 1)
        return json.loads((tmp_path / "curves_quantised.json").read_text())

    kinds = ["float8, current", "float8, delayed", "MXFP8", "NVFP4"]
    kinds += ["NVFP4, then bfloat16", "NVFP4, weights alone"]
    record = record_of(kinds)
    assert (tmp_path / "curves_quantised.png").read_bytes().startswith(b"\x89PNG")
    assert record["versions"]["jax"] == jax.__version__
    means = [one["mean"] for one in record["results"].values()]
    # Close, as weights and batches are the same; not equal, or nothing was float8.
    assert len(set(means)) == 1 + len(kinds)
    np.testing.assert_allclose(means, means[0], rtol=1e-2)
    # Another kind joins those of the record.
    longer = record_of(["MXFP8, weights alone"])["results"]
    for name, one in record["results"].items():
        np.testing.assert_allclose(longer[name]["finals"], one["finals"], rtol=1e-6)
    assert len(longer) == 2 + len(kinds)


def test_what_is_of_another_model_does_not_join(tmp_path):
    path, size = tmp_path / "record.json", curves_quantised.Size()
    write_record(path, 0.0, 5, 3, {}, model={"dim": 8, "depth": 1, "peak_rate": 0.1})
    assert curves_quantised.runs_of_record(path, 5, 3, size) == {}


def test_nvfp4_keeps_the_last_blocks_of_deep_models():
    kind = curves_quantised.KINDS["NVFP4"]
    policy = kind.policy_for(8)
    assert isinstance(policy, PolicyMap)
    assert policy["block_7"] == get_policy("mixed_bfloat16")
    assert policy["block_6"] == policy["block_0"] == kind.policy
    assert kind.policy_for(2) == kind.policy
