"""What a call changes in NNX objects is kept, wherever they are among its arguments."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import errors, nnx
from hypothesis import given, settings, strategies as st

from jaxamp_like import (
    AmpError,
    DynamicScalerState,
    amp,
    dynamic_scale_grad,
    dynamic_scale_tx,
    dynamic_scale_value_and_grad,
    explain,
    scope_modules,
)

pytestmark = pytest.mark.sample(5)

X = jnp.linspace(-1.0, 1.0, 12).reshape(3, 4)
same = functools.partial(amp, amp_policy={})  # changes no bit


class Net(nnx.Module):
    def __init__(self, rngs):
        self.linear = nnx.Linear(4, 4, rngs=rngs)
        self.norm = nnx.BatchNorm(4, rngs=rngs)
        self.dropout = nnx.Dropout(0.5, rngs=rngs)
        self.calls = 0

    def __call__(self, x):
        return self.dropout(self.norm(self.linear(x)))

    def counted(self, x):
        self.calls += 1
        self.last = nnx.Variable(x.sum())
        return self.linear(x)


def numbers(nodes):
    keys = jax.dtypes.prng_key
    return [
        np.asarray(jax.random.key_data(x) if jnp.issubdtype(x.dtype, keys) else x)
        for x in jax.tree.leaves(nnx.state(nodes))
    ]


def bits(*nodes):
    return [x.tobytes() for x in numbers(nodes)]


def objects():
    net = Net(nnx.Rngs(0))
    return {
        "net": net,
        "rngs": nnx.Rngs(noise=7),
        "variable": nnx.Variable(jnp.zeros(())),
        "average": nnx.metrics.Average("loss"),
        "metrics": nnx.MultiMetric(
            loss=nnx.metrics.Average("loss"), spread=nnx.metrics.Welford("loss")
        ),
        "optimizer": nnx.Optimizer(net, optax.sgd(0.5), wrt=nnx.Param),
        "shared": {"norm": net.norm, "stream": [net.dropout.rngs]},
    }


def change_optimizer(optimizer, net, x):
    optimizer.update(net, nnx.state(net, nnx.Param))


def add(variable, x):
    variable[...] += x


CHANGES = {
    "net": lambda o, x: o["net"](x).sum(),
    "rngs": lambda o, x: o["rngs"].noise.normal(()),
    "variable": lambda o, x: add(o["variable"], x.sum()),
    "average": lambda o, x: o["average"].update(loss=x.sum()),
    "metrics": lambda o, x: o["metrics"].update(loss=x),
    "optimizer": lambda o, x: change_optimizer(o["optimizer"], o["net"], x),
    "shared": lambda o, x: o["shared"]["norm"](x).sum(),
}


@pytest.mark.rest
@settings(max_examples=12)
@given(st.lists(st.sampled_from([*CHANGES]), min_size=1, max_size=4), st.booleans())
def test_every_change_of_every_kind_of_object_is_kept(names, jit):
    def step(objects, x):
        total = x.sum()
        for name in names:
            out = CHANGES[name](objects, x)
            total = total + (0.0 if out is None else jnp.sum(out))
        return total

    mixed, plain = objects(), objects()
    wrap = nnx.jit if jit else lambda fn: fn
    out, expected = wrap(same(step))(mixed, X), wrap(step)(plain, X)
    # Op by op, what functions of JAX compile for themselves may be fused otherwise.
    exact = dict(rtol=0, atol=0) if jit else dict(rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(out, expected, **exact)
    for a, b in zip(numbers(mixed), numbers(plain), strict=True):
        np.testing.assert_allclose(a, b, **exact)
    assert bits(*mixed.values()) != bits(*objects().values())
    assert mixed["shared"]["norm"] is mixed["net"].norm


def test_attributes_come_and_change():
    net = Net(nnx.Rngs(0))
    amp(net.counted)(X)
    amp(functools.partial(Net.counted, net))(2 * X)
    assert net.calls == 2 and net.last[...] == (2 * X).sum()


def test_objects_among_the_results():
    net = Net(nnx.Rngs(0))
    new, inner, whole = amp(
        lambda net: (nnx.Sequential(nnx.Dropout(0.1), net.linear), net.norm, net)
    )(net)
    assert inner is net.norm and whole is net and new.layers[1] is net.linear


@pytest.mark.parametrize("wrap", [amp, dynamic_scale_grad])
def test_a_change_that_would_be_lost_is_refused(wrap):
    net = Net(nnx.Rngs(0))
    more = {} if wrap is amp else {"dynamic_scaler_state": DynamicScalerState()}
    with pytest.raises(errors.TraceContextError) as info:
        wrap(lambda x: net(x).sum())(X, **more)
    assert any("Make the object an argument" in note for note in info.value.__notes__)
    assert net.dropout.rngs.count[...] == 0


def test_scoping_inside_of_a_gradient_is_explained():
    net = Net(nnx.Rngs(0))
    report = explain(nnx.grad(amp(lambda net, x: scope_modules(net)(x).sum())))(net, X)
    assert report.now.totals.low_share == 1 and type(net.linear) is nnx.Linear


def loss(net, rngs, metric, x):
    value = (net(x) ** 2).sum() + 0 * rngs.noise.normal(())
    metric.update(loss=value)
    return value


GRADIENTS = {
    "filter": lambda n: dynamic_scale_value_and_grad(loss, redo_on_nan=n),
    "jax": lambda n: dynamic_scale_value_and_grad(loss, redo_on_nan=n, filter=False),
    "nnx": lambda n: dynamic_scale_tx(nnx.value_and_grad, redo_on_nan=n)(loss),
    "DiffState": lambda n: dynamic_scale_tx(
        functools.partial(nnx.value_and_grad, argnums=nnx.DiffState(0, nnx.Param)), n
    )(loss),
}


@pytest.mark.rest
@pytest.mark.sample(4)
@pytest.mark.cross("make", jit=2, redo=2)
@pytest.mark.parametrize("jit", [lambda f: f, nnx.jit], ids=["eager", "jit"])
@pytest.mark.parametrize("redo", [0, 2])
@pytest.mark.parametrize("make", GRADIENTS.values(), ids=GRADIENTS)
def test_scaled_gradients_keep_what_the_loss_changes(make, redo, jit):
    def start():
        return Net(nnx.Rngs(0)), nnx.Rngs(noise=1), nnx.metrics.Average("loss")

    @jit
    def step(state, net, rngs, metric, x):
        return make(redo)(net, rngs, metric, x, dynamic_scaler_state=state)

    ours, plain = start(), start()
    high = DynamicScalerState(scaler=2.0**126, adjust_factor=2.0**20)  # overflows once
    state = high if redo else DynamicScalerState()
    state, (value, grads) = step(state, *ours, 4 * X)
    expected, wanted = jit(nnx.value_and_grad(loss))(*plain, 4 * X)
    assert np.allclose(value, expected, rtol=1e-6)
    got = jax.tree.leaves(grads)
    assert len(got) == 4
    for a, b in zip(got, jax.tree.leaves(wanted), strict=True):
        assert np.allclose(a, b, rtol=1e-4, atol=1e-4)
    net, rngs, metric = ours
    # Of one try, however many there were.
    assert net.dropout.rngs.count[...] == rngs.noise.count[...] == 1
    assert np.allclose(metric.compute(), expected, rtol=1e-6)
    assert np.allclose(net.norm.mean[...], plain[0].norm.mean[...], rtol=1e-6)

    before = bits(*ours)
    state, (value, _) = step(state, *ours, X.at[0, 0].set(jnp.nan))
    assert jnp.isnan(value) and state.overflows == 1 and bits(*ours) == before


def test_groups_have_one_change_of_state():
    """Each group has its own backward pass, of the same dropout mask."""
    net = Net(nnx.Rngs(0))
    state = nnx.State({k: DynamicScalerState() for k in ("linear", "norm")})
    step = dynamic_scale_value_and_grad(lambda net, x: (net(x) ** 2).sum())
    state, (_, grads) = step(net, X, dynamic_scaler_state=state)
    wanted = nnx.grad(lambda net, x: (net(x) ** 2).sum())(Net(nnx.Rngs(0)), X)
    assert net.dropout.rngs.count[...] == 1
    for a, b in zip(jax.tree.leaves(grads), jax.tree.leaves(wanted), strict=True):
        assert np.allclose(a, b, rtol=1e-5, atol=1e-5)


def test_objects_beside_what_is_differentiated():
    rngs, state = nnx.Rngs(noise=0), DynamicScalerState()
    step = dynamic_scale_grad(lambda w, rngs: w["a"] * rngs.noise.normal(()))
    first, second = (
        step({"a": jnp.array(1.0), "n": 3}, rngs, dynamic_scaler_state=state)[1]["a"]
        for _ in range(2)
    )
    assert first != second and rngs.noise.count[...] == 2
    weight = nnx.Variable(jnp.array(3.0))
    _, grads = dynamic_scale_grad(lambda v: v[...] ** 2)(
        weight, dynamic_scaler_state=state
    )
    assert grads[...] == 6


def test_a_transform_that_loses_changes_is_refused():
    class Counter(nnx.Module):
        def __init__(self):
            self.weight = nnx.Param(jnp.array(2.0))
            self.total = nnx.BatchStat(jnp.array(0.0))

        def __call__(self, x):
            self.total[...] += x
            return self.weight[...] * x

    def jax_grad(fun, **options):
        return jax.grad(fun, **options)

    counter, state = Counter(), DynamicScalerState()
    with pytest.raises((AmpError, errors.TraceContextError)) as info:
        dynamic_scale_tx(jax_grad)(Counter.__call__)(
            counter, jnp.array(3.0), dynamic_scaler_state=state
        )
    if info.type is AmpError:
        assert "such as `nnx.value_and_grad`" in str(info.value)
    dynamic_scale_tx(jax.grad)(Counter.__call__)(  # which is known
        counter, jnp.array(3.0), dynamic_scaler_state=state
    )
    assert counter.total[...] == 3
