"""Loss scaling on many devices: all of them skip, repeat and grow together.

Each test has eight devices, of which one overflows. `test_scale_processes.py` does the
same with real processes, and a time limit that kills what waits for ever."""

import warnings

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax import lax
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P

from jaxamp_like import (
    AmpWarning,
    DynamicScalerState,
    all_finite,
    dynamic_scale_grad,
    dynamic_scale_value_and_grad,
    loss_scale_optimizer,
)

pytestmark = pytest.mark.sample(5)

N = 8


@pytest.fixture
def mesh():
    return jax.make_mesh((N,), ("d",))


def shards(mesh, values):
    x = np.asarray(values, np.float16)
    return jax.device_put(x, NamedSharding(mesh, P("d")))


def one_large(at, value):
    """Ones, but for one device."""
    x = np.ones(N)
    x[at] = value
    return x


def mean_loss(w, x):
    return lax.pmean((w.astype(jnp.float16) * x).sum().astype(jnp.float32), "d")


def local_loss(w, x):
    return (w.astype(jnp.float16) * x).sum().astype(jnp.float32)


LOSSES = {"collective": mean_loss, "local": local_loss}


def all_equal(stacked):
    return all((np.asarray(x) == np.asarray(x)[0]).all() for x in stacked)


@pytest.mark.parametrize("axis_name", [None, "d", ()], ids=str)
def test_an_optimizer_whose_scale_differs_by_device_is_told(mesh, axis_name):
    tx = loss_scale_optimizer(optax.sgd(0.1), axis_name=axis_name)

    def body(state, w, x):
        state, w = jax.tree.map(lambda s: s[0], (state, w))
        grads = tx.grad(local_loss, state)(w, x)
        updates, state = tx.update(grads, state, w)
        return jax.tree.map(lambda s: s[None], (w + updates, state))

    specs = {"in_specs": P("d"), "out_specs": P("d")}
    run = jax.jit(jax.shard_map(body, mesh=mesh, **specs))
    w = shards(mesh, np.ones(N)).astype(jnp.float32)
    many = jax.tree.map(lambda s: jnp.stack([s] * N), tx.init(jnp.ones(())))
    many = jax.device_put(many, NamedSharding(mesh, P("d")))
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        run(many, w, shards(mesh, one_large(2, 16)))
    said = [str(one.message) for one in told if "its own part" in str(one.message)]
    assert bool(said) == (axis_name is None)


@pytest.mark.parametrize("redo", [0, 4])
@pytest.mark.parametrize("loss", LOSSES.values(), ids=LOSSES)
@pytest.mark.parametrize("check_vma", [True, False])
def test_shard_map(mesh, loss, check_vma, redo):
    step = dynamic_scale_value_and_grad(loss, redo_on_nan=redo, axis_name="d")

    def body(state, w, x):
        state, (_, g) = step(w, x, dynamic_scaler_state=state)
        return jax.tree.map(lambda s: s[None], state), g[None]

    run = jax.jit(
        jax.shard_map(
            body,
            mesh=mesh,
            in_specs=(P(), P("d"), P("d")),
            out_specs=(P("d"), P("d")),
            check_vma=check_vma,
        )
    )
    w = shards(mesh, np.ones(N)).astype(jnp.float32)
    state = DynamicScalerState(scaler=2**15, patience=1, count=1)
    states, g = jax.device_get(run(state, w, shards(mesh, one_large(3, 16))))
    assert all_equal(states)
    state = jax.tree.map(lambda s: s[0], states)
    # 16 * scale must be below 65520; an eighth of it, where the mean is transposed to
    # one (without `check_vma`, a sum becomes a sum).
    fits = 2**14 if loss is mean_loss and check_vma else 2**11
    if redo:
        assert state.scaler == fits and np.isfinite(g).all()
    else:
        assert (state.scaler, state.overflows) == (2**14, 1)
    # What can't be cured costs all devices one step, and no more.
    states, _ = jax.device_get(run(state, w, shards(mesh, one_large(5, np.nan))))
    assert all_equal(states) and states.scaler[0] == state.scaler / 2


@pytest.mark.parametrize("redo", [0, 4])
def test_axes_that_shard_map_knows_need_no_name(mesh, redo):
    def body(state, w, x):
        step = dynamic_scale_grad(local_loss, redo_on_nan=redo)
        state, g = step(w, x, dynamic_scaler_state=state)
        return state, g

    specs = dict(in_specs=(P(), P("d"), P("d")), out_specs=(P(), P("d")))
    run = jax.jit(jax.shard_map(body, mesh=mesh, **specs))
    w = shards(mesh, np.ones(N)).astype(jnp.float32)
    state, _ = run(DynamicScalerState(), w, shards(mesh, one_large(0, np.inf)))
    assert (state.scaler, state.overflows) == (2**14, 1)


@pytest.mark.parametrize("redo", [0, 4])
def test_each_device_may_have_a_scale_of_its_own(mesh, redo):
    def body(state, w, x):
        state = jax.tree.map(lambda s: s[0], state)
        step = dynamic_scale_grad(local_loss, redo_on_nan=redo)
        state, _ = step(w, x, dynamic_scaler_state=state)
        return jax.tree.map(lambda s: s[None], state)

    run = jax.jit(jax.shard_map(body, mesh=mesh, in_specs=P("d"), out_specs=P("d")))
    one = DynamicScalerState()
    many = jax.tree.map(lambda s: jnp.stack([s] * N), one)
    many = jax.device_put(many, NamedSharding(mesh, P("d")))
    w = shards(mesh, np.ones(N)).astype(jnp.float32)
    states = run(many, w, shards(mesh, one_large(2, 16)))
    wanted = np.full(N, 2.0**15)
    wanted[2] = 2.0**11 if redo else 2.0**14
    assert states.scaler.tolist() == wanted.tolist()


@pytest.mark.parametrize("redo", [0, 4])
@pytest.mark.parametrize("loss", LOSSES.values(), ids=LOSSES)
@pytest.mark.filterwarnings("ignore:.*pmap.*:DeprecationWarning")
def test_pmap(loss, redo):
    step = dynamic_scale_grad(loss, redo_on_nan=redo, axis_name="d")

    def body(state, w, x):
        return step(w, x, dynamic_scaler_state=state)

    run = jax.pmap(body, axis_name="d", in_axes=(None, 0, 0))
    x = jnp.asarray(one_large(3, np.inf), jnp.float16)
    states, _ = run(DynamicScalerState(), jnp.ones(N), x)
    assert all_equal(states) and states.scaler[0] == 2**14


@pytest.mark.parametrize("redo", [0, 4])
def test_plain_jit_over_sharded_arrays(mesh, redo):
    def loss(w, x):
        return (w.astype(jnp.float16) * x).mean().astype(jnp.float32)

    step = jax.jit(dynamic_scale_grad(loss, redo_on_nan=redo))
    w = jax.device_put(jnp.ones(N), NamedSharding(mesh, P("d")))
    state, g = step(
        w, shards(mesh, one_large(6, np.nan)), dynamic_scaler_state=DynamicScalerState()
    )
    assert (state.scaler, state.overflows) == (2**14, 1)
    assert state.scaler.is_fully_replicated and np.isnan(g).sum() == 1


@pytest.mark.parametrize("check_vma", [True, False])
def test_optimizer_on_shards(mesh, check_vma):
    axis_name = None if check_vma else "d"
    tx = loss_scale_optimizer(optax.adam(0.1), axis_name=axis_name)

    def body(w, opt_state, x):
        grads = tx.grad(local_loss, opt_state)(w, x)
        updates, opt_state = tx.update(grads, opt_state, w)
        return optax.apply_updates(w, updates), opt_state

    w = shards(mesh, np.ones(N)).astype(jnp.float32)
    opt_state = tx.init(w)
    spec = jax.tree.map(lambda x: P("d") if x.ndim else P(), opt_state)
    run = jax.jit(
        jax.shard_map(
            body,
            mesh=mesh,
            in_specs=(P("d"), spec, P("d")),
            out_specs=(P("d"), spec),
            check_vma=check_vma,
        )
    )
    new, opt_state = run(w, opt_state, shards(mesh, one_large(1, np.inf)))
    assert (new == w).all() and opt_state.scaler.scaler == 2**14
    assert opt_state.inner_state[0].count == 0
    new, opt_state = run(w, opt_state, shards(mesh, np.ones(N)))
    assert (new < w).all() and opt_state.inner_state[0].count == 1


UNBOUND = {
    "step": lambda: dynamic_scale_grad(lambda w: w, axis_name="x")(
        jnp.array(1.0), dynamic_scaler_state=DynamicScalerState()
    ),
    "retry": lambda: dynamic_scale_grad(lambda w: w, axis_name=("x",), redo_on_nan=1)(
        jnp.array(1.0), dynamic_scaler_state=DynamicScalerState()
    ),
    "test": lambda: all_finite(1.0, axis_name="x"),
}


@pytest.mark.parametrize("call", UNBOUND.values(), ids=UNBOUND)
def test_unbound_axis(call):
    with pytest.raises(
        ValueError, match="names 'x', but no axis of this name is bound"
    ):
        call()


def untracked(mesh, step):
    """A step whose `shard_map` does not track which values differ."""

    def body(state, w, x):
        return step(w, x, dynamic_scaler_state=state)[0]

    specs = dict(in_specs=(P(), P("d"), P("d")), out_specs=P())
    run = jax.shard_map(body, mesh=mesh, check_vma=False, **specs)
    w = shards(mesh, np.ones(N)).astype(jnp.float32)
    return lambda: jax.jit(run)(DynamicScalerState(), w, shards(mesh, np.ones(N)))


def test_devices_that_may_not_agree_are_told(mesh):
    untracked(mesh, dynamic_scale_grad(mean_loss, axis_name="d"))()
    with pytest.warns(
        AmpWarning, match="names no `axis_name`.*Pass `axis_name='d'` to `dynamic"
    ):
        untracked(mesh, dynamic_scale_grad(mean_loss))()


def test_axes_that_are_left_out_of_several_are_told():
    mesh = Mesh(np.array(jax.devices()).reshape(4, 2), ("a", "b"))
    step = dynamic_scale_grad(lambda w: jnp.sum(w**2), axis_name="a")
    run = jax.shard_map(
        lambda w, state: step(w, dynamic_scaler_state=state)[0],
        mesh=mesh,
        in_specs=(P("a"), P()),
        out_specs=P(),
        check_vma=False,
    )
    with pytest.warns(AmpWarning, match=r"only 'a' by.*Pass `axis_name=\('a', 'b'\)`"):
        jax.jit(run)(jnp.ones(4), DynamicScalerState())


def test_devices_with_models_of_their_own_need_not_agree():
    mesh = Mesh(np.array(jax.devices()), ("d",))
    states = jax.vmap(lambda _: DynamicScalerState())(jnp.ones(N))
    w = jnp.asarray([1.0] + [1e38] * (N - 1))

    def step(axis_name):
        grad = dynamic_scale_grad(lambda w: w**2, axis_name=axis_name)
        return lambda w, state: grad(w, dynamic_scaler_state=state)[0].skipped

    run = jax.shard_map(
        jax.vmap(step(())),
        mesh=mesh,
        in_specs=P("d"),
        out_specs=P("d"),
        check_vma=False,
    )
    with warnings.catch_warnings():
        warnings.simplefilter("error", AmpWarning)
        by_pmap, by_shard_map = jax.pmap(step(None))(w, states), jax.jit(run)(w, states)
    np.testing.assert_array_equal(by_pmap, [0] + [1] * (N - 1))
    np.testing.assert_array_equal(by_shard_map, by_pmap)


def pmapped_step(tx, share):
    """A step of `jax.pmap`, run on a batch that overflows on one device of two."""

    def body(w, opt_state, x):
        grads = share(tx.grad(local_loss, opt_state)(w, x))
        updates, opt_state = tx.update(grads, opt_state, w)
        return optax.apply_updates(w, updates), opt_state.scaler.scaler

    w = jnp.float32(1)
    x = np.asarray([[1.0], [np.inf]], np.float16)
    devices = jax.devices()[:2]
    axes = None, None, 0
    run = jax.pmap(body, axis_name="d", in_axes=axes, devices=devices)
    return run(w, tx.init(w), x)


SHARED = {
    "averaged": (loss_scale_optimizer(optax.sgd(0.1)), lambda g: lax.pmean(g, "d")),
    "named": (loss_scale_optimizer(optax.sgd(0.1), axis_name="d"), lambda g: g),
}


@pytest.mark.filterwarnings("error::jaxamp_like.AmpWarning")
@pytest.mark.parametrize(("tx", "share"), SHARED.values(), ids=SHARED)
def test_devices_of_pmap_agree_by_averages_or_by_the_name(tx, share):
    new, scales = pmapped_step(tx, share)
    np.testing.assert_array_equal(new, [1, 1])
    np.testing.assert_array_equal(scales, [2**14] * 2)


def test_an_optimizer_in_pmap_without_an_average_is_told():
    told = r"runs in `jax.pmap`.*`grads = jax.lax.pmean\(grads, 'd'\)`.*`axis_name='d'`"
    with pytest.warns(AmpWarning, match=told):
        _, scales = pmapped_step(loss_scale_optimizer(optax.sgd(0.1)), lambda g: g)
    np.testing.assert_array_equal(scales, [2**15, 2**14])


@pytest.mark.rest
@pytest.mark.filterwarnings("ignore:A step with a loss scale")
def test_retry_that_would_wait_for_ever_is_refused(mesh):
    run = untracked(mesh, dynamic_scale_grad(mean_loss, redo_on_nan=1))
    with pytest.raises(ValueError, match=r"(?s)axis 'd'.*Pass `axis_name='d'`"):
        run()
