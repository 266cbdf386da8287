"""The command that trains with Optax's optimizers, at the smallest size."""

import json

import numpy as np
import pytest

from benchmarks import curves, curves_low_bits, curves_optimizers
from benchmarks.seeds import Trained

from .test_curves_quantised import run


@pytest.mark.parametrize(
    ("int8", "int4", "missed"), ((0.9, 3, 0), (1.1, 0, 3), (-2, 0, 0))
)
def test_what_is_missed(int8, int4, missed):
    shifts = dict(zip(curves_optimizers.STORED, (0.0, int8, int4), strict=True))
    by_way = {
        way: curves.figures(run(2.0 + shift), run(2.0)) for way, shift in shifts.items()
    }
    results = {"Adam": {task.name: by_way for task in curves_low_bits.MODELS}}
    assert len(list(curves_optimizers.misses(results))) == missed


@pytest.mark.parametrize("final", (2.0, np.nan, np.inf))
def test_what_diverges_in_float32_is_not_compared(final):
    by_way = {curves_optimizers.PLAIN: Trained(run(final), 12.0)}
    assert curves_optimizers.diverges({"GAN": by_way}) == (not np.isfinite(final))


def test_a_record_of_other_settings_is_no_part_of_another(tmp_path):
    file = tmp_path / "curves_optimizers.json"
    assert curves_optimizers.recorded_before(file, 4, 2) == {}
    file.write_text(json.dumps({"steps": 4, "seeds": 2, "results": {"Adam": {}}}))
    assert curves_optimizers.recorded_before(file, 4, 2) == {"Adam": {}}
    assert curves_optimizers.recorded_before(file, 4, 3) == {}


@pytest.mark.nightly
def test_the_command(tmp_path):
    call = "--steps 4 --seeds 2 --optimizers Signum --out".split()
    assert curves_optimizers.main([*call, str(tmp_path)]) in (0, 1)
    assert (tmp_path / "curves_optimizers.png").read_bytes().startswith(b"\x89PNG")
    call[call.index("Signum")] = "Lion"
    assert curves_optimizers.main([*call, str(tmp_path)]) in (0, 1)
    record = json.loads((tmp_path / "curves_optimizers.json").read_text())
    assert [*record["results"]] == ["Lion", "Signum"]
    by_task = record["results"]["Signum"]
    assert [len(by_way) for by_way in by_task.values()] == [3, 3, 3]
    gan = by_task["GAN"]
    assert (
        gan["int8 states"]["bytes_per_parameter"]
        < gan["float32"]["bytes_per_parameter"]
    )
    assert len(gan["float32"]["finals"]) == 8
