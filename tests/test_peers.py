"""Peers beside ours: what runs is measured, what does not is told; and who leads."""

import dataclasses
import json
import sys

import jax
import jax.numpy as jnp
import pytest

from benchmarks import peers, steps
from benchmarks.rewrite import Figures
from benchmarks.workloads import WORKLOADS

MLP = WORKLOADS["MLP"]
ONE = Figures(1.0, 1.0, 3, 6, 1000, 0, 0, 0.1, 1e-3, 1e-2)


def everything_low(workload, dtype):
    def loss(*args):
        low = [jax.tree.map(lower, arg) for arg in args]
        return workload.loss(*low).astype(jnp.float32)

    def lower(x):
        return x.astype(dtype) if jnp.issubdtype(x.dtype, jnp.floating) else x

    return loss


@pytest.fixture(autouse=True)
def users_promotion():
    with jax.numpy_rank_promotion("allow"), jax.numpy_dtype_promotion("standard"):
        yield


@pytest.fixture
def other(monkeypatch):
    """A peer that everybody has, instead of packages."""
    monkeypatch.setattr(peers, "PEERS", {"other": everything_low})
    monkeypatch.setattr(steps, "PEERS", {"other": everything_low})


@pytest.mark.quick
def test_a_package_that_is_not_there_is_named(monkeypatch):
    for module in ("jmp", "mpx", "jaxamp"):
        monkeypatch.setitem(sys.modules, module, None)
    losses, failed = peers.contenders(MLP, "bfloat16")
    assert list(losses) == list(peers.BESIDE)
    assert list(failed) == list(peers.PEERS)
    assert all("ModuleNotFoundError" in why for why in failed.values())


@pytest.mark.quick
def test_a_package_that_fails_is_told_with_its_reason(monkeypatch):
    def broken(workload, dtype):
        def loss(params, batch):
            raise TypeError("of another JAX\nand more")

        return loss

    monkeypatch.setattr(peers, "PEERS", {"broken": broken})
    losses, failed = peers.contenders(MLP, "bfloat16")
    assert "broken" not in losses
    assert failed == {"broken": "TypeError: of another JAX"}


@pytest.mark.quick
@pytest.mark.parametrize(
    "better, told",
    [
        ({"saved_bytes": 900}, ["other saves 10.00% fewer bytes"]),
        ({"saved_bytes": 900, "gradient_error": 2e-2}, []),
        ({"saved_bytes": 1000}, []),
        ({"low_share": 0.9}, []),
    ],
)
def test_who_leads_at_no_larger_error(better, told, other):
    rows = {"float32": ONE, "amp": ONE, "other": dataclasses.replace(ONE, **better)}
    assert peers.behind(peers.Rows(rows, {})) == told


@pytest.mark.quick
def test_a_lower_share_and_slow_tracing_are_told(other):
    ours = dataclasses.replace(ONE, low_share=0.5, trace_seconds=0.25)
    rows = peers.Rows({"float32": ONE, "amp": ours, "other": ONE}, {})
    slow = "tracing takes 2.50 times as long as float32's"
    assert peers.behind(rows) == ["other has 1.000 low", slow]


@pytest.mark.rest
def test_a_record(other, tmp_path, capsys):
    file = tmp_path / "peers.json"
    small = "--workloads MLP --size toy --repeats 1 --seeds 2 --json".split()
    assert peers.main([*small, str(file)]) == 0
    record = json.loads(file.read_text())
    rows = record["workloads"]["MLP"]
    assert list(rows["figures"]) == [*peers.BESIDE, "other"] and rows["failed"] == {}
    for name in ("amp", "other"):
        assert rows["figures"][name]["low_share"] == 1
        assert 0 < rows["figures"][name]["gradient_error"] < 0.1
    assert set(record["versions"]) >= {"jax", *peers.DISTRIBUTIONS.values()}
    assert "other" in capsys.readouterr().out


@pytest.mark.rest
def test_steps_are_timed_in_turns(other, tmp_path, capsys):
    file = tmp_path / "steps.json"
    small = "--workloads MLP --size toy --rounds 2 --contenders hand amp --json".split()
    assert steps.main([*small, str(file)]) == 0
    rows = json.loads(file.read_text())["workloads"]["MLP"]
    assert all(one["seconds"] > 0 for one in rows["figures"].values())
    assert list(rows["figures"]) == ["hand", "amp"]
    assert "MLP" in capsys.readouterr().out


@pytest.mark.quick
def test_the_table_of_the_guide_is_that_of_the_record(capsys):
    guide = peers.RECORD.parents[1] / "README.md"
    assert peers.markdown(peers.read()) in guide.read_text()
    assert peers.main(["--read", str(peers.RECORD)]) == 0
    assert peers.markdown(peers.read()) in capsys.readouterr().out
