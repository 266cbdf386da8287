"""The mean of gradients over devices in few bits: what it is, sends and keeps."""

from typing import Any

import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
import optax
import pytest
from jax import lax
from jax.sharding import AxisType, PartitionSpec as P

from jaxamp_like import amp, enable_amp
from jaxamp_like._jax import equations, varying_over
from jaxamp_like.storage import LowBitMeanState, low_bit_mean
from tests.programs import error

pytestmark = [pytest.mark.rest, pytest.mark.sample(5)]

N = 8
# The bytes that a number is sent as, twice, and the error of a mean, of Gaussian
# numbers: with 3 bits of mantissa 2.6 % for each rounding.
FORMATS = {
    "bfloat16": (2, 0.003),
    "int8": (1, 0.02),
    "float8": (1, 0.04),
    "int4": (0.5, 0.2),
}
AXES = {"data": (N,), ("data", "model"): (2, 4)}


def mesh_of(axes: Any) -> Any:
    names = axes if isinstance(axes, tuple) else (axes,)
    types = (AxisType.Auto,) * len(names)
    return jax.make_mesh(AXES[axes], names, axis_types=types)


def on_devices(fn: Any, axes: Any, in_specs: Any, out_specs: Any, **options: Any):
    specs = {"in_specs": in_specs, "out_specs": out_specs}
    return jax.jit(jax.shard_map(fn, mesh=mesh_of(axes), **specs, **options))


def started(mean: Any, axes: Any, params: Any) -> Any:
    return on_devices(mean.init, axes, P(), P(axes))(params)


def averaged(mean: Any, axes: Any = "data", **options: Any) -> Any:
    """The mean of gradients, of which each has a first axis of devices."""

    def local(grads: Any, state: Any) -> Any:
        return mean.update(jax.tree.map(lambda g: g[0], grads), state)

    specs = (P(axes), P(axes)), (P(), P(axes))
    return on_devices(local, axes, *specs, **options)


PARAMS: dict[str, jax.Array] = {
    "w": jnp.ones((100, 101)),
    "low": jnp.ones((64, 64), jnp.bfloat16),
    "b": jnp.ones(5),
}


def drawn(seed: int) -> dict[str, jax.Array]:
    """Gradients of all devices: what they have in common, and noise."""

    def one(p: Any) -> Any:
        common, noise = (
            jr.normal(jr.key(s), shape)
            for s, shape in ((99, p.shape), (seed, (N, *p.shape)))
        )
        return (common + noise).astype(p.dtype)

    return jax.tree.map(one, PARAMS)


def mean_of(grads: Any) -> Any:
    return jax.tree.map(lambda g: np.asarray(g, np.float64).mean(0), grads)


@pytest.mark.parametrize("axes", AXES, ids=str)
@pytest.mark.parametrize("format", FORMATS)
def test_the_mean_and_what_rounding_takes_from_it(format, axes):
    mean = low_bit_mean(axes, format)
    state = started(mean, axes, PARAMS)
    assert jax.tree.map(jnp.shape, state.errors) == {
        "w": (N, 100, 101),
        "low": (N, 64, 64),
        "b": None,
    }
    average = averaged(mean, axes)
    totals = wanted = jax.tree.map(lambda p: np.zeros(p.shape), PARAMS)
    for seed in range(16):
        means, state = average(grads := drawn(seed), state)
        expected = mean_of(grads)
        for name, (new, old) in {n: (means[n], PARAMS[n]) for n in means}.items():
            assert new.dtype == old.dtype
            worst = 1e-6 if name == "b" else FORMATS[format][1]
            # What is fed back makes a mean of later steps err by more.
            assert error(new, expected[name]) < worst * (1 if seed == 0 else 2)
        totals = jax.tree.map(lambda t, m: t + np.asarray(m, np.float64), totals, means)
        wanted = jax.tree.map(np.add, wanted, expected)
    assert error(totals["w"], wanted["w"]) < FORMATS[format][1] / 8
    # What is left of the sum is what is to be added: of all devices, over their number.
    left = np.asarray(state.errors["w"], np.float64).mean(0)
    assert np.allclose(totals["w"] + left, wanted["w"], atol=1e-4)


@pytest.mark.parametrize("format", FORMATS)
def test_what_is_sent(format):
    mean = low_bit_mean("data", format)
    state = started(mean, "data", PARAMS)
    average = averaged(mean)
    sent = [
        eqn.invars[0].aval  # pyright: ignore
        for eqn in equations(jax.make_jaxpr(average)(drawn(0), state).jaxpr)
        if eqn.primitive.name.startswith(("all_to_all", "all_gather"))
    ]
    # A device gathers a row of each other device, and gets one of each before.
    rows = sum(
        x.size * x.dtype.itemsize * (1 if x.ndim and x.shape[0] == N else N)
        for x in sent
    )
    numbers = sum(p.size for p in PARAMS.values())
    assert rows <= 2 * numbers * (FORMATS[format][0] + 4 / 256) * 1.05
    program = average.lower(drawn(0), state).compile().as_text()
    floats = [line for line in program.splitlines() if "all-to-all(" in line]
    assert floats and not any("f16[" in line or "f32[" in line for line in floats)


def test_without_errors():
    mean = low_bit_mean("data", error_feedback=False)
    state = started(mean, "data", PARAMS)
    assert state == LowBitMeanState(None)
    means, state = averaged(mean)(grads := drawn(0), state)
    assert error(means["w"], mean_of(grads)["w"]) < FORMATS["int8"][1]
    assert state == LowBitMeanState(None)


@pytest.mark.parametrize("bad", [jnp.nan, jnp.inf])
def test_a_step_that_is_skipped_leaves_the_errors(bad):
    mean = low_bit_mean("data")
    average = averaged(mean)
    _, state = average(drawn(0), started(mean, "data", PARAMS))
    for name in PARAMS:  # of each array, also of one that is sent as it is
        grads = drawn(1)
        grads[name] = grads[name].at[(3,) + (2,) * PARAMS[name].ndim].set(bad)
        means, new = average(grads, state)
        assert not np.isfinite(np.asarray(means[name], np.float32)).all()
        jax.tree.map(np.testing.assert_array_equal, new, state)
    _, new = average(drawn(1), state)
    assert not np.array_equal(new.errors["w"], state.errors["w"])


@pytest.mark.parametrize("shape", [(4099,), (3, 5, 7), (N,), (1,), (), (0, 3)], ids=str)
@pytest.mark.parametrize("block", [16, 17, 256])
@pytest.mark.parametrize("format", FORMATS)
def test_any_shape(format, block, shape):
    mean = low_bit_mean("data", format, block=block, min_size=0)
    params = jnp.ones(shape)
    grads = jr.normal(jr.key(0), (N, *shape))
    means, state = averaged(mean)(grads, started(mean, "data", params))
    assert means.shape == shape
    if not grads.size:
        assert state.errors is None
        return
    assert state.errors.shape == (N, *shape)
    left = np.asarray(state.errors).mean(0)
    assert np.allclose(means + left, grads.mean(0), atol=1e-5)


def test_training_with_mixed_precision():
    """Errors are fed back, so 4 bits find the minimum that a mean in full finds."""
    w, x = jr.normal(jr.key(0), (64, 64)) / 8, jr.normal(jr.key(1), (64, 64))
    y = jnp.tanh(x @ jr.normal(jr.key(2), (64, 64)) / 8)

    @amp(compute_dtype="bfloat16")
    def mixed(w: Any, x: Any, y: Any) -> Any:
        return jnp.mean((jnp.tanh(x @ w) - y) ** 2)

    def trained(means: Any, state: Any, spec: Any) -> Any:
        tx = optax.adam(1e-2)

        def step(w: Any, opt_state: Any, state: Any, x: Any, y: Any) -> Any:
            local = varying_over(w, ("data",))
            grads, state = means(jax.grad(mixed)(local, x, y), state)
            updates, opt_state = tx.update(grads, opt_state)
            return optax.apply_updates(w, updates), opt_state, state

        specs = (P(), P(), spec, P("data"), P("data")), (P(), P(), spec)
        run = on_devices(step, "data", *specs)
        found, opt_state = w, tx.init(w)
        for _ in range(100):
            found, opt_state, state = run(found, opt_state, state, x, y)
        return float(jnp.mean((jnp.tanh(x @ found) - y) ** 2))

    mean = low_bit_mean("data", "int4")
    low = trained(mean.update, started(mean, "data", w), P("data"))
    full = trained(lambda g, s: (lax.pmean(g, "data"), s), None, P())
    assert low < 1.2 * full + 1e-4


@pytest.mark.parametrize("how", ["pmap", "unchecked"])
def test_where_types_do_not_tell_what_varies(how):
    mean = low_bit_mean("data")
    grads = drawn(0)
    if how == "pmap":
        state = jax.pmap(lambda _: mean.init(PARAMS), axis_name="data")(jnp.arange(N))
        means, _ = jax.pmap(mean.update, axis_name="data")(grads, state)
        means = jax.tree.map(lambda x: x[0], means)
    else:
        state = started(mean, "data", PARAMS)
        means, _ = averaged(mean, check_vma=False)(grads, state)
    assert error(means["w"], mean_of(grads)["w"]) < FORMATS["int8"][1]


def test_one_device_rounds_nothing():
    mean = low_bit_mean(["data"], "int4")
    mesh = jax.make_mesh((1,), ("data",), axis_types=(AxisType.Auto,))
    specs = {"mesh": mesh, "in_specs": P(), "out_specs": P("data")}
    state = jax.shard_map(mean.init, **specs)(PARAMS)
    grads = drawn(0)["w"][:1]
    means, state = jax.shard_map(
        lambda g, s: mean.update(jax.tree.map(lambda x: x[0], g), s),
        mesh=mesh,
        in_specs=(P("data"), P("data")),
        out_specs=(P(), P("data")),
    )({n: p[None] for n, p in PARAMS.items()} | {"w": grads}, state)
    np.testing.assert_array_equal(means["w"], grads[0])


@pytest.mark.skipif(
    jax.__version_info__ < (0, 7), reason="XLA crashes on partly manual meshes"
)
def test_arrays_that_are_split_along_other_axes():
    kinds = (AxisType.Explicit,) * 2
    mesh = jax.make_mesh((4, 2), ("data", "model"), axis_types=kinds)
    place = jax.sharding.NamedSharding(mesh, P("data", None, "model"))
    grads = jax.device_put(np.asarray(jr.normal(jr.key(0), (4, 64, 128))), place)
    mean = low_bit_mean("data")

    def mapped(fn, **specs):
        return jax.jit(jax.shard_map(fn, mesh=mesh, axis_names={"data"}, **specs))

    init = mapped(mean.init, in_specs=P(), out_specs=P("data"))
    place = jax.sharding.NamedSharding(mesh, P(None, "model"))
    state = init(jax.device_put(jnp.ones((64, 128)), place))
    run = mapped(
        lambda grads, state: mean.update(grads[0], state),
        in_specs=(P("data"), P("data")),
        out_specs=(P(), P("data")),
    )
    means, state = run(grads, state)
    assert error(means, grads.mean(0)) < FORMATS["int8"][1]
    assert state.errors.shape == grads.shape
    for x in (means, state.errors):
        assert x.sharding.spec[-1] == "model"


def test_gradients_of_an_optimizer_that_scales_the_loss():
    w = jnp.ones((64, 64))
    mean, axis = low_bit_mean("data"), "data"

    def loss(w: Any, x: Any) -> Any:
        return jnp.mean((x @ w) ** 2)

    mixed, tx = enable_amp(
        loss, optax.sgd(0.1), compute_dtype="float16", axis_name=axis
    )

    def step(w: Any, opt_state: Any, state: Any, x: Any) -> Any:
        own = varying_over(w, (axis,))
        _, grads = tx.value_and_grad(mixed, opt_state)(own, x)
        grads, state = mean.update(grads, state)
        updates, opt_state = tx.update(grads, opt_state, w)
        return optax.apply_updates(w, updates), opt_state, state

    specs = (P(), P(), P(axis), P(axis)), (P(), P(), P(axis))
    run = on_devices(step, axis, *specs)
    x = jr.normal(jr.key(0), (N, 64))
    state = started(mean, axis, w)
    new, opt_state, state = run(w, tx.init(w), state, x)
    exact = w - 0.1 * jax.grad(loss)(w, x)
    assert error(new - w, exact - w) < FORMATS["int8"][1]
    bad = x.at[3, 0].set(jnp.inf)  # on one device
    skipped, _, after = run(new, opt_state, state, bad)
    np.testing.assert_array_equal(skipped, new)
    np.testing.assert_array_equal(after.errors, state.errors)


def test_mistakes():
    with pytest.raises(ValueError, match="no such axis is bound"):
        low_bit_mean("data").init(PARAMS)
    with pytest.raises(ValueError, match="Did you mean 'int8'"):
        low_bit_mean("data", "int88")
    with pytest.raises(ValueError, match="`block` must be an integer of at least 16"):
        low_bit_mean("data", block=3)
    mean = low_bit_mean("data")
    state = started(mean, "data", PARAMS)

    def summed(params: Any, state: Any, x: Any) -> Any:
        grads = jax.grad(lambda p: jnp.sum(p["w"]) * jnp.sum(x))(params)
        return mean.update(grads, state)

    specs = (P(), P("data"), P("data")), (P(), P("data"))
    with pytest.raises(ValueError, match=r"`updates\['\w+'\]` is the same on all dev"):
        on_devices(summed, "data", *specs)(PARAMS, state, jnp.ones(N))
    average = averaged(mean)
    with pytest.raises(TypeError, match="was given a dict"):
        average(drawn(0), drawn(0))
    with pytest.raises(ValueError, match="made for other parameters"):
        average(drawn(0), LowBitMeanState({"w": None}))
    other = averaged(low_bit_mean("data", min_size=10**6))
    with pytest.raises(ValueError, match=r"must have None on each device"):
        other(drawn(0), state)
