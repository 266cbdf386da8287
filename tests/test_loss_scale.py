"""Loss scaling: the state against a plain Python model, then each promise of a step."""

import dataclasses
import functools
import inspect
import pickle
import warnings

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
import optax
import pytest
from hypothesis import given, settings, strategies as st
from jax.sharding import NamedSharding, PartitionSpec as P

from jaxamp_like import (
    DynamicScalerState,
    all_finite,
    amp,
    dynamic_scale_grad,
    dynamic_scale_tx,
    dynamic_scale_value_and_grad,
)
from jaxamp_like.scaling import check_scaler

from .constructs import new_ref
from .scalers import GREATEST, LEAST, plain_scalers

pytestmark = pytest.mark.sample(6)

relaxed = settings(deadline=None, max_examples=60)
# Early versions of JAX have it as an experiment only.
enable_x64 = (
    jax.enable_x64 if hasattr(jax, "enable_x64") else jax.experimental.enable_x64
)


def assert_same(state, plain):
    got = {k: v.item() for k, v in state._asdict().items()}
    assert got == dataclasses.asdict(plain)


def types(tree):
    return jax.tree.map(lambda x: (x.dtype, x.shape, jnp.asarray(x).weak_type), tree)


TRACES = []


@jax.jit
@dynamic_scale_grad
def product_step(w, x):
    TRACES.append(x)
    return w * x


@relaxed
@given(plain_scalers(), st.lists(st.booleans(), max_size=40))
def test_state_follows_the_plain_model(plain, events):
    state = DynamicScalerState(**dataclasses.asdict(plain))
    before = types(state)
    for finite in events:
        x = jnp.array(1.0 if finite else jnp.inf)
        state, _ = product_step(jnp.array(1.0), x, dynamic_scaler_state=state)
        plain = plain.update(finite)
        assert_same(state, plain)
        assert LEAST <= float(state.scaler) <= GREATEST
        assert types(state) == before
    assert len(TRACES) <= 1  # over all examples: one program for all states


@pytest.mark.parametrize("bound, finite", [(LEAST, False), (GREATEST, True)])
def test_scale_stays_within_bounds_for_ever(bound, finite):
    state = DynamicScalerState(patience=1)
    many = jax.jit(
        lambda s: jax.lax.fori_loop(0, 1000, lambda _, s: s.update(finite), s)
    )
    assert many(state).scaler == bound
    grads = jnp.array(3.0, jnp.float32)
    for scaler in (0.0, LEAST / 2, bound, jnp.inf):  # a state from elsewhere, too
        leaves = [x if i != 2 else jnp.float32(scaler) for i, x in enumerate(state)]
        state = jax.tree.unflatten(jax.tree.structure(state), leaves)
        _, g = product_step(jnp.array(1.0), grads, dynamic_scaler_state=state)
        assert g == 3.0


@pytest.mark.parametrize("redo", [0, 3])
@pytest.mark.parametrize("jit", [jax.jit, eqx.filter_jit])
def test_one_compilation_for_all_states(jit, redo):
    traces = 0

    def loss(w, x):
        nonlocal traces
        traces += 1
        return (w * x).sum(), {"name": "loss"}

    step = dynamic_scale_value_and_grad(loss, redo_on_nan=redo, has_aux=True)
    step_of = jit(lambda state, x: step(jnp.ones(2), x, dynamic_scaler_state=state)[0])
    state = DynamicScalerState(patience=1)
    for x in (1.0, jnp.inf, jnp.nan, 1.0, 1.0, 1.0):
        state = step_of(state, jnp.full(2, x, jnp.float32))
    step_of(state._replace(scaler=8, count=3), jnp.ones(2))
    step_of(DynamicScalerState(7, 3, 2**20, 1, 2, 2**-20, 2**126, 1), jnp.ones(2))
    assert traces == 1


def half_loss(w, x):
    return w * x


REDO_STEPS = {
    n: jax.jit(dynamic_scale_value_and_grad(half_loss, redo_on_nan=n))
    for n in (1, 3, 20)
}


@relaxed
@given(plain_scalers(-20, 30), st.integers(-14, 15), st.sampled_from([*REDO_STEPS]))
def test_retry_follows_the_plain_model(plain, exponent, redo):
    state = DynamicScalerState(**dataclasses.asdict(plain))
    w, x = jnp.array(1.0, jnp.float16), jnp.array(2.0**exponent, jnp.float16)

    def is_finite(
        scaler,
    ):  # both the cotangent of the loss and the gradient are float16
        return max(scaler, scaler * 2.0**exponent) < 65520

    state, (value, g) = REDO_STEPS[redo](w, x, dynamic_scaler_state=state)
    assert_same(state, plain.redo(is_finite, redo))
    assert value == x and value.dtype == g.dtype == jnp.float16


def test_retry_finds_the_scale_that_works():
    w, x = jnp.array(1.0, jnp.float16), jnp.array(4.0, jnp.float16)
    state = DynamicScalerState(scaler=2**20)
    state, (_, g) = REDO_STEPS[20](w, x, dynamic_scaler_state=state)
    assert (g, state.scaler, state.total_resets, state.count) == (4, 2**13, 7, 1)


@pytest.mark.parametrize("redo, attempts", [(0, 1), (1, 2), (5, 6)])
def test_a_bad_batch_ends_after_its_tries_and_costs_one_step(redo, attempts):
    calls = []

    def loss(w, x):
        jax.debug.callback(lambda: calls.append(None))
        return (w * x).sum()

    step = jax.jit(dynamic_scale_value_and_grad(loss, redo_on_nan=redo))
    state, x = DynamicScalerState(), jnp.array([1.0, jnp.nan])
    for n in (1, 2, 3):
        state, (value, g) = step(jnp.ones(2), x, dynamic_scaler_state=state)
        jax.effects_barrier()
        assert len(calls) == n * attempts
        assert (state.scaler, state.total_resets) == (2 ** (15 - n), n)
        assert jnp.isnan(value) and jnp.isnan(g).tolist() == [False, True]


def test_no_attempt_is_repeated_at_the_minimum():
    calls = []

    def loss(w):
        jax.debug.callback(lambda: calls.append(None))
        return w * jnp.nan

    state = DynamicScalerState(scaler=4, min_scaler=1)
    step = dynamic_scale_grad(loss, redo_on_nan=1000)
    for total in (3, 5, 6, 7):  # at 4, 2 and 1; at 2 and 1; at 1 alone
        state, _ = step(jnp.array(1.0), dynamic_scaler_state=state)
        jax.effects_barrier()
        assert len(calls) == total
    assert state.stuck == 2


@pytest.mark.parametrize("wrap", [lambda f: f, jax.jit, amp], ids=["", "jit", "amp"])
def test_retry_of_what_writes_to_a_reference_is_refused(wrap):
    count = new_ref(jnp.array(0.0))

    def counted(w):
        count[...] = count[...] + 1
        return w**2

    def reads(w):
        own = new_ref(jnp.array(2.0))
        own[...] = own[...] + count[...]
        return w * own[...]

    state = DynamicScalerState(scaler=2.0**10)
    with pytest.raises(ValueError, match=r"(?s)`jax.Ref`.*`aux` \(`has_aux=True`\)"):
        dynamic_scale_grad(wrap(counted), redo_on_nan=2)(
            jnp.array(1.0), dynamic_scaler_state=state
        )
    count[...] = 0.0
    dynamic_scale_grad(wrap(counted))(jnp.array(1.0), dynamic_scaler_state=state)
    assert count[...] == 1
    _, grad = dynamic_scale_grad(wrap(reads), redo_on_nan=2)(
        jnp.array(1.0), dynamic_scaler_state=state
    )
    assert grad == 3


def test_retry_has_one_copy_of_the_gradient_code():
    def loss(w, x):
        return jnp.tanh(x @ w).sum()

    w, x, state = jnp.ones((3, 3)), jnp.ones((2, 3)), DynamicScalerState()

    def dots(redo):
        step = dynamic_scale_grad(loss, redo_on_nan=redo)
        run = jax.jit(lambda s: step(w, x, dynamic_scaler_state=s))
        program = str(jax.make_jaxpr(run)(state))
        return program.count("dot_general["), run.lower(state).as_text().count(".dot_")

    assert dots(0) == dots(5) and min(dots(0)) > 0


@pytest.mark.parametrize("redo", [0, 2])
def test_skipped_step_leaves_parameters_untouched(redo):
    optimizer = optax.apply_if_finite(optax.adam(0.1), max_consecutive_errors=100)
    grad = dynamic_scale_grad(lambda w, x: ((w * x) ** 2).sum(), redo_on_nan=redo)

    @jax.jit
    def train(w, x, opt, state):
        state, g = grad(w, x, dynamic_scaler_state=state)
        updates, opt = optimizer.update(g, opt, w)
        return optax.apply_updates(w, updates), opt, state

    w, state = jnp.array([1.0, 2.0]), DynamicScalerState()
    opt = optimizer.init(w)
    for x in (1.0, jnp.nan, 0.5, jnp.inf):
        new, new_opt, state = train(w, jnp.array([x, 1.0]), opt, state)
        untouched = not np.isfinite(x)
        assert np.array_equal(new, w) == untouched
        assert eqx.tree_equal(opt.inner_state, new_opt.inner_state) == untouched
        w, opt = new, new_opt
    assert state.total_resets == 2 and jnp.isfinite(w).all()


def mlp_loss(model, x, y):
    return ((jax.vmap(model)(x) - y) ** 2).mean()


MLP_STEPS = [
    eqx.filter_jit(dynamic_scale_value_and_grad(mlp_loss, redo_on_nan=n))
    for n in (0, 1)
]


@relaxed
@given(st.integers(-20, 20), st.integers(0, 2**16))
def test_power_of_two_scale_changes_no_bit(exponent, seed):
    keys = jr.split(jr.key(seed), 3)
    model = eqx.nn.MLP(3, 2, 4, 1, key=keys[0])
    x, y = jr.normal(keys[1], (5, 3)), jr.normal(keys[2], (5, 2))
    state = DynamicScalerState(scaler=2.0**exponent)
    for step in MLP_STEPS:
        _, wanted = step(model, x, y, dynamic_scaler_state=state._replace(scaler=1))
        _, got = step(model, x, y, dynamic_scaler_state=state)
        assert eqx.tree_equal(got, wanted)


def test_power_of_two_scale_gives_the_gradients_of_equinox():
    keys = jr.split(jr.key(0), 3)
    model = eqx.nn.MLP(3, 2, 4, 1, key=keys[0])
    x, y = jr.normal(keys[1], (5, 3)), jr.normal(keys[2], (5, 2))
    step = dynamic_scale_value_and_grad(mlp_loss)
    _, got = step(model, x, y, dynamic_scaler_state=DynamicScalerState())
    wanted = eqx.filter_value_and_grad(mlp_loss)(model, x, y)
    assert eqx.tree_equal(got, wanted, typematch=True)


@pytest.mark.parametrize("redo", [0, 2])
def test_any_scale_is_undone(redo):
    def loss(w):
        return (w**3).sum()

    w, state = jnp.linspace(-1.0, 1.0, 9), DynamicScalerState(scaler=1000.0 / 3)
    step = dynamic_scale_value_and_grad(loss, redo_on_nan=redo)
    _, (value, g) = step(w, dynamic_scaler_state=state)
    assert value == loss(w)  # as it was computed
    eps = float(jnp.finfo(jnp.float32).eps)
    assert np.allclose(g, 3 * w**2, rtol=4 * eps, atol=0)


TRANSFORMS = [jax.grad, jax.value_and_grad, jax.jacrev, jax.jacfwd]


@pytest.mark.sample(3)
@pytest.mark.parametrize("redo", [0, 2])
@pytest.mark.parametrize("has_aux", [False, True])
@pytest.mark.parametrize("argnums", [0, (0, 1), (1,)])
@pytest.mark.parametrize("transform", TRANSFORMS, ids=lambda f: f.__name__)
def test_results_have_the_form_of_the_transform(transform, argnums, has_aux, redo):
    def loss(w, b, x):
        value = (w["a"] * x + b.astype(x.dtype)).sum()
        return (value, {"x": x, "n": 3, "f": jnp.sin}) if has_aux else value

    args = {"a": jnp.arange(3.0)}, jnp.array(0.5, jnp.bfloat16), jnp.ones(3)
    scaled = dynamic_scale_tx(transform, redo)
    step = scaled(loss, argnums=argnums, has_aux=has_aux)
    state, results = step(*args, dynamic_scaler_state=DynamicScalerState())
    assert (state.count, state.scaler) == (1, 2**15)
    if has_aux and transform is jax.value_and_grad:
        (value, aux), grads = results
        results = value, grads
    elif has_aux:
        results, aux = results
    if has_aux:
        assert aux["n"] == 3 and aux["f"] is jnp.sin
        assert np.array_equal(aux["x"], args[2])
        has_aux = False
    wanted = transform(loss, argnums=argnums)(*args)
    assert eqx.tree_equal(results, wanted, typematch=True)


def test_options_may_be_bound_beforehand():
    transform = functools.partial(jax.value_and_grad, argnums=(0, 1))
    step = dynamic_scale_tx(lambda *args, **kwargs: jax.jit(transform(*args, **kwargs)))
    state = DynamicScalerState()
    state, (value, grads) = step(half_loss)(2.0, 3.0, dynamic_scaler_state=state)
    assert value == 6 and grads == (3, 2) and state.count == 1


@pytest.mark.parametrize("redo", [0, 2])
@pytest.mark.parametrize("filter", [False, True])
def test_aux_is_untouched_and_decides_nothing(filter, redo):
    key, array, names = jr.key(3), np.arange(3), ["a", None, object()]

    def loss(w, x):
        half = jnp.array([1, jnp.inf], jnp.float16)
        aux = dict(mask=-jnp.inf * x, half=half, key=key, array=array, names=names, n=7)
        return (w * x).sum(), aux | {"f": jnp.sin}

    step = dynamic_scale_grad(loss, has_aux=True, redo_on_nan=redo, filter=filter)
    w, x = jnp.ones(2), jnp.array([1.0, 2.0])
    state, (g, aux) = step(w, x, dynamic_scaler_state=DynamicScalerState())
    assert (state.total_resets, state.count) == (0, 1)
    assert np.array_equal(g, x) and jnp.isneginf(aux["mask"]).all()
    assert aux["half"].dtype == jnp.float16 and jnp.isinf(aux["half"]).any()
    assert np.array_equal(jr.key_data(aux["key"]), jr.key_data(key))
    assert aux["array"] is array and aux["names"] == names
    assert aux["n"] == 7 and aux["f"] is jnp.sin


@pytest.mark.parametrize("redo", [0, 2])
def test_model_with_static_leaves(redo):
    model = eqx.nn.MLP(2, "scalar", 4, 1, activation=jax.nn.tanh, key=jr.key(0))
    model = (model, "name", 3, jnp.arange(2), np.ones(1))

    def loss(model, x):
        mlp, _, n, ints, ones = model
        total = ints.astype(jnp.float32).sum() + ones.astype(jnp.float32).sum()
        return mlp(x) * n + total, {"model": model}

    x, state = jnp.ones(2), DynamicScalerState()
    step = eqx.filter_jit(dynamic_scale_grad(loss, has_aux=True, redo_on_nan=redo))
    state, (grads, aux) = step(model, x, dynamic_scaler_state=state)
    wanted, _ = eqx.filter_jit(eqx.filter_grad(loss, has_aux=True))(model, x)
    assert eqx.tree_equal(grads, wanted, rtol=1e-6)
    assert aux["model"][0].activation is model[0].activation
    assert aux["model"][1:3] == ("name", 3)


@pytest.mark.parametrize("redo", [0, 2])
def test_with_x64(redo):
    with enable_x64(True):
        w = {"f": jnp.linspace(0.0, 1.0, 7), "h": jnp.ones(7, jnp.bfloat16)}
        assert w["f"].dtype == jnp.float64

        def loss(w):
            return (jnp.sin(w["f"]) * w["h"].astype(jnp.float64)).sum()

        state = DynamicScalerState(patience=1)
        before = types(state)
        step = jax.jit(dynamic_scale_value_and_grad(loss, redo_on_nan=redo))
        for _ in range(2):
            state, results = step(w, dynamic_scaler_state=state)
            assert types(state) == before
        assert {x.dtype.name for x in state} == {"int32", "float32"}
        wanted = jax.jit(jax.value_and_grad(loss))(w)
        assert eqx.tree_equal(results, wanted, typematch=True)


@pytest.mark.rest
@pytest.mark.parametrize("redo", [0, 3])
def test_vmap_over_the_step(redo):
    step = dynamic_scale_value_and_grad(half_loss, redo_on_nan=redo)
    w, x = jnp.ones(4, jnp.float16), jnp.array([1, 2, jnp.nan, 16], jnp.float16)
    states = [DynamicScalerState(scaler=s) for s in (2**15, 2**15, 2**15, 2**12)]
    stacked = jax.tree.map(lambda *xs: jnp.stack(xs), *states)

    def member(state, w, x):
        return step(w, x, dynamic_scaler_state=state)

    together = jax.vmap(member)(stacked, w, x)
    for i, state in enumerate(states):
        alone = member(state, w[i], x[i])
        one = jax.tree.map(lambda a, i=i: a[i], together)
        for a, b in zip(jax.tree.leaves(one), jax.tree.leaves(alone), strict=True):
            assert np.array_equal(a, b, equal_nan=True) and a.dtype == b.dtype
    axes = jax.tree.map(lambda _: 0, stacked)  # a tree of this shape may hold anything
    assert jax.vmap(member, in_axes=(axes, 0, 0))(stacked, w, x)[0].count.shape == (4,)


@pytest.mark.parametrize("redo", [0, 2])
def test_complex_and_integer_parameters(redo):
    options = dict(filter=False, redo_on_nan=redo)
    state = DynamicScalerState()
    z = jnp.array(1.0 + 2.0j)

    step = dynamic_scale_value_and_grad(lambda z: z**2, holomorphic=True, **options)
    _, (value, g) = step(z, dynamic_scaler_state=state)
    assert value == z**2 and g == 2 * z and g.dtype == z.dtype

    step = dynamic_scale_grad(lambda z: jnp.abs(z) ** 2, **options)
    _, g = step(z, dynamic_scaler_state=state)
    assert np.allclose(g, jax.grad(lambda z: jnp.abs(z) ** 2)(z), rtol=1e-6)

    def loss(tree):
        return tree["w"] * tree["n"].astype(jnp.float32).sum()

    tree = {"w": jnp.array(2.0), "n": jnp.arange(3)}
    step = dynamic_scale_grad(loss, allow_int=True, **options)
    state, g = step(tree, dynamic_scaler_state=state)
    assert g["w"] == 3 and g["n"].dtype == jax.dtypes.float0 and g["n"].shape == (3,)
    assert state.count == 1
    _, g = dynamic_scale_grad(loss)(tree, dynamic_scaler_state=state)
    assert g["w"] == 3 and g["n"] is None


def test_complex_overflow_is_noticed():
    step = dynamic_scale_grad(lambda z, x: (z * x).real, redo_on_nan=1)
    z, x = jnp.array(1.0 + 1.0j), jnp.array(1e38)
    state, g = step(z, x, dynamic_scaler_state=DynamicScalerState(scaler=4))
    assert state.scaler == 2 and state.total_resets == 1 and jnp.isfinite(g)


def test_float16_loss_is_scaled_safely():
    w, x = jnp.array(200.0, jnp.float16), jnp.array(0.5, jnp.float16)

    def loss(w, x):
        return w * w * x  # 20000, far above what may be multiplied by 2**15 in float16

    step = dynamic_scale_value_and_grad(loss)
    state, (value, g) = step(
        jnp.array(1.0, jnp.float16), x, dynamic_scaler_state=DynamicScalerState()
    )
    assert (value, g, state.count) == (0.5, 1, 1)
    state = DynamicScalerState(scaler=2**8)
    state, (value, g) = step(w, x, dynamic_scaler_state=state)
    assert (value, g, state.count) == (20000, 200, 1)
    assert value.dtype == g.dtype == jnp.float16


def test_scaling_saves_what_float16_would_lose():
    def loss(w):
        return w.astype(jnp.float32) * 1e-9  # smallest float16: 6e-8

    def wide(w):
        return loss(w.astype(jnp.float16)).sum()

    w, state = jnp.array(1.0), DynamicScalerState()
    assert jax.grad(wide)(w) == 0
    _, g = dynamic_scale_grad(wide)(w, dynamic_scaler_state=state)
    assert abs(g - 1e-9) < 1e-3 * 1e-9


@pytest.mark.parametrize("redo", [0, 2])
def test_gradient_that_no_scale_can_hold_is_not_called_finite(redo):
    w = jnp.array(1.0, jnp.float16)
    step = dynamic_scale_grad(lambda w: w.astype(jnp.float32) * 1e5, redo_on_nan=redo)
    # Scaled by 1/16 it fits into float16, unscaled it does not.
    state, g = step(w, dynamic_scaler_state=DynamicScalerState(scaler=1 / 16))
    assert jnp.isinf(g) and state.scaler == 1 / 32


@pytest.mark.parametrize("redo", [0, 2])
def test_whole_training_in_one_scan(redo):
    @jax.jit
    def train(w, xs):
        def body(carry, x):
            w, state = carry
            step = dynamic_scale_value_and_grad(
                lambda w: ((w - x) ** 2).sum(), redo_on_nan=redo
            )  # closes over a tracer of the scan
            state, (value, g) = step(w, dynamic_scaler_state=state)
            return (w - 0.1 * jnp.nan_to_num(g), state), value

        return jax.lax.scan(body, (w, DynamicScalerState(patience=3)), xs)

    (w, state), values = train(jnp.zeros(2), jnp.ones((20, 2)).at[4].set(jnp.nan))
    assert jnp.isnan(values).sum() == 1 and values[-1] < 0.1
    assert state.total_resets == 1 and jnp.isfinite(w).all()


@pytest.mark.parametrize("redo", [0, 2])
def test_inside_shard_map(redo):
    n = jax.device_count()
    mesh = jax.make_mesh((n,), ("d",))

    def loss(w, x):
        return jax.lax.pmean((w * x).mean(), "d"), x.sum()[None]  # aux: one a device

    step = dynamic_scale_value_and_grad(loss, has_aux=True, redo_on_nan=redo)

    def body(state, w, x):
        state, ((value, aux), g) = step(w, x, dynamic_scaler_state=state)
        return state, value, aux, g

    specs = dict(in_specs=(P(), P(), P("d")), out_specs=(P(), P(), P("d"), P()))
    run = jax.jit(jax.shard_map(body, mesh=mesh, **specs))
    xs = np.arange(2.0 * n, dtype=np.float32)
    x = jax.device_put(xs, NamedSharding(mesh, P("d")))
    state, value, aux, g = run(DynamicScalerState(), jnp.array(2.0), x)
    assert (state.count, value, g) == (1, 2 * n - 1, n - 0.5)
    assert aux.tolist() == [4 * i + 1 for i in range(n)]
    # NaN on one device: the mean tells all the others.
    xs = np.where(xs == 0, np.float32(np.nan), xs)
    x = jax.device_put(xs, NamedSharding(mesh, P("d")))
    assert run(DynamicScalerState(), jnp.array(2.0), x)[0].scaler == 2**14


def test_methods_and_keywords():
    class Model(eqx.Module):
        w: jax.Array

        @dynamic_scale_grad
        def step(self, x, *, power=1):
            "Doc."
            return (self.w * x) ** power

    model, state = Model(jnp.array(3.0)), DynamicScalerState()
    _, g = model.step(2.0, power=2, dynamic_scaler_state=state)
    assert g.w == 24 and Model.step.__doc__ == "Doc."
    names = ["x", "power", "dynamic_scaler_state"]
    assert [*inspect.signature(model.step).parameters] == names


def test_state_is_a_tuple_that_travels():
    state = DynamicScalerState(patience=7, max_scaler=2**126)
    assert len(state) == len(jax.tree.leaves(state)) == 11 and state[0] == 7
    assert types(state) == types(DynamicScalerState())
    assert types(state._replace(scaler=3)) == types(state)
    same = pickle.loads(pickle.dumps(state))
    assert isinstance(same, DynamicScalerState) and eqx.tree_equal(same, state)
    paths = [jax.tree_util.keystr(k) for k, _ in jax.tree.leaves_with_path(state)]
    assert paths[2] == ".scaler"
    none = jax.tree.map(lambda _: "spec", state)
    assert isinstance(none, DynamicScalerState) and none.scaler == "spec"
    assert jax.eval_shape(lambda s: s.update(True), state).scaler.dtype == jnp.float32


@pytest.mark.parametrize(
    "tree, wanted",
    [
        ({}, True),
        ([1.0, 2j, np.ones(2), 3, "inf", None, True], True),
        ([float("nan")], False),
        ([complex(0, float("inf"))], False),
        ([jnp.array([1, jnp.nan], jnp.float8_e4m3fn)], False),
        ([jnp.ones(2, jnp.bfloat16), np.array([np.inf])], False),
        ([jnp.arange(3), jnp.zeros((0,))], True),
    ],
)
def test_all_finite(tree, wanted):
    assert bool(all_finite(tree)) is wanted


def test_check_scaler_tells_of_a_state_of_zeros():
    state = {"scaler": jax.tree.map(jnp.zeros_like, DynamicScalerState())}
    with pytest.raises(ValueError, match=r"scale of .*scaler.* a patience of 0 and"):
        check_scaler(state)


def test_check_scaler():
    state = DynamicScalerState(scaler=2, min_scaler=1)
    check_scaler(state)
    state = state.update(False)
    check_scaler(state)  # it has only just got there
    state = state.update(False).update(False)
    check_scaler(state, tolerate=2)
    with pytest.raises(
        FloatingPointError, match=r"minimum, 1.0, and yet the last 2 step"
    ):
        check_scaler(state)
    with pytest.warns(RuntimeWarning, match="No scale will cure this"):
        check_scaler(state, tolerate=1, warn=True)
    with warnings.catch_warnings():
        check_scaler(state.update(True), warn=True)


def scalar(w):
    return w * 1.0


STATE = DynamicScalerState()
ONE = jnp.array(1.0)
BAD_INPUT = {
    "no state": (
        lambda: dynamic_scale_grad(scalar)(ONE),
        TypeError,
        r"keyword `dynamic_scaler_state` is missing.\nBegin with",
    ),
    "state of another type": (
        lambda: dynamic_scale_grad(scalar)(ONE, dynamic_scaler_state=2.0),
        TypeError,
        r"must be a `DynamicScalerState`, but was given a float",
    ),
    "all that a step returned": (
        lambda: dynamic_scale_grad(scalar)(ONE, dynamic_scaler_state=(STATE, ONE)),
        TypeError,
        r"given a tuple.\nIf that is all that a step returned, take its first part",
    ),
    "negative redo": (
        lambda: dynamic_scale_grad(scalar, redo_on_nan=-1),
        ValueError,
        r"`redo_on_nan` must be 0 or more, but was given -1",
    ),
    "fractional redo": (
        lambda: dynamic_scale_value_and_grad(scalar, redo_on_nan=1.5),
        TypeError,
        r"`redo_on_nan` must be an integer, but was given 1.5",
    ),
    "boolean redo": (
        lambda: dynamic_scale_tx(jax.grad, True),
        TypeError,
        r"`redo_on_nan` must be an integer, but was given True",
    ),
    "no function": (
        lambda: dynamic_scale_grad(ONE),
        TypeError,
        r"`fun` must be callable, but was given Array",
    ),
    "no transform": (
        lambda: dynamic_scale_tx("grad"),
        TypeError,
        r"`transform` must be callable, but was given 'grad'",
    ),
    "wrong keyword": (
        lambda: dynamic_scale_grad(scalar, filter=False, argnum=0),
        TypeError,
        r"unexpected keyword argument 'argnum'",
    ),
    "argnums with filter": (
        lambda: dynamic_scale_grad(scalar, argnums=(0, 1)),
        ValueError,
        r"`argnums` was given as \(0, 1\).*\nPass `filter=False`",
    ),
    "loss with a shape": (
        lambda: dynamic_scale_grad(scalar)(jnp.ones(2), dynamic_scaler_state=STATE),
        TypeError,
        r"`scalar` must return a floating-point scalar .* returned float32\[2\]",
    ),
    "integer loss": (
        lambda: dynamic_scale_grad(lambda w: 3)(ONE, dynamic_scaler_state=STATE),
        TypeError,
        r"must return a floating-point scalar as its loss, but returned int32\[\]",
    ),
    "loss is a pair": (
        lambda: dynamic_scale_grad(lambda w: (w, 1))(ONE, dynamic_scaler_state=STATE),
        TypeError,
        r"returned tuple.\n.* returns `\(loss, aux\)`, pass `has_aux=True`",
    ),
    "loss is no pair": (
        lambda: dynamic_scale_grad(scalar, has_aux=True)(
            ONE, dynamic_scaler_state=STATE
        ),
        TypeError,
        r"With `has_aux=True`, `scalar` must return a pair",
    ),
    "transform of another form": (
        lambda: dynamic_scale_tx(lambda f, has_aux: lambda w: 3)(scalar)(
            ONE, dynamic_scaler_state=STATE
        ),
        TypeError,
        r"`transform\(fun, has_aux=True\)` must make a function .* returned a int",
    ),
    "scaler is text": (
        lambda: DynamicScalerState(scaler="big"),
        TypeError,
        r"`scaler` of a `DynamicScalerState` must be a real scalar, but .* 'big'",
    ),
    "fractional count": (
        lambda: STATE._replace(patience=2.5),
        TypeError,
        r"`patience` of a `DynamicScalerState` must be an integer scalar, .* given 2.5",
    ),
    "state of several": (
        lambda: DynamicScalerState(scaler=jnp.ones(3)),
        ValueError,
        r"`scaler` of .* must be a scalar, but was given shape \(3,\)",
    ),
}


@pytest.mark.parametrize("call, error, match", BAD_INPUT.values(), ids=BAD_INPUT.keys())
def test_bad_input(call, error, match):
    with pytest.raises(error, match=f"(?s){match}"):
        call()
