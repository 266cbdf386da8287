"""The benchmark of training curves with states in few bits, run for a few steps."""

import json

import pytest

from benchmarks import curves_low_bits
from benchmarks.curves import Figures

pytestmark = pytest.mark.rest


def figures_of(difference: float) -> Figures:
    return Figures([1.0], 1.0, 0.1, difference, abs(difference) / 0.1, 0.0, [0], [1.0])


@pytest.mark.parametrize(
    "way, difference, missed",
    [
        ("int8 states", 0.2, 1),
        ("int8 states", 0.05, 0),
        ("int8 states", -0.2, 0),  # better is no miss
        ("bfloat16 parameters, to the nearest", 0.2, 0),
    ],
)
def test_a_miss_is_worse_by_more_than_the_spread(way, difference, missed):
    results = {"GAN": {"float32": figures_of(0.0), way: figures_of(difference)}}
    assert len(list(curves_low_bits.misses(results))) == missed


def test_it_writes_a_record_and_a_plot(tmp_path, monkeypatch):
    (gan,) = (task for task in curves_low_bits.MODELS if task.name == "GAN")
    monkeypatch.setattr(curves_low_bits, "MODELS", (gan,))
    curves_low_bits.main(["--steps", "3", "--seeds", "2", "--out", str(tmp_path)])
    assert (tmp_path / "curves_low_bits.png").read_bytes().startswith(b"\x89PNG")
    record = json.loads((tmp_path / "curves_low_bits.json").read_text())
    ways = record["results"]["GAN"]
    assert set(ways) == set(curves_low_bits.WAYS)
    assert ways["int8 states"]["bytes_per_parameter"] < 7  # 12 in float32
