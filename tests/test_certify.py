"""Certificates: what is compiled is tied to what was decided, and drifts are told."""

import json
import os
import re
import subprocess
import sys
from collections import Counter
from pathlib import Path

import equinox as eqx
import jax
import jax.export
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax import lax
from jax.sharding import AxisType, NamedSharding, PartitionSpec as P

from benchmarks import xla_flags
from jaxamp_like import AmpError, amp, certify, default_amp_policy
from jaxamp_like._certify.certify import compared
from jaxamp_like._certify.drifts import (
    ADDED,
    DROPPED,
    DUPLICATED,
    EXCESS,
    GONE,
    KEPT_WIDE,
    NOT_DRIFTS,
    REDUCED_LOW,
    UNDECIDED,
    UNREAD,
    WIDE,
    WRITTEN_WIDE,
)
from jaxamp_like._certify.places import named
from jaxamp_like._hlo import devices, graph
from jaxamp_like._hlo.text import parse, trip_count
from jaxamp_like.rules import use_original_precision

from . import locks

ROOT = Path(__file__).parents[1]
LOW = "bfloat16 x bfloat16 -> bfloat16"
FULL = "float32 x float32 -> float32"


def low(fn):
    return amp(fn, compute_dtype="bfloat16")


def layers(ws, x):
    for i, w in enumerate(ws):
        with jax.named_scope(f"layer{i}"):
            x = jnp.tanh(x @ w)
    return jnp.mean(x**2)


def scanned(ws, x):
    return jnp.mean(lax.scan(lambda x, w: (jnp.tanh(x @ w), None), x, ws)[0] ** 2)


def checkpointed(ws, x):
    for w in ws:
        x = jax.checkpoint(lambda x, w: jnp.tanh(x @ w))(x, w)
    return jnp.mean(x**2)


def branches(ws, x):
    def is_tanh(w, x):
        return jnp.tanh(x @ w)

    def is_sin(w, x):
        return jnp.sin(x @ w)

    for w in ws:
        x = lax.cond(jnp.sum(x) > 0, is_tanh, is_sin, w, x)
    return jnp.mean(x**2)


def image(ws, x):
    x = x.reshape(4, 8, 8, 16)
    for w in ws:
        kernel = w.reshape(2, 2, 16, 64)[..., :16]
        x = jnp.tanh(
            lax.conv_general_dilated(
                x, kernel, (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC")
            )
        )
    return jnp.mean(x**2)


WS, X = jnp.full((3, 64, 64), 0.1), jnp.ones((64, 64))
PROGRAMS = {
    "layers": (layers, 3),
    "scan": (scanned, 1),
    "checkpoint": (checkpointed, 3),
    "cond": (branches, 6),
    "convolutions": (image, 3),
}
"""By name, a program and how many contractions its forward pass is written with."""


def contractions(certificate):
    return [one for one in certificate.operations if one.kind == "contraction"]


# --------------------------------------------------------------- compiled for this CPU


@pytest.mark.parametrize("name", PROGRAMS)
@pytest.mark.parametrize("lowers", (True, False), ids=("amp", "plain"))
def test_every_contraction_of_a_program_is_tied_and_as_decided(name, lowers):
    fn, written = PROGRAMS[name]
    certificate = certify(low(fn) if lowers else fn, WS, X)
    found = contractions(certificate)
    assert len(found) == written
    assert {one.decided for one in found} == {LOW if lowers else FULL}
    assert all(one.opcodes for one in found)
    assert certificate.is_as_decided
    assert certificate.share_tied == 1
    assert all("test_certify.py" in one.source for one in found)


@pytest.mark.parametrize("name", PROGRAMS)
def test_gradients_are_tied_and_as_decided(name):
    fn, written = PROGRAMS[name]
    certificate = certify(jax.grad(low(fn)), WS, X)
    found = contractions(certificate)
    assert certificate.is_as_decided
    assert certificate.share_tied == 1
    assert sum(one.phase == "forward" for one in found) == written
    # The cotangent of `x` is not asked for.
    assert sum(one.phase == "backward" for one in found) >= 2 * written - 2


def test_scopes_lines_and_reasons_are_told():
    certificate = certify(jax.grad(low(layers)), WS, X)
    scopes = {(one.scope, one.phase) for one in contractions(certificate)}
    assert scopes == {
        (f"layer{i}", phase) for i in range(3) for phase in ("forward", "backward")
    }
    line = layers.__code__.co_firstlineno + 3
    for one in contractions(certificate):
        assert one.source.endswith(f"test_certify.py:{line}")
        assert one.primitive == "dot_general"
        assert one.why == "computes in bfloat16"


def test_loops_tell_how_often_they_run():
    (one,) = contractions(certify(low(scanned), WS, X))
    assert one.times == 3
    assert one.work == 3 * 2 * 64**3


def test_a_product_that_becomes_a_sum_is_tied():
    x = jnp.ones(256)
    certificate = certify(jnp.dot, x, x)
    (one,) = contractions(certificate)
    assert GONE not in one.drifts
    assert one.compiled == (one.decided,)


def test_what_is_not_needed_is_told_as_gone():
    def fn(x):
        wasted = x @ x
        return x + 0 * wasted.shape[0] + lax.stop_gradient(x @ x.T)

    found = contractions(certify(fn, X))
    assert [GONE in one.drifts for one in found].count(False) == 1


@pytest.mark.parametrize(
    "wrap",
    (jax.jit, lambda f: f, lambda f: jax.jit(f).lower(WS, X)),
    ids=("jitted", "function", "lowered"),
)
def test_functions_and_stages_are_certified(wrap):
    step = wrap(jax.grad(low(layers)))
    args = () if isinstance(step, jax.stages.Lowered) else (WS, X)
    certificate = certify(step, *args)
    assert certificate.is_as_decided
    assert len(contractions(certificate)) >= 8


@pytest.mark.parametrize("lowers", (False, True), ids=("function", "lowered"))
@pytest.mark.parametrize("has_amp", (False, True), ids=("as written", "amp"))
def test_whether_amp_is_in_it_is_told(has_amp, lowers):
    step = jax.jit(jax.grad(low(layers) if has_amp else layers))
    args = [jnp.ones((8, 8))], jnp.ones((4, 8))
    certificate = certify(step.lower(*args)) if lowers else certify(step, *args)
    assert certificate.has_amp == has_amp
    assert ("no `amp` was found in it" in str(certificate)) != has_amp


def test_shapes_do_in_place_of_arrays():
    shapes = jax.eval_shape(lambda: (WS, X))
    assert certify(low(layers), *shapes) == certify(low(layers), WS, X)


def test_models_that_hold_what_is_no_array_are_certified():
    model = eqx.nn.MLP(64, 10, 32, 2, key=jax.random.key(0))  # with its activation

    def loss(model, x):
        return jnp.mean(jax.vmap(model)(x) ** 2)

    for step in (
        eqx.filter_grad(low(loss)),
        eqx.filter_jit(eqx.filter_grad(low(loss))),
    ):
        found = contractions(certify(step, model, X))
        assert len(found) == 8
        assert all(one.opcodes for one in found)


def test_modules_that_functions_change_are_certified():
    model = nnx.Linear(64, 10, rngs=nnx.Rngs(0))

    def loss(model, x):
        return jnp.mean(model(x) ** 2)

    certificate = certify(nnx.grad(low(loss)), model, X)
    assert certificate.is_as_decided
    assert len(contractions(certificate)) == 2


def test_everything_is_in_the_json():
    data = json.loads(certify(low(layers), WS, X).to_json())
    assert data["is_as_decided"] is True
    assert {one["decided"] for one in data["operations"] if one["work"]} == {LOW}


def test_sharded_weights_are_gathered_low():
    mesh = jax.make_mesh((8,), ("data",), axis_types=(AxisType.Auto,))
    sharded = NamedSharding(mesh, P(None, "data"))
    ws = jax.ShapeDtypeStruct(WS.shape, WS.dtype, sharding=sharded)
    x = jax.ShapeDtypeStruct(X.shape, X.dtype, sharding=NamedSharding(mesh, P("data")))
    certificate = certify(low(layers), ws, x)
    gathers = [one for one in certificate.operations if "all-gather" in one.opcodes]
    assert gathers
    assert {one.compiled for one in gathers} == {("bfloat16 -> bfloat16",)}


def test_collectives_of_a_shard_map_are_tied():
    mesh = jax.make_mesh((8,), ("data",), axis_types=(AxisType.Auto,))

    def loss(w, x):
        y = jnp.tanh(x @ lax.all_gather(w, "data", tiled=True))
        return lax.pmean(jnp.mean(y**2), "data")

    specs = P("data"), P("data")
    fn = jax.shard_map(loss, mesh=mesh, in_specs=specs, out_specs=P())
    certificate = certify(jax.grad(low(fn)), WS[0], X)
    found = {
        one.primitive for one in certificate.operations if one.kind == "collective"
    }
    assert {"all_gather", "reduce_scatter"} <= found
    assert certificate.is_as_decided


# ----------------------------------------------------------------------- planted drifts


def handed_over(fn, *args):
    return jax.jit(fn).lower(*args).as_text(dialect="hlo", debug_info=True)


def compiled(fn, *args):
    return jax.jit(fn).lower(*args).compile().as_text()


def against(decided, run, *args):
    """The certificate of a function, if XLA made of it what it makes of another."""
    return compared(
        handed_over(decided, *args),
        compiled(run, *args),
        name="step",
        device=jax.devices()[0],
    )


def full_in(*scopes, dtype="bfloat16"):
    """`layers` in a low dtype, with some scopes in float32."""
    policy = default_amp_policy | {scope: use_original_precision for scope in scopes}
    return amp(layers, compute_dtype=dtype, amp_policy=policy)


def drifts_by_scope(certificate):
    return {
        (one.scope, drift)
        for one in certificate.drifts
        for drift in one.drifts
        if drift not in NOT_DRIFTS
    }


@pytest.mark.parametrize("scope", ("layer0", "layer1", "layer2"))
@pytest.mark.parametrize("transform", (lambda f: f, jax.grad), ids=("value", "grad"))
def test_a_cast_that_is_left_out_is_told_by_its_scope(scope, transform):
    decided, run = transform(full_in()), transform(full_in(scope))
    assert drifts_by_scope(against(decided, run, WS, X)) == {(scope, DROPPED)}


@pytest.mark.parametrize("scope", ("layer0", "layer1", "layer2"))
@pytest.mark.parametrize("transform", (lambda f: f, jax.grad), ids=("value", "grad"))
def test_a_cast_that_is_added_is_told_by_its_scope(scope, transform):
    decided, run = transform(full_in(scope)), transform(full_in())
    found = drifts_by_scope(against(decided, run, WS, X))
    assert (scope, ADDED) in found
    assert {drift for _, drift in found} <= {ADDED, REDUCED_LOW}
    assert {name for name, _ in found} == {scope}


def test_another_dtype_of_as_many_bits_is_told():
    found = drifts_by_scope(against(full_in(dtype="float16"), full_in(), WS, X))
    assert {(f"layer{i}", ADDED) for i in range(3)} <= found
    assert {(f"layer{i}", DROPPED) for i in range(3)} <= found


# Written as XLA writes for a GPU: a weight is gathered, and read by a contraction;
# another one reads 8 bits; its result is summed, on each device and over all.
ADD = """
%add (a: f32[], b: f32[]) -> f32[] {
  %a = f32[] parameter(0)
  %b = f32[] parameter(1)
  ROOT %sum = f32[] add(%a, %b)
}

"""
HIGHEST = "operand_precision={highest,highest}"
DIMS = "lhs_contracting_dims={1}, rhs_contracting_dims={0}"


def of(op_name):
    return f'metadata={{op_name="jit(step)/{op_name}"}}'


TO_ENC, GATHER = of("enc/convert_element_type"), of("enc/all_gather")
ENC, HEAD = of("enc/dot_general"), of("head/dot_general")
TO_HEAD, SUM = of("head/convert_element_type"), of("head/reduce_sum")
DECIDED = f"""
  %w = f32[8,64] get-tuple-element(%all), index=0
  %x = f32[32,64] get-tuple-element(%all), index=1
  %wq = f8e4m3fn[64,64] get-tuple-element(%all), index=2
  %wb = bf16[8,64] convert(%w), {TO_ENC}
  %g = bf16[64,64] all-gather(%wb), dimensions={{0}}, {GATHER}
  %xb = bf16[32,64] convert(%x)
  %d = bf16[32,64] dot(%xb, %g), {DIMS}, {ENC}
  %t = bf16[32,64] tanh(%d)
  %q = f8e4m3fn[32,64] convert(%t), {TO_HEAD}
  %e = f32[32,64] dot(%q, %wq), {DIMS}, {HEAD}
  %zero = f32[] constant(0)
  %s = f32[32] reduce(%e, %zero), dimensions={{1}}, to_apply=%add, {SUM}
  %r = f32[32] all-reduce(%s), to_apply=%add, {of("head/psum")}
"""
LEFT_OUT = "  %xb = bf16[32,64] convert(%x)\n"
EDITS = {
    "gathered wide": (
        {
            "%wb = bf16[8,64] convert(%w)": "%wb = f32[8,64] copy(%w)",
            "%g = bf16[64,64] all-gather(%wb), dimensions={0}": (
                "%g32 = f32[64,64] all-gather(%wb), dimensions={0}"
            ),
            "  %xb": "  %g = bf16[64,64] convert(%g32)\n  %xb",
        },
        {("all_gather", WIDE), ("all_gather", DROPPED)},
    ),
    "widened to be gathered": (
        {
            "%g = bf16[64,64] all-gather(%wb), dimensions={0}": (
                "%w32 = f32[8,64] convert(%wb)\n"
                "  %g32 = f32[64,64] all-gather(%w32), dimensions={0}"
            ),
            "  %xb": "  %g = bf16[64,64] convert(%g32)\n  %xb",
        },
        {("all_gather", WIDE)},
    ),
    "gathered wide while other things run": (
        {
            "%g = bf16[64,64] all-gather(%wb), dimensions={0}": (
                "%w32 = f32[8,64] convert(%wb)\n"
                "  %gs = (f32[8,64], f32[64,64]) all-gather-start(%w32), "
                f"dimensions={{0}}, {GATHER}\n"
                "  %g32 = f32[64,64] all-gather-done(%gs)"
            ),
            "  %xb": "  %g = bf16[64,64] convert(%g32)\n  %xb",
        },
        {("all_gather", WIDE)},
    ),
    "gathered wide beside another array": (
        {
            "%g = bf16[64,64] all-gather(%wb), dimensions={0}": (
                "%w32 = f32[8,64] convert(%wb)\n"
                "  %gs = (bf16[8,64], f32[8,64], bf16[64,64], f32[64,64]) "
                f"all-gather-start(%wb, %w32), dimensions={{0}}, {GATHER}\n"
                "  %gd = (bf16[64,64], f32[64,64]) all-gather-done(%gs)\n"
                "  %g32 = f32[64,64] get-tuple-element(%gd), index=1"
            ),
            "  %xb": "  %g = bf16[64,64] convert(%g32)\n  %xb",
        },
        {("all_gather", WIDE)},
    ),
    "cast of an activation left out": (
        {LEFT_OUT: "", "dot(%xb, %g)": "dot(%x, %g)"},
        {("dot_general", DROPPED)},
    ),
    "8 bits left out": (
        {"dot(%q, %wq)": "dot(%t, %wq)"},
        {("dot_general", DROPPED)},
    ),
    "result of a contraction rounded": (
        {
            "%e = f32[32,64]": "%eb = bf16[32,64]",
            "  %zero": "  %e = f32[32,64] convert(%eb)\n  %zero",
        },
        {("dot_general", REDUCED_LOW), ("reduce_sum", ADDED)},
    ),
    "result of a contraction rounded by its reader": (
        {
            "reduce(%e": "reduce(%e2",
            "  %zero": (
                "  %e1 = bf16[32,64] convert(%e)\n"
                "  %e2 = f32[32,64] convert(%e1)\n  %zero"
            ),
        },
        {("dot_general", REDUCED_LOW), ("reduce_sum", ADDED)},
    ),
    "summed low": (
        {
            "%s = f32[32] reduce(%e, %zero)": "%sb = bf16[32] reduce(%e, %zero)",
            "  %r = ": "  %s = f32[32] convert(%sb)\n  %r = ",
        },
        {("reduce_sum", REDUCED_LOW), ("psum", ADDED)},
    ),
    "summed low over devices": (
        {
            "  %r = f32[32] all-reduce(%s)": (
                "  %sb = bf16[32] convert(%s)\n  %rb = bf16[32] all-reduce(%sb)"
            ),
            "  ROOT %last": "  %r = f32[32] convert(%rb)\n  ROOT %last",
        },
        {("reduce_sum", REDUCED_LOW), ("psum", REDUCED_LOW), ("psum", ADDED)},
    ),
    "contraction run twice": (
        {"  %t = ": (f"  %d2 = bf16[32,64] dot(%xb, %g), {DIMS}, {ENC}\n  %t = ")},
        {("dot_general", DUPLICATED)},
    ),
    "quantised twice": (
        {"  %zero": (f"  %q2 = f8e4m3fn[32,64] convert(%t), {TO_HEAD}\n  %zero")},
        {("convert_element_type", DUPLICATED)},
    ),
    "operand in 8 bits": (
        {
            "dot(%xb, %g)": "dot(%x8, %g)",
            "  %d = ": "  %x8 = f8e5m2[32,64] convert(%xb)\n  %d = ",
        },
        {("dot_general", ADDED)},
    ),
    "operand rounded to float16 on its way": (
        {
            "dot(%xb, %g)": "dot(%x2, %g)",
            "  %d = ": (
                "  %xh = f16[32,64] convert(%xb)\n"
                "  %x2 = bf16[32,64] convert(%xh)\n  %d = "
            ),
        },
        {("dot_general", ADDED)},
    ),
    "operand rounded in place": (
        {
            "dot(%xb, %g)": "dot(%x8, %g)",
            "  %d = ": (
                "  %x8 = bf16[32,64] reduce-precision(%xb), exponent_bits=5, "
                "mantissa_bits=2\n  %d = "
            ),
        },
        {("dot_general", ADDED)},
    ),
    "another dtype of 16 bits": (
        {
            LEFT_OUT: "  %xb = f16[32,64] convert(%x)\n",
            "dot(%xb, %g)": "dot(%xb, %gh)",
            "  %d = ": "  %gh = f16[64,64] convert(%g)\n  %d = ",
        },
        {("dot_general", DROPPED), ("dot_general", ADDED)},
    ),
}
"""By name, what is changed in the program above, and what is to be found."""

ARGUMENTS = "(f32[8,64], f32[32,64], f8e4m3fn[64,64], f32[32])"


def in_entry(lines):
    return (
        f"HloModule jit_step\n\n{ADD}ENTRY %main (all: f32[]) -> f32[] {{\n"
        f"  %all = {ARGUMENTS} parameter(0)\n{lines}"
        f"  ROOT %last = {ARGUMENTS} tuple(%w, %x, %wq, %r)\n}}\n"
    )


def called(lines, by):
    """The program as a computation that the entry calls."""
    inner = in_entry(lines).replace("ENTRY %main", "%inner")
    return (
        f"{inner}\nENTRY %main (args: f32[]) -> f32[] {{\n"
        f"  %args = {ARGUMENTS} parameter(0)\n  ROOT %out = {ARGUMENTS} {by}\n}}\n"
    )


def in_call(lines):
    return called(lines, "call(%args), to_apply=%inner")


def in_loop(lines):
    known = 'backend_config={"known_trip_count":{"n":"4"}}'
    return called(lines, f"while(%args), condition=%cond, body=%inner, {known}")


class GPU:
    platform, device_kind = "gpu", "described"


class TPU:
    platform, device_kind = "tpu", "described"


@pytest.mark.parametrize("device", (GPU, TPU))
def test_the_default_precision_of_float32_allows_rounding_and_does_not_ask(device):
    plain = DECIDED.replace("dot(%xb, %g)", "dot(%x, %wide)").replace(
        "  %xb", "  %wide = f32[64,64] convert(%wq)\n  %xb"
    )
    decided = in_entry(plain)
    exact = decided.replace(f"{DIMS}, {ENC}", f"{DIMS}, {HIGHEST}, {ENC}")
    allowed = compared(decided, exact, name="step", device=device)
    assert allowed.is_as_decided
    asked = compared(exact, decided, name="step", device=device)
    (one,) = asked.drifts
    assert one.drifts == (ADDED,)
    assert one.arithmetic == {GPU: "tf32", TPU: "one bfloat16 pass"}[device]


@pytest.mark.parametrize("around", (in_entry, in_call, in_loop))
@pytest.mark.parametrize("name", EDITS)
def test_a_drift_in_the_compiled_program_is_named(name, around):
    edits, expected = EDITS[name]
    before = text = around(DECIDED)
    for old, new in edits.items():
        assert old in text
        text = text.replace(old, new, 1)
    certificate = compared(before, text, name="step", device=GPU)
    found = {(one.primitive, d) for one in certificate.drifts for d in one.real_drifts}
    assert found == expected
    assert not certificate.is_as_decided


@pytest.mark.parametrize("around", (in_entry, in_call, in_loop))
def test_nothing_is_found_in_a_program_as_it_was_decided(around):
    text = around(DECIDED)
    certificate = compared(text, text, name="step", device=GPU)
    assert certificate.is_as_decided
    assert all(not one.drifts for one in certificate.operations)
    kinds = {one.kind for one in certificate.operations}
    assert kinds == {"contraction", "reduction", "collective", "quantisation"}


# -------------------------------------------------------- drifts that were once missed


def drifts_of(decided, run, *args):
    certificate = against(decided, run, *args)
    return {drift for one in certificate.operations for drift in one.drifts}


INDICES = jnp.arange(64) % 7
WEIGHT = np.linspace(-1, 1, 64 * 64, dtype=np.float32).reshape(64, 64)


def rounded(x):
    return lax.reduce_precision(x, 8, 7)


@pytest.mark.parametrize(
    ("decided", "run", "expected"),
    (
        (
            lambda x: jnp.sum(jnp.tanh(x), 1),
            lambda x: jnp.sum(rounded(jnp.tanh(x)), 1),
            ADDED,
        ),
        (
            lambda x: jnp.sum(rounded(jnp.tanh(x)), 1),
            lambda x: jnp.sum(jnp.tanh(x), 1),
            EXCESS,
        ),
        (
            lambda x: rounded(x) @ rounded(jnp.asarray(WEIGHT)),
            lambda x: rounded(x) @ WEIGHT,
            UNREAD,
        ),
    ),
    ids=("sum", "sum of more", "constant"),
)
def test_sums_and_constants_are_compared(decided, run, expected):
    assert expected in drifts_of(decided, run, X)
    assert not drifts_of(decided, decided, X) & {ADDED, DROPPED}


@pytest.mark.parametrize(
    ("condition", "step"),
    (
        (lambda i: i <= 10, 1),
        (lambda i: i > -7, -1),
        (lambda i: i != 10, 1),
        (lambda i: i < 10, 2),
        (lambda i: i < 1.0, 0.125),
    ),
)
def test_a_loop_of_another_length_runs_nothing_twice(condition, step):
    def fn(x):
        start = jnp.asarray(0 * step)
        body = lambda c: (c[0] + step, jnp.tanh(c[1] @ c[1]))  # noqa: E731
        return lax.while_loop(lambda c: condition(c[0]), body, (start, x))[1]

    certificate = certify(fn, X)
    assert certificate.is_as_decided
    (one,) = contractions(certificate)
    assert one.times == 1  # as for a loop of unknown length


def test_an_outer_product_is_tied():
    (one,) = contractions(certify(jnp.matmul, jnp.ones((64, 1)), jnp.ones((1, 64))))
    assert one.opcodes == ("multiply",)
    assert one.compiled == (one.decided,) == (FULL,)


def test_gradients_of_grouped_convolutions_are_tied():
    def loss(k, x):
        dims = ("NHWC", "HWIO", "NHWC")
        y = lax.conv_general_dilated(
            x, k, (1, 1), "SAME", dimension_numbers=dims, feature_group_count=8
        )
        return jnp.mean(y**2)

    args = jnp.ones((3, 3, 1, 8)), jnp.ones((2, 8, 8, 8))
    certificate = certify(jax.grad(low(loss)), *args)
    assert certificate.is_as_decided
    assert certificate.share_tied == 1


def test_kernels_of_libraries_are_tied():
    kinds = {
        one.kind: one.opcodes for one in certify(jnp.linalg.solve, X, X).operations
    }
    assert "kernel" in kinds
    assert certify(jax.scipy.linalg.expm, X).is_as_decided
    lstsq = certify(lambda x: jnp.linalg.lstsq(x, x)[0], X)
    assert not [
        one for one in lstsq.operations if one.kind == "kernel" and not one.opcodes
    ]


def test_lines_of_one_name_are_told_apart():
    def decided(x, y):
        a = rounded(x) @ rounded(y)
        return a, y @ x

    def run(x, y):
        a = x @ y
        return a, rounded(y) @ rounded(x)

    before, after = handed_over(decided, X, X), compiled(run, X, X)
    lines = [decided.__code__.co_firstlineno + i for i in (1, 2)]
    there = [run.__code__.co_firstlineno + i for i in (1, 2)]
    for old, new in zip(there, lines, strict=True):
        after = re.sub(rf"line={old}\b", f"line={new}", after)
    certificate = compared(before, after, name="step", device=jax.devices()[0])
    found = {
        one.source.rpartition(":")[2]: one.real_drifts for one in certificate.drifts
    }
    assert found == {str(lines[0]): (DROPPED,), str(lines[1]): (ADDED,)}


@pytest.mark.parametrize(
    "name",
    (
        "cond",
        "while",
        "scan/cell",
        "block/block",
        "a/b/a/b",
        "a(b",
        "a)b",
        "vmap(",
        "a\\b",
        "amp_equation:7x",
    ),
)
def test_scopes_of_any_name_are_told(name):
    def fn(x):
        with jax.named_scope(name):
            return jnp.tanh(x @ x)

    (one, *_) = contractions(
        certify(
            low(fn),
            X,
        )
    )
    assert (one.scope, one.primitive) == (name, "dot_general")


def test_a_scope_named_like_a_mark_is_no_mark():
    def fn(x):
        with jax.named_scope("amp_equation:3"):
            return x @ x

    assert certify(fn, X).is_as_decided


@pytest.mark.parametrize(
    ("asked", "given", "expected"),
    (
        ("highest,highest", "high,high", {GPU: ADDED, TPU: ADDED}),
        ("highest,highest", "default,highest", {GPU: None, TPU: None}),
        ("high,high", "default,default", {GPU: None, TPU: ADDED}),
    ),
)
@pytest.mark.parametrize("device", (GPU, TPU))
def test_levels_of_precision_are_told_apart(asked, given, expected, device):
    text = in_entry(
        DECIDED.replace("dot(%xb, %g)", "dot(%x, %y)").replace(
            "  %xb", "  %y = f32[64,64] tanh(%x)\n  %xb"
        )
    )
    levels = [
        text.replace(f"{DIMS}, {ENC}", f"{DIMS}, operand_precision={{{p}}}, {ENC}")
        for p in (asked, given)
    ]
    found = compared(*levels, name="step", device=device).drifts
    assert {d for one in found for d in one.drifts} == {expected[device]} - {None}


@pytest.mark.parametrize("device", (GPU, TPU))
def test_an_algorithm_asks_for_its_rounding(device):
    text = in_entry(
        DECIDED.replace("dot(%xb, %g)", "dot(%x, %y)").replace(
            "  %xb", "  %y = f32[64,64] tanh(%x)\n  %xb"
        )
    )
    with_algorithm = text.replace(
        f"{DIMS}, {ENC}", f"{DIMS}, algorithm=dot_bf16_bf16_f32, {ENC}"
    )
    found = compared(with_algorithm, text, name="step", device=device).drifts
    assert {d for one in found for d in one.drifts} == (
        {DROPPED} if device is GPU else set()
    )


def test_sums_over_devices_that_are_sent_wider_are_told():
    low_sum = DECIDED.replace(
        "  %r = f32[32] all-reduce(%s)", "  %r = bf16[32] all-reduce(%b)"
    )
    low_sum = low_sum.replace("  %r =", "  %b = bf16[32] convert(%s)\n  %r =")
    wide = low_sum.replace(
        "  %r = bf16[32] all-reduce(%b)",
        "  %v = f32[32] convert(%b)\n  %r = f32[32] all-reduce(%v)",
    )
    certificate = compared(in_entry(low_sum), in_entry(wide), name="step", device=GPU)
    assert {(one.primitive, one.real_drifts) for one in certificate.drifts} == {
        ("psum", (WIDE,))
    }


def test_collectives_that_became_one_are_compared_one_by_one():
    decided = (
        DECIDED + f"  %r2 = f32[32,64] all-reduce(%e), to_apply=%add, {of('b/psum')}\n"
    )
    both = DECIDED.replace(
        f"  %r = f32[32] all-reduce(%s), to_apply=%add, {of('head/psum')}",
        "  %low = bf16[32,64] convert(%e)\n"
        "  %both = (f32[32], bf16[32,64]) all-reduce(%s, %low), to_apply=%add, "
        f"{of('head/psum')}\n"
        "  %r = f32[32] get-tuple-element(%both), index=0",
    )
    certificate = compared(in_entry(decided), in_entry(both), name="step", device=GPU)
    wrong = {one.scope for one in certificate.drifts if one.kind == "collective"}
    assert wrong == {"b"}


@pytest.mark.parametrize(
    ("line", "primitive"),
    (
        (
            "%c = f32[32,64] scatter(%wide, %i, %u), update_window_dims={1}, "
            "to_apply=%add",
            "scatter-add",
        ),
        (
            "%c = f32[32,64] reduce-window(%u, %nought), "
            "window={size=1x64 pad=0_0x63_0}, to_apply=%add",
            "cumsum",
        ),
    ),
)
def test_sums_into_an_array_of_the_same_size_are_compared(line, primitive):
    text = DECIDED + (
        "  %nought = f32[] constant(0)\n"
        "  %wide = f32[32,64] broadcast(%nought), dimensions={}\n"
        "  %i = s32[32] iota(), iota_dimension=0\n"
        f"  %u = f32[32,64] exponential(%x)\n  {line}, {of(primitive)}\n"
    )
    edited = text.replace("%u)", "%v)")
    edited = edited.replace("(%u, ", "(%v, ").replace(
        "  %c =",
        "  %vb = bf16[32,64] convert(%u)\n  %v = f32[32,64] convert(%vb)\n  %c =",
    )
    certificate = compared(in_entry(text), in_entry(edited), name="step", device=GPU)
    (one,) = certificate.drifts
    assert (one.primitive, one.real_drifts) == (primitive, (ADDED,))
    assert compared(in_entry(text), in_entry(text), name="", device=GPU).is_as_decided


def test_sums_of_one_name_that_run_in_steps_are_as_decided():
    low_sum = (
        "  %h = bf16[32,64] convert(%e)\n  %e2 = f32[32,64] convert(%h)\n"
        f"  %s2 = f32[32] reduce(%e2, %zero), dimensions={{1}}, to_apply=%add, {SUM}\n"
    )
    decided = DECIDED + low_sum
    steps = decided
    for name, operand in (("s2", "e2"), ("s", "e")):
        whole = f"%{name} = f32[32] reduce(%{operand}, %zero)"
        assert whole in steps
        steps = steps.replace(
            f"  {whole}, dimensions={{1}}",
            f"  %{name}v = f32[32,8,8] bitcast(%{operand})\n"
            f"  %{name}p = f32[32,8] reduce(%{name}v, %zero), dimensions={{2}}, "
            f"to_apply=%add, {SUM}\n"
            f"  %{name} = f32[32] reduce(%{name}p, %zero), dimensions={{1}}",
        )
    certificate = compared(in_entry(decided), in_entry(steps), name="step", device=GPU)
    assert certificate.is_as_decided
    sums = [one for one in certificate.operations if one.kind == "reduction"]
    assert [one.compiled for one in sums] == [(one.decided,) for one in sums]


def test_names_in_loops_of_called_functions_are_whole():
    lowered = jax.jit(lambda ws, x: jnp.sin(jax.jit(scanned)(ws, x))).lower(WS, X)
    text = lowered.as_text(dialect="hlo", debug_info=True)
    names = {node.op_name for node in graph.program(parse(text)).innermost}
    (product,) = (name for name in names if name.endswith("/dot_general"))
    assert product.count("while") == 1
    (one,) = contractions(certify(lowered))
    assert one.compiled == (FULL,)


def test_names_in_calls_within_calls_have_the_scopes_around_all_of_them():
    @jax.jit
    def inner(w, x):
        with jax.named_scope("inner"):
            return x @ w

    @jax.jit
    def outer(w, x):
        with jax.named_scope("outer"):
            return inner(w, x)

    def step(w, x):
        with jax.named_scope("step"):
            return outer(w, x)

    text = jax.jit(step).lower(WS[0], X).as_text(dialect="hlo", debug_info=True)
    names = {node.op_name for node in graph.program(parse(text)).innermost}
    (product,) = (name for name in names if name.endswith("/dot_general"))
    assert named(product).inner == ("step", "outer", "inner")
    assert product.startswith("jit(step)/")
    (one,) = contractions(certify(step, WS[0], X))
    assert (one.scope, one.compiled) == ("step/outer/inner", (FULL,))


def test_contractions_that_became_one_are_tied():
    q = f"  %k = bf16[32,64] dot(%xb, %g), {DIMS}, {of('k/dot_general')}\n"
    decided = DECIDED + q + q.replace("%k", "%v").replace("k/", "v/")
    merged = DECIDED.replace(
        f"  %d = bf16[32,64] dot(%xb, %g), {DIMS}, {ENC}",
        "  %ggg = bf16[64,192] concatenate(%g, %g, %g), dimensions={1}\n"
        f"  %ddd = bf16[32,192] dot(%xb, %ggg), {DIMS}, {ENC}\n"
        "  %d = bf16[32,64] slice(%ddd), slice={[0:32], [0:64]}",
    )
    certificate = compared(in_entry(decided), in_entry(merged), name="step", device=GPU)
    assert certificate.is_as_decided
    assert certificate.share_tied == 1
    assert not [one for one in contractions(certificate) if not one.opcodes]


DOT = f"  %d = bf16[32,64] dot(%xb, %g), {DIMS}, {ENC}\n"
AGAIN = DOT.replace("%d", "%d2")
COPIES = {
    "of the same operands": AGAIN,
    "without a name": AGAIN.replace(f", {ENC}", ""),
    "of operands that are computed again": (
        "  %x1 = bf16[32,64] copy(%xb)\n  %x2 = bf16[32,64] convert(%x)\n"
        + AGAIN.replace("%xb", "%x2")
    ),
    "behind a barrier": (
        "  %both = (bf16[32,64], bf16[64,64]) tuple(%xb, %g)\n"
        "  %kept = (bf16[32,64], bf16[64,64]) opt-barrier(%both)\n"
        "  %x2 = bf16[32,64] get-tuple-element(%kept), index=0\n"
        "  %g2 = bf16[64,64] get-tuple-element(%kept), index=1\n"
        + AGAIN.replace("%xb, %g", "%x2, %g2")
    ),
}
"""By name, a contraction that computes what another one of `DECIDED` does."""


def duplicated(decided, compiled):
    certificate = compared(in_entry(decided), in_entry(compiled), name="", device=GPU)
    return [one.primitive for one in certificate.drifts if DUPLICATED in one.drifts]


@pytest.mark.parametrize("name", COPIES)
def test_what_is_computed_again_is_told(name):
    twice = DECIDED.replace(DOT, DOT + COPIES[name])
    assert duplicated(DECIDED, twice) == ["dot_general"]
    thrice = twice.replace("%d2", "%d3").replace(DOT, DOT + COPIES[name])
    assert duplicated(twice, twice) == []
    assert duplicated(twice, DECIDED) == []
    assert duplicated(twice, thrice) == ["dot_general"]


LOOP = """
HloModule jit_step

%condition (p: f32[]) -> pred[] {
  %carried = (s32[], f32[1024], f32[1024]) parameter(0)
  %count = s32[] get-tuple-element(%carried), index=0
  %three = s32[] constant(3)
  ROOT %less = pred[] compare(%count, %three), direction=LT
}

%body (p: f32[]) -> f32[] {
  %p = (s32[], f32[1024], f32[1024]) parameter(0)
  %i = s32[] get-tuple-element(%p), index=0
  %one = s32[] constant(1)
  %j = s32[] add(%i, %one)
  %c = f32[1024] get-tuple-element(%p), index=1
  %d = f32[1024] get-tuple-element(%p), index=2
  %cb = bf16[1024] convert(%c)
  %t = bf16[1024] tanh(%cb), metadata={op_name="jit(step)/tanh"}
  %wide = f32[1024] convert(%t)
  %e = f32[1024] exponential(%d), metadata={op_name="jit(step)/exp"}
  %yes = pred[1024] compare(%wide, %e), direction=GT
  %s = f32[1024] select(%yes, %wide, %e), metadata={op_name="jit(step)/select_n"}
  ROOT %next = (s32[], f32[1024], f32[1024]) tuple(%j, %s, %e)
}

ENTRY %main (x: f32[]) -> f32[] {
  %x = f32[1024] parameter(0)
  %zero = s32[] constant(0)
  %first = (s32[], f32[1024], f32[1024]) tuple(%zero, %x, %x)
  %loop = (s32[], f32[1024], f32[1024]) while(%first), condition=%condition, body=%body
  %last = f32[1024] get-tuple-element(%loop), index=1
  %low = bf16[1024] convert(%last)
  ROOT %out = (bf16[1024]) tuple(%low)
}
"""


@pytest.mark.parametrize("is_copied", [False, True])
def test_a_loop_runs_as_often_as_its_condition_counts(is_copied):
    text = LOOP
    if is_copied:  # as XLA for TPUs may hand a counter on
        added = "%o = s32[] copy(%i)\n  %k = s32[] add(%o, %one)\n  %j = s32[] copy(%k)"
        text = LOOP.replace("%j = s32[] add(%i, %one)", added)
        assert text != LOOP
    module = parse(text)
    entry = module.computations[module.entry]
    assert trip_count(module, entry["loop"], entry) == 3


@pytest.mark.parametrize(
    ("reader", "is_told"),
    (
        ("", False),
        ("%cb = bf16[1024] convert(%c)", True),  # in the next iteration
        ("%low = bf16[1024] convert(%last)", True),  # after the last one
    ),
)
def test_what_a_loop_carries_may_be_rounded_if_all_readers_round_it(reader, is_told):
    wide = reader.replace("bf16", "f32").replace("convert", "exponential")
    decided = LOOP.replace(reader, wide) if reader else LOOP
    decided = decided.replace("tanh(%cb)", "tanh(%wb)").replace(
        "  %t = ", "  %wb = bf16[1024] convert(%cb)\n  %t = "
    )
    low = decided.replace("%s = f32[1024] select", "%sb = bf16[1024] select").replace(
        "  ROOT %next", "  %s = f32[1024] convert(%sb)\n  ROOT %next"
    )
    certificate = compared(decided, low, name="step", device=TPU, large=1024)
    told = {one.primitive for one in certificate.arrays if one.drift == REDUCED_LOW}
    assert ("select_n" in told) is is_told


def test_it_is_told_where_an_equal_amount_of_work_is_gone():
    other = DOT.replace("%d", "%k").replace("enc/", "k/").replace("%xb", "%xc")
    other = "  %xc = bf16[32,64] negate(%xb)\n" + other
    decided = DECIDED.replace(DOT, DOT + other)
    again = DECIDED.replace(DOT, DOT + AGAIN)  # the other one is unused, say
    assert duplicated(decided, DECIDED) == []
    assert duplicated(decided, again) == ["dot_general"]


def test_it_is_told_where_the_first_run_has_no_name():
    quantised = next(line for line in DECIDED.splitlines(True) if "  %q = " in line)
    first = re.sub(", metadata=.*", "", quantised).replace("%q", "%q0")
    again = DECIDED.replace(quantised, first + quantised)
    assert duplicated(DECIDED, again) == ["convert_element_type"]


SUMS = """
  %x = f32[32,64] get-tuple-element(%all), index=1
  %zero = f32[] constant(0)
  %s = f32[] reduce(%x, %zero), dimensions={0,1}, to_apply=%add
  %one = f32[1] reshape(%s)
  %flat = f32[2048] reshape(%x)
"""


@pytest.mark.parametrize("dtype", ("f32", "bf16"))
def test_sums_over_devices_that_became_one_are_tied(dtype):
    def summed(name, operand, size, named=""):
        metadata = f", {of(named)}" if named else ""
        return (
            f"  {name} = f32[{size}] all-reduce({operand}), to_apply=%add{metadata}\n"
        )

    tail = "  %r = f32[2048] negate(%b)\n"
    decided = SUMS + summed("%a", "%one", 1, "loss/psum")
    decided += summed("%b", "%flat", 2048, "grad/psum") + tail
    run = SUMS + "  %c = f32[2049] concatenate(%one, %flat), dimensions={0}\n"
    run += f"  %cd = {dtype}[2049] convert(%c)\n"
    run += summed("%both", "%cd", 2049).replace("= f32", f"= {dtype}")
    run += "  %wide = f32[2049] convert(%both)\n"
    run += "  %b = f32[2048] slice(%wide), slice={[1:2049]}\n" + tail
    texts = (
        in_entry(one).replace("%w, %x, %wq, %r", "%x, %r") for one in (decided, run)
    )
    certificate = compared(*texts, name="step", device=GPU)
    found = {one.scope for one in certificate.drifts if REDUCED_LOW in one.drifts}
    assert found == ({"loss", "grad"} if dtype == "bf16" else set())
    sent = [one for one in certificate.operations if one.kind == "collective"]
    assert not [one for one in sent if GONE in one.drifts]


def test_arrays_may_be_cast_before_they_are_moved():
    gathered = DECIDED.replace(
        "%wb = bf16[8,64] convert(%w)", "%wb = f32[8,64] copy(%w)"
    )
    gathered = gathered.replace(
        "%g = bf16[64,64] all-gather", "%gw = f32[64,64] all-gather"
    )
    gathered = gathered.replace("  %d = ", "  %g = bf16[64,64] convert(%gw)\n  %d = ")
    texts = map(in_entry, (gathered, DECIDED))
    assert compared(*texts, name="step", device=GPU).is_as_decided


def test_a_step_without_arguments_has_a_lock(tmp_path):
    certificate = certify(lambda: jnp.ones(3) * 2)
    certificate.check(certificate.save(tmp_path / "a.lock"))


@pytest.mark.parametrize("scope", ("a\nb", "a\x0cb", "a\u2028b"))
def test_a_scope_with_line_breaks_has_a_lock(tmp_path, scope):
    def fn(x):
        with jax.named_scope(scope):
            return x @ x

    certificate = certify(fn, X)
    certificate.check(certificate.save(tmp_path / "a.lock"))


def test_it_is_told_where_others_were_merged():
    q = DOT.replace("%d", "%k").replace("enc/", "k/")
    decided = DECIDED + q + q.replace("%k", "%v").replace("k/", "v/")
    large = f"  %ddd = bf16[32,192] dot(%xb, %ggg), {DIMS}, {ENC}\n"
    merged = DECIDED.replace(
        DOT,
        "  %ggg = bf16[64,192] concatenate(%g, %g, %g), dimensions={1}\n"
        f"{large}  %d = bf16[32,64] slice(%ddd), slice={{[0:32], [0:64]}}\n",
    )
    assert duplicated(decided, merged) == []
    again = merged.replace(large, large + large.replace("%ddd", "%again"))
    assert duplicated(decided, again) == ["dot_general"]


def test_it_is_told_where_each_device_has_a_part():
    x = "  %x = f32[32,64] get-tuple-element(%all), index=1\n"
    part = DECIDED.replace(x, x.replace("32", "8"))
    part = re.sub(r"((bf16|f32|f8e4m3fn)\[)32([],])", r"\g<1>8\3", part)
    part_of_dot = DOT.replace("[32,64]", "[8,64]")
    assert part_of_dot in part
    again = part_of_dot + part_of_dot.replace("%d", "%d2")
    assert duplicated(DECIDED, part) == []
    assert duplicated(DECIDED, part.replace(part_of_dot, again)) == ["dot_general"]


@pytest.mark.parametrize(
    ("wrap", "match"),
    (
        (lambda: jax.jit(layers).lower(WS, X).compile(), "compiled already"),
        (lambda: 3, "must be a function"),
        (lambda: None, "must be a function"),
    ),
)
def test_what_can_not_be_certified_is_told(wrap, match):
    with pytest.raises(TypeError, match=match):
        certify(wrap(), WS, X)


def test_what_is_traced_is_certified():
    assert certify(jax.jit(low(layers)).trace(WS, X)).is_as_decided


# --------------------------------------------------------------------------- lock files


@pytest.fixture
def lock(tmp_path):
    return certify(jax.grad(full_in()), WS, X).save(tmp_path / "a" / "precision.lock")


def test_a_lock_holds_for_the_same_program(lock):
    certify(jax.grad(full_in()), WS, X, lock=lock)


def test_a_lock_is_sorted_and_names_neither_files_nor_versions(lock):
    text = lock.read_text()
    head, lines = text.split("\n\n")
    assert sorted(lines.splitlines()) == lines.splitlines()
    assert ".py" not in text
    assert jax.__version__ not in text
    assert "platform: cpu" in head


def test_a_lock_holds_where_one_of_two_equal_operations_drifts(tmp_path):
    again = f"  %d2 = bf16[32,64] dot(%xb, %g), {DIMS}, {ENC}\n"
    decided = in_entry(DECIDED + again)
    run = decided.replace(again, again.replace("%xb", "%x"))
    certificate = compared(decided, run, name="step", device=GPU)
    assert [one.real_drifts for one in certificate.drifts] == [(DROPPED,)]
    certificate.check(certificate.save(tmp_path / "a.lock"))


def test_a_scope_named_like_an_algorithm_is_none():
    def fn(x):
        with jax.named_scope("dot_bf16_bf16_f32"):
            return x @ x

    (one,) = contractions(certify(fn, X))
    assert (one.decided, one.arithmetic) == (FULL, "")


def test_a_rounding_that_rounds_nothing_leaves_the_name_of_the_dtype():
    (one,) = contractions(certify(lambda x: lax.reduce_precision(x, 8, 23) @ x, X))
    assert one.decided == FULL


def test_a_changed_scope_shows_as_its_own_lines(lock):
    with pytest.raises(AmpError) as e:
        certify(jax.grad(full_in("layer1")), WS, X, lock=lock)
    changed = str(e.value).splitlines()[1:]
    assert changed
    assert all(re.match(r"[-+]layer1: ", line) for line in changed)


def test_a_lock_of_other_shapes_is_told(lock):
    with pytest.raises(ValueError, match=r"lock of another program.*64,64.*32,64"):
        certify(jax.grad(full_in()), WS, X[:32], lock=lock)


ITS_STEP = """
import jax, jax.numpy as jnp
from jaxamp_like import amp, certify

def loss(params, x):
    for name in ("encoder", "middle", "head"):
        with jax.named_scope(name):
            x = jax.checkpoint(lambda w, x: jnp.tanh(x @ w))(params[name], x)
    with jax.named_scope("loss"):
        return jnp.mean(jax.nn.softmax(x, axis=-1) ** 2)

params = {name: jnp.ones((32, 32)) for name in {"head", "encoder", "middle"}}
step = jax.grad(amp(loss, compute_dtype="bfloat16"))
print(certify(step, params, jnp.ones((8, 32))).save("its.lock"))
"""


@pytest.mark.rest
def test_a_lock_is_the_same_from_two_processes_in_two_folders(tmp_path):
    # Hashes of strings differ, and so does the order of sets.
    written = set()
    for seed in ("1", "22"):
        folder = tmp_path / seed / ("deeper" * int(seed))
        folder.mkdir(parents=True)
        (folder / "its_step.py").write_text(ITS_STEP)
        environment = {"PYTHONHASHSEED": seed, "PYTHONPATH": str(ROOT)}
        subprocess.run(
            [sys.executable, "its_step.py"],
            cwd=folder,
            env=os.environ | environment,
            check=True,
        )
        written.add((folder / "its.lock").read_text())
    (text,) = written
    assert "encoder: forward dot_general" in text


@pytest.mark.rest
@pytest.mark.parametrize("name", locks.MODELS)
def test_locks_of_whole_models_hold_on_every_machine(name):
    locks.certificate_of(name).check(locks.path_of(name))


@pytest.mark.parametrize("text", ("", "precision lock, format 9\n"))
def test_what_is_no_lock_is_told(tmp_path, text):
    path = tmp_path / "other.lock"
    path.write_text(text)
    with pytest.raises(ValueError, match="first line must be"):
        certify(full_in(), WS, X, lock=path)


# --------------------------------------------------------- many devices and frameworks


def mesh_of_8():
    return jax.make_mesh((8,), ("data",), axis_types=(AxisType.Auto,))


@pytest.mark.parametrize("spec", (P(None, "data"), P(None, None, "data"), P()))
@pytest.mark.parametrize("gives", (True, False), ids=("given", "inferred"))
@pytest.mark.parametrize("lowers", (True, False), ids=("amp", "plain"))
def test_partitioned_steps_are_tied(spec, gives, lowers):
    mesh = mesh_of_8()
    sharding, rows = NamedSharding(mesh, spec), NamedSharding(mesh, P("data"))
    ws = jax.ShapeDtypeStruct(WS.shape, WS.dtype, sharding=sharding)
    x = jax.ShapeDtypeStruct(X.shape, X.dtype, sharding=rows)
    fn = jax.grad(low(layers) if lowers else layers)
    step = jax.jit(fn, out_shardings=sharding) if gives else fn
    certificate = certify(step, ws, x)
    found = contractions(certificate)
    assert certificate.is_as_decided
    assert len(found) == 8
    assert all(one.opcodes for one in found)
    assert not [one for one in certificate.operations if one.kind == "kernel"]


@pytest.mark.parametrize("rounds_x", (True, False))
def test_a_drift_of_a_partitioned_gradient_is_told(rounds_x):
    mesh = mesh_of_8()

    @jax.custom_vjp
    def product(x, w):
        return x @ w

    def backward(kept, ct):
        x, w = kept
        return ct @ w.T, (rounded(x) if rounds_x else x).T @ ct

    product.defvjp(lambda x, w: (x @ w, (x, w)), backward)

    def loss(w, x):
        return jnp.mean(jnp.tanh(product(x, w)) ** 2)

    step = jax.jit(jax.grad(loss), out_shardings=NamedSharding(mesh, P("data")))
    shapes = [
        jax.ShapeDtypeStruct((64, 64), jnp.float32, sharding=NamedSharding(mesh, spec))
        for spec in (P("data"), P("data"))
    ]
    lowered = step.lower(*shapes)
    compiled_text = lowered.compile().as_text()
    plain = handed_over(step, *shapes).replace("reduce-precision(", "copy(")
    certificate = compared(plain, compiled_text, name="", device=jax.devices()[0])
    assert certificate.is_as_decided is not rounds_x


def test_gradients_of_sums_over_devices_are_as_decided():
    mesh = mesh_of_8()

    def loss(x):
        return lax.pmean(jnp.mean(x**2), "data")

    fn = jax.shard_map(
        loss, mesh=mesh, in_specs=P("data"), out_specs=P(), check_vma=False
    )
    assert certify(jax.grad(fn), X).is_as_decided


@pytest.mark.parametrize(
    "moved",
    (
        lambda x: lax.with_sharding_constraint(
            x, NamedSharding(mesh_of_8(), P("data"))
        ),
        lambda x: jnp.sum(x[:, None, :], 1),
        lambda x: jnp.max(x.reshape(64, 64, 1), 2),
        lambda x: jnp.zeros((65, 64)).at[1:].set(x)[1:],
        lambda x: jnp.concatenate([x, jnp.zeros((1, 64))])[:-1],
    ),
)
def test_what_moves_rounded_numbers_keeps_them(moved):
    assert certify(lambda x: moved(rounded(x)) @ rounded(x), X).is_as_decided


def test_a_loss_over_labels_is_as_decided():
    def loss(x, labels):
        return optax.softmax_cross_entropy_with_integer_labels(x, labels).mean()

    assert certify(jax.grad(loss), X, jnp.zeros(64, jnp.int32)).is_as_decided


def test_the_stages_of_equinox_are_certified():
    step = eqx.filter_jit(jax.grad(low(layers)))
    assert certify(step.lower(WS, X)).is_as_decided


def test_a_lock_holds_for_all_stages_of_a_function(tmp_path):
    step = jax.grad(low(layers))
    step.__name__ = "step"
    lock = certify(step, WS, X).save(tmp_path / "a.lock")
    certify(jax.jit(step).lower(WS, X), lock=lock)
    certify(jax.jit(step).trace(WS, X), lock=lock)


def test_a_lock_that_is_not_there_is_told_before_anything_is_traced(tmp_path):
    def step(w):
        raise AssertionError("was traced")

    with pytest.raises(FileNotFoundError, match="There is no lock file"):
        certify(step, WS, lock=tmp_path / "a.lock")


@pytest.mark.parametrize("encoding", ("utf-8-sig", "utf-16"))
def test_a_lock_in_another_encoding_is_read_or_told(lock, encoding):
    lock.write_text(lock.read_text() + "\n\n", encoding=encoding)
    if encoding == "utf-16":
        with pytest.raises(ValueError, match="no lock file"):
            certify(jax.grad(full_in()), WS, X, lock=lock)
    else:
        certify(jax.grad(full_in()), WS, X, lock=lock)


# ----------------------------------------------- what was expected of small programs

# Each says what the program's operations read and make, as they run, and how many
# instructions of which opcode are in the text that XLA prints for a CPU. It was written
# down from the program and from that text, not from what a certificate said. The text
# is counted by a regular expression, which shares nothing with the package's reader.
NHWC = ("NHWC", "HWIO", "NHWC")
IS_0_12 = jax.__version_info__ >= (0, 12)
PIXELS, KERNEL = jnp.ones((2, 8, 8, 4)), jnp.ones((3, 3, 4, 8))
BF16, F16 = jnp.bfloat16, jnp.float16
HALF, ROWS = jnp.ones((64, 64), BF16), jnp.arange(64) % 7
BF16_TO_32, SUM32 = "bfloat16 x bfloat16 -> float32", "float32 -> float32"


def conv(x, k):
    return lax.conv_general_dilated(x, k, (1, 1), "SAME", dimension_numbers=NHWC)


def squares(fn):
    return lambda *args: jnp.sum(fn(*args) ** 2)


def repeated(fn, length):
    return lambda x: lax.scan(lambda x, _: (fn(x), None), x, length=length)[0]


def over_devices(fn, *out):
    return jax.shard_map(
        fn, mesh=mesh_of_8(), in_specs=P("data"), out_specs=P(*out), check_vma=False
    )


def times(x, y):
    return x @ y


def tanh_of_product(x):
    return jnp.tanh(x @ x)


def both_ways(x):
    return lax.cond(x[0, 0] > 0, lambda x: x @ x, lambda x: x.T @ x, x)


EXPECTED = {
    # name: function, arguments, contractions, sums, collectives, opcodes in the text
    "product": (times, (X, X), {FULL: 1}, {}, {}, {"dot": 1}),
    "low product": (low(times), (X, X), {LOW: 1}, {}, {}, {"dot": 1}),
    "product of 16 bits, summed in 32": (
        lambda x, y: jnp.dot(x, y, preferred_element_type=jnp.float32),
        (HALF, HALF),
        {BF16_TO_32: 1},
        {},
        {},
        {"dot": 1},
    ),
    "product of float16": (
        lambda x, y: x.astype(F16) @ y.astype(F16),
        (X, X),
        {"float16 x float16 -> float16": 1},
        {},
        {},
        {"dot": 1},
    ),
    "product of two dtypes": (
        lambda x, y: jnp.dot(x, y),
        (X, HALF),
        {"float32 x bfloat16 -> float32": 1},
        {},
        {},
        {"dot": 1},
    ),
    "batch of products": (
        lambda x: jnp.einsum("bij,bjk->bik", x, x),
        (jnp.ones((4, 16, 16)),),
        {FULL: 1},
        {},
        {},
        {"dot": 1},
    ),
    "chain": (lambda x: x @ x @ x @ x, (X,), {FULL: 3}, {}, {}, {"dot": 3}),
    "gradient of a product": (
        jax.grad(squares(times)),
        (X, X),
        {FULL: 2},
        {},
        {},
        {"dot": 2},
    ),
    "value and both gradients, low": (
        # The gradients are made float32 for the caller, and XLA for CPUs leaves out
        # that one of them is rounded to bfloat16 before.
        jax.value_and_grad(low(squares(times)), argnums=(0, 1)),
        (X, X),
        {LOW: 2, BF16_TO_32: 1},
        {SUM32: 1},
        {},
        {"dot": 3},
    ),
    "convolution": (conv, (PIXELS, KERNEL), {FULL: 1}, {}, {}, {"convolution": 1}),
    "low convolution and its kernel's gradient": (
        jax.grad(low(squares(conv)), argnums=1),  # the same is left out
        (PIXELS, KERNEL),
        {LOW: 1, BF16_TO_32: 1},
        {},
        {},
        {"convolution": 2},
    ),
    "loop": (
        repeated(tanh_of_product, 5),
        (X,),
        {FULL: 5},
        {},
        {},
        {"dot": 1, "while": 1},
    ),
    "loop in a loop": (
        repeated(repeated(tanh_of_product, 3), 4),
        (X,),
        {FULL: 12},
        {},
        {},
        {"dot": 1, "while": 2},
    ),
    "branches": (both_ways, (X,), {FULL: 2}, {}, {}, {"dot": 2}),
    "recomputed": (
        # Older XLA for CPUs does not honour `prevent_cse`: the product runs once.
        jax.grad(lambda x: jnp.sum(jnp.sin(jax.checkpoint(tanh_of_product)(x)))),
        (X,),
        {FULL: 3 + IS_0_12},
        {},
        {},
        {"dot": 3 + IS_0_12},
    ),
    "sum": (lambda x: jnp.sum(jnp.tanh(x), 1), (X,), {}, {SUM32: 1}, {}, {"reduce": 1}),
    "sum of 16 bits": (
        lambda x: jnp.sum(x, 1),
        (HALF,),
        {},
        {"bfloat16 -> float32": 1},
        {},
        {"reduce": 1},
    ),
    "softmax": (
        lambda x: jax.nn.softmax(x),
        (X,),
        {},
        {SUM32: 1},
        {},
        {"reduce": 2},
    ),
    "variance": (
        lambda x: jnp.mean((x - jnp.mean(x, 1, keepdims=True)) ** 2, 1),
        (X,),
        {},
        {SUM32: 2},
        {},
        {"reduce": 2},
    ),
    "sum by row": (
        # A scatter, which older XLA for CPUs writes out as a loop.
        lambda x, i: jnp.zeros_like(x).at[i].add(x),
        (X, ROWS),
        {},
        {SUM32: 1} if IS_0_12 else {},
        {},
        {} if IS_0_12 else {"while": 1},
    ),
    "sum over devices": (
        over_devices(lambda x: lax.psum(x, "data")),
        (X,),
        {},
        {},
        {SUM32: 1},
        {"all-reduce": 1},
    ),
    "gathered in 16 bits": (
        over_devices(lambda x: lax.all_gather(x.astype(BF16), "data", tiled=True)),
        (X,),
        {},
        {},
        {"bfloat16 -> bfloat16": 1},
        {"all-gather": 1},
    ),
    "scattered sum, and sent around": (
        over_devices(
            lambda x: lax.ppermute(
                lax.psum_scatter(x.T, "data", tiled=True),
                "data",
                [(i, (i + 1) % 8) for i in range(8)],
            ),
            "data",
        ),
        (X,),
        {},
        {},
        {SUM32: 2},
        {"reduce-scatter": 1, "collective-permute": 1},
    ),
    "exchanged": (
        over_devices(lambda x: lax.all_to_all(x, "data", 1, 1, tiled=True), "data"),
        (X,),
        {},
        {},
        {SUM32: 1},
        {"all-to-all": 1},
    ),
}
OPCODES = (
    "dot convolution while reduce all-reduce all-gather reduce-scatter "
    "collective-permute all-to-all"
).split()


@pytest.mark.parametrize("name", EXPECTED)
def test_what_was_expected_of_a_small_program_is_compiled_and_certified(name):
    fn, args, *expected, in_text = EXPECTED[name]
    lowered = jax.jit(fn).lower(*args)
    text = lowered.compile().as_text()
    found = {opcode: len(re.findall(rf" {opcode}\(", text)) for opcode in OPCODES}
    kinds = ("contraction", "reduction", "collective")
    runs = {kind: Counter() for kind in kinds}
    for one in certify(lowered).operations:
        if one.kind in kinds and one.compiled:
            (signature,) = one.compiled
            runs[one.kind][signature] += one.times
    assert list(runs.values()) == expected
    # Of reductions some find maxima, and some are parts of products.
    for opcode in {*OPCODES} - ({"reduce"} - {*in_text}):
        assert found[opcode] == in_text.get(opcode, 0), (opcode, text)


# ---------------------------------------------------------------------------- bad input


def test_a_result_in_place_of_a_function_is_told():
    with pytest.raises(TypeError, match="Write `certify\\(step, x\\)`"):
        certify(layers(WS, X))


def test_arguments_before_the_function_are_told():
    with pytest.raises(TypeError, match=r"not `certify\(x, step\)`"):
        certify((WS, X), layers)


def test_an_unknown_name_of_a_device_is_told():
    with pytest.raises(ValueError, match=r"names h200, b200, v4, .* but got 'gpu'"):
        certify(layers, WS, X, device="gpu")


def test_what_is_no_device_is_told():
    with pytest.raises(TypeError, match=r"`device` must be a device, .* but got 3"):
        certify(layers, WS, X, device=3)


@pytest.mark.parametrize(
    ("name", "extra"), (("b200", "gpu-compile"), ("v5e", "tpu-compile"))
)
def test_a_compiler_that_is_missing_is_told(name, extra, monkeypatch):
    monkeypatch.setattr(devices, "find_spec", lambda package: None)
    with pytest.raises(ImportError, match=rf"pip install 'jaxamp_like\[{extra}\]'"):
        certify(layers, WS, X, device=name)


# ------------------------------------------------------------ devices that aren't there


def needs(*packages):
    there = any(map(devices.find_spec, packages))
    reason = f"needs XLA's compiler, which is in {packages[0]}"
    return pytest.mark.skipif(not there, reason=reason)


OF_GPUS = needs("jax_cuda13_plugin", "jax_cuda12_plugin")
DESCRIBED = (
    pytest.param("h200", "NVIDIA H200", marks=OF_GPUS),
    pytest.param("b200", "NVIDIA B200", marks=OF_GPUS),
    pytest.param("v5e", "TPU v5 lite", marks=needs("libtpu")),
)


def carried(w, x):
    def block(c, w):
        return c + jnp.tanh(c @ w) @ w.T, None

    return jnp.mean(lax.scan(jax.checkpoint(block), x, w)[0] ** 2)


def summed_in_branches(w, x):
    y = lax.cond(x[0, 0] > 0, lambda x: x @ w[0], lambda x: x * 2, x)
    return jnp.mean(jnp.sum(y, -1) ** 2)


def transformed(w, x):
    return jnp.mean(jnp.abs(jnp.fft.rfft(x @ w[0])) ** 2)


def grouped(w, x):
    shape = dict(dimension_numbers=("NHWC", "HWIO", "NHWC"), feature_group_count=2)
    y = lax.conv_general_dilated(
        x.reshape(4, 8, 8, 16),
        w.ravel()[:1152].reshape(3, 3, 8, 16),
        (1, 1),
        "SAME",
        **shape,
    )
    return jnp.mean(jnp.tanh(y) ** 2)


@needs("libtpu")
@pytest.mark.parametrize(
    "fn",
    (carried, summed_in_branches, transformed, grouped),
    ids=lambda fn: fn.__name__,
)
def test_what_libtpu_rewrites_is_no_drift(fn):
    certificate = certify(jax.grad(low(fn), argnums=(0, 1)), WS, X, device="v5e")
    if fn is transformed and jax.__version_info__ < (0, 7):
        # Its libtpu leaves out the names of the products that an FFT becomes.
        told = {drift for one in certificate.drifts for drift in one.drifts}
        assert told == {UNDECIDED}
        return
    assert certificate.is_as_decided, certificate
    assert certificate.share_tied == 1


@pytest.mark.cross("program", name=3)
@pytest.mark.parametrize(("name", "kind"), DESCRIBED)
@pytest.mark.parametrize("program", PROGRAMS)
def test_gradients_for_described_devices_are_as_decided(name, kind, program):
    fn, written = PROGRAMS[program]
    certificate = certify(jax.grad(low(fn)), WS, X, device=name)
    found = contractions(certificate)
    assert certificate.device == kind
    assert certificate.is_as_decided, certificate
    assert certificate.share_tied == 1
    assert sum(one.phase == "forward" for one in found) == written
    assert {one.decided for one in found} == {LOW}


def batch(ws, x):
    y = jnp.einsum("bij,bjk->bik", ws, ws)
    return jnp.sum(jnp.tanh(jnp.einsum("bij,bjk->bik", y, ws)) ** 2)


@pytest.mark.parametrize(("name", "kind"), DESCRIBED)
def test_batches_of_products_are_tied(name, kind):
    # For TPUs they become convolutions, whose windows lie on holes for the most part.
    certificate = certify(jax.grad(low(batch)), WS, X, device=name)
    found = contractions(certificate)
    assert certificate.is_as_decided, certificate
    assert len(found) == 6
    assert {one.work for one in found if one.opcodes} == {2 * 3 * 64**3}
    lines = [int(one.source.rpartition(":")[2]) for one in found if one.opcodes]
    assert {*lines} == {batch.__code__.co_firstlineno + i for i in (1, 2)}


@pytest.mark.parametrize("other", ("%m", "%x"))
def test_contractions_of_other_numbers_may_become_one(other):
    mask = (
        "  %p = pred[32,64] compare(%x, %x), direction=GT\n"
        "  %m = bf16[32,64] convert(%p)"
    )
    two = (
        f"{mask}\n  %d = bf16[32,64] dot(%xb, %g), {DIMS}, {ENC}\n"
        f"  %d2 = bf16[32,64] dot(%m, %g), {DIMS}, {of('mask/dot_general')}"
    )
    old = f"  %d = bf16[32,64] dot(%xb, %g), {DIMS}, {ENC}"
    assert old in DECIDED
    decided = in_entry(DECIDED.replace(old, two))
    merged = in_entry(
        DECIDED.replace(
            old,
            f"{mask}\n  %both = {'f32' if other == '%x' else 'bf16'}[64,64] "
            f"concatenate(%xb, {other}), dimensions={{0}}\n"
            f"  %dd = bf16[64,64] dot(%both, %g), {DIMS}, {ENC}\n"
            "  %d = bf16[32,64] slice(%dd), slice={[0:32], [0:64]}",
        )
    )
    certificate = compared(decided, merged, name="step", device=GPU)
    assert certificate.is_as_decided is (other == "%m")
    assert not [one for one in contractions(certificate) if not one.opcodes]


@pytest.mark.parametrize("device", (GPU, TPU))
@pytest.mark.parametrize("reader", ("bf16", "f32"))
def test_a_sum_may_round_its_result_for_its_readers_on_tpus(device, reader):
    decided = DECIDED.replace("all-reduce(%s)", "all-reduce(%b)").replace(
        "  %r = f32[32]", f"  %b = {reader}[32] convert(%s)\n  %r = {reader}[32]"
    )
    run = decided.replace("%s = f32[32] reduce", "%s = bf16[32] reduce")
    certificate = compared(in_entry(decided), in_entry(run), name="", device=device)
    found = {one.primitive for one in certificate.drifts if REDUCED_LOW in one.drifts}
    assert ("reduce_sum" in found) is (device is GPU or reader == "f32")


def test_a_mean_of_one_number_rounds_nothing():
    def fn(x):
        return jnp.sum(jnp.mean(rounded(x)[:, None, :], axis=1), 0)

    (one,) = [o for o in certify(fn, X).operations if o.opcodes]
    assert one.decided == one.compiled[0] == "bfloat16 -> float32"


def test_nameless_contractions_are_tied_in_order():
    decided = in_entry(DECIDED)
    nameless = decided.replace(f", {ENC}", "").replace(f", {HEAD}", "")
    assert compared(decided, nameless, name="", device=GPU).is_as_decided


@pytest.mark.parametrize(("name", "kind"), DESCRIBED)
def test_what_described_devices_multiply_float32_in_is_told(name, kind):
    (one,) = contractions(certify(lambda x: jnp.tanh(x @ x), X, device=name))
    is_gpu = "NVIDIA" in kind
    assert one.arithmetic == ("tf32" if is_gpu else "one bfloat16 pass")
    dtype = "tf32" if is_gpu else "bfloat16"
    assert one.compiled == (one.decided,) == (f"{dtype} x {dtype} -> float32",)


# ------------------------------------------------------- large arrays, and what is kept

KEEPING = f"""
  %x = f32[32,64] get-tuple-element(%all), index=1
  %t = f32[32,64] tanh(%x), {of("jvp(enc)/tanh")}
  %k = bf16[32,64] convert(%t), {of("jvp(enc)/convert_element_type")}
  %s = f32[32,64] exponential(%t), {of("jvp(enc)/exp")}
  %b = bf16[32,64] convert(%s), {of("jvp(enc)/to_head/convert_element_type")}
  %h = f32[32,64] sine(%b), {of("jvp(head)/sin")}
  %u = f32[32,64] convert(%k), {of("transpose(jvp(enc))/convert_element_type")}
  %r = f32[32,64] multiply(%u, %s), {of("transpose(jvp(enc))/mul")}
"""
ARRAY_EDITS = {
    "nothing": ({}, set()),
    "kept as float32": (
        {
            "%k = bf16[32,64] convert(%t)": "%kb = bf16[32,64] convert(%t)",
            "  %s =": "  %k = f32[32,64] convert(%kb)\n  %s =",
            "convert(%k)": "sine(%k)",
        },
        {("convert_element_type", KEPT_WIDE)},
    ),
    "kept before it is rounded": (
        {
            "%u = f32[32,64] convert(%k)": "%u = f32[32,64] convert(%k2)",
            "  %u =": (
                "  %k2 = bf16[32,64] convert(%t), "
                f"{of('transpose(jvp(enc))/late/convert_element_type')}\n  %u ="
            ),
        },
        {("tanh", KEPT_WIDE)},
    ),
    "written as float32": (
        {
            "%b = bf16[32,64] convert(%s)": "%b = f32[32,64] reduce-precision(%s), "
            "exponent_bits=8, mantissa_bits=7"
        },
        {("convert_element_type", WRITTEN_WIDE)},
    ),
    "computed in bfloat16": (
        {
            "%s = f32[32,64] exponential(%t)": "%s = bf16[32,64] exponential(%t)",
        },
        {("exp", REDUCED_LOW)},
    ),
    "without a name": ({f", {of('jvp(head)/sin')}": ""}, {("sine", UNDECIDED)}),
}


@pytest.mark.parametrize("around", (in_entry, in_call, in_loop))
@pytest.mark.parametrize("name", ARRAY_EDITS)
def test_arrays_that_are_stored_otherwise_are_told(name, around):
    edits, expected = ARRAY_EDITS[name]
    before = text = around(KEEPING).replace("%w, %x, %wq, %r", "%x, %r")
    for old, new in edits.items():
        assert old in text
        text = text.replace(old, new, 1)
    certificate = compared(before, text, name="step", device=GPU, large=1)
    found = {(one.primitive, one.drift) for one in certificate.arrays if one.drift}
    assert found == expected
    assert certificate.is_as_decided is (expected <= {("sine", UNDECIDED)})
    assert certificate.kept == {"bfloat16": 2 * 32 * 64, "float32": 4 * 32 * 64}


@pytest.mark.parametrize("operand", ("%t", "%x"))
def test_what_moves_a_rounded_copy_may_have_the_name_of_what_was_copied(operand):
    decided = in_entry(KEEPING.replace("convert(%t)", f"convert({operand})"))
    decided = decided.replace("%w, %x, %wq, %r", "%x, %r")
    tanh = of("jvp(enc)/tanh")
    moved = f"  %m = bf16[64,32] transpose(%k), dimensions={{1,0}}, {tanh}\n  %s = "
    run = decided.replace("  %s = ", moved)
    certificate = compared(decided, run, name="step", device=GPU, large=1)
    told = {one.primitive for one in certificate.arrays if one.drift == REDUCED_LOW}
    assert ("tanh" in told) is (operand == "%x")


def test_a_rounded_copy_is_that_of_the_equation_that_is_rounded():
    added = of("block/add")
    lines = f"""
  %x = f32[32,64] get-tuple-element(%all), index=1
  %a = f32[32,64] add(%x, %x), {added}
  %b = f32[32,64] add(%a, %x), {added}
  %c = bf16[32,64] convert(%b)
  %s = f32[32,64] sine(%c), {of("block/sin")}
  %r = f32[32,64] multiply(%s, %b), {of("block/mul")}
"""
    text = in_entry(lines).replace("%w, %x, %wq, %r", "%x, %r")
    assert compared(text, text, name="step", device=GPU, large=1).is_as_decided


def test_sums_in_windows_are_not_taken_for_others():
    summed = "to_apply=%add, " + of("cumsum/reduce_window_sum")
    lines = f"""
  %x = f32[32,64] get-tuple-element(%all), index=1
  %p = pred[32,64] compare(%x, %x), direction=GT
  %o = f32[32,64] convert(%p)
  %zero = f32[] constant(0)
  %c = f32[32,64] reduce-window(%o, %zero), window={{size=32x1 pad=31_0x0_0}}, {summed}
  %y = f32[32,64] multiply(%c, %x)
  %gone = f32[32] reduce(%y, %zero), dimensions={{1}}, to_apply=%add, {of("sum")}
  %r = f32[32] reduce(%y, %zero), dimensions={{1}}, to_apply=%add, {of("sum")}
"""
    run = lines.replace("cumsum/reduce_window_sum", "reduce-window")
    run = "".join(line for line in run.splitlines(True) if "%gone" not in line)
    decided, run = (in_entry(one).replace("%w, %x, %wq", "%x") for one in (lines, run))
    certificate = compared(decided, run, name="step", device=TPU)
    assert certificate.is_as_decided, certificate


TWINS = f"""
  %x = f32[32,64] get-tuple-element(%all), index=1
  %t = f32[32,64] tanh(%x), {of("jvp(enc)/tanh")}
  %t1 = f32[32,64] sine(%x), {of("jvp(enc)/sin")}
  %k = bf16[32,64] convert(%t), {of("jvp(enc)/stacked")}
  %s = f32[32,64] copy(%t1), {of("jvp(enc)/stacked")}
  %s0 = f32[32,64] add(%t1, %t), {of("jvp(enc)/stacked")}
  %u = f32[32,64] sine(%k), {of("transpose(jvp(enc))/sin")}
  %r = f32[32,64] multiply(%u, %s0), {of("transpose(jvp(enc))/mul")}
"""


def test_two_kept_arrays_of_one_name_are_told_apart():
    text = in_entry(TWINS).replace("%w, %x, %wq, %r", "%x, %r")
    wide = text.replace("%k = bf16[32,64] convert(%t)", "%k = f32[32,64] sine(%t)")
    certificate = compared(text, wide, name="step", device=GPU, large=1)
    found = {(one.primitive, one.drift) for one in certificate.arrays if one.drift}
    assert found == {("stacked", KEPT_WIDE)}
    assert compared(text, text, name="", device=GPU, large=1).is_as_decided


@pytest.mark.parametrize("operand", ("x", "y"))
def test_what_is_rounded_before_it_is_put_together_may_be_as_decided(operand):
    text = f"""
  %x = f32[32,64] get-tuple-element(%all), index=1
  %h = bf16[32,64] convert(%x)
  %y = f32[32,64] convert(%h)
  %one = f32[32,64] subtract(%{operand}, %{operand}), {of("sub")}
  %two = f32[32,64] add(%{operand}, %{operand}), {of("add")}
  %c = f32[64,64] concatenate(%one, %two), dimensions={{0}}, {of("concatenate")}
  %r = bf16[64,64] convert(%c), {of("convert_element_type")}
"""
    text = in_entry(text).replace("%w, %x, %wq, %r", "%x, %r")
    early = text.replace("convert(%c)", "copy(%c)")
    for name in ("%one", "%two", "%c"):
        early = early.replace(f"{name} = f32", f"{name} = bf16")
    certificate = compared(text, early, name="step", device=GPU, large=1)
    told = {one.primitive for one in certificate.arrays if one.drift == REDUCED_LOW}
    # Of rounded operands, a sum in bfloat16 is the rounded sum.
    assert told == ({"sub", "add"} if operand == "x" else set())


def test_small_arrays_are_not_compared():
    text = in_entry(KEEPING).replace("%w, %x, %wq, %r", "%x, %r")
    assert compared(text, text, name="step", device=GPU).arrays == ()


WIDE_WS = jax.ShapeDtypeStruct((3, 1024, 1024), jnp.float32)
MANY_XS = jax.ShapeDtypeStruct((1024, 1024), jnp.float32)


@pytest.mark.rest
@pytest.mark.parametrize(("name", "kind"), DESCRIBED)
@pytest.mark.parametrize("fn", (layers, scanned))
def test_what_is_kept_for_the_backward_pass_is_as_decided(name, kind, fn):
    certificate = certify(jax.grad(low(fn)), WIDE_WS, MANY_XS, device=name)
    assert certificate.is_as_decided, certificate
    kept = [one for one in certificate.arrays if one.is_kept]
    assert {one.drift for one in kept} == {""}
    wide = {one.primitive for one in kept if one.stored != "bfloat16"}
    assert wide <= {"tanh"}  # which the loss reads in full
    assert len(kept) > len(wide)
    assert certificate.kept["bfloat16"] >= 2 * 2 * 1024**2
    assert "kept for the backward pass: " in str(certificate)
    computed = [one for one in kept if "arrays" not in one.primitive]
    assert all("test_certify.py" in one.source for one in computed)


# ------------------------------------- contractions and sums that run in several steps

LOW_ADD = ADD.replace("%add ", "%low_add ").replace(
    "ROOT %sum = f32[] add(%a, %b)",
    "%la = bf16[] convert(%a)\n  %lb = bf16[] convert(%b)\n"
    "  %low = bf16[] add(%la, %lb)\n  ROOT %sum = f32[] convert(%low)",
)
WHOLE = f"%d = bf16[32,64] dot(%xb, %g), {DIMS}, {ENC}"
IN_PARTS = f"""%x4 = bf16[32,4,16] bitcast(%xb)
  %g4 = bf16[4,16,64] bitcast(%g)
  %p = f32[4,32,64] dot(%x4, %g4), lhs_batch_dims={{1}}, rhs_batch_dims={{0}}, \
lhs_contracting_dims={{2}}, rhs_contracting_dims={{1}}, {ENC}
  %nought = f32[] constant(0)
  %sp = f32[32,64] reduce(%p, %nought), dimensions={{0}}, to_apply=%add, {ENC}
  %d = bf16[32,64] convert(%sp)"""
BY_VECTOR = f"""%xv = f32[32,64,64] broadcast(%xb), dimensions={{0,1}}
  %gv = f32[32,64,64] broadcast(%g), dimensions={{1,2}}
  %p = f32[32,64,64] multiply(%xv, %gv), {ENC}
  %nought = f32[] constant(0)
  %sp = f32[32,64] reduce(%p, %nought), dimensions={{1}}, to_apply=%add, {ENC}
  %d = bf16[32,64] convert(%sp)"""
ROUNDED_PARTS = {
    "nothing": {},
    "parts in bfloat16": {
        "reduce(%p, ": "reduce(%pw, ",
        "  %nought": (
            "  %pl = bf16[SHAPE] convert(%p)\n"
            "  %pw = f32[SHAPE] convert(%pl)\n  %nought"
        ),
    },
    "added up in bfloat16": {"to_apply=%add": "to_apply=%low_add"},
}


def compared_in_entry(decided, run):
    texts = (in_entry(one).replace(ADD, ADD + LOW_ADD) for one in (decided, run))
    return compared(*texts, name="step", device=GPU)


@pytest.mark.parametrize("edit", ROUNDED_PARTS)
@pytest.mark.parametrize("written", (IN_PARTS, BY_VECTOR), ids=("split", "by a vector"))
def test_parts_of_a_contraction_that_are_rounded_are_told(written, edit):
    assert WHOLE in DECIDED
    (shape,) = re.findall(r"%p = f32\[([\d,]*)\]", written)
    for old, new in ROUNDED_PARTS[edit].items():
        assert old in written
        written = written.replace(old, new.replace("SHAPE", shape))
    certificate = compared_in_entry(DECIDED, DECIDED.replace(WHOLE, written))
    told = [] if edit == "nothing" else [("enc", "dot_general", (REDUCED_LOW,))]
    drifts = certificate.drifts
    assert [(one.scope, one.primitive, one.real_drifts) for one in drifts] == told
    assert certificate.share_tied == 1


def test_parts_may_be_added_up_by_each_reader():
    twice = IN_PARTS + (
        "\n  %sp2 = f32[32,64] reduce(%p, %nought), dimensions={0}, to_apply=%add, "
        f"{ENC}\n  %d2 = bf16[32,64] convert(%sp2)"
    )
    run = DECIDED.replace(WHOLE, twice).replace("tanh(%d)", "tanh(%d2)")
    certificate = compared_in_entry(DECIDED, run)
    assert certificate.is_as_decided
    assert len([one for one in certificate.operations if one.scope == "enc"]) == 2


def test_a_sum_whose_additions_are_rounded_is_told():
    line = f"to_apply=%add, {SUM}"
    run = DECIDED.replace(line, line.replace("%add", "%low_add"))
    (one,) = compared_in_entry(DECIDED, run).drifts
    assert (one.primitive, one.real_drifts) == ("reduce_sum", (REDUCED_LOW,))


def matvec(w, x):
    return x @ w


def exact_matvec(w, x):
    return jnp.matmul(x, w, preferred_element_type=jnp.float32).astype(x.dtype)


@pytest.mark.parametrize(("name", "kind"), DESCRIBED)
@pytest.mark.parametrize("rows", ((), (1,)), ids=("vector", "one row"))
def test_products_with_a_vector_are_rounded_unless_float32_is_asked_for(
    name, kind, rows
):
    w = jax.ShapeDtypeStruct((512, 256), jnp.bfloat16)
    x = jax.ShapeDtypeStruct((*rows, 512), jnp.bfloat16)
    (one,) = certify(matvec, w, x, device=name).drifts
    assert one.real_drifts == (REDUCED_LOW,)
    assert one.compiled == (f"{LOW}, adding up bfloat16",)
    assert certify(exact_matvec, w, x, device=name).is_as_decided


@pytest.mark.parametrize("op_name", ("enc/dot_general", ""), ids=("named", "nameless"))
def test_sums_that_the_partitioner_adds_are_told_if_they_are_wide(op_name):
    given = of(op_name) if op_name else "replica_groups={}"
    low = f"%dp = bf16[32,64] dot(%xb, %g), {DIMS}, {ENC}\n  %d = "
    low += f"bf16[32,64] all-reduce(%dp), to_apply=%add, {given}"
    wide = low.replace("%d = bf16", "%dw = f32[32,64] convert(%dp)\n  %ds = f32")
    wide = wide.replace("all-reduce(%dp)", "all-reduce(%dw)")
    wide += "\n  %d = bf16[32,64] convert(%ds)"
    for run, told in ((low, set()), (wide, {WIDE})):
        certificate = compared_in_entry(DECIDED, DECIDED.replace(WHOLE, run))
        assert {d for one in certificate.drifts for d in one.real_drifts} == told


def test_sums_of_the_partitioner_that_are_rounded_before_their_result_are_told():
    wide = DECIDED.replace(WHOLE, WHOLE.replace("%d = bf16", "%df = f32"))
    wide = wide.replace("  %t =", "  %d = bf16[32,64] convert(%df)\n  %t =")
    part = wide.replace("%df = f32[32,64] dot", "%dp = f32[32,64] dot")
    exact = f"  %df = f32[32,64] all-reduce(%dp), to_apply=%add, {ENC}\n  %d ="
    low = "  %dl = bf16[32,64] convert(%dp)\n"
    low += f"  %d = bf16[32,64] all-reduce(%dl), to_apply=%add, {ENC}\n"
    runs = {
        part.replace("  %d =", exact): set(),
        part.replace("  %d = bf16[32,64] convert(%df)\n", low): {REDUCED_LOW},
    }
    for run, told in runs.items():
        certificate = compared_in_entry(wide, run)
        assert {d for one in certificate.drifts for d in one.real_drifts} == told


def largest(x):
    return jnp.argmax(x, 1), jnp.tanh(x) * 2


def widened(x):
    return jnp.tanh(x.astype(jnp.bfloat16)).astype(jnp.float32)


@pytest.mark.parametrize(("name", "kind"), DESCRIBED)
@pytest.mark.parametrize("fn", (largest, widened), ids=lambda fn: fn.__name__)
def test_results_of_any_structure_are_as_decided(name, kind, fn):
    certificate = certify(fn, MANY_XS, device=name)
    assert certificate.is_as_decided, certificate
    assert certificate.arrays


def split_over(these, shape, *axes, dtype=jnp.float32):
    mesh = jax.sharding.Mesh(np.asarray(these), ("d",))
    where = NamedSharding(mesh, P(*axes))
    return jax.ShapeDtypeStruct(shape, dtype, sharding=where)


@needs("libtpu")
def test_weights_may_be_gathered_as_a_matrix_unit_reads_them():
    ws = [split_over(devices.tpus("v5e:2x4"), (1024, 1024), "d")] * 2
    loss = lambda ws, x: jnp.sum(jnp.tanh(jnp.tanh(x @ ws[0]) @ ws[1]) ** 2)  # noqa: E731
    certificate = certify(jax.grad(loss), ws, ws[0])
    assert any(
        one.opcodes[0].startswith("all-gather") for one in certificate.operations
    )
    assert certificate.is_as_decided, certificate


@OF_GPUS
def test_what_xla_names_by_itself_is_tied_in_order():
    these = devices.gpus("h200", 8)
    embedding = split_over(these, (256, 256), "d")
    tokens = split_over(these, (64,), dtype=jnp.int32)
    loss = lambda e, i: jnp.sum(low(lambda e, i: e[i] @ e.T)(e, i) ** 2)  # noqa: E731
    certificate = certify(jax.grad(loss), embedding, tokens)
    assert certificate.is_as_decided, certificate
    assert certificate.share_tied == 1


def test_what_all_readers_round_is_written_wide():
    text = KEEPING.replace(
        "  %r =",
        f"  %q = f32[32,64] cosine(%h), {of('jvp(head)/cos')}\n"
        f"  %c = bf16[32,64] convert(%q), {of('jvp(head)/convert_element_type')}\n"
        "  %r =",
    )
    text = in_entry(text).replace("%w, %x, %wq, %r", "%x, %r")
    certificate = compared(text, text, name="step", device=GPU, large=1)
    found = {(one.primitive, one.drift) for one in certificate.arrays if one.drift}
    assert found == {("cos", WRITTEN_WIDE)}


# ------------------------------------------------------------------- more of bad input


def test_a_folder_in_place_of_a_lock_is_told(tmp_path):
    with pytest.raises(IsADirectoryError, match="Give the path of the lock file"):
        certify(layers, WS, X, lock=tmp_path)


@pytest.mark.parametrize("path", (None, 3, ""))
def test_what_is_no_path_of_a_lock_is_told(path):
    with pytest.raises(TypeError, match="`path` must be the path of a lock file"):
        certify(layers, WS, X).check(path)


@pytest.mark.parametrize("lock", (3, ""))
def test_a_lock_that_is_no_path_is_told(lock):
    with pytest.raises(TypeError, match="`lock` must be the path of a lock file"):
        certify(layers, WS, X, lock=lock)


@pytest.mark.parametrize("path", (None, 3, ""))
def test_what_is_no_path_to_write_to_is_told(path):
    with pytest.raises(TypeError, match="where the lock file is to be written"):
        certify(layers, WS, X).save(path)


def test_a_lock_that_can_not_be_written_is_told(tmp_path):
    with pytest.raises(IsADirectoryError, match="the lock file could not be written"):
        certify(layers, WS, X).save(tmp_path)


def test_what_is_exported_is_told():
    exported = jax.export.export(jax.jit(layers))(WS, X)
    with pytest.raises(TypeError, match=r"exported already.*function that was"):
        certify(exported, WS, X)


def test_the_dtypes_of_contractions_are_printed():
    assert f"as decided: 3 {FULL}" in str(certify(layers, WS, X))
    assert f"as decided: 3 {LOW}" in str(certify(low(layers), WS, X))


def test_arguments_of_what_is_lowered_are_told():
    with pytest.raises(TypeError, match="leave out `args`"):
        certify(jax.jit(layers).lower(WS, X), WS, X)


@pytest.mark.parametrize(
    ("op_name", "expected"),
    (
        ("jit(f)/dot_general", ("", "forward", "dot_general", None)),
        ("jit(f)/a/b/dot_general", ("a/b", "forward", "dot_general", None)),
        (
            "jit(f)/jvp(amp_rewritten)/a/while/body/closed_call/amp_equation:7/tanh",
            ("a", "forward", "tanh", 7),
        ),
        (
            "jit(f)/transpose(jvp(amp_rewritten))/a/jvp(amp_rewritten)/a/checkpoint/"
            "dot_general",
            ("a", "backward", "dot_general", None),
        ),
        (
            "jit(f)/transpose(jvp(a))/checkpoint/rematted_computation/mul",
            ("a", "recomputed", "mul", None),
        ),
        ("jit(f)/out/amp_rewritten/in/tanh", ("out/in", "forward", "tanh", None)),
        ("jit(f)/vmap(a)/dot_general", ("a", "forward", "dot_general", None)),
        ("", ("", "forward", "", None)),
    ),
)  # fmt: skip
def test_names_of_operations_are_read(op_name, expected):
    one = named(op_name)
    scope = "/".join([*one.outer, *one.inner])
    assert (scope, one.phase, one.primitive, one.step) == expected


# ------------------------------------------------------------ what attacks have found


def chained(w, x):
    return jnp.mean(jnp.tanh((x @ w) @ w) ** 2)


def read_in_two_dtypes(w, x):
    y = lax.dot(x.astype("bfloat16"), w.astype("bfloat16"), preferred_element_type="f4")
    return jnp.mean(jnp.tanh(y @ w) ** 2)


@needs("libtpu")
@pytest.mark.parametrize("fn", (chained, read_in_two_dtypes))
def test_a_result_that_only_matrix_units_read_may_be_rounded_as_they_do(fn):
    certificate = certify(jax.grad(fn, (0, 1)), WS[0], X, device="v5e")
    assert certificate.is_as_decided, certificate
    assert certificate.share_tied == 1


@needs("libtpu")
@pytest.mark.parametrize("argnums", ((0,), (1,), (0, 1)))
def test_gradients_of_ragged_products_are_tied_on_tpus(argnums):
    def loss(x, w, sizes):
        return jnp.sum(jnp.tanh(lax.ragged_dot(x, w, sizes)))

    x, w = jax.ShapeDtypeStruct((64, 128), jnp.float32), jnp.ones((4, 128, 64))
    sizes = jax.ShapeDtypeStruct((4,), jnp.int32)
    certificate = certify(jax.grad(low(loss), argnums), x, w, sizes, device="v5e")
    found = contractions(certificate)
    assert certificate.is_as_decided, certificate
    assert certificate.share_tied == 1
    assert len(found) == 1 + len(argnums) and all(one.opcodes for one in found)


def test_what_is_split_is_tied_by_its_scope_before_its_size():
    def loss(w, v, x):
        with jax.named_scope("low"):
            x = lax.dot(
                x.astype("bfloat16"), w.astype("bfloat16"), preferred_element_type="f4"
            )
        with jax.named_scope("high"):
            return jnp.mean(jnp.tanh(x @ v) ** 2)

    these = jax.devices()[:2]
    # Split, the first product is as large as the second one is whole.
    w, v = split_over(these, (64, 64), "d"), split_over(these, (64, 32), "d")
    x = split_over(these, (32, 64))
    certificate = certify(jax.grad(loss, (0, 1, 2)), w, v, x)
    assert certificate.is_as_decided, certificate
    assert [one.scope for one in contractions(certificate)].count("high") == 3


def test_positions_that_xla_computes_are_no_contractions():
    q = split_over(jax.devices()[:4], (1, 32, 4, 16), None, "d")
    loss = lambda q: jnp.sum(jax.nn.dot_product_attention(q, q, q))  # noqa: E731
    certificate = certify(jax.grad(loss), q)
    assert certificate.is_as_decided, certificate
    assert len(contractions(certificate)) == 5
    assert all(one.opcodes for one in contractions(certificate))


def test_a_ring_may_send_what_a_cpu_did_not_round():
    mesh = jax.sharding.Mesh(np.asarray(jax.devices()[:4]), ("d",))
    ring = [(i, (i + 1) % 4) for i in range(4)]

    def body(w, x):
        step = lambda c, _: (lax.ppermute(jnp.tanh(c @ w), "d", ring), None)  # noqa: E731
        return lax.scan(step, x, None, length=4)[0]

    specs = dict(in_specs=(P(), P("d")), out_specs=P("d"))
    ring_of = jax.shard_map(body, mesh=mesh, **specs)
    loss = lambda w, x: jnp.sum(ring_of(w, x))  # noqa: E731
    w = split_over(mesh.devices, (32, 32))
    x = split_over(mesh.devices, (16, 32), "d")
    certificate = certify(jax.grad(low(loss)), w, x)
    assert certificate.is_as_decided, certificate


def test_a_sum_whose_result_is_rounded_is_told():
    def text(rounds, compiles):
        def step(x):
            s = jnp.sum(jnp.exp(x), -1, keepdims=True)
            s = lax.reduce_precision(s, 8, 7) if rounds else s
            return x / s

        lowered = jax.jit(step).lower(X)
        if compiles:
            return lowered.compile().as_text()
        return lowered.as_text("hlo", debug_info=True)

    def drifts(decided, compiled):
        certificate = compared(
            text(decided, False), text(compiled, True), name="", device=jax.devices()[0]
        )
        return {drift for one in certificate.drifts for drift in one.drifts}

    assert drifts(False, True) == {REDUCED_LOW}
    assert not drifts(False, False) and not drifts(True, True)


@pytest.mark.parametrize(
    "total",
    (
        lambda x: jax.ops.segment_sum(jnp.exp(x), jnp.arange(64) % 8, 8),
        lambda x: jax.grad(lambda e: jnp.sum(jnp.sin(e[jnp.arange(8)])))(x),
    ),
    ids=("segment_sum", "gradient of an embedding"),
)
def test_a_scatter_whose_result_is_rounded_is_told(total):
    # Older emitters, which tests use, write a loop in its place.
    older = "--xla_cpu_use_fusion_emitters=false" in xla_flags.QUICK
    options = {"xla_cpu_use_fusion_emitters": True} if older else {}

    def step(rounds):
        def fn(x):
            s = total(x)
            return jnp.tanh(lax.reduce_precision(s, 8, 7) if rounds else s)

        return jax.jit(fn).lower(X)

    def drifts(decided, compiled):
        before = step(decided).as_text("hlo", debug_info=True)
        after = step(compiled).compile(options).as_text()
        certificate = compared(before, after, name="", device=jax.devices()[0])
        return {drift for one in certificate.drifts for drift in one.drifts}

    assert drifts(False, True) == {REDUCED_LOW}
    assert not drifts(False, False) and not drifts(True, True)


def summed_twice(w, x):
    return jnp.mean(jnp.sum(jnp.abs(x.reshape(4, 16, 64) @ w), -1))


def balanced(w, x):
    """The load of experts, as losses of their routers have it."""
    chances = jax.nn.softmax(x @ w)
    chosen = jax.nn.one_hot(lax.top_k(chances, 2)[1], 64)
    return jnp.sum(chances.mean(0) * chosen.sum(1).mean(0))


@pytest.mark.parametrize("fn", (summed_twice, balanced))
def test_a_sum_of_sums_may_become_one(fn):
    certificate = certify(low(fn), WS[0], X)
    assert certificate.is_as_decided, certificate


@OF_GPUS
@pytest.mark.parametrize("groups", (4, 2, 1))
def test_contractions_that_became_one_read_the_same_array(groups):
    """Attention whose keys and values have fewer heads than queries."""

    def attention(p, x):
        batch, length, dim = x.shape
        q = (x @ p["q"]).reshape(batch, length, groups, 4 // groups, dim // 4)
        k, v = ((x @ p[n]).reshape(batch, length, groups, dim // 4) for n in "kv")
        scores = jax.nn.softmax(jnp.einsum("btghd,bsgd->bghts", q, k) / dim**0.5)
        mixed = jnp.einsum("bghts,bsgd->btghd", scores, v)
        return jnp.mean((mixed.reshape(x.shape) @ p["o"]) ** 2)

    shapes = dict(q=(64, 64), k=(64, 16 * groups), v=(64, 16 * groups), o=(64, 64))
    params = {n: jax.ShapeDtypeStruct(s, jnp.float32) for n, s in shapes.items()}
    x = jax.ShapeDtypeStruct((8, 16, 64), jnp.float32)
    certificate = certify(jax.grad(low(attention)), params, x, device="h200")
    assert certificate.is_as_decided, certificate
    assert certificate.share_tied == 1


def test_sizes_that_are_not_known_yet_are_told():
    rows = jax.ShapeDtypeStruct((*jax.export.symbolic_shape("n"), 64), jnp.float32)
    exported = jax.export.export(jax.jit(lambda x, w: jnp.tanh(x @ w)))(rows, WS[0])
    with pytest.raises(ValueError, match=r"symbolic sizes.*the function that was exp"):
        certify(lambda x, w: exported.call(x, w), X, WS[0])


def test_a_scope_may_look_like_a_size_that_is_not_known():
    def fn(ws, x):
        with jax.named_scope("f32[?,64]"):
            return layers(ws, x)

    assert certify(fn, WS, X).is_as_decided


def test_symbolic_shapes_of_arguments_are_told():
    rows = jax.ShapeDtypeStruct((*jax.export.symbolic_shape("n"), 64), jnp.float32)
    with pytest.raises(ValueError, match=r"symbolic shape \(n, 64\).*of the sizes"):
        certify(lambda x: x @ x.T, rows)


def prints(x):
    jax.debug.print("{}", x[0, 0])
    return x @ x


def calls_back(x):
    return jax.pure_callback(lambda a: a, X, x) @ x


@OF_GPUS
@pytest.mark.parametrize("step", (prints, calls_back))
def test_callbacks_can_not_be_lowered_for_a_gpu_that_is_not_there(step):
    with pytest.raises(ValueError, match=r"calls Python back.*Leave these calls out"):
        certify(step, X, device="h200")


@pytest.mark.rest
def test_a_cache_of_compiled_programs_does_not_exchange_names(tmp_path):
    program = """
import sys
import jax
import jax.numpy as jnp
from jaxamp_like import certify

jax.config.update("jax_compilation_cache_dir", sys.argv[1])
jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)
jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)

def loss(first):
    def fn(ws, x):
        for i, w in enumerate(ws):
            dtype = "bfloat16" if i else "float32"
            with jax.named_scope(f"layer_{i + first}"):
                x = jnp.tanh((x.astype(dtype) @ w.astype(dtype)).astype("float32"))
        return jnp.mean(x**2)
    return jax.grad(fn)

for first in (0, 1):  # the same program but for its names
    print(certify(loss(first), [jnp.ones((32, 32))] * 3, jnp.ones((16, 32))).drifts)
"""
    command = [sys.executable, "-c", program, str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["()", "()"]
