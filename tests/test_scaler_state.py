"""The scale's own rules, far out and for long; then the pieces around a state."""

import dataclasses
import pickle

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from jaxamp_like import (
    DynamicScalerState,
    all_finite,
    dynamic_scale_grad,
    dynamic_scale_value_and_grad,
)
from jaxamp_like.scaling import (
    NoScaler,
    check_scaler,
    merge_scalers,
    restore_scaler,
    static_scaler,
)

from .scalers import GREATEST, LEAST, MOST, extreme_scalers, plain_scalers

pytestmark = pytest.mark.sample(5)

STEPS = 10_000


@jax.jit
def run(state, events):
    def body(state, finite):
        state = state.update(finite)
        return state, state

    return jax.lax.scan(body, state, events)[1]


@st.composite
def event_sequences(draw):
    """Runs of finite and of non-finite steps, of lengths from one to thousands."""
    seed = draw(st.integers(0, 2**32 - 1))
    rng = np.random.default_rng(seed)
    lengths = (
        draw(st.sampled_from([1, 2, 10, 300, 5000])),
        draw(st.sampled_from([1, 2, 10, 300, 5000])),
    )
    events = []
    while len(events) < STEPS:
        for finite, length in zip((True, False), lengths, strict=True):
            events += [finite] * rng.integers(1, length + 1)
    return np.array(events[:STEPS])


@pytest.mark.rest
@settings(deadline=None, max_examples=30)
@given(plain_scalers() | extreme_scalers(), event_sequences())
def test_ten_thousand_steps_follow_the_plain_model(plain, events):
    state = DynamicScalerState(**dataclasses.asdict(plain))
    history = jax.device_get(run(state, events))
    wanted = []
    for finite in events.tolist():
        plain = plain.update(finite)
        wanted.append((plain.scaler, plain.count, plain.total_resets, plain.stuck))
    kept = history.scaler, history.count, history.total_resets, history.stuck
    assert [*zip(*(x.tolist() for x in kept), strict=True)] == wanted
    assert (history.scaler >= LEAST).all() and (history.scaler <= GREATEST).all()


@pytest.mark.parametrize("scaler", [LEAST / 4, 3e38])
def test_a_scale_out_of_bounds_is_moved_into_them(scaler):
    state = DynamicScalerState(scaler=scaler)
    state, g = dynamic_scale_grad(lambda w: 3 * w)(
        jnp.array(1.0), dynamic_scaler_state=state
    )
    assert g == 3 and LEAST <= state.scaler <= GREATEST


def test_a_traced_nan_becomes_the_least_scale():
    state = DynamicScalerState(min_scaler=4)
    broken = jax.tree.map(lambda x: x, state)
    step = jax.jit(
        lambda s: dynamic_scale_grad(lambda w: 3 * w)(
            jnp.array(1.0), dynamic_scaler_state=state._replace(scaler=s)
        )
    )
    after, g = step(jnp.nan)
    assert g == 3 and after.scaler == 4
    assert eqx.tree_equal(broken, state)


def test_hysteresis_forgives_what_is_rare():
    state = DynamicScalerState(scaler=1024, hysteresis=3)
    events = [False, False, True, False, False, False, False, True]
    scales = []
    for finite in events:
        state = state.update(finite)
        scales.append(int(state.scaler))
    assert scales == [1024] * 5 + [512, 256, 256]
    assert (state.total_resets, state.overflows, state.count) == (2, 0, 1)


def test_a_retry_that_helps_lowers_the_scale_whatever_the_hysteresis():
    step = dynamic_scale_grad(lambda w, x: w * x, redo_on_nan=20)
    w, x = jnp.array(1.0, jnp.float16), jnp.array(4.0, jnp.float16)
    state = DynamicScalerState(scaler=2**20, hysteresis=5)
    state, g = step(w, x, dynamic_scaler_state=state)
    assert (g, state.scaler, state.overflows) == (4, 2**13, 0)
    state, _ = step(w, x * jnp.nan, dynamic_scaler_state=state)
    assert (state.scaler, state.overflows) == (2**13, 1)  # in vain: forgiven


@pytest.mark.parametrize("scaler", [0.0, np.inf, np.nan])
def test_a_scale_from_elsewhere_is_usable_by_hand_too(scaler):
    state = jax.tree.unflatten(
        jax.tree.structure(DynamicScalerState()),
        [x if i != 2 else scaler for i, x in enumerate(DynamicScalerState())],
    )
    assert state.unscale(state.scale(1.0)) == 1.0


@pytest.mark.parametrize("redo", [0, 2])
def test_static_scale(redo):
    step = dynamic_scale_grad(lambda w, x: w * x, redo_on_nan=redo)
    state = static_scaler(1024)
    for x in (1.0, jnp.inf, 1.0, jnp.inf):
        state, _ = step(jnp.array(1.0), x, dynamic_scaler_state=state)
        assert state.scaler == 1024
    assert state.stuck == 1
    with pytest.raises(
        FloatingPointError, match=r"(?s)fixed at 1024.0, .*try a smaller"
    ):
        check_scaler(state)


@pytest.mark.parametrize("redo", [0, 2])
def test_no_scaling_costs_nothing(redo):
    def loss(w):
        return (jnp.sin(w) ** 2).sum(), {"w": w}

    step = dynamic_scale_value_and_grad(loss, has_aux=True, redo_on_nan=redo)
    w = jnp.linspace(0.0, 1.0, 5)
    state, results = step(w, dynamic_scaler_state=NoScaler())
    assert state == NoScaler()
    wanted = jax.value_and_grad(loss, has_aux=True)
    assert eqx.tree_equal(results, wanted(w))

    def ops(fn):
        return jax.jit(fn).lower(w).compile().as_text().count(" = ")

    assert ops(lambda w: step(w, dynamic_scaler_state=NoScaler())[1]) == ops(wanted)


def group_loss(params, x):
    """The gradient by `a` is 4 x in float16, that by `b` is x / 1024."""
    a, b = (params[k].astype(jnp.float16) for k in "ab")
    loss = a * (4 * x) + b * (x / 1024)
    return loss.astype(jnp.float32)


@pytest.mark.parametrize("redo", [0, 9])
def test_groups_have_scales_of_their_own(redo):
    step = jax.jit(dynamic_scale_value_and_grad(group_loss, redo_on_nan=redo))
    params = {"a": jnp.array(1.0), "b": jnp.array(1.0)}
    x = jnp.array(1.0, jnp.float16)
    state = {k: DynamicScalerState(scaler=2**15, patience=1, count=1) for k in "ab"}
    state, (value, g) = step(params, x, dynamic_scaler_state=state)
    assert value == 4 and g["b"] == 2**-10
    if redo:
        assert g["a"] == 4 and state["a"].scaler == 2**13
    else:
        assert jnp.isinf(g["a"]) and state["a"].scaler == 2**14
    assert state["b"].scaler == 2**16 and state["b"].overflows == 0


def test_groups_save_what_one_scale_would_lose():
    def loss(params):
        big = params["big"].astype(jnp.float16) * jnp.float16(2**10)
        small = params["small"].astype(jnp.float16) * jnp.float16(2**-14)
        return (big.astype(jnp.float32) + small.astype(jnp.float32) * 2**-14).sum()

    params = {"big": jnp.ones(2), "small": jnp.ones(2)}
    one = DynamicScalerState(scaler=2**3)
    _, g = dynamic_scale_grad(loss)(params, dynamic_scaler_state=one)
    assert (g["small"] == 0).all()  # 2**-25 in float16
    groups = {"big": one, "small": one._replace(scaler=2**15)}
    _, g = dynamic_scale_grad(loss)(params, dynamic_scaler_state=groups)
    assert (g["big"] == 2**10).all() and (g["small"] == 2**-28).all()


def test_groups_may_be_subtrees_and_turned_off():
    def loss(params):
        return sum(jnp.sum(x**2) for x in jax.tree.leaves(params))

    params = ({"w": jnp.ones(2), "b": jnp.ones(3)}, [jnp.ones(1)])
    state = DynamicScalerState(), NoScaler()
    step = dynamic_scale_grad(loss, redo_on_nan=1)
    (first, second), g = step(params, dynamic_scaler_state=state)
    assert first.count == 1 and second == NoScaler()
    assert eqx.tree_equal(g, jax.grad(loss)(params))


def test_merging_parts_of_a_step():
    state = DynamicScalerState(patience=3, count=3, scaler=64)
    good, bad = state.update(True), state.update(False)
    assert eqx.tree_equal(merge_scalers(good, good), good)
    assert eqx.tree_equal(merge_scalers(good, bad, good), bad)
    stacked = jax.tree.map(lambda *xs: jnp.stack(xs), good, bad)
    assert eqx.tree_equal(merge_scalers(stacked), bad)
    assert merge_scalers(NoScaler(), NoScaler()) == NoScaler()
    groups = merge_scalers({"a": good, "b": good}, {"a": good, "b": bad})
    assert eqx.tree_equal(groups, {"a": good, "b": bad})
    for wrong in ((), (good, 1.0), ((good, 2.0),)):
        with pytest.raises(TypeError, match="takes the next states"):
            merge_scalers(*wrong)
    with pytest.raises(TypeError, match=r"`merge_scalers\(\*states\)`"):
        merge_scalers([good, bad])


@pytest.mark.parametrize("bad", [None, 0, 3])
def test_accumulation_changes_the_scale_once(bad):
    """Microbatches in a scan; the gradient is that of the whole batch."""

    def loss(w, x):
        return ((w * x) ** 2).mean()

    w, x = jnp.array(2.0), jnp.arange(12.0).reshape(4, 3)
    if bad is not None:
        x = x.at[bad, 1].set(jnp.nan)

    @jax.jit
    def step(w, x, state):
        grad = dynamic_scale_grad(loss)

        def micro(total, x):
            following, g = grad(w, x, dynamic_scaler_state=state)
            return total + g / len(x), following

        total, states = jax.lax.scan(micro, jnp.zeros_like(w), x)
        return merge_scalers(states), total

    state, g = step(w, x, DynamicScalerState(patience=1, count=1))
    if bad is None:
        assert state.scaler == 2**16
        assert np.allclose(g, jax.grad(lambda w: loss(w, x))(w) * 4 / 3, rtol=1e-6)
    else:
        assert (state.scaler, state.overflows) == (2**14, 1) and jnp.isnan(g)


def test_two_losses_over_one_scale():
    """As of a discriminator and a generator: whichever overflows, the scale falls."""
    state = DynamicScalerState(scaler=2**15, patience=1, count=1)
    step = dynamic_scale_grad(lambda w, x: (w * x).astype(jnp.float32))
    w = jnp.array(1.0, jnp.float16)
    first, _ = step(w, jnp.float16(1), dynamic_scaler_state=state)
    second, g = step(w, jnp.float16(64), dynamic_scaler_state=state)
    assert first.scaler == 2**16 and jnp.isinf(g)
    assert merge_scalers(first, second).scaler == 2**14


def test_scaling_by_hand():
    state = DynamicScalerState(scaler=2**10)
    w = {"w": jnp.array(2.0), "n": 3, "none": None}
    value, g = jax.value_and_grad(lambda w: state.scale(w**2 * 1e-3))(w["w"])
    assert value == jnp.float32(2.0**2 * 1e-3) * 2**10
    g = state.unscale({"w": g, "n": 3, "none": None})
    assert g == {"w": jnp.float32(4e-3), "n": 3, "none": None}
    assert state.update(all_finite(g)).count == 1
    for scaler in (state, NoScaler()):
        with pytest.raises(TypeError, match=r"`loss` must be a .* was given int32\[\]"):
            scaler.scale(jnp.array(3))


@pytest.mark.parametrize(
    "grads", [{}, None, [3, "x"], {"f0": np.zeros(3, jax.dtypes.float0)}]
)
def test_gradients_without_numbers_are_finite(grads):
    state = DynamicScalerState()
    assert all_finite(state.unscale(grads))
    step = dynamic_scale_grad(lambda tree: jnp.float32(1), redo_on_nan=1)
    state, g = step({}, dynamic_scaler_state=state)
    assert g == {} and state.count == 1


SAVED = {
    "first version": [2000, 2.0, 1024.0, 7, 1],
    "mapping": {"scaler": 1024.0, "count": 7, "total_resets": 1},
    "other dtypes": {
        "scaler": np.float64(1024),
        "count": np.int64(7),
        "total_resets": np.uint8(1),
        "max_scaler": jnp.float16(2048),
    },
    "itself": DynamicScalerState(scaler=1024, count=7, total_resets=1),
}


@pytest.mark.parametrize("saved", SAVED.values(), ids=SAVED)
def test_restoring(saved):
    state = restore_scaler(saved)
    assert (state.scaler, state.count, state.total_resets) == (1024, 7, 1)
    assert {x.dtype.name for x in state} == {"int32", "float32"}
    step = dynamic_scale_grad(lambda w: w)
    state, _ = step(jnp.array(1.0), dynamic_scaler_state=state)
    assert state.count == 8


def test_an_old_pickle_gets_the_new_fields():
    state = pickle.loads(pickle.dumps(DynamicScalerState(scaler=4)))
    old = DynamicScalerState.__new__(DynamicScalerState, *tuple(state)[:8])
    assert eqx.tree_equal(old, state)


ONE = jnp.array(1.0)
STATE = DynamicScalerState()


def grad_with(state):
    return dynamic_scale_grad(lambda w: w * 1.0)(ONE, dynamic_scaler_state=state)


BAD_INPUT = {
    "factor": (
        lambda: DynamicScalerState(adjust_factor=1),
        "`adjust_factor` .* above 1",
    ),
    "factor inf": (
        lambda: DynamicScalerState(adjust_factor=np.inf),
        "`adjust_factor` .* given inf",
    ),
    "patience": (lambda: DynamicScalerState(patience=0), "`patience` .* 1 or more"),
    "patience -1": (lambda: DynamicScalerState(patience=-1), "`patience` .* given -1"),
    "patience large": (
        lambda: DynamicScalerState(patience=2**31),
        "`patience` .* fit into int32",
    ),
    "hysteresis": (
        lambda: DynamicScalerState(hysteresis=0),
        "`hysteresis` .* 1 or more",
    ),
    "bounds": (
        lambda: DynamicScalerState(min_scaler=8, max_scaler=4),
        "`max_scaler` .* no less than `min_scaler`, 8.0, but was given 4.0",
    ),
    "scaler": (lambda: DynamicScalerState(scaler=np.nan), "`scaler` .* given nan"),
    "scaler 0": (
        lambda: DynamicScalerState(scaler=0.0),
        "`scaler` .* finite and above 0, .*`NoScaler.*given 0.0",
    ),
    "scaler -1": (lambda: DynamicScalerState(scaler=-1), "`scaler` .* given -1.0"),
    "scaler inf": (lambda: DynamicScalerState(scaler=np.inf), "`scaler` .* given inf"),
    "least": (lambda: DynamicScalerState(min_scaler=-1), "`min_scaler` .* given -1.0"),
    "least inf": (lambda: DynamicScalerState(min_scaler=np.inf), "`min_scaler` .* inf"),
    "greatest": (lambda: DynamicScalerState(max_scaler=0), "`max_scaler` .* above 0"),
    "count": (lambda: DynamicScalerState(count=-1), "`count` .* 0 or more"),
    "static zero": (lambda: static_scaler(0), "above 0.* `NoScaler"),
    "static inf": (lambda: static_scaler(np.inf), "`scaler` .* given inf"),
    "static tiny": (lambda: static_scaler(2.0**-130), "between .* use `NoScaler"),
    "replaced scaler": (lambda: STATE._replace(scaler=0), "`scaler` .* given 0.0"),
    "replaced": (
        lambda: DynamicScalerState()._replace(count=jnp.array(-3)),
        "`count` .* given -3",
    ),
    "restored": (
        lambda: grad_with(tuple.__new__(DynamicScalerState, range(11))),
        "`patience` .* given 0",
    ),
    "newer": (lambda: restore_scaler({"scaler": 1.0, "shift": 2}), "has not: shift"),
    "longer": (lambda: restore_scaler(range(5, 18)), "has not: number 11, number 12"),
    "prefix of one": (
        lambda: dynamic_scale_grad(lambda w: w["a"])(
            {"a": ONE}, dynamic_scaler_state={"c": DynamicScalerState()}
        ),
        "must be a prefix of the tree of gradients",
    ),
    "prefix": (
        lambda: dynamic_scale_grad(lambda w: w["a"] + w["b"])(
            {"a": ONE, "b": ONE},
            dynamic_scaler_state={"a": DynamicScalerState(), "c": DynamicScalerState()},
        ),
        "must be a prefix of the tree of gradients",
    ),
}


@pytest.mark.parametrize("call, match", BAD_INPUT.values(), ids=BAD_INPUT)
def test_bad_values(call, match):
    with pytest.raises(ValueError, match=f"(?s){match}"):
        call()


BAD_TYPES = {
    "old state": (
        lambda: grad_with(tuple.__new__(DynamicScalerState, [2000, 2.0, 8.0, 0, 0])),
        "has 5 fields, .*`restore_scaler`",
    ),
    "mapping": (lambda: grad_with({"scaler": ONE}), "given a dict.*`restore_scaler`"),
    "empty": (lambda: grad_with({}), "given a dict"),
    "restoring text": (lambda: restore_scaler("2**15"), "`saved` must hold the fields"),
    "restoring nothing": (lambda: restore_scaler({}), "`scaler` among them"),
    "wrong dtype": (lambda: restore_scaler({"scaler": 1.0, "count": 0.5}), "`count`"),
    "complex": (lambda: DynamicScalerState(scaler=1j), "`scaler` .* a real scalar"),
}


@pytest.mark.parametrize("call, match", BAD_TYPES.values(), ids=BAD_TYPES)
def test_bad_types(call, match):
    with pytest.raises(TypeError, match=f"(?s){match}"):
        call()


@pytest.mark.parametrize("redo", [0, 1])
def test_under_strict_promotion(redo):
    with jax.numpy_dtype_promotion("strict"), jax.numpy_rank_promotion("raise"):
        step = dynamic_scale_grad(lambda w: (w * w).sum(), redo_on_nan=redo)
        state, g = step(jnp.ones(3), dynamic_scaler_state=DynamicScalerState())
        assert state.count == 1 and (g == jnp.full(3, 2.0)).all()
        assert merge_scalers(state, state.update(jnp.array(False))).overflows == 1


def test_counts_stop_at_the_largest():
    state = DynamicScalerState(patience=MOST, count=MOST - 1, total_resets=MOST)
    assert state.update(True).count == MOST
    assert state.update(True).update(True).scaler == 2**16
    assert state.update(False).total_resets == MOST
