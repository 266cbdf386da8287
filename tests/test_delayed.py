"""Delayed scaling: a state that goes in and out, through every construct of JAX."""

import functools
import json
from collections.abc import Callable
from typing import Any

import flax.linen as nn
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from flax.linen import fp8_ops
from hypothesis import given

from jaxamp_like import (
    AmpError,
    AmpWarning,
    Policy,
    amp,
    amp_with_state,
    default_amp_policy,
    disable_amp,
    explain,
    get_policy,
    init_amp_state,
    trace_numerics,
)
from jaxamp_like._delayed.tensors import TensorFinder
from jaxamp_like._quantised.delayed import (
    TensorScale,
    measured,
    next_scale,
    updated_scale,
)
from jaxamp_like._quantised.scaled import AsFloat8
from jaxamp_like.presets import quantised
from jaxamp_like.rules import float8
from tests.programs import error, values
from tests.test_quantised import contractions

pytestmark = pytest.mark.sample(9)

LENGTH = 4


DELAYED = float8(delayed=True, amax_history_length=LENGTH, where=None)


def policy(dtype="bfloat16", **options):
    rule = float8(delayed=True, amax_history_length=LENGTH, where=None, **options)
    return Policy(dtype, rules=quantised(rule))


POLICY = policy()


# Agreement with Flax.


class MLP(nn.Module):
    dense: Callable[..., nn.Module]

    @nn.compact
    def __call__(self, x):
        x = self.dense(16, name="up")(x).astype(jnp.float32)
        return self.dense(4, name="down")(nn.gelu(x)).astype(jnp.float32)


def squares(model, x, y):
    return lambda variables: jnp.mean((model.apply(variables, x) - y) ** 2)


# XLA as it comes, but for roundings that it leaves out where it fuses: of two programs
# in different places.
AS_ROUNDED = {
    "xla_allow_excess_precision": False,
    "xla_backend_optimization_level": 3,
    "xla_llvm_disable_expensive_passes": False,
}

FLAX_NAMES = {
    "input": "lhs",
    "kernel": "rhs",
    "output_grad": "cotangent",
}


def train_by_flax(dtype, batches, params):
    """Each step by Flax's own layers: parameters, loss, gradients, and the state."""
    dense = functools.partial(
        nn.Dense,
        use_bias=False,
        dtype=dtype,
        dot_general_cls=functools.partial(
            fp8_ops.Fp8DirectDotGeneralOp, amax_history_length=LENGTH
        ),
    )
    model = MLP(dense)
    meta = model.init(jax.random.key(0), batches[0][0])["_overwrite_with_gradient"]
    # Flax divides by 1 in its first step, where nothing is known yet.
    meta = jax.tree_util.tree_map_with_path(
        lambda path, x: x.at[0].set(1.0) if "history" in str(path) else x, meta
    )

    @functools.partial(jax.jit, compiler_options=AS_ROUNDED)
    def step(params, meta, x, y):
        def loss(params, meta):
            variables = {"params": params, "_overwrite_with_gradient": meta}
            return squares(model, x, y)(variables)

        value, (grads, meta) = jax.value_and_grad(loss, (0, 1))(params, meta)
        return value, grads, meta

    for x, y in batches:
        value, grads, meta = step(params, meta, x, y)
        state = {}
        for layer, ((_, held),) in ((k, v.items()) for k, v in meta.items()):
            for theirs, ours in FLAX_NAMES.items():
                scale, history = (
                    held[f"{theirs}_{what}"] for what in ("scale", "amax_history")
                )
                state[layer, ours] = scale[0], history
        yield params, (value, grads, state)
        params = jax.tree.map(lambda p, g: p - 0.01 * g, params, grads)


def steps_with_state(dtype, batches, trained):
    """The same of ours, from the parameters of each step."""
    model = MLP(functools.partial(nn.Dense, use_bias=False))

    def loss(params, x, y):
        return squares(model, x, y)({"params": params})

    by = policy(dtype, power_of_two=False)
    step = amp_with_state(jax.value_and_grad(loss), amp_policy=by)
    step = jax.jit(step, compiler_options=AS_ROUNDED)
    state = {
        key: tensor._replace(history=tensor.history.at[0].set(1.0))
        for key, tensor in init_amp_state(step, trained[0], *batches[0]).items()
    }
    for params, (x, y) in zip(trained, batches, strict=True):
        (value, grads), state = step(state, params, x, y)
        found = {}
        for key, tensor in state.items():
            *_, scope, _, role = key.split("/")
            found[scope.partition(".")[0], role] = tuple(tensor)
        yield value, grads, found


@pytest.mark.rest
@pytest.mark.sample(2)
@pytest.mark.parametrize("dtype", ("float32", "bfloat16"))
def test_agrees_with_flax_step_by_step(dtype):
    # Magnitudes come and go, so that scales follow and values are clipped meanwhile.
    batches = [
        (values(8, 12, seed=i) * 2.0 ** (i * 7 % 5), values(8, 4, seed=100 + i))
        for i in range(20)
    ]
    params = {
        "up": {"kernel": values(12, 16) / 4},
        "down": {"kernel": values(16, 4, seed=1) / 4},
    }
    trained, flax = zip(*train_by_flax(dtype, batches, params), strict=True)
    ours = list(steps_with_state(dtype, batches, trained))
    assert len(ours) == 20
    for i, ((value, grads, state), own) in enumerate(zip(flax, ours, strict=True)):
        same = jax.tree.map(
            lambda x, y: bool(np.all(x == y)), (value, state), (own[0], own[2])
        )
        assert all(jax.tree.leaves(same)), (i, same)
        # XLA multiplies a sum by its two scales in the order that it likes, with three
        # roundings: on JAX 0.6 one number of these gradients differs by two last bits.
        jax.tree.map(
            lambda x, y: np.testing.assert_allclose(x, y, rtol=2**-22, atol=0),
            grads,
            own[1],
        )


# Structure: one tensor has one history, whatever is around the contractions.


def train(fn, *args, steps=2, by: Any = POLICY, argnums: Any = None) -> Any:
    """What the last of some steps returns, and the state after it."""
    step = jax.jit(amp_with_state(fn, amp_policy=by, argnums=argnums))
    out, state = None, init_amp_state(step, *args)
    for _ in range(steps):
        out, state = step(state, *args)
    return out, state


def assert_equal(a, b):
    assert jax.tree.structure(a) == jax.tree.structure(b)
    same = jax.tree.map(lambda x, y: bool(jnp.all(x == y)), a, b)
    assert all(jax.tree.leaves(same)), (a, b)


def layer(x, w):
    with jax.named_scope("layer"):
        return x + jnp.tanh(x @ w), None


def two(x, w):
    return x + jnp.tanh(jnp.tanh(x @ w) @ w.T), None


LAYERS, X = values(2, 8, 8) / 2, values(4, 8, seed=1)


def through(block, loop):
    return jax.value_and_grad(lambda ws, x: jnp.mean(loop(block, x, ws)[0] ** 2))


def unrolled(block, x, ws):
    for w in ws:
        x, _ = block(x, w)
    return x, None


def test_every_iteration_of_a_scan_has_its_own_history():
    (value, grads), state = train(through(layer, jax.lax.scan), LAYERS, X)
    (other, others), apart = train(through(layer, unrolled), LAYERS, X)
    assert_equal((value, grads), (other, others))
    assert [*state] == [f"layer/dot_general/{n}" for n in ("cotangent", "lhs", "rhs")]
    for key, tensor in state.items():
        *path, role = key.split("/")
        keys = ["/".join(path) + number + f"/{role}" for number in ("", ".1")]
        assert_equal(
            tensor, jax.tree.map(lambda *xs: jnp.stack(xs), *map(apart.get, keys))
        )
    assert len(apart) == 6
    amax = jnp.max(abs(LAYERS.astype("bfloat16")), (1, 2)).astype("float32")
    assert (state["layer/dot_general/rhs"].history[:, 0] == amax).all()


@pytest.mark.sample(4)
@pytest.mark.parametrize("block", (layer, two))
@pytest.mark.parametrize("loop", (jax.lax.scan, unrolled))
def test_what_is_made_again_counts_once(block, loop):
    plain = train(through(block, loop), LAYERS, X)
    again = train(through(jax.checkpoint(block), loop), LAYERS, X)
    assert again[1].keys() == plain[1].keys()
    tensors = 5 if block is two else 3  # the transposed weight is the weight
    assert len(plain[1]) == tensors * (2 if loop is unrolled else 1)
    assert_equal(again, plain)


def loop_made_again(block, x, ws):
    return jax.checkpoint(functools.partial(jax.lax.scan, block))(x, ws)


@pytest.mark.sample(2)
@pytest.mark.parametrize("block", (layer, two))
def test_a_loop_that_is_made_again_counts_once(block):
    plain = train(through(block, jax.lax.scan), LAYERS, X)
    again = train(through(block, loop_made_again), LAYERS, X)
    assert again[1].keys() == plain[1].keys()
    assert_equal(again, plain)


def test_loops_that_do_the_same_have_one_history():
    def loop(x, ws, then=jnp.tanh, **options):
        body = lambda x, w: (then(x @ w), None)  # noqa: E731
        return jax.lax.scan(body, x, ws, **options)[0]

    def names(*loops):
        fn = amp_with_state(lambda ws: [loop(ws) for loop in loops], amp_policy=POLICY)
        return [key.rpartition("/")[2] for key in init_amp_state(fn, LAYERS)]

    once = functools.partial(loop, X)
    assert sorted(names(once, once)) == ["lhs", "rhs"]
    others = {
        "body": functools.partial(once, then=jnp.sin),
        "start": functools.partial(loop, 2 * X),
        "direction": functools.partial(once, reverse=True),
    }
    for what, other in others.items():
        assert sorted(names(once, other)) == ["lhs", "lhs", "rhs"], what


def test_iterations_that_share_an_operand_share_a_history():
    def recurrent(wx, wh, xs):
        def step(h, x):
            return jnp.tanh(x @ wx + h @ wh), None

        return jnp.mean(jax.lax.scan(step, jnp.zeros((2, 8)), xs)[0] ** 2)

    xs = values(5, 2, 8) * jnp.arange(1.0, 6)[:, None, None]
    grad = jax.value_and_grad(recurrent, (0, 1))
    _, state = train(grad, *LAYERS[:2], xs, argnums=(0, 1))
    assert {x.history.shape for x in state.values()} == {(LENGTH,)}
    assert len(state) == 5  # both contractions have one cotangent
    amax = jnp.max(abs(xs.astype("bfloat16"))).astype("float32")
    assert state["dot_general/lhs"].history[0] == amax


def test_microbatches_are_combined_by_max():
    def loss(w, x):
        return jnp.mean(jnp.tanh(x @ w) ** 2)

    def accumulated(w, xs):
        def add(total, x):
            return jax.tree.map(jnp.add, total, jax.value_and_grad(loss)(w, x)), None

        return jax.lax.scan(add, (0.0, jnp.zeros_like(w)), xs)[0]

    w, xs = LAYERS[0], jnp.stack([X, 3 * X])
    _, state = train(accumulated, w, xs)
    step = jax.jit(amp_with_state(jax.value_and_grad(loss), amp_policy=POLICY))
    apart = init_amp_state(step, w, X)
    for _ in range(2):
        apart = jax.tree.map(jnp.maximum, *(step(apart, w, x)[1] for x in xs))
    assert_equal(state, apart)


def branches(wide):
    def fn(pred, w, v, x):
        def yes(x):
            return jnp.tanh(x @ w) @ v

        def no(x):
            return jnp.tanh(x) @ v

        return jnp.mean(jax.lax.cond(pred, yes, no, x) ** 2)

    return jax.value_and_grad(fn, (1, 2)) if wide else fn


@pytest.mark.parametrize("wide", (False, True))
def test_a_branch_that_is_not_taken_keeps_its_histories(wide):
    fn = branches(wide)
    w, v = LAYERS[0], LAYERS[1]
    step = jax.jit(amp_with_state(fn, amp_policy=POLICY, argnums=(1, 2)))
    state = init_amp_state(step, True, w, v, X)
    _, after_no = step(state, False, w, v, X)
    _, after_yes = step(after_no, True, w, v, 2 * X)
    assert state.keys() == after_no.keys() == after_yes.keys()
    seen = {key for key in state if after_no[key].history[0] > 0}
    unseen = state.keys() - seen
    assert seen and unseen
    for key in unseen:
        assert_equal(after_no[key], state[key])
        assert after_yes[key].history[0] > 0
    amax = 2 * jnp.max(abs(X.astype("bfloat16")))
    assert after_yes["dot_general.1/lhs"].history[0] == amax
    _, again = step(after_yes, False, w, v, X)
    for key in unseen:
        assert_equal(again[key], after_yes[key])


def test_a_while_loop_counts_its_largest():
    def grow(n, w, x):
        def step(state):
            i, x = state
            return i + 1, x @ w

        return jax.lax.while_loop(lambda state: state[0] < n, step, (0, x))[1]

    step = jax.jit(amp_with_state(grow, amp_policy=POLICY, argnums=1))
    w = 2 * jnp.eye(8)
    state = init_amp_state(step, 3, w, X)
    _, none = step(state, 0, w, X)
    assert_equal(none, state)
    out, state = step(state, 3, w, X)
    assert np.allclose(out, 8 * X, rtol=0.1)
    largest = 4 * jnp.max(abs(X)).astype("bfloat16").astype("float32")
    assert np.allclose(state["dot_general/lhs"].history[0], largest, rtol=0.1)


def test_a_while_loop_whose_condition_contracts():
    def search(w, x):
        def far(x):
            return jnp.sum(x @ w) < 50.0

        with jax.named_scope("search"):
            return jax.lax.while_loop(far, lambda x: 2 * x, x)

    # By a scope: such a loop is a solver, and stays as written.
    by = Policy("bfloat16", rules=default_amp_policy | {"search": DELAYED})
    out, state = train(search, jnp.eye(8), jnp.full((4, 8), 0.25), by=by)
    assert jnp.all(out == 2.0)
    assert state["search/dot_general/lhs"].history[0] == 2.0


def test_two_calls_of_one_jitted_function_have_histories_of_their_own():
    @jax.jit
    def dense(w, x):
        return jnp.tanh(x @ w)

    def fn(v, w, x):
        return jnp.mean(dense(w, dense(v, x)) ** 2)

    args = 4 * LAYERS[0], LAYERS[1], X
    _, state = train(jax.value_and_grad(fn, (0, 1)), *args, argnums=(0, 1))
    assert len(state) == 6
    first, second = (state[f"dot_general{n}/rhs"].history[0] for n in ("", ".1"))
    assert first == 4 * jnp.max(abs(LAYERS[0].astype("bfloat16")))
    assert second == jnp.max(abs(LAYERS[1].astype("bfloat16")))


@jax.custom_jvp
def by_own_jvp(w, x):
    return jnp.tanh(x @ w)


@by_own_jvp.defjvp
def _(primals, tangents):
    (w, x), (dw, dx) = primals, tangents
    y = by_own_jvp(w, x)
    return y, (1 - y**2) * (x @ dw + dx @ w)


@jax.custom_vjp
def by_own_vjp(w, x):
    return jnp.tanh(x @ w)


def _backward(kept, ct):
    w, x, y = kept
    ct = ct * (1 - y**2)
    return x.T @ ct, ct @ w.T


by_own_vjp.defvjp(lambda w, x: ((y := by_own_vjp(w, x)), (w, x, y)), _backward)


@pytest.mark.parametrize("fn", (by_own_jvp, by_own_vjp))
def test_derivative_rules_of_an_author(fn):
    def loss(w, x):
        return jnp.mean(fn(w, x) ** 2)

    args = LAYERS[0], X
    (_, grads), state = train(jax.value_and_grad(loss, (0, 1)), *args)
    for made, plain in zip(grads, jax.grad(loss, (0, 1))(*args), strict=True):
        assert jnp.linalg.norm(made - plain) < 0.2 * jnp.linalg.norm(plain)
    assert all(tensor.history[0] > 0 for tensor in state.values())
    # A transposed operand is the tensor that the forward pass has read.
    assert {*state} == {f"dot_general/{role}" for role in ("lhs", "rhs", "cotangent")}
    (_, undifferentiated) = train(loss, LAYERS[0], X)
    assert {*undifferentiated} == {"dot_general/lhs", "dot_general/rhs"}


@pytest.mark.rest
def test_examples_of_a_vmap():
    def fn(w, x):
        return jnp.tanh(x @ w)

    step = amp_with_state(fn, amp_policy=POLICY)
    state = init_amp_state(step, LAYERS[0], X[0][None])
    _, each = jax.vmap(step, (None, None, 0))(state, LAYERS[0], X[:, None])
    _, together = train(jax.vmap(fn, (None, 0)), LAYERS[0], X[:, None], steps=1)
    assert_equal(jax.tree.map(lambda x: jnp.max(x, 0), each), together)


@pytest.mark.rest
@pytest.mark.sample(2)
@pytest.mark.parametrize("check_vma", (True, False))
def test_devices_of_a_shard_map_share_histories(check_vma):
    mesh = jax.sharding.Mesh(np.array(jax.devices()[:4]), "d")
    split, whole = jax.sharding.PartitionSpec("d"), jax.sharding.PartitionSpec()

    def over_devices(fn, out):
        specs = {"in_specs": (whole, split), "out_specs": out}
        return jax.shard_map(fn, mesh=mesh, check_vma=check_vma, **specs)

    def check(made, alone):
        assert made.keys() == alone.keys()
        for key in made:
            assert np.allclose(made[key].history, alone[key].history, rtol=0.1), key

    def loss(ws, x):
        return jnp.mean(jax.lax.scan(jax.checkpoint(layer), x, ws)[0] ** 2)

    mean = over_devices(lambda ws, x: jax.lax.pmean(loss(ws, x), "d"), whole)
    (value, grads), state = train(jax.value_and_grad(mean), LAYERS, X)
    (other, plain), alone = train(jax.value_and_grad(loss), LAYERS, X)
    check(state, alone)
    assert np.allclose(value, other, rtol=0.01)
    assert jnp.linalg.norm(grads - plain) < 0.1 * jnp.linalg.norm(plain)

    def uneven(w, x):
        """Each device takes a branch, and as many steps, as its part says."""
        x = jax.lax.cond(x[0, 0] > 0, lambda x: x @ w, lambda x: x, x)
        return jax.lax.while_loop(lambda x: jnp.max(x) < 9, lambda x: x @ w, x)

    w, x = 2 * jnp.eye(8), abs(X).at[2, 0].multiply(-1)
    made, state = train(over_devices(uneven, split), w, x)
    parts = [train(uneven, w, row[None]) for row in x]
    assert np.allclose(made, jnp.concatenate([part for part, _ in parts]), rtol=0.2)
    check(
        state,
        jax.tree.map(
            lambda *xs: functools.reduce(jnp.maximum, xs), *(s for _, s in parts)
        ),
    )


SHARING = {
    "scan": (None, through(jax.checkpoint(two), jax.lax.scan), LAYERS, X),
    "unrolled": (None, through(jax.checkpoint(two), unrolled), LAYERS, X),
    "branches": ((1, 2), branches(wide=True), True, *LAYERS, X),
}


@pytest.mark.rest
@pytest.mark.sample(3)
@pytest.mark.parametrize("case", SHARING)
def test_what_shares_a_history_is_the_same_tensor(case, monkeypatch):
    """Measured by all who read it, a tensor has the maximum that one has measured."""
    argnums, fn, *args = SHARING[case]
    state = train(fn, *args, argnums=argnums)[1]
    use = TensorFinder._use
    shared = []

    def recording(*given):
        found = use(*given)
        shared.append(not found.records)
        return found._replace(records=True)

    monkeypatch.setattr(TensorFinder, "_use", recording)
    everywhere = train(fn, *args, argnums=argnums)[1]
    assert 2 * sum(shared) > len(state)
    assert everywhere.keys() == state.keys()
    for key in state:
        np.testing.assert_allclose(
            everywhere[key].history, state[key].history, rtol=2**-6, err_msg=key
        )


# Numbers, programs, mistakes.


def product(w, x):
    return jnp.sum(x @ w)


@pytest.mark.rest
def test_first_by_what_is_there_then_by_what_was_seen():
    """Scales are powers of two, of the largest of the last steps."""
    step = amp_with_state(product, amp_policy=POLICY)
    state = init_amp_state(step, jnp.eye(8), X)
    scales = []
    for amax in (10.0, 900.0, 3.0, 3.0, 3.0, 3.0, 0.0, 0.0, 0.0, 0.0, 0.0, 900.0):
        _, state = step(state, jnp.eye(8), jnp.full((4, 8), amax))
        scales.append(float(state["dot_general/lhs"].scale))
    # 4 are remembered: 900 / 448 is rounded up to 4, 10 / 448 to 2^-5, 3 to 2^-7.
    # Where none of them is known any more, the next one is measured again.
    assert scales == [2**-5, 2**-5, 4, 4, 4, 4, *[2**-7] * 5, 4]


@given(
    st.lists(st.floats(width=32), min_size=LENGTH, max_size=LENGTH),
    st.floats(width=32),
    st.booleans(),
)
def test_scales_are_numbers_whatever_was_seen(history, amax, exact):
    """And what is not finite is not remembered: no scale is stuck for 1024 steps."""
    fmt = AsFloat8(jnp.dtype("float8_e4m3fn"), power_of_two=not exact)
    state = TensorScale(jnp.float32(1.0), jnp.abs(jnp.float32(history)))
    amax = jnp.float32(abs(amax))
    scale = measured(next_scale(state, fmt), amax, fmt)
    assert 2.0**-112 <= scale <= 2.0**126
    if not exact:
        assert np.frexp(scale)[0] == 0.5
    after = updated_scale(state, scale, amax)
    if np.isfinite(amax):
        assert after.history[0] == amax and after.scale == scale
    else:
        assert_equal(jnp.isnan(after.history), jnp.isnan(state.history))
        assert after.scale == state.scale


@pytest.mark.parametrize("exact", (False, True))
@pytest.mark.parametrize("bad", (float("inf"), float("nan")))
def test_what_is_not_finite_is_seen_by_the_loss_and_not_remembered(bad, exact):
    step = amp_with_state(
        jax.value_and_grad(product), amp_policy=policy(power_of_two=not exact)
    )
    state = init_amp_state(step, jnp.eye(8), X)
    _, state = step(state, jnp.eye(8), X)
    (value, grads), after = step(state, jnp.eye(8), X.at[1, 2].set(bad))
    assert jnp.isnan(value) and jnp.isnan(grads).any()
    key = "dot_general/lhs"
    assert_equal(after[key], state[key])
    assert after["dot_general/rhs"].history[0] == 1.0


def three_layers(activation, params, x):
    for i, w in enumerate(params):
        with jax.named_scope(f"layer_{i}"):
            x = activation(x @ w)
    return jnp.mean(x**2)


def three_layers_args(size=1.0):
    params = [values(32, 32, seed=i) / 6 for i in range(3)]
    return params, size * values(16, 32, seed=9)


CURRENT = Policy("bfloat16", rules=quantised(float8(where=None)))


@pytest.mark.parametrize("size", (1e-4, 1.0, 1e4))
def test_the_first_step_is_scaled_by_what_it_measures(size):
    params, x = three_layers_args(size)
    loss = functools.partial(three_layers, lambda x: x)
    step = jax.jit(amp_with_state(jax.value_and_grad(loss), amp_policy=POLICY))
    state = init_amp_state(step, params, x)
    (_, grads), state = step(state, params, x)
    exact = jax.grad(loss)(params, x)
    current = jax.jit(jax.grad(amp(loss, amp_policy=CURRENT)))(params, x)
    for made, other, one in zip(grads, current, exact, strict=True):
        assert error(made, one) < 1.2 * error(other, one) < 0.15
    for tensor in state.values():  # that is what it was divided by
        assert 0.4 < tensor.history[0] / tensor.scale / 448 <= 1 or (
            0.4 < tensor.history[0] / tensor.scale / 57344 <= 1
        )


@pytest.mark.rest
def test_the_first_step_of_layers_in_a_scan_is_measured_for_each():
    sizes = jnp.array([1.0, 1e-3, 1e4])

    def loss(ws, x, loop=jax.lax.scan):
        body = lambda x, w: ((x @ w) / jnp.max(abs(w)), None)  # noqa: E731
        return jnp.mean(loop(body, x, ws)[0] ** 2)

    ws = sizes[:, None, None] * values(3, 8, 8) / 3
    for fn in (loss, functools.partial(loss, loop=unrolled)):
        (_, grad), _ = train(jax.value_and_grad(fn), ws, X, steps=1)
        for made, exact in zip(grad, jax.grad(fn)(ws, X), strict=True):
            assert error(made, exact) < 0.15


def block(w, x):
    x = x - jnp.mean(x, -1, keepdims=True)
    x = x * jax.lax.rsqrt(jnp.mean(x * x, -1, keepdims=True) + 1e-5)
    return jax.nn.gelu(x @ w) @ w.T


def residuals(params, x):
    for w in params:
        x = x + block(w, x)
    return jnp.mean(x**2)


KEEPING = {
    "tanh": functools.partial(three_layers, jnp.tanh),
    "relu": functools.partial(three_layers, jax.nn.relu),
    "gelu": functools.partial(three_layers, jax.nn.gelu),
    "nothing": functools.partial(three_layers, lambda x: x),
    "jitted": jax.jit(functools.partial(three_layers, jnp.sin)),
    "checkpoint": jax.checkpoint(functools.partial(three_layers, jnp.tanh)),
    "residual": residuals,
}


@pytest.mark.rest
@pytest.mark.sample(4)
@pytest.mark.parametrize("loss", KEEPING.values(), ids=KEEPING)
def test_keeps_no_more_than_current_scaling_and_no_weight(loss):
    params, x = three_layers_args()
    step = amp_with_state(jax.value_and_grad(loss), amp_policy=POLICY)
    state = init_amp_state(step, params, x)
    now = explain(step)(state, params, x).now
    current = explain(jax.value_and_grad(amp(loss, amp_policy=CURRENT)))(params, x)
    scalars = sum(one.num_bytes for one in now.saved if not one.shape)
    kept = now.totals.saved_bytes - scalars
    assert kept <= current.now.totals.saved_bytes
    assert all(one.shape != (32, 32) for one in now.saved)
    (_, grads), _ = jax.jit(step)(state, params, x)
    assert error(grads, jax.grad(loss)(params, x)) < 0.15


def test_every_contraction_reads_float8_and_is_scaled_once():
    def fn(ws, x):
        return jnp.mean(jax.lax.scan(jax.checkpoint(two), x, ws)[0] ** 2)

    step = amp_with_state(jax.value_and_grad(fn), amp_policy=POLICY)
    state = init_amp_state(step, LAYERS, X)
    found = contractions(step, state, LAYERS, X)
    forward = ("float8_e4m3fn", "float8_e4m3fn", "bfloat16", "mul", 1)
    backward = ("float8_e5m2", *forward[1:])
    # Both are made again, since the residual stream needs the second one's result.
    assert sorted(found) == [forward] * 4 + [backward] * 4


def test_weight_gradients_in_the_compute_dtype():
    by = policy(weight_gradient="compute")
    step = amp_with_state(jax.value_and_grad(product, (0, 1)), amp_policy=by)
    state = init_amp_state(step, LAYERS[0], X)
    operands = [row[:2] for row in contractions(step, state, LAYERS[0], X)]
    assert sorted(operands) == [
        ("bfloat16", "bfloat16"),
        ("float8_e4m3fn", "float8_e4m3fn"),
        ("float8_e5m2", "float8_e4m3fn"),
    ]


def test_state_is_beside_parameters_and_survives_saving(tmp_path):
    step = jax.jit(amp_with_state(jax.value_and_grad(product), amp_policy=POLICY))
    shapes = jax.eval_shape(lambda: (LAYERS[0], X))
    state = init_amp_state(step, *shapes)
    (_, grads), state = step(state, LAYERS[0], X)
    assert grads.shape == LAYERS[0].shape
    leaves, tree = jax.tree.flatten(state)
    np.savez(tmp_path / "state.npz", *leaves)
    with np.load(tmp_path / "state.npz") as held:
        loaded = jax.tree.unflatten(tree, [*held.values()])
    assert_equal(step(loaded, LAYERS[0], X), step(state, LAYERS[0], X))


class Block(nn.Module):
    @nn.compact
    def __call__(self, x):
        return x + nn.Dense(8)(jnp.tanh(nn.Dense(4)(x)))


class Blocks(nn.Module):
    block: Any
    names: tuple[str | None, ...]

    @nn.compact
    def __call__(self, x):
        for name in self.names:
            x = self.block(name=name)(x)
        return x


@pytest.mark.rest
@pytest.mark.parametrize("names", (("first", "last"), (None, None)))
def test_a_state_fits_with_and_without_remat(names):
    """Modules without a name have another one in Linen, with their parameters."""
    plain, remat = Blocks(Block, names), Blocks(nn.remat(Block), names)

    def stepped(model, state=None):
        def loss(params, x):
            return jnp.mean(model.apply(params, x) ** 2)

        step = amp_with_state(jax.value_and_grad(loss), amp_policy=POLICY)
        # The same parameters for both, by the names that each gives them.
        leaves = jax.tree.leaves(plain.init(jax.random.key(0), X))
        tree = jax.tree.structure(model.init(jax.random.key(0), X))
        params = jax.tree.unflatten(tree, leaves)
        state = init_amp_state(step, params, X) if state is None else state
        return step(state, params, X)[1]

    first = stepped(plain)
    own, moved = stepped(remat, stepped(remat)), stepped(remat, first)
    assert own.keys() == moved.keys()
    if names[0]:
        assert own.keys() == first.keys()
    for key, scale in own.items():
        np.testing.assert_array_equal(scale.history, moved[key].history)
    assert stepped(plain, moved).keys() == first.keys()


def test_a_state_read_back_by_names_of_fields():
    step = jax.jit(amp_with_state(jax.value_and_grad(product), amp_policy=POLICY))
    _, state = step(init_amp_state(step, LAYERS[0], X), LAYERS[0], X)
    loaded = {key: tensor._asdict() for key, tensor in state.items()}
    assert_equal(step(loaded, LAYERS[0], X), step(state, LAYERS[0], X))


@pytest.mark.parametrize("is_tied", (True, False), ids=("tied", "untied"))
def test_a_function_and_its_gradient_call_tensors_by_the_same_names(is_tied):
    """So that a model is evaluated by what it was trained with, or a part of it."""

    def loss(ws, x):
        with jax.named_scope("first"):
            h = jnp.tanh(x @ ws[0])
        return jnp.sum(h @ ws[0 if is_tied else 1])

    ws, x = (jnp.eye(8), jnp.ones((8, 8)) / 4), values(4, 8)
    step = amp_with_state(jax.value_and_grad(loss), amp_policy=POLICY)
    _, state = step(init_amp_state(step, ws, x), ws, x)
    evaluated = amp_with_state(loss, amp_policy=POLICY)
    part = {key: state[key] for key in init_amp_state(evaluated, ws, x)}
    amax = {k: float(v.history[0]) for k, v in part.items()}
    _, after = evaluated(part, ws, x)
    assert {k: float(v.history[0]) for k, v in after.items()} == amax


def test_each_cotangent_of_a_scope_with_a_number_sign_has_a_history():
    def step(w, x):
        out, pull = jax.vjp(jax.named_scope("block#1")(product), w, x)
        return pull(out), pull(100 * out)

    state = state_of(step)
    assert [k for k in state if "cotangent" in k] == [
        "block#1/dot_general/cotangent",
        "block#1/dot_general/cotangent#1",
    ]


def test_functions_of_nnx_modules():
    model = nnx.Linear(8, 4, rngs=nnx.Rngs(0))

    def loss(model, x):
        return jnp.mean(model(x) ** 2)

    step = amp_with_state(nnx.value_and_grad(loss), amp_policy=POLICY)
    state = init_amp_state(step, model, X)
    (value, grads), state = step(state, model, X)
    assert value > 0 and jnp.any(grads["kernel"][...] != 0)
    assert len(state) == 3
    amax = jnp.max(abs(model.kernel[...].astype("bfloat16")))
    assert [t.history[0] for k, t in state.items() if k.endswith("rhs")] == [amax]


def test_disable_amp_hands_the_state_through():
    with disable_amp():
        step = amp_with_state(product, amp_policy=POLICY)
        state = init_amp_state(step, LAYERS[0], X)
        out, after = step(state, LAYERS[0], X)
    assert out == product(LAYERS[0], X)
    assert state == after == {}


@pytest.mark.rest
def test_reports_of_a_step():
    step = amp_with_state(jax.value_and_grad(product), amp_policy=POLICY)
    state = init_amp_state(step, LAYERS[0], X)
    report = explain(step)(state, LAYERS[0], X)
    assert "tensor x tensor, delayed" in report.to_json()
    # Without a state too, since nothing is run.
    report = explain(product, amp_policy=POLICY)(LAYERS[0], X)
    assert "scaled by maxima of steps before" in report.to_json()
    assert "no inf or NaN" in str(trace_numerics(step)(state, LAYERS[0], X))


def state_of(fn, by=POLICY):
    return init_amp_state(amp_with_state(fn, amp_policy=by), LAYERS[0], X)


def wrong(value: Any) -> Any:
    return value


MISTAKES = {
    "without a state": (
        lambda: amp(product, amp_policy=POLICY)(LAYERS[0], X),
        AmpError,
        "`amp` has no state.*amp_with_state.*test_delayed",
    ),
    "differentiated": (
        lambda: jax.grad(
            lambda w: amp_with_state(product, amp_policy=POLICY)(
                state_of(product), w, X
            )[0]
        )(LAYERS[0]),
        AmpError,
        "largest cotangents would be lost.*amp_with_state\\(jax.value_and_grad",
    ),
    "differentiated within": (
        lambda: train(jax.grad(amp(product, amp_policy=POLICY)), LAYERS[0], X),
        AmpError,
        "amp_with_state",
    ),
    "the state of a loss for its gradient": (
        lambda: amp_with_state(jax.grad(product), amp_policy=POLICY)(
            state_of(product), LAYERS[0], X
        ),
        AmpError,
        "the function has, and the state has not, 'dot_general/cotangent'",
    ),
    "the state of a gradient for its loss": (
        lambda: amp_with_state(product, amp_policy=POLICY)(
            state_of(jax.grad(product)), LAYERS[0], X
        ),
        AmpError,
        "the state has, and the function has not, .*is given its part: `part = ",
    ),
    "the state of another model": (
        lambda: amp_with_state(product, amp_policy=POLICY)(
            state_of(jax.named_scope("dense")(product)), LAYERS[0], X
        ),
        AmpError,
        "has not, 'dot_general/lhs'.*the function has not, 'dense/dot_general/lhs'",
    ),
    "another number of layers": (
        lambda: amp_with_state(through(layer, jax.lax.scan), amp_policy=POLICY)(
            train(through(layer, jax.lax.scan), LAYERS[:1], X)[1], LAYERS, X
        ),
        AmpError,
        r"is float32\[1\], and must be float32\[2\]",
    ),
    "another length": (
        lambda: amp_with_state(product, amp_policy=policy())(
            {
                k: v._replace(history=v.history[..., :2])
                for k, v in state_of(product).items()
            },
            LAYERS[0],
            X,
        ),
        AmpError,
        r"amax_history_length=4.*is float32\[2\], and must be float32\[4\]",
    ),
    "parameters for a state": (
        lambda: amp_with_state(product, amp_policy=POLICY)({"w": LAYERS[0]}, X),
        TypeError,
        "first argument.*but got a dict that holds a .*Array.* under 'w'",
    ),
    "no state": (
        lambda: amp_with_state(product, amp_policy=POLICY)(LAYERS[0], X),
        TypeError,
        "first argument.*init_amp_state",
    ),
    "a plain function": (
        lambda: init_amp_state(product, LAYERS[0], X),
        TypeError,
        "what `amp_with_state` returned",
    ),
    "a call": (
        lambda: amp_with_state(wrong(product(LAYERS[0], X))),
        TypeError,
        "not `amp_with_state\\(fn\\(x\\)\\)`",
    ),
    "nothing delayed": (
        lambda: train(product, LAYERS[0], X, by="mixed_bfloat16"),
        AmpWarning,
        "nothing to remember",
    ),
    "code that is linear by hand": (
        lambda: train(
            lambda w, x: jax.custom_derivatives.linear_call(
                lambda w, x: x @ w, lambda w, ct: ct @ w.T, w, x
            ),
            LAYERS[0],
            X,
            by=policy(parameters_only=False),
        ),
        AmpError,
        "histories within `linear_call`.*amp_stop",
    ),
    "a custom_vmap, mapped": (
        lambda: jax.vmap(
            amp_with_state(mapped_by_hand, amp_policy=policy(parameters_only=False)),
            (None, None, 0),
        )(
            state_of(mapped_by_hand, policy(parameters_only=False)),
            LAYERS[0],
            X[:, None],
        ),
        AmpError,
        "amp_with_state\\(jax.vmap\\(fn\\)\\)",
    ),
    "no length": (lambda: float8(delayed=True, amax_history_length=0), ValueError, "1"),
    "a float": (
        lambda: float8(delayed=True, amax_history_length=wrong(2.0)),
        TypeError,
        "an integer",
    ),
    "a length alone": (
        lambda: float8(amax_history_length=16),
        ValueError,
        "Give `delayed=True` too",
    ),
    "by row": (
        lambda: float8(delayed=True, granularity="row"),
        ValueError,
        "of a whole tensor",
    ),
    "a length of int8": (
        lambda: get_policy("int8_from_float32", amax_history_length=16),
        ValueError,
        "policies in float8",
    ),
}


@jax.custom_batching.custom_vmap
def mapped_by_hand(w, x):
    return x @ w


@mapped_by_hand.def_vmap
def _(size, batched, w, x):
    return x @ w, True


@pytest.mark.parametrize("mistake", MISTAKES)
def test_mistakes(mistake):
    call, kind, message = MISTAKES[mistake]
    with pytest.raises(kind, match=f"(?s){message}"):
        call()


def test_names_as_in_keras():
    by = get_policy("float8_from_mixed_bfloat16", amax_history_length=16)
    rule = float8(delayed=True, amax_history_length=16)
    assert by == Policy("bfloat16", "float32", rules=quantised(rule))
    assert Policy.from_dict(json.loads(json.dumps(by.to_dict()))) == by
    assert repr(rule) == "float8(delayed=True, amax_history_length=16)"
