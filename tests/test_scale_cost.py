"""What scaling adds to a compiled step, by XLA's own count: no clock is involved."""

import warnings

import jax
import pytest

from benchmarks import loss_scaling
from benchmarks.workloads import WORKLOADS

CONTENDERS = loss_scaling.CONTENDERS
OURS = ("loss_scale_optimizer", "dynamic_scale_value_and_grad")


@pytest.fixture(scope="module", autouse=True)
def small():
    """The gradient code of an MLP compiles in a second."""
    with (
        pytest.MonkeyPatch.context() as patch,
        jax.numpy_rank_promotion("allow"),
        jax.numpy_dtype_promotion("standard"),
    ):
        patch.setattr(loss_scaling, "WORKLOAD", WORKLOADS["MLP"])
        yield


@pytest.fixture(scope="module")
def compiled(small):
    names = "unscaled", *OURS, "the same, redo_on_nan=2", "jmp", "flax DynamicScale"
    with warnings.catch_warnings():
        # jmp looks at the dtype of whatever a tree of its shape holds.
        warnings.filterwarnings("ignore", "Expected floating type for loss_scale")
        return {n: loss_scaling.compiled(CONTENDERS[n], "toy") for n in names}


@pytest.mark.rest
@pytest.mark.parametrize("peer", ["jmp", "flax DynamicScale"])
@pytest.mark.parametrize("name", OURS)
def test_no_more_bytes_than_others(compiled, name, peer):
    state = 200  # some scalars more than theirs, in and out
    assert compiled[name].bytes <= compiled[peer].bytes + state
    assert compiled[name].ops <= compiled[peer].ops


@pytest.mark.rest
def test_a_retry_has_one_copy_of_the_code(compiled):
    without = compiled["dynamic_scale_value_and_grad"].ops
    assert compiled["the same, redo_on_nan=2"].ops <= 1.1 * without


@pytest.mark.rest
def test_a_peer_that_fails_is_told_of():
    def broken(loss):
        raise RuntimeError("no such attribute\nand more")

    contender = loss_scaling.Contender(broken, lambda carry: 1, ("flax", "flax"))
    found = loss_scaling.row("flax", contender, "toy", None)
    assert found == {"failure": "RuntimeError: no such attribute"}
    missing = loss_scaling.Contender(broken, lambda carry: 1, ("no_such", "no-such"))
    found = loss_scaling.row("none", missing, "toy", None)
    assert found == {"failure": "not installed: pip install no-such"}
    cpu = {"ops": 100, "bytes": 1e6, "seconds": None}
    plain = {"cpu": cpu, "parameter_error": 0.0}
    table = loss_scaling.table({"unscaled": plain, "none": found}, "title")
    assert table.row_count == 2
