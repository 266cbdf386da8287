"""Right programs that look like mistakes: nothing is said of them, and they run.

Warnings of the library are errors in all tests."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

from jaxamp_like import (
    AmpError,
    AmpWarning,
    amp,
    convert,
    default_amp_policy,
    enable_amp,
    guard_step,
    set_global_policy,
)
from jaxamp_like.rules import use_compute_precision, use_original_precision, when
from jaxamp_like.scaling import static_scaler

pytestmark = pytest.mark.quick

w = {"a": jnp.full((4, 8), 0.1), "b": jnp.full((8, 1), 0.1)}
x = jnp.ones((16, 4))


def loss(w, x):
    return jnp.mean((jnp.tanh(x @ w["a"]) @ w["b"] - 1) ** 2)


def updated(tx, mixed, state, x):
    w, opt_state = state
    grads = tx.grad(mixed, opt_state)(w, x)
    updates, opt_state = tx.update(grads, opt_state, w)
    return optax.apply_updates(w, updates), opt_state


@pytest.fixture
def trained():
    mixed, tx = enable_amp(loss, optax.adam(1e-2), compute_dtype="float16")
    return mixed, tx, (w, tx.init(w))


def test_guarded_step_that_evaluates(trained):
    mixed, tx, state = trained

    @functools.partial(jax.jit, static_argnames="train")
    @guard_step
    def step(state, x, train):
        if not train:
            return state, mixed(state[0], x)
        return updated(tx, mixed, state, x), mixed(state[0], x)

    state, _ = step(state, x, train=True)
    same, _ = step(state, x, train=False)
    assert same[0]["a"].tolist() == state[0]["a"].tolist()


def test_guarded_step_that_drops_the_next_scale_is_refused(trained):
    mixed, tx, state = trained

    @guard_step
    def step(state, x):
        return updated(tx, mixed, state, x)[0], state[1]

    with pytest.raises(TypeError, match="came out as it went in"):
        step(state, x)


@pytest.mark.parametrize("names", [("state", "obs"), ("mean", "var"), ("loss_mean",)])
def test_what_a_guarded_step_returns_beside_its_state(trained, names):
    mixed, tx, state = trained

    @guard_step
    def step(state, x, batch):
        return updated(tx, mixed, state, x), {k: 2 * v for k, v in batch.items()}

    step(state, x, dict.fromkeys(names, x))


def test_statistics_that_a_guarded_step_returns_beside_its_state(trained):
    mixed, tx, state = trained

    @guard_step
    def step(state, x, stats):
        return updated(tx, mixed, state, x), {k: 2 * v for k, v in stats.items()}

    with pytest.warns(AmpWarning, match="the statistics of BatchNorm"):
        step(state, x, {"running_mean": jnp.ones(3), "running_var": jnp.ones(3)})


def test_key_of_a_part_that_only_trains():
    def net(w, x, train):
        y = x @ w["a"]
        if train:
            with jax.named_scope("auxiliary"):
                y = y + x @ w["a"]
        return y

    policy = default_amp_policy | {"auxiliary": "float32"}
    mixed = amp(net, compute_dtype="bfloat16", amp_policy=policy)
    mixed(w, x, True)
    mixed(w, x, False)


def test_convert_of_a_model_with_one_output_takes_one_row():
    def model(w, x):
        return jnp.tanh(x @ w["a"]) @ w["b"]

    keys = jax.random.split(jax.random.key(0), 3)
    shapes = (4, 8), (8, 1), (3, 4)
    a, b, x = (jax.random.normal(*pair) for pair in zip(keys, shapes, strict=True))
    low = convert(model, {"a": a, "b": b}, x, compute_dtype="bfloat16")
    expected = model({"a": a, "b": b}, x)
    # Operands are rounded, by at most 2**-9 each, before a sum of 8 products below 3.
    for actual in (low(x[:1])[0], jax.vmap(low)(x[:, None])[0, 0]):
        np.testing.assert_allclose(actual, expected[0], atol=8 * 3 * 2 * 2**-9)
        assert actual.dtype == jnp.float32


def test_convert_refuses_shapes_for_which_a_policy_decides_otherwise():
    def is_long(site):
        return site.avals[0].shape[0] > 2

    a, x = jnp.ones((4, 8)), jnp.ones((3, 4))
    low_if_long = when(is_long, use_compute_precision, use_original_precision)
    policy = default_amp_policy | {jax.lax.dot_general_p: low_if_long}
    options: Any = {"compute_dtype": "bfloat16", "amp_policy": policy}
    low = convert(lambda w, x: x @ w, a, x, **options)
    with pytest.raises(AmpError, match="it is also read by dot_general"):
        low(x[:1])


def test_state_of_nnx_within_a_jitted_step():
    def loss_of(model, x):
        return jnp.mean((model(x) - 1) ** 2)

    mixed, tx = enable_amp(loss_of, optax.adam(1e-2), compute_dtype="float16")
    model = nnx.Linear(4, 1, rngs=nnx.Rngs(0))
    objects = model, nnx.Optimizer(model, tx, wrt=nnx.Param)
    graphdef, state = nnx.split(objects)

    def step(model, optimizer, x):
        grads = tx.grad(mixed, optimizer)(model, x)
        optimizer.update(model, grads)

    @jax.jit
    def jitted(state, x):
        model, optimizer = nnx.merge(graphdef, state)
        guard_step(step)(model, optimizer, x)
        return nnx.state((model, optimizer))

    @guard_step
    def of_arrays(state, x):
        return jitted(state, x)

    after = jitted(jitted(state, x), x)  # the first step overflows
    assert jax.tree.leaves(after)[0] != jax.tree.leaves(state)[0]
    with pytest.raises(TypeError, match=r"`guard_step\(step\)\(model, optimizer"):
        of_arrays(state, x)


def test_state_whose_structure_the_first_gradients_give():
    inner = optax.chain(
        optax.monitor({"norm": optax.tree_utils.tree_norm}), optax.sgd(0.1)
    )
    mixed, tx = enable_amp(loss, inner, compute_dtype="float16")
    state = w, tx.init(w)
    for _ in range(2):
        state = updated(tx, mixed, state, x)
    assert float(state[1].inner_state[0].measurements["norm"]) > 0


def test_gradients_under_debug_nans(trained):
    mixed, tx, (w, opt_state) = trained
    with jax.debug_nans(True):
        assert tx.grad(mixed, opt_state)(w, x)["a"].shape == (4, 8)


def test_global_policy_that_computes_the_same():
    mixed: Any = amp(loss)
    set_global_policy("mixed_float16")
    assert amp(loss) is not mixed
    set_global_policy(None)


def test_penalty_in_full_precision(trained):
    mixed, tx, (w, opt_state) = trained
    tx.grad(mixed, opt_state)(w, x)
    tx.grad(lambda w: jnp.sum((w["a"] @ w["a"].T) ** 2), opt_state)(w)


def test_guarded_step_of_numpy_parameters(trained):
    mixed, tx, _ = trained
    params = jax.tree.map(lambda w: np.asarray(w, np.float64), w)
    step = guard_step(functools.partial(updated, tx, mixed))
    params, _ = step((params, tx.init(params)), x)
    assert params["a"].dtype == jnp.float32


def test_donated_scale_that_never_changes():
    scaler = static_scaler(jnp.float32(1024))
    assert jax.jit(lambda s: s.update(True), donate_argnums=0)(scaler).scaler == 1024
