"""Weights that are gathered under rules that quantise: in 8 bits, the same numbers."""

import contextlib
from typing import Any

import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
import pytest
from jax import lax
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec as P

from benchmarks import collectives, roofline
from jaxamp_like import amp
from jaxamp_like._hlo import text as hlo
from jaxamp_like._jax import raw, subjaxprs, varying_over
from jaxamp_like.presets import full_sums_over_devices, quantised
from jaxamp_like.rules import float8, int8, mxfp8
from tests.programs import error
from tests.test_many_devices import in_mesh, reshard

pytestmark = pytest.mark.rest

N, DIM, HIDDEN, ROWS = 8, 64, 256, 64
FLOAT8 = float8(where=None)
RULES = {
    "float8": FLOAT8,
    "float8 by rows": float8(granularity="row", where=None),
    "int8": int8(where=None),
    "mxfp8": mxfp8(emulate=True, where=None),
}
SPLIT = {"up": P(None, "data"), "down": P("data", None)}
SPECS = SPLIT, P("data")


def loss(w, x):
    h = jax.nn.gelu(x @ w["up"])
    return jnp.mean(jnp.square(h @ w["down"] - x))


def twice(w, x):
    for _ in range(2):
        x = jax.nn.gelu(x @ w["up"]) @ w["down"]
    return jnp.mean(jnp.square(x))


def drawn():
    up = jr.normal(jr.key(1), (DIM, HIDDEN)) / DIM**0.5
    down = jr.normal(jr.key(2), (HIDDEN, DIM)) / HIDDEN**0.5
    x = jr.normal(jr.key(3), (ROWS, DIM))
    # The largest number of each weight lies on one device.
    return {"up": up.at[3, 5].set(7.0), "down": down.at[-1, 2].set(-5.0)}, x


def mesh(kind=AxisType.Auto, devices=None):
    devices = jax.devices()[:N] if devices is None else devices
    return Mesh(np.array(devices), ("data",), axis_types=(kind,))


def gather(w):
    up = lax.all_gather(w["up"], "data", axis=1, tiled=True)
    return {"up": up, "down": lax.all_gather(w["down"], "data", tiled=True)}


def gathered(w, x):
    return loss(gather(w), x)


def gathered_transposed(w, x):
    up = lax.all_gather(w["up"].T, "data", tiled=True).T
    down = lax.all_gather(w["down"], "data", tiled=True)
    return loss({"up": up, "down": down}, x)


def gathered_as_new_axes(w, x):
    up = lax.all_gather(w["up"], "data", axis=1)
    down = lax.all_gather(w["down"], "data")
    h = jax.nn.gelu(jnp.einsum("bk,kdh->bdh", x, up))
    return jnp.mean(jnp.square(jnp.einsum("bdh,dhk->bk", h, down) - x))


def gathered_in_checkpoint(w, x):
    return jax.checkpoint(gathered)(w, x)


def gathered_before_checkpoint(w, x):
    return jax.checkpoint(loss)(gather(w), x)


def gathered_before_call(w, x):
    return jax.jit(loss)(gather(w), x)


def gathered_before_loop(w, x):
    w = gather(w)

    def step(x, _):
        return jax.nn.gelu(x @ w["up"]) @ w["down"], None

    return jnp.mean(jnp.square(lax.scan(step, x, length=2)[0]))


def gathered_in_loop(w, x):
    def step(x, w):
        w = gather(w)
        return jax.nn.gelu(x @ w["up"]) @ w["down"], None

    stacks = jax.tree.map(lambda w: jnp.stack([w, w]), w)
    return jnp.mean(jnp.square(lax.scan(step, x, stacks)[0]))


BY_HAND = {
    fn.__name__.removeprefix("gathered").strip("_") or "plain": (fn, alone)
    for fn, alone in {
        gathered: loss,
        gathered_transposed: loss,
        gathered_as_new_axes: loss,
        gathered_in_checkpoint: loss,
        gathered_before_checkpoint: loss,
        gathered_before_call: loss,
        gathered_before_loop: twice,
        gathered_in_loop: twice,
    }.items()
}


def over_devices(body, where):
    def per_device(w, x):
        return lax.pmean(body(w, x), "data")

    return jax.shard_map(per_device, mesh=where, in_specs=SPECS, out_specs=P())


def constrained(where):
    def fn(w, x):
        whole = NamedSharding(where, P())
        return loss(
            jax.tree.map(lambda w: lax.with_sharding_constraint(w, whole), w), x
        )

    return fn


def by_types(where):
    def fn(w, x):
        return loss(jax.tree.map(lambda w: reshard(w, P()), w), x)

    return fn


def under(rule, fn):
    return amp(fn, compute_dtype="bfloat16", amp_policy=quantised(rule))


def placed(where, args):
    at = jax.tree.map(lambda spec: NamedSharding(where, spec), SPECS)
    return jax.tree.map(jax.device_put, args, at)


def on(where):
    is_explicit = AxisType.Explicit in where.axis_types
    return in_mesh(where) if is_explicit else contextlib.nullcontext()


def eqns(jaxpr):
    for eqn in raw(jaxpr).eqns:
        yield eqn
        for inner in subjaxprs(eqn.params):
            yield from eqns(inner)


def moved(fn, args, name):
    """The dtypes of matrices that a primitive moves."""
    found = (
        eqn for eqn in eqns(jax.make_jaxpr(fn)(*args)) if eqn.primitive.name == name
    )
    return [x.aval.dtype.name for eqn in found for x in eqn.invars if x.aval.ndim > 1]


@pytest.mark.sample(3)
@pytest.mark.parametrize("way", BY_HAND)
def test_in_shard_map_float8_is_gathered_and_scattered_low(way):
    fn, alone = BY_HAND[way]
    mixed, args = under(FLOAT8, over_devices(fn, mesh())), drawn()
    step = jax.value_and_grad(mixed)
    assert set(moved(step, args, "all_gather")) == {"float8_e4m3fn"}
    assert set(moved(step, args, "reduce_scatter")) == {"bfloat16"}
    results = jax.jit(step)(*args)
    exact = jax.value_and_grad(alone)(*args)
    one = jax.jit(jax.value_and_grad(under(FLOAT8, alone)))(*args)
    assert error(results, exact) < 1.1 * error(one, exact)


@pytest.mark.sample(5)
@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("way", ("plain", "transposed", "as_new_axes", "before_loop"))
def test_numbers_are_those_of_one_device(rule, way):
    """Scales are those of the whole weight, and no rounding comes before."""
    fn, alone = BY_HAND[way]
    (w, x), where = drawn(), mesh()
    specs = SPLIT, P()

    def body(w, x):
        return fn(w, varying_over(x, ["data"]))[None]

    everywhere = jax.shard_map(body, mesh=where, in_specs=specs, out_specs=P("data"))
    mixed = under(RULES[rule], everywhere)
    results = jax.jit(mixed)(w, x)
    one = jax.jit(under(RULES[rule], alone))(w, x)
    np.testing.assert_allclose(results, np.full(N, one), rtol=1e-6)


@pytest.mark.sample(3)
@pytest.mark.parametrize(
    "way", ("plain", "as_new_axes", "in_checkpoint", "before_loop")
)
def test_gradients_by_blocks_are_those_of_one_device(way):
    """Weights are rounded twice: along the sums of either pass."""
    fn, alone = BY_HAND[way]
    step, args = (
        jax.value_and_grad(under(RULES["mxfp8"], over_devices(fn, mesh()))),
        drawn(),
    )
    one = jax.jit(jax.value_and_grad(under(RULES["mxfp8"], alone)))(*args)
    assert error(jax.jit(step)(*args), one) < 4e-3  # sums over devices are bfloat16


@pytest.mark.parametrize("kind", ("constraint", "types"))
def test_what_is_placed_whole_is_sent_in_float8(kind):
    is_explicit = kind == "types"
    where = mesh(AxisType.Explicit if is_explicit else AxisType.Auto)
    fn = by_types(where) if is_explicit else constrained(where)
    name = "reshard" if is_explicit else "sharding_constraint"
    mixed, args = under(FLOAT8, fn), placed(where, drawn())
    with on(where):
        sent = moved(jax.value_and_grad(mixed), args, name)
        results = jax.jit(jax.value_and_grad(mixed))(*args)
    # There the numbers, back the cotangents.
    assert sorted(sent) == ["bfloat16"] * 2 + ["float8_e4m3fn"] * 2
    one = jax.jit(jax.value_and_grad(under(FLOAT8, loss)))(*drawn())
    assert error(results, one) < 1e-3


def read_elsewhere(w, x):
    whole = gather(w)
    return loss(whole, x) + jnp.sum(whole["up"]) * 1e-3


def returned(w, x):
    whole = gather(w)
    return loss(whole, x) + lax.optimization_barrier(whole["up"])[0, 0]


def gathered_in_groups(w, x):
    groups = [[0, 1, 2, 3], [4, 5, 6, 7]]
    up = lax.all_gather(w["up"], "data", axis_index_groups=groups, axis=1, tiled=True)
    return loss({"up": up, "down": w["down"][:1].repeat(HIDDEN // 2, 0)}, x)


@pytest.mark.parametrize("fn", (read_elsewhere, returned, gathered_in_groups))
def test_what_others_read_is_sent_as_it_is(fn):
    w, x = drawn()
    body = jax.shard_map(
        lambda w, x: fn(w, x)[None],
        mesh=mesh(),
        in_specs=SPECS,
        out_specs=P("data"),
        check_vma=fn is not gathered_in_groups,
    )
    sent = moved(under(FLOAT8, body), (w, x), "all_gather")
    assert not sent[0].startswith("float8")
    results = jax.jit(under(FLOAT8, body))(w, x)
    assert error(results, jax.jit(body)(w, x)) < 0.05


def test_two_gathers_after_each_other_send_the_same_numbers():
    where = jax.make_mesh((2, 4), ("data", "model"), axis_types=(AxisType.Auto,) * 2)

    def body(w, x):
        w = lax.all_gather(w, "model", axis=1, tiled=True)
        w = lax.all_gather(w, "data", axis=0, tiled=True)
        return (x @ w)[None, None]

    (w, x), specs = drawn(), (P("data", "model"), P())
    both = jax.shard_map(body, mesh=where, in_specs=specs, out_specs=P("data", "model"))
    mixed = under(FLOAT8, both)
    assert moved(mixed, (w["up"], x), "all_gather") == ["float8_e4m3fn"] * 2
    results = jax.jit(mixed)(w["up"], x)
    one = jax.jit(under(FLOAT8, lambda w, x: x @ w))(w["up"], x)
    for device in np.ndindex(2, 4):
        np.testing.assert_array_equal(results[device], one)


def test_activations_are_sent_as_numbers_too():
    """Rows that all devices read, as in sequence parallelism."""

    def body(w, x):
        x = jnp.tanh(lax.all_gather(jnp.tanh(x), "data", tiled=True) @ w)
        return lax.pmean(jnp.mean(x**2), "data")

    specs = P(None, "data"), P("data")
    fn = jax.shard_map(body, mesh=mesh(), in_specs=specs, out_specs=P())
    w, x = drawn()
    step = jax.value_and_grad(under(FLOAT8, fn), (0, 1))
    assert set(moved(step, (w["up"], x), "all_gather")) == {"float8_e4m3fn"}
    exact = jax.value_and_grad(fn, (0, 1))(w["up"], x)
    assert error(jax.jit(step)(w["up"], x), exact) < 0.1


def test_gradients_are_summed_in_full_where_that_is_asked_for():
    policy = full_sums_over_devices() | {lax.dot_general_p: FLOAT8}
    fn = over_devices(gathered, mesh())
    step = jax.value_and_grad(amp(fn, compute_dtype="bfloat16", amp_policy=policy))
    assert set(moved(step, drawn(), "all_gather")) == {"float8_e4m3fn"}
    assert set(moved(step, drawn(), "reduce_scatter")) == {"float32"}


def test_an_overflow_is_seen_on_all_devices():
    (w, x), where = drawn(), mesh()
    w["down"] = w["down"].at[0, 0].set(jnp.inf)
    mixed = under(FLOAT8, over_devices(gathered, where))
    value, grads = jax.jit(jax.value_and_grad(mixed))(w, x)
    assert not jnp.isfinite(value)
    assert not jnp.isfinite(grads["up"]).any()


def test_it_runs_under_vmap():
    w, x = drawn()
    ws = jax.tree.map(lambda w: jnp.stack([w, 2 * w]), w)
    mixed = under(FLOAT8, over_devices(gathered, mesh()))
    many = jax.jit(jax.vmap(mixed, (0, None)))(ws, x)
    each = [jax.jit(mixed)(jax.tree.map(lambda w, i=i: w[i], ws), x) for i in (0, 1)]
    np.testing.assert_allclose(many, each, rtol=1e-3)


def sent_on_gpus(fn, kind="all-gather", axis=AxisType.Auto):
    """What code for GPUs sends by one kind, in bytes for each number of the weights."""
    where = mesh(axis, collectives.described_devices(N))
    at = jax.tree.map(lambda spec: NamedSharding(where, spec), SPECS)
    args = jax.tree.map(
        lambda x, at: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=at), drawn(), at
    )
    with on(where):
        compiled: Any = jax.jit(fn(where)).lower(*args).compile()
    sent = {}
    for one in collectives.collectives(hlo.parse(compiled.as_text()), N):
        if one.kind == kind:
            sent[one.dtype] = sent.get(one.dtype, 0) + one.sent * one.times
    whole = 2 * DIM * HIDDEN * (N - 1) / N
    return {dtype: sent / whole for dtype, sent in sent.items()}


on_gpus = pytest.mark.skipif(
    not roofline.has_plugin(), reason="XLA's compiler for NVIDIA GPUs is not installed"
)


@on_gpus
@pytest.mark.parametrize("rule", RULES)
def test_forward_alone_gathers_8_bits_on_gpus(rule):
    sent = sent_on_gpus(lambda on: under(RULES[rule], over_devices(gathered, on)))
    assert sent.pop("s8" if rule == "int8" else "f8e4m3fn") == 1
    assert sum(sent.values()) < 0.05  # scales


@on_gpus
@pytest.mark.parametrize(
    "rule, way, numbers",
    [
        ("float8", "plain", 1),
        ("float8", "in_checkpoint", 2),
        ("mxfp8", "plain", 1.5),  # of two weights, one is read by the backward pass
        ("mxfp8", "in_checkpoint", 2.5),
    ],
)
def test_training_gathers_8_bits_on_gpus(rule, way, numbers):
    def step(on):
        fn = over_devices(BY_HAND[way][0], on)
        return jax.value_and_grad(under(RULES[rule], fn))

    sent = sent_on_gpus(step)
    assert sent.pop("f8e4m3fn") == numbers
    assert sum(sent.values()) < 0.1  # scales


@on_gpus
@pytest.mark.parametrize("kind", ("constraint", "types"))
def test_gradients_of_what_is_placed_whole_are_scattered(kind):
    """Scales multiply them after: XLA merges the sum with taking a part of it."""
    make, axis = {
        "constraint": (constrained, AxisType.Auto),
        "types": (by_types, AxisType.Explicit),
    }[kind]

    def step(on):
        def sharded(w, x):
            value, grads = jax.value_and_grad(under(FLOAT8, make(on)))(w, x)
            at = jax.tree.map(lambda spec: NamedSharding(on, spec), SPLIT)
            if kind == "constraint":
                grads = jax.tree.map(lax.with_sharding_constraint, grads, at)
            return value, grads

        return sharded

    assert sent_on_gpus(step, "all-gather", axis)["f8e4m3fn"] == 1
    assert sent_on_gpus(step, "reduce-scatter", axis) == {"bf16": 2}
