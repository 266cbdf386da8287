"""A skipped step is one that never happened, whatever the step changes."""

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
import optax
import pytest
from flax import nnx
from hypothesis import given, settings, strategies as st

from jaxamp_like import (
    AmpWarning,
    DynamicScalerState,
    dynamic_scale_value_and_grad,
    guard_step,
    loss_scale_optimizer,
)
from jaxamp_like.scaling import NoScaler, merge_scalers

pytestmark = pytest.mark.sample(5)

# Powers of two are undone without a trace: another scale changes no bit.
SCALER = DynamicScalerState(scaler=2.0**10, patience=2)
W = {"w": jnp.array([1.0, -2.0]), "b": jnp.array(0.5)}


def loss_fn(w, mean, x, key):
    noisy = x + 0.1 * jr.normal(key, x.shape)
    return ((w["w"] * noisy + w["b"]) ** 2).sum(), 0.9 * mean + 0.1 * noisy


def by_optimizer():
    tx = loss_scale_optimizer(optax.adam(0.1), SCALER)

    def step(state, x):
        w, mean, ema, key, opt_state = state
        key, noise = jr.split(key)
        value_and_grad = tx.value_and_grad(loss_fn, opt_state, has_aux=True)
        (loss, mean), grads = value_and_grad(w, mean, x, noise)
        updates, opt_state = tx.update(grads, opt_state, w)
        w = optax.apply_updates(w, updates)
        ema = jax.tree.map(lambda e, p: 0.9 * e + 0.1 * p, ema, w)
        return (w, mean, ema, key, opt_state), loss

    start = W, jnp.zeros(2), W, jr.key(0), tx.init(W)
    return step, start, lambda state: (*state[:4], state[4].inner_state)


def by_transform(redo):
    tx = optax.adam(0.1)
    value_and_grad = dynamic_scale_value_and_grad(
        loss_fn, has_aux=True, redo_on_nan=redo
    )

    def step(state, x):
        key, noise = jr.split(state["key"])
        scaler, ((loss, mean), grads) = value_and_grad(
            state["w"], state["mean"], x, noise, dynamic_scaler_state=state["scaler"]
        )
        updates, opt_state = tx.update(grads, state["opt"], state["w"])
        w = optax.apply_updates(state["w"], updates)
        new = dict(w=w, mean=mean, opt=opt_state, scaler=scaler, key=key)
        return new | {"count": state["count"] + 1}, loss

    start = dict(w=W, mean=jnp.zeros(2), opt=tx.init(W), scaler=SCALER, key=jr.key(0))
    start["count"] = jnp.int32(0)
    return step, start, lambda state: {k: v for k, v in state.items() if k != "scaler"}


def by_groups():
    step, start, kept = by_transform(0)
    return step, start | {"scaler": {"w": SCALER, "b": SCALER}}, kept


FORMS = {
    "optimizer": by_optimizer,
    "transform": lambda: by_transform(0),
    "retries": lambda: by_transform(2),
    "groups": by_groups,
}
RUNS = {
    name: (jax.jit(guard_step(step)), start, kept)
    for name, (step, start, kept) in ((n, make()) for n, make in FORMS.items())
}


def bits(tree):
    keys = jax.dtypes.prng_key
    return [
        np.asarray(
            jr.key_data(x) if jax.dtypes.issubdtype(x.dtype, keys) else x
        ).tobytes()
        for x in jax.tree.leaves(tree)
    ]


@settings(max_examples=10)
@given(
    st.sampled_from([*RUNS]),
    st.lists(st.sampled_from([None, np.inf, -np.inf, np.nan]), max_size=12),
)
def test_a_skipped_step_leaves_no_trace(name, spoilt):
    step, start, kept = RUNS[name]
    rng, state, spared = np.random.default_rng(0), start, start
    for bad in spoilt:
        x = rng.normal(size=2).astype(np.float32)
        if bad is None:
            spared, wanted = step(spared, x)
            state, loss = step(state, x)
            assert bits(loss) == bits(wanted)
        else:
            state, loss = step(state, np.array([x[0], bad], np.float32))
            assert not np.isfinite(loss)
        assert bits(kept(state)) == bits(kept(spared))
    overflows = sum(bad is not None for bad in spoilt)
    scaler = jax.tree.leaves(state, is_leaf=lambda x: isinstance(x, DynamicScalerState))
    resets = [s.total_resets for s in scaler if isinstance(s, DynamicScalerState)]
    assert max(map(int, resets)) == overflows


@pytest.mark.parametrize("name", RUNS)
def test_without_the_guard_there_is_a_trace(name):
    step, start, kept = FORMS[name]()
    state, _ = step(start, jnp.array([1.0, jnp.inf]))
    assert any(
        np.isnan(x).any() or np.isinf(x).any()
        for x in jax.tree.leaves(eqx.filter(kept(state), eqx.is_inexact_array))
    )


def test_in_a_scan():
    step, start, kept = RUNS["optimizer"]
    xs = np.random.default_rng(0).normal(size=(6, 2)).astype(np.float32)
    spoilt = np.insert(xs, 3, np.inf, axis=0)
    runs = (
        jax.jit(lambda s, xs: jax.lax.scan(step, s, xs))(start, x) for x in (xs, spoilt)
    )
    (plain, _), (guarded, losses) = runs
    assert bits(kept(plain)) == bits(kept(guarded)) and not np.isfinite(losses[3])


def test_a_state_that_can_be_read_once():
    class Counting(eqx.Module):
        index: eqx.nn.StateIndex

        def __init__(self):
            self.index = eqx.nn.StateIndex(jnp.zeros(()))

    model, model_state = eqx.nn.make_with_state(Counting)()
    tx = loss_scale_optimizer(optax.sgd(0.1))

    @eqx.filter_jit
    @guard_step
    def step(state, x):
        w, model_state, opt_state = state
        model_state = model_state.set(model.index, model_state.get(model.index) + x)
        grads = tx.grad(lambda w: w * x, opt_state)(w)
        updates, opt_state = tx.update(grads, opt_state, w)
        return w + updates, model_state, opt_state

    w = jnp.array(1.0)
    state = w, model_state, tx.init(w)
    for x in (2.0, np.inf, 3.0):
        state = step(state, jnp.float32(x))
    assert state[1].get(model.index) == 5 and state[0] == 0.5


def test_objects_are_guarded_in_place():
    class Net(nnx.Module):
        def __init__(self, rngs):
            self.linear = nnx.Linear(2, 2, rngs=rngs)
            self.norm = nnx.BatchNorm(2, rngs=rngs)
            self.dropout = nnx.Dropout(0.5, rngs=rngs)

        def __call__(self, x):
            return self.dropout(self.norm(self.linear(x)))

    tx = loss_scale_optimizer(optax.chain(optax.clip(1.0), optax.adam(0.1)), SCALER)
    net = Net(nnx.Rngs(0))
    optimizer = nnx.Optimizer(net, tx, wrt=nnx.Param)
    metrics, loose = nnx.metrics.Average("loss"), nnx.Variable(jnp.zeros(()))

    @nnx.jit
    @guard_step
    def step(net, optimizer, metrics, loose, x):
        for part in (x[:2], x[2:]):  # the second alone may overflow
            tx_of = tx.value_and_grad(lambda net, x: (net(x) ** 2).sum(), optimizer)
            loss, grads = tx_of(net, part)
        optimizer.update(net, grads)
        metrics.update(loss=loss)
        loose[...] += loss
        return loss

    x = jnp.linspace(-1.0, 1.0, 8).reshape(4, 2)
    step(net, optimizer, metrics, loose, x)
    everything = net, metrics, loose, optimizer.step, optimizer.opt_state.inner_state
    before = bits(nnx.state(everything))
    step(net, optimizer, metrics, loose, x.at[3, 1].set(jnp.inf))
    assert bits(nnx.state(everything)) == before
    assert optimizer.opt_state.scaler.scaler[...] == 2**9
    step(net, optimizer, metrics, loose, x)
    assert bits(nnx.state(everything)) != before and optimizer.step[...] == 2


def test_objects_beside_a_state():
    @guard_step
    def step(state, x):
        model, scaler = state
        scaler, (_, grads) = dynamic_scale_value_and_grad(lambda m, x: m(x).sum())(
            model, x, dynamic_scaler_state=scaler
        )
        params = nnx.state(model, nnx.Param)
        nnx.update(model, jax.tree.map(lambda p, g: p - 0.1 * g, params, grads))
        return (model, scaler), grads

    model, x = nnx.Linear(2, 2, rngs=nnx.Rngs(0)), jnp.ones((1, 2))
    before = bits(nnx.state(model))
    (same, scaler), _ = step((model, SCALER), x * jnp.inf)
    assert same is model and bits(nnx.state(model)) == before
    step((model, scaler), x)
    assert bits(nnx.state(model)) != before


def test_no_overflow_within_a_step_is_forgotten():
    """Two losses with one scale, handed on: the second is finite again."""
    value_and_grad = dynamic_scale_value_and_grad(lambda w, x: jnp.sum(w * x))

    @guard_step
    def step(state, first, second):
        w, v, scaler = state
        scaler, (_, grads) = value_and_grad(w, first, dynamic_scaler_state=scaler)
        w = w - grads
        scaler, (_, grads) = value_and_grad(v, second, dynamic_scaler_state=scaler)
        return w, v - grads, scaler

    one = jnp.ones(2)
    w, v, scaler = step((one, one, SCALER), jnp.inf * one, one)
    np.testing.assert_array_equal((w, v), (one, one))
    assert (scaler.overflows, scaler.skipped) == (0, 1)
    w, v, scaler = step((w, v, scaler), one, one)
    np.testing.assert_array_equal((w, v), (0 * one, 0 * one))


def test_a_loop_inside_is_one_step():
    value_and_grad = dynamic_scale_value_and_grad(lambda w, x: jnp.sum(w * x))

    def body(state, x):
        w, scaler = state
        scaler, (_, grads) = value_and_grad(w, x, dynamic_scaler_state=scaler)
        return (w - 0.1 * grads, scaler), None

    xs = jnp.ones((3, 2)).at[0].set(jnp.inf)
    loop = guard_step(lambda state, xs: jax.lax.scan(body, state, xs))
    (w, _), _ = loop((jnp.ones(2), SCALER), xs)
    np.testing.assert_array_equal(w, jnp.ones(2))
    (w, _), _ = jax.lax.scan(guard_step(body), (jnp.ones(2), SCALER), xs)
    np.testing.assert_allclose(w, 0.8 * jnp.ones(2), rtol=1e-6)


def test_a_scaler_that_is_not_handed_on():
    value_and_grad = dynamic_scale_value_and_grad(lambda w: jnp.sum(w))

    @guard_step
    def step(state):
        w, scaler = state
        _, (_, grads) = value_and_grad(w, dynamic_scaler_state=scaler)
        return w - grads, scaler

    for run in (step, jax.jit(step)):
        with pytest.raises(TypeError, match="came out as it went in"):
            run((jnp.ones(2), SCALER))


def test_a_scale_that_had_no_part_in_the_step_skips_nothing():
    """As of a generator, which is trained at every other step, and overflowed last."""
    critic, generator = SCALER, SCALER.update(False)

    @jax.jit
    @guard_step
    def step(state, finite):
        total, critic, generator = state
        return total + 1, critic.update(finite), generator

    total, critic, _ = step((jnp.int32(0), critic, generator), True)
    assert total == 1
    total, critic, _ = step((total, critic, generator), False)
    assert total == 1 and critic.total_resets == 1


def test_numbers_and_what_is_no_array():
    @guard_step
    def step(state, finite):
        return {**state, "n": state["n"] + 1, "scaler": state["scaler"].update(finite)}

    state = {"n": 0, "f": jnp.sin, "name": "x", "scaler": SCALER}
    state = step(state, True)
    state = step(step(state, False), False)
    assert state["n"] == 1 and state["f"] is jnp.sin and state["scaler"].overflows == 2


def test_no_scaling_guards_nothing_and_costs_nothing():
    def step(state, x):
        return state[0] * x, state[1]

    state = jnp.array(1.0), NoScaler()
    program = str(jax.make_jaxpr(guard_step(step))(state, 2.0))
    assert program == str(jax.make_jaxpr(step)(state, 2.0))


def test_state_that_stands_beside_the_state_is_told():
    statistics = {"mean": jnp.zeros(2), "var": jnp.ones(2)}

    @guard_step
    def step(state, statistics, x):
        w, scaler = state
        scaler, (loss, _) = dynamic_scale_value_and_grad(lambda w: (w * x).sum())(
            w, dynamic_scaler_state=scaler
        )
        return (w, scaler), jax.tree.map(lambda s: s + x, statistics), loss

    @guard_step
    def right(state, batch):
        w, scaler = state
        scaler, _ = dynamic_scale_value_and_grad(lambda w: (w * batch["x"]).sum())(
            w, dynamic_scaler_state=scaler
        )
        return (w, scaler), batch, {"x": batch["x"], "z": w}, w

    state = jnp.ones(2), SCALER
    right(state, {"x": jnp.ones(2), "y": jnp.ones(2)})
    with pytest.warns(AmpWarning, match="returns argument 2 anew, beside its state"):
        jax.jit(step)(state, statistics, jnp.ones(2))


def test_several_losses_of_one_step():
    @jax.jit
    @guard_step
    def step(state, x, y):
        w, seen, scaler = state
        grad = dynamic_scale_value_and_grad(lambda w, x: w * x)
        first, _ = grad(w, x, dynamic_scaler_state=scaler)
        second, _ = grad(w, y, dynamic_scaler_state=scaler)
        return w + 1, seen + x, merge_scalers(first, second)

    state = step((jnp.array(1.0), jnp.array(0.0), SCALER), 1.0, jnp.inf)
    assert state[0] == 1 and state[1] == 0
    assert step(state, 1.0, 2.0)[:2] == (2, 1)


STATE = {"w": jnp.ones(2), "scaler": SCALER}


def after(state, w):
    return {"w": w, "scaler": state["scaler"].update(True)}


BAD = {
    "no step": (lambda: guard_step(STATE), "`step` must be callable.*given dict"),
    "no scale": (
        lambda: guard_step(lambda s: s)({"w": jnp.ones(2)}),
        "No loss scale was found .* into its first argument",
    ),
    "nothing": (
        lambda: guard_step(lambda s: None)(STATE),
        "must return the next state",
    ),
    "other order": (
        lambda: guard_step(lambda s: (jnp.ones(()), s))(STATE),
        "first argument is a dict of .*but the step returned a tuple of",
    ),
    "more": (
        lambda: guard_step(lambda s: s | {"loss": jnp.ones(())})(STATE),
        "must return the next state",
    ),
    "dtype": (
        lambda: guard_step(lambda s: after(s, s["w"].astype(jnp.float16)))(STATE),
        r"\['w'\] was float32\[2\] and is float16\[2\]",
    ),
    "shape": (
        lambda: jax.jit(guard_step(lambda s: after(s, s["w"].sum())))(STATE),
        r"\['w'\] was float32\[2\] and is float32\[\]",
    ),
}


@pytest.mark.parametrize("call, match", BAD.values(), ids=BAD)
def test_bad_input(call, match):
    with pytest.raises(TypeError, match=f"(?s){match}"):
        call()
