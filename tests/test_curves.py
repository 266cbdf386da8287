"""The command that draws training curves, at the smallest size, and what it tells."""

import json
import math

import jax
import numpy as np
import pytest

from benchmarks import curves
from examples import train_digits


@pytest.fixture
def small(monkeypatch):
    """Compiling is most of a short run, so: one block each, and less optimisation."""
    monkeypatch.setattr(train_digits, "DEPTH", 1)
    monkeypatch.setattr(curves, "DEPTH", 1)
    before = jax.config.read("jax_disable_most_optimizations")
    jax.config.update("jax_disable_most_optimizations", True)
    yield
    jax.config.update("jax_disable_most_optimizations", before)


@pytest.mark.nightly
def test_the_command(small, tmp_path, capsys):
    curves.main(["--steps", "2", "--seeds", "1", "--out", str(tmp_path)])
    assert "One seed has no spread" in capsys.readouterr().out
    assert (tmp_path / "curves.png").read_bytes().startswith(b"\x89PNG")
    assert "| digits ViT | bfloat16 |" in (tmp_path / "curves.md").read_text()
    record = json.loads((tmp_path / "curves.json").read_text())
    assert record["versions"]["jax"] == jax.__version__
    assert list(record["tasks"]) == ["digits ViT", "character GPT"]
    for rows in record["tasks"].values():
        means = [rows[precision]["mean"] for precision in curves.PRECISIONS]
        assert all(map(math.isfinite, means))
        # Close, as weights and batches are the same; not equal, or it was all float32.
        assert len(set(means)) == 3
        np.testing.assert_allclose(means[1:], means[0], rtol=1e-2)
        assert rows["float16"]["skipped"] == [0]


def some_runs(*finals):
    return [curves.Run(np.full(30, final), 0, 1.0) for final in finals]


@pytest.mark.parametrize(
    ("shift", "inside"), ((0.9, "Every final loss"), (-1.1, "1 of 2"))
)
def test_differences_are_told_in_spreads(shift, inside):
    plain = some_runs(1.0, 2.0, 3.0)  # of standard deviation 1
    other = some_runs(1.0 + shift, 2.0 + shift, 3.0 + shift)
    runs = {"float32": plain, "float16": plain, "bfloat16": other}
    results = curves.summarise({"a model": runs})
    one = results["a model"]["bfloat16"]
    assert one.mean == pytest.approx(2.0 + shift)
    assert one.spread == pytest.approx(1.0)
    assert one.difference == pytest.approx(shift)
    assert one.of_spread == pytest.approx(abs(shift))
    assert one.largest == pytest.approx(abs(shift))
    assert curves.verdict(results).startswith(inside)


def test_only_the_last_steps_count():
    losses = np.concatenate([np.full(30, 9.0), np.full(curves.TAIL, 1.0)])
    assert curves.Run(losses, 0, 1.0).final == 1.0


@pytest.mark.parametrize("option", ("--steps", "--seeds"))
def test_none_at_all_is_refused(option, capsys):
    with pytest.raises(SystemExit):
        curves.parse_args([option, "0"])
    assert "must be 1 or more" in capsys.readouterr().err
