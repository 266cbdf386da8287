"""`amp` of a model of Equinox or NNX is a model, which trains."""

import copy
import dataclasses
import inspect
import pickle

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen, nnx

from jaxamp_like import (
    AmpWarning,
    PolicyMap,
    amp,
    default_amp_policy,
    disable_amp,
    enable_amp,
    explain,
    scope_modules,
)

from .programs import W, X

pytestmark = pytest.mark.rest

BF16 = {"compute_dtype": "bfloat16"}


class Net(eqx.Module):
    first: eqx.nn.Linear
    norm: eqx.nn.LayerNorm
    second: eqx.nn.Linear
    scale: float
    name: str = eqx.field(static=True)

    def __init__(self, key=0):
        keys = jax.random.split(jax.random.key(key))
        self.first = eqx.nn.Linear(8, 8, key=keys[0])
        self.norm = eqx.nn.LayerNorm(8)
        self.second = eqx.nn.Linear(8, 2, key=keys[1])
        self.scale, self.name = 2.0, "net"

    def encode(self, x):
        return jax.vmap(lambda x: jnp.tanh(self.norm(self.first(x))))(x)

    def __call__(self, x):
        return jax.vmap(self.second)(self.encode(x)) * self.scale


class NNXNet(nnx.Module):
    def __init__(self, rngs):
        self.first = nnx.Linear(8, 8, rngs=rngs)
        self.norm = nnx.BatchNorm(8, rngs=rngs)
        self.second = nnx.Linear(8, 2, rngs=rngs)
        self.calls = 0

    def encode(self, x):
        self.calls += 1
        return jnp.tanh(self.norm(self.first(x)))

    def __call__(self, x):
        return self.second(self.encode(x))


def loss(model, x):
    return jnp.mean((model(x) - 1) ** 2)


def dtypes(fn, *args):
    """What the contractions read."""
    ops = explain(fn)(*args).now.ops
    return {op.dtype for op in ops if op.flops}


def test_a_mixed_module_is_one_with_the_same_parameters():
    net = Net()
    mixed = amp(net, **BF16)
    assert isinstance(mixed, Net) and mixed.name == "net" and mixed.scale == 2.0
    assert mixed.first.weight is net.first.weight
    paths, others = (
        jax.tree_util.tree_flatten_with_path(model)[0] for model in (mixed, net)
    )
    assert [p for p, _ in paths] == [p for p, _ in others]
    assert all(a is b for (_, a), (_, b) in zip(paths, others, strict=True))
    assert dtypes(mixed, X) == dtypes(mixed.encode, X) == {"bfloat16"}
    assert dtypes(net, X) == {"float32"}
    assert mixed(X).dtype == jnp.float32


def test_a_mixed_module_trains_as_one_whose_loss_is_mixed():
    tx = optax.adam(0.05)

    @eqx.filter_jit
    def step(model, opt_state, wrap):
        value, grads = eqx.filter_value_and_grad(wrap(loss))(model, X)
        updates, opt_state = tx.update(grads, opt_state, model)
        return eqx.apply_updates(model, updates), opt_state, value, grads

    found = []
    for model, wrap in (
        (amp(Net(), **BF16), lambda loss: loss),
        (Net(), lambda loss: amp(loss, **BF16)),
    ):
        opt_state = tx.init(eqx.filter(model, eqx.is_inexact_array))
        values = []
        for _ in range(4):
            model, opt_state, value, grads = step(model, opt_state, wrap)
            values.append(value)
        assert {g.dtype for g in jax.tree.leaves(grads)} == {jnp.dtype("float32")}
        assert all(jnp.any(g != 0) for g in jax.tree.leaves(grads))
        assert values[-1] < values[0]
        found.append(values)
    np.testing.assert_allclose(*found, rtol=0.02)

    # It is still mixed when it comes out of compiled code.
    assert dtypes(eqx.filter_jit(lambda model: model)(amp(Net(), **BF16)), X) == {
        "bfloat16"
    }


def test_functions_of_modules_take_a_mixed_one():
    mixed = amp(Net(), **BF16)
    zero = jnp.zeros_like(mixed.first.weight)
    changed = eqx.tree_at(lambda m: m.first.weight, mixed, zero)
    assert type(changed) is type(mixed) and (changed.first.weight == 0).all()
    dynamic, static = eqx.partition(mixed, eqx.is_array)
    assert dtypes(eqx.combine(dynamic, static), X) == {"bfloat16"}
    assert eqx.nn.inference_mode(mixed).name == "net"
    assert type(jax.tree.map(lambda x: x, mixed)) is type(mixed)
    assert type(copy.deepcopy(mixed)) is type(mixed)
    stacked = eqx.filter_vmap(lambda key: amp(Net(key), **BF16))(jnp.arange(3))
    assert stacked.first.weight.shape == (3, 8, 8)
    outs = eqx.filter_vmap(lambda net: net(X))(stacked)
    assert outs.shape == (3, 4, 2) and dtypes(stacked.first, X[0]) == {"float32"}


def test_transforms_of_jax_take_a_mixed_module_as_a_function():
    mixed = amp(Net(), **BF16)
    expected = mixed(X)
    for fn in (jax.jit(mixed), jax.jit(mixed.__call__), jax.checkpoint(mixed)):
        np.testing.assert_allclose(fn(X), expected, atol=1e-2)
    assert jax.vmap(mixed)(X[None]).shape == (1, 4, 2)
    assert jax.grad(lambda x: jnp.sum(mixed(x)))(X).dtype == jnp.float32
    assert dtypes(jax.jit(lambda x: mixed(x)), X) == {"bfloat16"}


@pytest.mark.parametrize(
    "settings",
    (
        BF16,
        {"amp_policy": default_amp_policy | {"head": "float32"}, "strict": False},
        {"amp_policy": PolicyMap("mixed_bfloat16", {"head": "float32"})},
    ),
    ids=("dtype", "dict", "map"),
)
def test_equal_settings_give_one_class_and_are_pickled(settings):
    linear = eqx.nn.Linear(8, 8, key=jax.random.key(0))
    mixed = amp(linear, **settings)
    assert type(amp(linear, **settings)) is type(mixed)
    assert type(amp(linear, compute_dtype="float16", lean=True)) is not type(mixed)
    again = pickle.loads(pickle.dumps(mixed))
    assert type(again) is type(mixed) and (again.weight == mixed.weight).all()


def test_amp_of_a_mixed_module():
    mixed = amp(Net(), **BF16)
    assert dtypes(amp(mixed), X) == {"bfloat16"}
    with disable_amp():
        net = Net()
        assert amp(net) is net
    with pytest.warns(AmpWarning, match="wrapped by `amp` before"), disable_amp():
        mixed(X)


def test_scopes_of_a_mixed_module():
    policy = default_amp_policy | {"second": "float32"}
    for model in (
        amp(scope_modules(Net()), amp_policy=policy, **BF16),
        scope_modules(amp(Net(), amp_policy=policy, **BF16)),
    ):
        ops = [op for op in explain(model)(X).now.ops if op.flops]
        assert [op.dtype for op in ops] == ["bfloat16", "float32"]


def test_modules_without_parameters_and_functions_of_equinox_are_functions():
    assert amp(eqx.filter_jit(loss)).__name__ == "loss"
    assert not isinstance(amp(eqx.nn.AvgPool1d(2)), eqx.Module)
    mapped = amp(eqx.filter_vmap(Net(), in_axes=None, axis_size=1), **BF16)
    grads = eqx.filter_grad(lambda fn, x: jnp.sum(fn(x)))(mapped, X)
    assert len(jax.tree.leaves(grads)) == 6
    method = amp(Net().encode, **BF16)
    grads = eqx.filter_grad(lambda fn, x: jnp.sum(fn(x)))(method, X)
    assert len(jax.tree.leaves(grads)) == 6 and dtypes(method, X) == {"bfloat16"}


def test_partial_applications_that_are_pytrees_stay_such():
    fn = amp(jax.tree_util.Partial(lambda w, x: x @ w, W), **BF16)
    assert jax.tree.leaves(fn)[0] is W and dtypes(fn, X) == {"bfloat16"}
    grads = jax.grad(lambda fn, x: jnp.sum(fn(x)))(fn, X)
    np.testing.assert_allclose(grads.args[0], X.sum(0)[:, None] + 0 * W, rtol=0.01)


@jax.tree_util.register_dataclass
@dataclasses.dataclass
class Affine:
    w: jax.Array

    def __call__(self, x):
        return x @ self.w


def test_of_other_pytrees_it_is_told_that_they_become_functions():
    with pytest.warns(AmpWarning, match=r"is an? Affine, a pytree that.*`amp\(loss\)"):
        mixed = amp(Affine(W), **BF16)
    assert dtypes(mixed, X) == {"bfloat16"}
    assert dtypes(amp(lambda m, x: m(x), **BF16), Affine(W), X) == {"bfloat16"}


class Helpful(eqx.Module):
    w: jax.Array

    @eqx.filter_jit
    def __call__(self, x):
        return x @ self.w

    def rows(self):
        yield from self.w

    def halved(self):
        return eqx.tree_at(lambda m: m.w, self, self.w / 2)

    def often(self, x, n):
        return self.often(self(x), n - 1) if n else x

    @property
    def size(self):
        return self.w.size


def test_methods_of_a_mixed_module():
    mixed = amp(Helpful(W), **BF16)
    assert dtypes(mixed, X) == dtypes(lambda x: mixed.often(x, 3), X) == {"bfloat16"}
    half = mixed.halved()
    assert type(half) is type(mixed) and dtypes(half, X) == {"bfloat16"}
    assert len([*mixed.rows()]) == 8 and mixed.size == 64
    assert "Mixed" in repr(mixed)


def test_an_nnx_module_trains():
    model, tx = NNXNet(nnx.Rngs(0)), optax.sgd(0.05)
    mixed = amp(model, **BF16)
    assert isinstance(mixed, NNXNet) and mixed.first is model.first
    optimizer = nnx.Optimizer(mixed, tx, wrt=nnx.Param)

    @nnx.jit
    def step(model, optimizer, x):
        value, grads = nnx.value_and_grad(loss)(model, x)
        optimizer.update(model, grads)
        return value

    before = np.asarray(model.first.kernel[...])
    values = [step(mixed, optimizer, X) for _ in range(4)]
    assert values[-1] < values[0]
    assert (model.first.kernel[...] != before).any()  # they share all that they hold
    assert model.calls == mixed.calls == 4 and (model.norm.mean[...] != 0).any()
    gradient = nnx.grad(lambda m, x: jnp.sum(m(x)))
    assert dtypes(gradient, mixed, X) == {"bfloat16"}
    assert dtypes(lambda m, x: m.encode(x), mixed, X) == {"bfloat16"}
    assert dtypes(gradient, model, X) == {"float32"}
    assert dtypes(mixed, X) == {"bfloat16"} and type(nnx.clone(mixed)) is type(mixed)


def test_bound_modules_of_linen_stay_functions():
    """They hold parameters that nothing differentiates by; the loss calls `apply`."""
    dense = linen.Dense(2)
    params = dense.init(jax.random.key(0), X)
    low = amp(dense.apply, **BF16)
    grads = jax.grad(lambda p: jnp.sum(low(p, X)))(params)
    assert jax.tree.structure(grads) == jax.tree.structure(params)
    assert amp(dense.bind(params))(X).shape == (4, 2)


def test_a_mixed_module_under_loss_scaling():
    mixed, tx = amp(Net()), enable_amp(loss, optax.sgd(0.1))[1]
    opt_state = tx.init(eqx.filter(mixed, eqx.is_inexact_array))
    _, grads = tx.value_and_grad(loss, opt_state)(mixed, X)
    updates, _ = tx.update(grads, opt_state, mixed)
    trained = eqx.apply_updates(mixed, updates)
    assert (trained.first.weight != mixed.first.weight).any()


def test_a_method_that_returns_before_it_computes_is_left_as_it_is():
    class Streaming(Net):
        async def stream(self, x):
            yield self(x)

        def parts(self, x):
            yield self(x)

    model = amp(Streaming(), **BF16)
    x = jnp.ones((3, 8))
    np.testing.assert_array_equal(next(model.parts(x)), model(x))
    assert inspect.isasyncgen(model.stream(x))
