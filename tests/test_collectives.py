"""The reader of collectives, on HLO as XLA writes it for several devices."""

import jax
import jax.random as jr
import pytest

from benchmarks import collectives, split_models
from benchmarks.collectives import Collective
from benchmarks.split_models import SPLITS
from jaxamp_like._hlo.text import parse


def found(entry, *computations):
    header = "HloModule jit_step, is_scheduled=true, entry_computation_layout={()->()}"
    main = f"ENTRY %main (x: f32[8]) -> f32[8] {{\n  {entry.strip()}\n}}"
    return collectives.collectives(
        parse("\n\n".join([header, *computations, main])), devices=8
    )


GATHER = (
    "%all-gather-start = ((f32[64]{0}, bf16[16,512]{1,0}), "
    "(f32[512]{0}, bf16[128,512]{1,0})) all-gather-start(%a, %b), channel_id=1, "
    "replica_groups=[1,8]<=[8], dimensions={0}, use_global_device_ids=true"
)
REDUCE = (
    "%all-reduce = (f32[16]{0}, f32[]) all-reduce(%a, %b), channel_id=2, "
    "replica_groups={{0,1,2,3},{4,5,6,7}}, to_apply=%add"
)
PERMUTE = (
    "%p = (bf16[4,8]{1,0}, bf16[4,8]{1,0}, u32[], u32[]) "
    "collective-permute-start(%a), channel_id=3, source_target_pairs={{0,1},{1,0}}"
)


def test_what_starts_is_counted_by_what_it_leaves():
    assert found(GATHER) == [
        Collective("all-gather", "f32", 7 / 8 * 512 * 4, 1),
        Collective("all-gather", "bf16", 7 / 8 * 128 * 512 * 2, 1),
    ]


def test_what_is_done_is_not_counted_again():
    done = (
        "%all-gather-done = (f32[512]{0}, bf16[128,512]{1,0}) all-gather-done(%start)"
    )
    assert found(done) == []


def test_a_sum_goes_around_twice_within_its_group():
    (one,) = found(REDUCE)
    assert (one.kind, one.dtype) == ("all-reduce", "f32")
    assert one.sent == pytest.approx(2 * 3 / 4 * 17 * 4)


def test_a_permute_sends_what_it_leaves():
    assert found(PERMUTE) == [Collective("collective-permute", "bf16", 64, 1)]


def test_a_scatter_sends_of_what_it_was_given():
    scatter = (
        "%r = bf16[512,64]{1,0} reduce-scatter(%a), channel_id=1, "
        "replica_groups=[1,8]<=[8], dimensions={1}, to_apply=%add"
    )
    (one,) = found(scatter)
    assert one.sent == 7 / 8 * 512 * 64 * 8 * 2


def test_loops_count_as_often_as_they_run():
    body = f"%body (p: f32[8]) -> f32[8] {{\n  {PERMUTE}\n}}"
    loop = (
        "%w = f32[8]{0} while(%x), condition=%cond, body=%body, "
        'backend_config={"known_trip_count":{"n":"12"}}'
    )
    (one,) = found(loop, body)
    assert one.times == 12


def test_of_branches_the_dearest_counts():
    cheap = f"%cheap (p: f32[8]) -> f32[8] {{\n  {PERMUTE}\n}}"
    dear = f"%dear (p: f32[8]) -> f32[8] {{\n  {GATHER}\n}}"
    conditional = (
        "%c = f32[8]{0} conditional(%i, %x, %x), branch_computations={%cheap, %dear}"
    )
    assert found(conditional, cheap, dear) == found(GATHER)


def test_what_runs_beside_is_looked_into():
    called = f"%wrapped (p: f32[8]) -> f32[8] {{\n  {PERMUTE}\n}}"
    start = "%s = ((f32[8]), f32[8]{0}) async-start(%x), calls=%wrapped"
    assert len(found(start, called)) == 1


def test_what_a_tpu_fuses_with_the_parts_of_a_gather_counts_once():
    gather = (
        "%g = bf16[512,2048]{1,0} all-gather(%a), channel_id=5, dimensions={1}, "
        "replica_groups=mesh['axis_0'=2,'axis_1'=4] {'axis_1'}"
    )
    parts = [f"%part{i} (p: f32[8]) -> f32[8] {{\n  {gather}\n}}" for i in range(3)]
    calls = [
        f"%f{i} = f32[8]{{0}} fusion(%x), kind=kCustom, calls=%part{i}"
        for i in range(3)
    ]
    (one,) = found("\n  ".join(calls), *parts)
    assert one == Collective("all-gather", "bf16", 3 / 4 * 512 * 2048 * 2, 1)


def test_a_tpu_fuses_a_sum_with_taking_a_part_of_it():
    reduce = (
        "%r = f32[2048,8]{1,0} all-reduce(%a), channel_id=5, "
        "replica_groups={{0,1,2,3,4,5,6,7}}, to_apply=%add"
    )
    part = f"%all-reduce-scatter.1 (p: f32[8]) -> f32[8] {{\n  {reduce}\n}}"
    call = "%f = f32[256,8]{1,0} fusion(%x), kind=kCustom, calls=%all-reduce-scatter.1"
    (one,) = found(call, part)
    assert one == Collective("reduce-scatter", "f32", 7 / 8 * 2048 * 8 * 4, 1)


SMALL = dict(ROWS=2, LENGTH=8, DIM=16, HIDDEN=32, EXPERTS=8, MICROBATCHES=4)


def drawn(x):
    """Values of a shape, where it says."""
    values = jr.normal(jr.key(x.size), x.shape, x.dtype) / x.shape[-2] ** 0.5
    return jax.device_put(values, x.sharding)


@pytest.mark.rest
@pytest.mark.parametrize("name", SPLITS)
def test_models_that_split_their_work_run_in_both_styles(name, monkeypatch):
    for constant, value in SMALL.items():
        monkeypatch.setattr(split_models, constant, value)
    split = SPLITS[name]
    mesh = collectives.mesh_of(split.axes, jax.devices(), split.axis_type)
    args = jax.tree.map(drawn, split.arguments(mesh, mesh.size))
    with collectives.on(mesh):
        plain, low = (
            float(jax.jit(split_models.in_style(split, dtype, True, mesh))(*args))
            for dtype in (None, "bfloat16")
        )
    assert low == pytest.approx(plain, rel=0.02)
