"""`loss_scale_optimizer`: unscales, skips, adapts, and is hard to put in wrongly."""

import functools
import warnings

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
import optax
import pytest
from flax import nnx
from flax.training import train_state
from hypothesis import given, settings, strategies as st

from jaxamp_like import (
    AmpWarning,
    DynamicScalerState,
    Policy,
    PolicyMap,
    _errors,
    all_finite,
    amp,
    disable_amp,
    dynamic_scale_grad,
    enable_amp,
    explain,
    guard_step,
    loss_scale_optimizer,
)
from jaxamp_like.rules import smaller_than, use_precision_by_pass, when
from jaxamp_like.scaling import (
    LossScaleState,
    NoScaler,
    Unscaled,
    check_scaler,
    overflowed_leaves,
    scale_loss,
    static_scaler,
    unscale_grads,
)
from jaxamp_like.storage import low_bit_state

pytestmark = pytest.mark.sample(5)


def half_loss(w, x):
    """Float16 within: gradients of `x` above 65504 / scale overflow."""
    return (w.astype(jnp.float16) * x.astype(jnp.float16)).astype(jnp.float32).sum()


# Without it, LLVM puts products and sums together in one of two programs alone.
jit_alike = functools.partial(
    jax.jit, compiler_options={"xla_backend_optimization_level": 3}
)


def make_step(tx, loss=half_loss, jit=jax.jit):
    @jit
    def step(w, opt_state, x):
        grads = tx.grad(loss, opt_state)(w, x)
        updates, opt_state = tx.update(grads, opt_state, w)
        return optax.apply_updates(w, updates), opt_state

    return step


def bits(tree):
    return [np.asarray(x).tobytes() for x in jax.tree.leaves(tree)]


OPTIMIZERS = {
    "sgd": lambda: optax.sgd(0.1),
    "momentum": lambda: optax.sgd(0.1, momentum=0.9),
    "adamw": lambda: optax.adamw(0.1),
    "clipped": lambda: optax.chain(optax.clip_by_global_norm(1.0), optax.adam(0.1)),
    "injected": lambda: optax.inject_hyperparams(optax.sgd)(
        learning_rate=optax.linear_schedule(0.1, 0.0, 5)
    ),
    "if finite": lambda: optax.apply_if_finite(optax.adam(0.1), 5),
    "partitioned": lambda: optax.partition(
        {"a": optax.adam(0.1), "b": optax.set_to_zero()}, {"w": "a", "c": "b"}
    ),
}


@pytest.mark.parametrize("make", OPTIMIZERS.values(), ids=OPTIMIZERS)
def test_finite_steps_are_those_of_the_optimizer_and_others_are_none(make):
    def loss(p, x):
        return half_loss(p["w"], x) ** 2 + half_loss(p["c"], x)

    tx = loss_scale_optimizer(make(), DynamicScalerState(scaler=2**10))
    plain = make()
    step = make_step(tx, loss, jit_alike)
    w = {"w": jnp.array([1.0, -0.0, 3.0]), "c": jnp.array([-0.0, 2.0, 0.5])}
    opt_state, wanted, plain_state = tx.init(w), w, plain.init(w)
    x = jnp.array([1.0, 0.5, 0.25])

    @jit_alike
    def plain_step(w, opt_state, x):
        updates, opt_state = plain.update(jax.grad(loss)(w, x), opt_state, w)
        return optax.apply_updates(w, updates), opt_state

    for spoilt in (None, jnp.inf, jnp.nan, None, 65504.0, None):
        before = bits((w, opt_state.inner_state))
        at = x if spoilt is None else x.at[1].set(spoilt)
        w, opt_state = step(w, opt_state, at)
        if spoilt is None:
            wanted, plain_state = plain_step(wanted, plain_state, x)
        else:
            assert bits((w, opt_state.inner_state)) == before
    assert opt_state.scaler.total_resets == 3 and opt_state.scaler.scaler == 2**7
    assert eqx.tree_equal(w, wanted)
    assert eqx.tree_equal(opt_state.inner_state, plain_state)


@pytest.mark.rest
@settings(deadline=None, max_examples=10)
@given(st.integers(0, 2**32 - 1), st.sampled_from([0.001, 0.1, 0.5, 0.99]))
def test_parameters_stay_finite_for_ten_thousand_steps(seed, rate):
    rng = np.random.default_rng(seed)
    odd = rng.choice([np.inf, -np.inf, np.nan, 6e4, -1e-7, 0.0], size=(10_000, 4))
    x = np.where(rng.random((10_000, 4)) < rate, odd, rng.normal(size=(10_000, 4)))
    ws, opt_states = long_run(x.astype(np.float32))
    history = jax.device_get(opt_states.scaler)
    assert np.isfinite(ws).all()
    skipped = history.overflows > 0
    assert skipped.any() and not skipped.all()
    steps = np.concatenate([np.ones((1, 4)), ws]).astype(np.float32)
    assert steps[:-1][skipped].tobytes() == steps[1:][skipped].tobytes()
    assert (history.scaler >= 2.0**-126).all() and (history.scaler <= 2.0**126).all()


LONG = loss_scale_optimizer(
    optax.chain(optax.clip_by_global_norm(1.0), optax.adam(1e-2)),
    DynamicScalerState(patience=3),
)


@jax.jit
def long_run(xs):
    step = make_step(LONG)

    def body(carry, x):
        carry = step(*carry, x)
        return carry, carry

    w = jnp.ones(4)
    return jax.lax.scan(body, (w, LONG.init(w)), xs)[1]


def test_nan_for_ever():
    ws, opt_states = long_run(np.full((1000, 4), np.nan, np.float32))
    assert (ws == 1).all() and opt_states.scaler.scaler[-1] == 2.0**-126
    assert opt_states.inner_state[1][0].count[-1] == 0
    last = jax.tree.map(lambda x: x[-1], opt_states)
    stuck = 1000 - (15 + 126)
    with pytest.raises(FloatingPointError, match=rf"the last {stuck} step"):
        check_scaler(last)


@pytest.mark.rest
def test_power_of_two_scale_changes_no_bit():
    keys = jr.split(jr.key(0), 3)
    model = eqx.nn.MLP(3, 2, 4, 1, key=keys[0])
    params, static = eqx.partition(model, eqx.is_array)
    x, y = jr.normal(keys[1], (5, 3)), jr.normal(keys[2], (5, 2))

    def loss(params):
        return ((jax.vmap(eqx.combine(params, static))(x) - y) ** 2).mean()

    wanted = jax.jit(jax.grad(loss))(params)
    for scaler in ("dynamic", 2**-20, 2.0**60, None):
        tx = loss_scale_optimizer(optax.sgd(1.0), scaler)
        state = tx.init(params)

        @jax.jit
        def updates(params, state, tx=tx):
            grads = tx.grad(loss, state)(params)
            return tx.update(grads, state, params)[0]

        got = jax.tree.map(jnp.negative, updates(params, state))
        assert eqx.tree_equal(got, wanted)


def test_one_compilation():
    traces = 0

    def loss(w, x):
        nonlocal traces
        traces += 1
        return half_loss(w, x)

    tx = loss_scale_optimizer(optax.adamw(0.1))
    step, w = make_step(tx, loss), jnp.ones(2)
    opt_state = tx.init(w)
    for x in (1.0, np.inf, np.nan, 1.0):
        w, opt_state = step(w, opt_state, jnp.full(2, x, jnp.float32))
    assert traces == 1


def test_scalers_to_choose_from():
    w = jnp.ones(2)

    def first(scaler):
        return loss_scale_optimizer(optax.sgd(0.1), scaler).init(w).scaler

    assert eqx.tree_equal(first("dynamic"), DynamicScalerState())
    assert eqx.tree_equal(first(1024), static_scaler(1024))
    assert eqx.tree_equal(first(np.float64(0.5)), static_scaler(0.5))
    state = DynamicScalerState(hysteresis=2)
    assert eqx.tree_equal(first(state), state)
    assert first(None) == first(NoScaler()) == NoScaler()


def test_multi_steps_within():
    """Overflowing microbatches are dropped; the scale grows once a step at most."""
    k, scaler = 3, DynamicScalerState(patience=1)
    tx = loss_scale_optimizer(optax.MultiSteps(optax.sgd(1.0), k), scaler)
    step, w = make_step(tx), jnp.ones(1)
    opt_state = tx.init(w)
    xs = [0.25, 0.5, np.inf, 0.75, 0.5, 0.25, 0.75]
    scales, ws, skipped = [], [], []
    for x in xs:
        w, opt_state = step(w, opt_state, jnp.array([x]))
        scales.append(int(np.log2(opt_state.scaler.scaler)))
        ws.append(float(w[0]))
        skipped.append(int(opt_state.scaler.overflows))
    assert scales == [15, 15, 14, 14, 14, 14, 15]
    assert ws == [1, 1, 1, 0.5, 0.5, 0.5, 0]  # less the mean of three that counted
    assert skipped == [0, 0, 1, 0, 0, 0, 0]


def test_extra_arguments_and_one_state_for_two_losses():
    tx = loss_scale_optimizer(
        optax.chain(optax.sgd(0.5), optax.contrib.reduce_on_plateau(patience=1))
    )
    w = {"generator": jnp.array(1.0), "critic": jnp.array(2.0)}
    opt_state = tx.init(w)

    def losses(w):
        first = (w["generator"] - 3) ** 2
        second = (w["critic"] + 1) ** 2
        return scale_loss(first, opt_state) + scale_loss(second, opt_state)

    grads = unscale_grads(jax.grad(losses)(w), opt_state)
    updates, opt_state = tx.update(grads, opt_state, w, value=1.0)
    assert updates == {"generator": 2, "critic": -3}
    assert opt_state.scaler.count == 1


@pytest.mark.rest
def test_a_line_search_is_given_plain_gradients_by_name():
    """As `optax.lbfgs` is, whose search keeps them in the carry of a loop."""
    w, x = {"w": jr.normal(jr.key(0), (4, 2))}, jr.normal(jr.key(1), (8, 4))

    def loss(w):
        return jnp.mean(jnp.tanh(x @ w["w"] - 1) ** 2)

    def trained(tx, value_and_grad):
        params, state = w, tx.init(w)
        for _ in range(2):
            value, grads = value_and_grad(state)(params)
            given = {"value": value, "grad": grads, "value_fn": loss}
            updates, state = tx.update(grads, state, params, **given)
            params = optax.apply_updates(params, updates)
        return params

    plain = trained(optax.lbfgs(), lambda _: jax.value_and_grad(loss))
    tx = loss_scale_optimizer(optax.lbfgs(), 1024)
    scaled = trained(tx, lambda state: tx.value_and_grad(loss, state))
    np.testing.assert_array_equal(scaled["w"], plain["w"])


def test_all_finite_reads_what_the_optimizer_reads():
    """A gradient that fits scaled, and not unscaled, is not finite."""
    tx = loss_scale_optimizer(optax.sgd(0.1), 2**-4)
    w = jnp.array(1.0, jnp.float16)
    opt_state = tx.init(w.astype(jnp.float32))  # of float16, it warns
    grads = unscale_grads(jnp.array(6e4, jnp.float16), opt_state)
    updates, opt_state = tx.update(grads, opt_state, w)
    assert updates == 0 and opt_state.scaler.overflows == 1
    assert all_finite(updates)


TX = loss_scale_optimizer(optax.sgd(0.1))
NESTED = {
    "itself": lambda: loss_scale_optimizer(TX),
    "in a chain": lambda: loss_scale_optimizer(optax.chain(optax.clip(1.0), TX)),
    "in chains": lambda: loss_scale_optimizer(
        optax.chain(optax.chain(optax.identity(), optax.apply_if_finite(TX, 3)))
    ),
    "masked": lambda: loss_scale_optimizer(optax.masked(TX, True)),
    "in steps": lambda: loss_scale_optimizer(optax.MultiSteps(TX, 2)),
}


@pytest.mark.parametrize("make", NESTED.values(), ids=NESTED)
def test_wrapping_twice_is_refused(make):
    with pytest.raises(ValueError, match="already scales the loss"):
        make().init(jnp.ones(2))


@pytest.mark.parametrize(
    "outer, name",
    [
        (
            functools.partial(optax.apply_if_finite, max_consecutive_errors=3),
            "apply_if_",
        ),
        (functools.partial(optax.MultiSteps, every_k_schedule=2), "MultiSteps"),
    ],
)
def test_what_must_stand_within_is_told(outer, name):
    opt_state = outer(TX).init(jnp.ones(2))
    with pytest.raises(ValueError, match=rf"`optax.{name}.*\n?.*Put it within"):
        scale_loss(jnp.float32(1), opt_state)


W = jnp.ones(2)
BAD_INPUT = {
    "no optimizer": (
        lambda: loss_scale_optimizer(optax.adam),
        TypeError,
        "`optimizer` must be an Optax optimizer .* given function",
    ),
    "word": (lambda: loss_scale_optimizer(optax.sgd(1), "auto"), ValueError, "'auto'"),
    "groups": (
        lambda: loss_scale_optimizer(optax.sgd(1), {"a": DynamicScalerState()}),
        TypeError,
        "must be one state, but was given a dict.*`dynamic_scale_grad`",
    ),
    "number": (lambda: loss_scale_optimizer(optax.sgd(1), 1j), TypeError, "`scaler`"),
    "nan": (
        lambda: loss_scale_optimizer(optax.sgd(1), np.nan),
        ValueError,
        "given nan",
    ),
    "state": (
        lambda: TX.update(W, optax.sgd(1).init(W), W),
        TypeError,
        "is the `LossScaleState` .* but it was given a tuple",
    ),
    "no scale": (
        lambda: scale_loss(1.0, optax.adam(1).init(W)),
        ValueError,
        "must hold one loss scale, but holds 0",
    ),
    "two scales": (
        lambda: scale_loss(1.0, optax.chain(TX, TX).init(W)),
        ValueError,
        r"must hold one loss scale, but holds 2.\nA loss has one.*optax.partition",
    ),
    "changed places": (
        lambda: TX.value_and_grad(TX.init(W), sum),
        TypeError,
        "changed places: the loss comes first",
    ),
    "argnums": (
        lambda: TX.grad(sum, TX.init(W), argnums=(0, 1)),
        ValueError,
        r"as \(0, 1\).*Pass `filter=False`",
    ),
    "zero_nans": (
        lambda: scale_loss(1.0, optax.chain(optax.zero_nans(), TX).init(W)),
        ValueError,
        "`optax.zero_nans` is beside .*\nPut it within",
    ),
    "loss": (lambda: scale_loss(W, TX.init(W)), TypeError, r"given float32\[2\]"),
    "integer loss": (lambda: scale_loss(3, TX.init(W)), TypeError, r"given int32\[\]"),
    "axis": (
        lambda: loss_scale_optimizer(optax.sgd(1), axis_name="d").update(
            Unscaled(W), TX.init(W), W
        ),
        ValueError,
        "names 'd', but no axis",
    ),
}


@pytest.mark.parametrize("call, error, match", BAD_INPUT.values(), ids=BAD_INPUT)
def test_bad_input(call, error, match):
    with pytest.raises(error, match=f"(?s){match}"):
        call()


def matmul_loss(w, x):
    return jnp.mean((x @ w) ** 2)


def dots(fn, *args):
    return str(jax.make_jaxpr(fn)(*args)).count("f16[")


def test_enable_amp():
    w, x = jnp.ones((3, 2)), jnp.ones((4, 3)) / 4
    loss, tx = enable_amp(matmul_loss, optax.sgd(0.1))
    assert dots(loss, w, x) > 0
    opt_state = tx.init(w)
    assert isinstance(opt_state, LossScaleState)
    assert eqx.tree_equal(opt_state.scaler, DynamicScalerState())
    value, grads = tx.value_and_grad(loss, opt_state)(w, x)
    updates, opt_state = tx.update(grads, opt_state, w)
    assert value == loss(w, x)
    assert np.allclose(updates, -0.1 * jax.grad(matmul_loss)(w, x), rtol=1e-3)

    loss, tx = enable_amp(matmul_loss, optax.sgd(0.1), compute_dtype="bfloat16")
    assert tx.init(w).scaler == NoScaler()
    with pytest.warns(AmpWarning, match="still rewritten to float16"):
        enable_amp(matmul_loss, optax.sgd(0.1), scaler=None)
    with pytest.raises(ValueError, match="already scales"):
        enable_amp(matmul_loss, tx)


@pytest.mark.parametrize(
    "policy",
    (
        PolicyMap("mixed_bfloat16", {"top": "mixed_float16"}),
        Policy("bfloat16", rules={"top": "float16"}),
        Policy("bfloat16", rules={"top": when(smaller_than(9), "float16", "float32")}),
        Policy(
            "bfloat16",
            rules={"top": use_precision_by_pass(input_gradient="float16")},
        ),
    ),
    ids=("map", "rule", "condition", "pass"),
)
def test_a_part_in_float16_has_a_scale(policy):
    """So that its gradients do not vanish, though the compute dtype is bfloat16."""

    def loss(w, x):
        with jax.named_scope("top"):
            return jnp.sum(x @ w) * 1e-9

    w, x = jnp.ones((2, 2)), jnp.ones((2, 2))
    mixed, tx = enable_amp(loss, optax.sgd(0.1), amp_policy=policy)
    assert tx.scales
    grads = jnp.asarray(tx.grad(mixed, tx.init(w))(w, x))
    np.testing.assert_allclose(grads, jax.grad(loss)(w, x), rtol=2**-8)
    assert not enable_amp(loss, optax.sgd(0.1), amp_policy="mixed_bfloat16")[1].scales


@pytest.mark.parametrize("is_loop", (False, True), ids=("step", "loop"))
def test_a_scale_that_is_a_constant_of_the_program_is_told(is_loop):
    tx = loss_scale_optimizer(optax.sgd(0.1))
    w = jnp.ones(3)

    def loss(w):
        return jnp.sum(w**2)

    def gradient(w, opt_state):
        def part(total, x):
            grads = tx.grad(lambda w: loss(w * x), opt_state)(w)
            return jax.tree.map(jnp.add, total, grads), None

        if not is_loop:
            return tx.grad(loss, opt_state)(w)
        return jax.lax.scan(part, Unscaled(jnp.zeros_like(w)), jnp.ones(2))[0]

    gradient(w, tx.init(w))  # traced anew at each call
    jax.jit(gradient)(w, tx.init(w))
    static = loss_scale_optimizer(optax.sgd(0.1), 1024.0)
    jax.jit(static.grad(loss, static.init(w)))(w)  # it never changes
    opt_state = tx.init(w)
    explain(lambda w: gradient(w, opt_state))(w)  # runs nothing
    with pytest.warns(AmpWarning, match="The loss scale is a constant of the program"):
        jax.jit(lambda w: gradient(w, opt_state))(w)


def test_gradients_that_were_cast_to_float16_are_told():
    w, tx = jnp.ones(3), loss_scale_optimizer(optax.sgd(0.1))
    grads = tx.grad(lambda w: jnp.sum(w**2), tx.init(w))(w)
    tx.update(jax.tree.map(lambda g: g.astype(jnp.bfloat16), grads), tx.init(w), w)
    with pytest.warns(AmpWarning, match="float16 gradients of float32 parameters"):
        half = jax.tree.map(lambda g: g.astype(jnp.float16), grads)
        tx.update(half, tx.init(w), w)


@pytest.mark.filterwarnings("ignore:The optimizer updates float16 parameters")
def test_moments_in_float16_are_told():
    loss_scale_optimizer(optax.adam(0.1, mu_dtype="bfloat16")).init(jnp.ones(3))
    with pytest.warns(AmpWarning, match=r"float16 numbers \(`.*mu.*for wider param"):
        loss_scale_optimizer(optax.adam(0.1, mu_dtype="float16")).init(jnp.ones(3))
    low = loss_scale_optimizer(low_bit_state(optax.adam(0.1)))
    with pytest.warns(AmpWarning, match="epsilon of 1e-8 are zero there"):
        low.init(jnp.ones((64, 64), jnp.float16))


def test_a_scale_that_is_made_anew_in_each_step_is_told(monkeypatch):
    w, tx = jnp.ones(3), loss_scale_optimizer(optax.sgd(0.1))
    gradient = dynamic_scale_grad(lambda w: jnp.sum(w**2))

    def step(w):
        return gradient(w, dynamic_scaler_state=DynamicScalerState())[1]

    def training(w):
        def body(carry, _):
            w, state = carry
            state, grads = gradient(w, dynamic_scaler_state=state)
            return (w - 0.1 * grads, state), None

        return jax.lax.scan(body, (w, DynamicScalerState()), length=3)[0]

    step(w)  # the first of a loop in Python, perhaps
    jax.jit(training)(w)
    static = loss_scale_optimizer(optax.sgd(0.1), 1024.0)
    jax.jit(lambda w: static.grad(lambda w: jnp.sum(w**2), static.init(w))(w))(w)
    redone = dynamic_scale_grad(lambda w: jnp.sum(w**2), redo_on_nan=9)
    jax.jit(lambda w: redone(w, dynamic_scaler_state=DynamicScalerState()))(w)
    told = "loss scale is made in the program that is being traced.*<lambda>"
    with pytest.warns(AmpWarning, match=told):
        jax.jit(step)(w)
    monkeypatch.setattr(_errors, "_seen", set())
    with pytest.warns(AmpWarning, match=told):
        jax.jit(lambda w: tx.grad(lambda w: jnp.sum(w**2), tx.init(w))(w))(w)


def test_disable_amp():
    w, x = jnp.ones((3, 2)), jnp.ones((4, 3))
    before = amp(matmul_loss)
    with disable_amp():
        assert amp(matmul_loss) is matmul_loss
        assert amp(compute_dtype="bfloat16")(matmul_loss) is matmul_loss
        loss, tx = enable_amp(matmul_loss, optax.sgd(0.1))
        assert loss is matmul_loss and tx.init(w).scaler == NoScaler()
        with pytest.raises(TypeError, match="`fn` must be callable"):
            amp(w)
        with pytest.warns(
            AmpWarning, match=r"wrapped by `amp` before `disable_amp\(\)`"
        ):
            assert dots(before, w, x) > 0
        with disable_amp():
            pass
        assert amp(matmul_loss) is matmul_loss
    with warnings.catch_warnings():
        assert dots(amp(matmul_loss), w, x) == dots(before, w, x) > 0

    @disable_amp()
    def plain():
        return amp(matmul_loss)

    assert plain() is matmul_loss


# Gradients that nobody scaled.


AROUND = {
    "itself": lambda tx: tx,
    "chain": lambda tx: optax.chain(optax.clip_by_global_norm(1e9), tx),
    "scaled after": lambda tx: optax.chain(tx, optax.scale(1.0)),
    "injected": lambda tx: optax.inject_hyperparams(lambda rate: tx)(rate=0.1),
    "masked": lambda tx: optax.masked(tx, {"w": True, "c": False}),
}
PARTS = {"w": jnp.array([1.0, 2.0]), "c": jnp.array(3.0)}


def parts_loss(p, x):
    return half_loss(p["w"], x) ** 2 + p["c"] ** 2


@pytest.mark.parametrize("wrap", [jax.jit, lambda f: f], ids=["jit", "eager"])
@pytest.mark.parametrize("around", AROUND.values(), ids=AROUND)
def test_plain_gradients_are_refused_and_its_own_are_not(around, wrap):
    scaled = loss_scale_optimizer(optax.sgd(0.1), 2.0**10)
    tx, x = around(scaled), jnp.array([0.5, 0.25])
    opt_state = tx.init(PARTS)
    with pytest.raises(TypeError, match=r"(?s)`tx\.value_and_grad\(loss_fn.*`grads"):
        wrap(lambda g, s: tx.update(g, s, PARTS))(
            jax.grad(parts_loss)(PARTS, x), opt_state
        )
    value_and_grad = scaled.value_and_grad(parts_loss, opt_state)
    value, grads = wrap(value_and_grad)(PARTS, x)  # leave and enter a jitted function
    assert value == parts_loss(PARTS, x)
    updates, _ = wrap(lambda g, s: tx.update(g, s, PARTS))(grads, opt_state)
    wanted = jax.tree.map(lambda g: -0.1 * g, jax.grad(parts_loss)(PARTS, x))
    assert np.allclose(updates["w"], wanted["w"], rtol=1e-3)


BELONGS_WITHIN = {
    "ema": optax.ema(0.9),
    "trace": optax.trace(0.9),
    "scale_by_adam": optax.scale_by_adam(),
    "add_decayed_weights": optax.add_decayed_weights(0.1),
}


@pytest.mark.parametrize("transform", BELONGS_WITHIN.values(), ids=BELONGS_WITHIN)
def test_what_reads_another_tree_is_told_to_stand_within(transform):
    tx = optax.chain(transform, TX)
    opt_state = tx.init(PARTS)
    grads = TX.grad(parts_loss, opt_state)(PARTS, W)
    with pytest.raises(ValueError, match=r"put it within `loss_scale_optimizer\("):
        tx.update(grads, opt_state, PARTS)


def test_what_takes_gradients_apart_is_told_to_stand_within():
    tx = optax.flatten(TX)
    opt_state = tx.init(PARTS)
    grads = TX.grad(parts_loss, opt_state)(PARTS, W)
    with pytest.raises(TypeError, match="put that within: `loss_scale_optimizer"):
        tx.update(grads, opt_state, PARTS)


def test_train_state_and_nnx_optimizer():
    scaled = loss_scale_optimizer(optax.sgd(0.1), 2.0**10)
    x = jnp.array([0.5, 0.25])
    state = train_state.TrainState.create(apply_fn=None, params=PARTS, tx=scaled)
    with pytest.raises(TypeError, match="come from a scaled loss"):
        state.apply_gradients(grads=jax.grad(parts_loss)(PARTS, x))
    grads = state.tx.grad(parts_loss, state)(PARTS, x)
    assert state.apply_gradients(grads=grads).params["c"] == 3.0 - 0.1 * 6

    model = nnx.Linear(2, 1, rngs=nnx.Rngs(0))
    optimizer = nnx.Optimizer(model, scaled, wrt=nnx.Param)

    def loss(model, x):
        return model(x).sum()

    assert scale_loss(1.0, optimizer.opt_state) == scale_loss(1.0, optimizer) == 2**10
    with pytest.raises(TypeError, match="come from a scaled loss"):
        optimizer.update(model, nnx.grad(loss)(model, x))
    grads = scaled.grad(loss, optimizer)(model, x)
    wanted = model.kernel[...] - 0.1 * x[:, None]
    optimizer.update(model, grads)
    assert np.allclose(model.kernel[...], wanted, rtol=1e-6)

    def by_hand(model, x):
        return scale_loss(loss(model, x), optimizer.opt_state)

    grads = unscale_grads(nnx.grad(by_hand)(model, x), optimizer.opt_state)
    optimizer.update(model, grads)
    assert np.allclose(model.kernel[...], wanted - 0.1 * x[:, None], rtol=1e-6)


def test_gradients_that_are_put_together():
    tx = loss_scale_optimizer(optax.sgd(1.0), 2.0**10)
    opt_state, xs = tx.init(PARTS), jnp.ones((4, 2)) / 8

    def microbatch(total, x):
        loss, grads = tx.value_and_grad(parts_loss, opt_state)(PARTS, x)
        return jax.tree.map(jnp.add, total, grads), loss

    zeros = jax.tree.map(lambda p: Unscaled(jnp.zeros_like(p)), PARTS)
    total, _ = jax.lax.scan(microbatch, zeros, xs)
    updates, _ = tx.update(total, opt_state, PARTS)
    assert updates["c"] == -24
    lost = jax.tree.map(jnp.zeros_like, PARTS)
    lost = jax.tree.map(jnp.add, lost, tx.grad(parts_loss, opt_state)(PARTS, xs[0]))
    with pytest.raises(TypeError, match=r"`jax.tree.map\(Unscaled, grads\)`"):
        tx.update(lost, opt_state, PARTS)
    tx.update(jax.tree.map(Unscaled, lost), opt_state, PARTS)


@settings(deadline=None, max_examples=20)
@given(st.integers(-30, 30), st.floats(0.5, 2.0), st.booleans())
def test_value_and_grad_is_that_of_jax(exponent, w, has_aux):
    def loss(w, x):
        return (w["a"] * x, {"x": x, "name": "aux"}) if has_aux else w["a"] * x

    tx = loss_scale_optimizer(optax.sgd(1.0), 2.0**exponent)
    w, x = {"a": jnp.float32(w), "n": None}, jnp.float32(3)
    options = dict(has_aux=has_aux)
    got = tx.value_and_grad(loss, tx.init(w), **options)(w, x)
    value, grads = jax.value_and_grad(loss, **options)(w, x)
    assert got[0] == value and got[1]["a"].value == grads["a"]
    out = tx.grad(loss, tx.init(w), filter=False, **options)(w, x)
    grads = out[0] if has_aux else out
    assert grads["a"].value == 3 and (not has_aux or out[1]["name"] == "aux")


def test_without_scaling_plain_gradients_will_do():
    for scaler in (None, NoScaler()):
        tx = loss_scale_optimizer(optax.sgd(0.5), scaler)
        opt_state = tx.init(W)
        own = tx.grad(lambda w: w.sum(), opt_state)(W)
        for grads in (own, jax.grad(lambda w: w.sum())(W)):
            assert (tx.update(grads, opt_state, W)[0] == -0.5).all()


def test_training_without_scaling_the_loss_is_no_longer_silent():
    """What was 32768 times too small, and trained nothing."""
    loss, tx = enable_amp(matmul_loss, optax.sgd(0.1))
    w, x = jnp.ones((3, 2)), jnp.ones((4, 3)) / 4
    with pytest.raises(TypeError, match="may have become zero in float16"):
        jax.jit(tx.update)(jax.grad(loss)(w, x), tx.init(w), w)


def test_each_run_has_arrays_of_its_own():
    """So that one may be donated while another goes on."""
    tx = loss_scale_optimizer(optax.sgd(0.1))
    first, second = tx.init(W), tx.init(W)
    jax.jit(lambda state: jax.tree.map(lambda x: x + 1, state), donate_argnums=0)(first)
    assert float(second.scaler.scaler) == float(tx.init(W).scaler.scaler)


def apart(tx, name):
    """`tx` for the parameters called `name`, and another optimizer for the others."""
    only = {key: key == name for key in PARTS}
    others = {key: key != name for key in PARTS}
    return optax.chain(optax.masked(tx, only), optax.masked(optax.sgd(0.1), others))


HIDING = {
    "masked": lambda tx: apart(tx, "c"),
    "partition": lambda tx: optax.partition(
        {"plain": optax.sgd(0.1), "scaled": tx}, {"w": "plain", "c": "scaled"}
    ),
    "clip": lambda tx: optax.chain(optax.clip(1.0), tx),
    "sign": lambda tx: optax.chain(
        optax.stateless(lambda g, _: jax.tree.map(jnp.sign, g)), tx
    ),
    "clip, then masked": lambda tx: optax.chain(optax.clip(1.0), apart(tx, "c")),
}


@pytest.mark.parametrize("by_hand", [False, True], ids=["grad", "by hand"])
@pytest.mark.parametrize("around", HIDING.values(), ids=HIDING)
def test_an_overflow_that_update_is_not_shown_is_noticed(around, by_hand):
    """The gradient of `w` overflows, and that of `c` does not."""
    scaled = loss_scale_optimizer(optax.sgd(0.1), DynamicScalerState(scaler=2.0**10))
    tx = around(scaled)

    def loss(p, x):
        return half_loss(p["w"], x) + p["c"] ** 2

    @jax.jit
    @guard_step
    def step(state, x):
        p, opt_state = state
        if by_hand:
            grads = jax.grad(lambda p: scale_loss(loss(p, x), opt_state))(p)
            grads = unscale_grads(grads, opt_state)
        else:
            grads = scaled.grad(loss, opt_state)(p, x)
        updates, opt_state = tx.update(grads, opt_state, p)
        return (optax.apply_updates(p, updates), opt_state), None

    start = PARTS, tx.init(PARTS)
    (p, opt_state), _ = step(start, jnp.array([100.0, 0.5]))
    assert bits(p) == bits(PARTS)
    assert scale_loss(1.0, opt_state) == 2.0**9
    (p, opt_state), _ = step(start, jnp.array([1.0, 0.5]))
    assert all(jnp.all(p[key] != PARTS[key]) for key in PARTS)
    assert scale_loss(1.0, opt_state) == 2.0**10


def test_gradients_of_a_step_that_overflowed_are_nan():
    tx = loss_scale_optimizer(optax.sgd(0.1), 2.0**10)
    opt_state = tx.init(PARTS)
    grad = jax.jit(tx.grad(parts_loss, opt_state))
    bad = grad(PARTS, jnp.array([jnp.inf, 0.5]))
    assert all(jnp.isnan(g).all() for g in jax.tree.leaves(bad))
    for some in (bad, {"w": None, "c": bad["c"]}, jax.tree.map(jnp.sign, bad)):
        updates, following = tx.update(some, tx.init(some))
        assert not any(jnp.any(u) for u in jax.tree.leaves(updates))
        assert following.scaler.overflows == 1


@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_which_leaves_overflowed_is_still_told(dtype):
    tx = loss_scale_optimizer(optax.sgd(0.1), 2.0**10)
    p = jax.tree.map(lambda x: x.astype(dtype), PARTS)
    grad = jax.jit(tx.grad(parts_loss, tx.init(PARTS)))
    bad = grad(p, jnp.array([jnp.inf, 0.5]))
    assert all(jnp.isnan(g).all() for g in jax.tree.leaves(bad))
    (leaf,) = overflowed_leaves(bad)
    assert leaf.path == "['w']" and leaf.size == 2
    assert overflowed_leaves(grad(p, jnp.array([0.25, 0.5]))) == []


def test_a_skipped_step_leaves_numpy_arrays_of_the_state_as_they_were():
    def update(grads, state, params=None):
        return grads, state + np.float32(1)

    counting = optax.GradientTransformation(lambda _: np.zeros(1, np.float32), update)
    tx = loss_scale_optimizer(counting)
    w = {"w": jnp.ones(3)}
    state = tx.init(w)
    for factor, count in ((jnp.inf, 0), (1.0, 1)):
        gradient = tx.grad(lambda w, by=factor: jnp.sum(w["w"] * by), state)
        _, state = tx.update(gradient(w), state, w)
        (found,) = (x for x in jax.tree.leaves(state) if np.shape(x) == (1,))
        assert found == count
