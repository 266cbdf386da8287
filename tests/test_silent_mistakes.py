"""Mistakes that would change nothing, or the wrong thing, without a word are told."""

import functools
import pickle
import threading
from contextvars import ContextVar
from typing import Any

import equinox as eqx
import flax.serialization
import jax
import jax.experimental
import jax.numpy as jnp
import keras
import numpy as np
import optax
import pytest
from flax import linen, nnx
from flax.training.dynamic_scale import DynamicScale
from jax.sharding import AxisType, PartitionSpec as P

from jaxamp_like import (
    AmpError,
    AmpWarning,
    DynamicScalerState,
    Policy,
    PolicyMap,
    _errors,
    amp,
    amp_stop,
    calibrate,
    convert,
    dynamic_scale_grad,
    enable_amp,
    get_policy,
    guard_step,
    loss_scale_optimizer,
    presets,
    storage,
    using_policy,
)
from jaxamp_like._rewrite import switch
from jaxamp_like.scaling import all_finite, scale_loss, unscale_grads

pytestmark = pytest.mark.quick

enable_x64 = (
    jax.enable_x64 if hasattr(jax, "enable_x64") else jax.experimental.enable_x64
)

w = {"a": jnp.full((4, 8), 0.1), "b": jnp.full((8, 1), 0.1)}
x = jnp.ones((16, 4))
bfloat16: Any = {"compute_dtype": "bfloat16", "strict": True}


def loss(w, x):
    with jax.named_scope("net"):
        h = jnp.tanh(x @ w["a"])
    with jax.named_scope("head"):
        return jnp.mean((h @ w["b"]) ** 2)


def with_activation(w, x):
    h = x @ w["a"]
    with jax.named_scope("act"):
        h = jnp.tanh(h)
    return jnp.mean(h @ w["b"])


def test_a_loss_that_is_made_and_never_differentiated():
    _, tx = enable_amp(loss, optax.adam(1e-3), compute_dtype="bfloat16")
    state = tx.init(w)
    with pytest.warns(AmpWarning, match="that it made was never called"):
        tx.update(jax.grad(loss)(w, x), state, w)


@pytest.mark.parametrize("how", ["by jax.grad", "by the optimizer", "another amp"])
def test_a_loss_that_is_differentiated_in_any_way_is_used(how):
    mixed, tx = enable_amp(loss, optax.adam(1e-3), compute_dtype="bfloat16")
    state = tx.init(w)
    if how == "by jax.grad":
        grads = jax.jit(jax.grad(mixed))(w, x)
    elif how == "by the optimizer":
        grads = tx.grad(mixed, state)(w, x)
    else:
        grads = jax.grad(amp(loss, compute_dtype="bfloat16"))(w, x)
    tx.update(grads, state, w)


def test_the_pair_that_enable_amp_returns_says_what_it_is():
    pair = enable_amp(loss, optax.sgd(0.1), compute_dtype="bfloat16")
    with pytest.raises(TypeError, match="returns two things"):
        pair(w, x)  # pyright: ignore
    with pytest.raises(AttributeError, match="returns two things"):
        pair.init(w)  # pyright: ignore
    _, tx = pair
    assert isinstance(pair, tuple) and pair[1] is tx


@pytest.mark.parametrize("is_jitted", [False, True])
@pytest.mark.parametrize("is_carried", [False, True])
def test_a_loop_carries_the_state_of_the_optimizer(is_jitted, is_carried):
    tx = loss_scale_optimizer(optax.sgd(0.1))

    def epoch(w, state, xs):
        def body(carry, x):
            w, inner = carry
            now = inner if is_carried else state
            grads = tx.grad(loss, now)(w, x)
            updates, now = tx.update(grads, now, w)
            return (optax.apply_updates(w, updates), now if is_carried else inner), 0

        return jax.lax.scan(body, (w, state), xs)[0]

    run = jax.jit(epoch) if is_jitted else epoch
    if is_carried:
        run(w, tx.init(w), x[None])
        return
    with pytest.warns(AmpWarning, match="in the body of a loop with a state from out"):
        run(w, tx.init(w), x[None])


def test_microbatches_of_a_loop_share_a_scale():
    tx = loss_scale_optimizer(optax.sgd(0.1))

    @jax.jit
    def step(w, state, xs):
        def add(total, x):
            grads = tx.grad(loss, state)(w, x)
            return jax.tree.map(jnp.add, total, jax.tree.map(lambda g: g, grads)), 0

        first = tx.grad(loss, state)(w, xs[0])
        grads, _ = jax.lax.scan(add, first, xs[1:])
        updates, state_ = tx.update(grads, state, w)
        return optax.apply_updates(w, updates), state_

    step(w, tx.init(w), jnp.stack([x, x]))


def test_each_scale_of_a_guarded_step_is_updated():
    one, other = (
        loss_scale_optimizer(optax.sgd(0.1)),
        loss_scale_optimizer(optax.adam(0.1)),
    )

    def step(state, x, is_right):
        w, first, second = state
        grads = one.grad(loss, first)(w, x)
        if is_right:
            updates, first = one.update(grads, first, w)
            w = optax.apply_updates(w, updates)
            grads = other.grad(loss, second)(w, x)
        updates, second = other.update(grads, second, w)
        return optax.apply_updates(w, updates), first, second

    state = w, one.init(w), other.init(w)
    guard_step(step)(state, x, True)
    with pytest.warns(AmpWarning, match="One of the loss scales in the state"):
        guard_step(step)(state, x, False)


def outside(name):
    """A user's predicate: those of the library ask for sizes."""
    return lambda site: site.scope == name


def test_a_scope_is_no_string():
    policy = get_policy("mixed_bfloat16").where(outside("head"))
    with pytest.warns(AmpWarning, match="Write `'head' in site.scope`"):
        amp(loss, amp_policy=policy)(w, x)
    for predicate in (
        lambda site: "head" in site.scope,
        lambda site: site.scope == ("head",),
        lambda site: site.avals[0].size > 10**6,
    ):
        policy = get_policy("mixed_bfloat16").where(predicate)
        amp(loss, amp_policy=policy, strict=True)(w, x)


def test_maps_whose_low_keys_hold_no_contraction():
    policies = PolicyMap("float32", {"act": "mixed_bfloat16"})
    with pytest.raises(AmpError, match="no contraction is under the key 'act'"):
        amp(with_activation, amp_policy=policies, strict=True)(w, x)
    policies = PolicyMap("float32", {"act": "mixed_bfloat16", "head": "mixed_bfloat16"})
    with pytest.raises(AmpError, match="key 'act' of `amp_policy` matched nothing"):
        amp(loss, amp_policy=policies, strict=True)(w, x)


def test_a_float64_batch_makes_all_float64():
    with enable_x64(True):
        batch = jnp.asarray(np.ones((16, 4)))
        weights = jax.tree.map(lambda x: x.astype("float32"), w)
        with pytest.raises(AmpError, match="float64 array beside a float32 one"):
            amp(loss, **bfloat16)(weights, batch)


def test_exported_programs_can_not_be_opened():
    made = jax.export.export(jax.jit(lambda w, x: x @ w["a"]))(w, x)
    with pytest.raises(AmpError, match=r"was made by `jax\.export`"):
        amp(lambda w, x: jnp.mean(made.call(w, x)), **bfloat16)(w, x)
    amp(lambda w, x: jnp.mean(amp_stop(made.call)(w, x)), **bfloat16)(w, x)
    mixed = jax.jit(amp(lambda w, x: x @ w["a"], **bfloat16))
    low = jax.export.export(mixed)(w, x)
    amp(lambda w, x: jnp.mean(low.call(w, x)), **bfloat16)(w, x)


@pytest.mark.parametrize(
    "lists", [presets.mxnet, presets.tensorflow_graph_rewrite], ids=lambda f: f.__name__
)
def test_lists_for_bfloat16_compute_in_bfloat16(lists):
    made = jax.make_jaxpr(amp(loss, amp_policy=lists("bfloat16"), strict=True))(w, x)
    assert "bf16" in str(made) and "f16[" not in str(made).replace("bf16[", "")
    policy = lists("bfloat16")
    mixed = amp(loss, amp_policy=policy, compute_dtype="float16", strict=True)
    assert "bf16" not in str(jax.make_jaxpr(mixed)(w, x))


def test_lean_says_what_a_gradient_around_amp_keeps():
    with pytest.raises(AmpError, match="`lean='int8'` changes nothing"):
        amp(jax.grad(loss), lean="int8", **bfloat16)(w, x)
    jax.grad(amp(loss, lean="int8", **bfloat16))(w, x)
    amp(loss, lean="int8", **bfloat16)(w, x)
    second = amp(lambda w, x: jax.grad(loss)(w, x)["a"].sum(), lean=True, **bfloat16)
    jax.grad(second)(w, x)


def test_amp_stop_of_a_module_without_parameters():
    layer = linen.Dense(2)
    variables = layer.init(jax.random.key(0), x)
    with pytest.raises(TypeError, match="is a Dense without parameters"):
        amp_stop(layer)(variables, x)  # pyright: ignore
    amp_stop(layer.apply)(variables, x)


def test_what_amp_has_made_is_converted_in_its_own_dtype():
    mixed = amp(loss, compute_dtype="float16")
    with pytest.raises(AmpError, match="is what `amp` has made already"):
        convert(mixed, w, x, compute_dtype="bfloat16", strict=True)
    convert(mixed, w, x)


def test_parameters_that_calibrate_is_given_second():
    batches = [(x * i, w) for i in (1.0, 2.0, 3.0, 4.0)]
    with pytest.warns(AmpWarning, match="write `argnums=1`"):
        calibrate(lambda x, w: loss(w, x), batches, budget=0.05, max_passes=8)


@pytest.mark.parametrize(
    "call, match",
    [
        (lambda: storage.apply_updates(w, w, jax.random.key(0)), "key=key"),  # pyright: ignore
        (lambda: presets.jmp("bfloat16"), "amp_policy=jmp"),  # pyright: ignore
        (lambda: using_policy(loss, "mixed_bfloat16"), "using_policy.policy"),  # pyright: ignore
        (lambda: all_finite(jnp.ones(()), w), "all_finite..loss, grads"),  # pyright: ignore
        (lambda: enable_amp(loss, optax.sgd(0.1), scaler=False), "None for none"),
        (lambda: amp(classmethod(loss)), "`@classmethod` above `@amp`"),  # pyright: ignore
        (lambda: amp(loss, amp_policy=keras.DTypePolicy("mixed_bfloat16")), "its name"),  # pyright: ignore
        (lambda: PolicyMap("float32").__setitem__("net", "float16"), "policies . .key"),
    ],
)
def test_arguments_that_do_not_fit(call, match):
    with pytest.raises(TypeError, match=match):
        call()


def test_operators_on_what_is_stored_in_few_bits():
    params = {"a": jnp.zeros((128, 128))}
    low = storage.low_bit_state(optax.adam(1e-3))
    with pytest.raises(TypeError, match="which the `update` of `low_bit_state` dec"):
        optax.adam(1e-3).update(params, low.init(params).inner_state, params)


@pytest.mark.parametrize(
    "owner, name, match",
    [
        (get_policy("mixed_bfloat16"), "variable_dtype", "`param_dtype`"),
        (get_policy("mixed_bfloat16"), "with_output_dtype", "output_dtype=..."),
        (DynamicScalerState(), "adjust", "scaler.update.finite"),
    ],
)
def test_attributes_that_other_libraries_have(owner, name, match):
    with pytest.raises(AttributeError, match=match):
        getattr(owner, name)


@pytest.mark.parametrize("call", [scale_loss, unscale_grads])
def test_a_state_in_the_wrong_place(call):
    state = loss_scale_optimizer(optax.sgd(0.1)).init(w)
    with pytest.raises(TypeError, match="have changed places"):
        call(state, jnp.ones(()))
    with pytest.raises(ValueError, match=r"It scales by itself: .scaler\.scale.loss"):
        call(jnp.ones(()), DynamicScalerState())


def test_sums_of_16_bits_do_not_abort_where_a_mesh_of_cpus_is_partly_manual():
    kinds = (AxisType.Auto, AxisType.Auto)
    mesh = jax.make_mesh((4, 2), ("data", "model"), axis_types=kinds)

    def split(w, x):
        def on_a_device(w, x):
            return jax.lax.pmean(loss(w, x), "data")

        specs = {"in_specs": (P(), P("data")), "out_specs": P()}
        return jax.shard_map(on_a_device, **specs, mesh=mesh, axis_names={"data"})(w, x)

    mixed = jax.jit(jax.grad(amp(split, compute_dtype="bfloat16")))(w, x)
    plain = jax.jit(jax.grad(split))(w, x)
    for one, other in zip(*map(jax.tree.leaves, (mixed, plain)), strict=True):
        np.testing.assert_allclose(one, other, rtol=0.02)


def test_a_guarded_step_may_scale_by_hand():

    @guard_step
    def step(state, x):
        w, scaler = state
        grads = scaler.unscale(jax.grad(lambda w: scaler.scale(loss(w, x)))(w))
        return (w, scaler.update(all_finite(grads))), 0

    step((w, DynamicScalerState()), x)


def layers_of_nnx(wrap):
    class Net(nnx.Module):
        def __init__(self):
            rngs = nnx.Rngs(0)
            self.body = nnx.Linear(4, 8, rngs=rngs)
            self.head = wrap(nnx.Linear(8, 2, rngs=rngs))

        def __call__(self, x):
            return self.head(jnp.tanh(self.body(x)))

    return Net()


def test_layers_of_nnx_that_amp_stop_keeps_are_trained():
    net = layers_of_nnx(amp_stop)
    mixed, tx = enable_amp(
        lambda net, x: jnp.mean(net(x) ** 2), optax.sgd(0.1), compute_dtype="bfloat16"
    )
    optimizer = nnx.Optimizer(net, tx, wrt=nnx.Param)

    @nnx.jit
    def step(net, optimizer, x):
        _, grads = tx.value_and_grad(mixed, optimizer)(net, x)
        optimizer.update(net, grads)

    before = jax.tree.map(jnp.copy, nnx.state(net, nnx.Param))
    for _ in range(2):
        step(net, optimizer, x)
    after = nnx.state(net, nnx.Param)
    moved = jax.tree.map(lambda a, b: bool((a != b).any()), before, after)
    assert len(jax.tree.leaves(moved)) == 4 and all(jax.tree.leaves(moved))
    plain = layers_of_nnx(lambda layer: layer)
    assert jax.tree.structure(before) == jax.tree.structure(nnx.state(plain, nnx.Param))
    made = str(jax.make_jaxpr(amp(lambda x: net(x), compute_dtype="bfloat16"))(x))
    assert "bf16[4,8]" in made and "bf16[8,2]" not in made


def test_layers_of_equinox_that_amp_stop_keeps_are_trained():
    model = eqx.nn.MLP(4, 2, 8, 1, key=jax.random.key(0))
    head = amp_stop(model.layers[1])
    assert isinstance(head, eqx.nn.Linear)
    kept = eqx.tree_at(lambda m: m.layers[1], model, head)

    def error(model, x):
        return jnp.mean(jax.vmap(model)(x) ** 2)

    grads = eqx.filter_grad(amp(error, compute_dtype="bfloat16"))(kept, x)
    assert len(jax.tree.leaves(grads)) == 4
    made = str(jax.make_jaxpr(amp(lambda x: error(kept, x)))(x))
    assert "f16[8,4]" in made and "f16[2,8]" not in made
    again = pickle.loads(pickle.dumps(head))
    assert type(again) is type(head)
    np.testing.assert_array_equal(again(jnp.ones(8)), model.layers[1](jnp.ones(8)))


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_states_are_saved_as_flax_saves_those_of_optax(dtype):
    _, tx = enable_amp(loss, optax.adam(1e-2), compute_dtype=dtype)
    state = tx.init(w)
    data = flax.serialization.to_bytes(state)
    again: Any = flax.serialization.from_bytes(state, data)
    assert jax.tree.structure(again) == jax.tree.structure(state)
    assert type(again.scaler) is type(state.scaler)


def test_states_in_few_bits_are_saved_by_flax():
    params = {"a": jnp.ones((128, 64))}
    tx = storage.low_bit_state(optax.adam(1e-2))
    _, state = tx.update(params, tx.init(params), params)
    data = flax.serialization.to_bytes(state)
    again: Any = flax.serialization.from_bytes(tx.init(params), data)
    assert jax.tree.structure(again) == jax.tree.structure(state)
    for one, other in zip(jax.tree.leaves(again), jax.tree.leaves(state), strict=True):
        np.testing.assert_array_equal(one, other)
    other = storage.low_bit_state(optax.adam(1e-2), "float8").init(params)
    with pytest.raises(ValueError, match="An array in 'float8' was saved as 'int8'"):
        flax.serialization.from_bytes(other, data)
    with pytest.raises(ValueError, match="was saved as '"):
        plain = flax.serialization.to_bytes(optax.adam(1e-2).init(params))
        state = storage.LowBitState(tx.init(params).inner_state, None)
        flax.serialization.from_bytes(state.inner_state, plain)


def test_a_loss_is_scaled_once():
    tx = loss_scale_optimizer(optax.sgd(0.1))
    state = tx.init(w)

    def scaled(w):
        return state.scaler.scale(loss(w, x))

    with pytest.raises(TypeError, match="is scaled already, by `scale` of the state"):
        tx.value_and_grad(scaled, state)(w)
    with pytest.raises(TypeError, match="is scaled already, by `scale` of the state"):
        dynamic_scale_grad(scaled)(w, dynamic_scaler_state=state.scaler)

    def with_inner_gradient(w):
        scaler = state.scaler
        inner = scaler.unscale(jax.grad(lambda w: scaler.scale(loss(w, x)))(w))
        return loss(w, x) + sum(jnp.sum(g**2) for g in jax.tree.leaves(inner))

    tx.value_and_grad(with_inner_gradient, state)(w)


def test_gradients_are_unscaled_once():
    scaler = DynamicScalerState()
    scaler, grads = dynamic_scale_grad(loss)(w, x, dynamic_scaler_state=scaler)
    with pytest.raises(TypeError, match="`dynamic_scale_grad` and its like return"):
        scaler.unscale(grads)
    scaler.unscale(jax.tree.map(lambda g: g * scaler.scaler, grads))


def test_methods_of_keras_are_those_of_the_model():
    model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(2)])
    mixed = amp(model, compute_dtype="bfloat16")
    for name in ("save", "summary", "get_weights", "fit"):
        with pytest.raises(TypeError, match="call those of the model itself"):
            getattr(mixed, name)()


@pytest.mark.parametrize(
    ("drop", "written"),
    [
        (lambda: drop_of_amp(), "mixed = amp"),
        (lambda: drop_of_guard(), "step = guard_step"),
        (lambda: drop_of_state(), "scaler = scaler.update"),
    ],
    ids=("amp", "guard_step", "update"),
)
def test_a_result_that_is_dropped(drop, written):
    with pytest.warns(AmpWarning, match=f"dropped here. Write `{written}"):
        drop()


def drop_of_amp():
    amp(loss, **bfloat16)


def drop_of_guard():
    guard_step(lambda state: state)


def drop_of_state():
    scaler = DynamicScalerState()
    scaler.update(True)


class Trainer:
    """Whose scale can be taken once, and which has another under a private name."""

    def __init__(self):
        self.__mine, self.held = DynamicScalerState(), [DynamicScalerState()]

    @property
    def scaler(self):
        return self.held.pop()

    def drop(self):
        self.__mine.update(True)


def test_what_a_call_names_is_not_asked_of_the_users_code():
    trainer = Trainer()
    with pytest.warns(AmpWarning, match="dropped here"):
        trainer.scaler.update(True)


def test_a_result_that_is_dropped_under_a_private_name():
    with pytest.warns(AmpWarning, match="dropped here"):
        Trainer().drop()


def test_results_that_are_kept_by_what_is_written_in_c():
    low, made = functools.partial(amp, **bfloat16), []
    made.extend(map(amp, [loss]))
    record = {}
    record.update(enumerate(map(DynamicScalerState().update, (True, False))))
    made.extend(map(low, [loss]))
    low(loss)  # under another name
    functools.lru_cache(amp)(loss)
    assert len(made) == 2


class Recorder:
    """Whose record can't be looked at without running code of the user's."""

    def __init__(self):
        self.entries, self.scaler = {}, DynamicScalerState()

    @property
    def record(self):
        return self.entries

    def note(self, flags):
        self.record.update(zip("ab", map(self.scaler.update, flags), strict=True))


def test_results_that_a_property_keeps():
    recorder = Recorder()
    recorder.note((True, False))
    assert len(recorder.entries) == 2


def test_a_result_that_a_library_drops():
    thread = threading.Thread(target=amp, args=(loss,))
    thread.start()
    thread.join()


class Asking(functools.partial):
    """Of which nothing may be asked."""

    def __getattr__(self, name):
        raise RuntimeError(name)


def test_what_is_called_is_asked_nothing():
    made = []
    keep = Asking(made.extend)
    keep(map(amp, [loss]))
    assert len(made) == 1


def test_a_call_in_code_without_lines():
    def drop():
        amp(loss)

    drop.__code__ = drop.__code__.replace(co_linetable=b"")
    drop()


def test_a_training_step_that_enable_amp_is_given(monkeypatch):
    """Nothing scales the gradient in it; a loss with a gradient in it is none."""
    tx = optax.sgd(1.0)

    def step(w, state, x):
        grads = jax.grad(loss)(w, x)
        updates, state = tx.update(grads, state, w)
        return optax.apply_updates(w, updates), state

    def adapting(w, x):
        adapted = jax.tree.map(lambda w, g: w - 0.1 * g, w, jax.grad(loss)(w, x))
        return loss(adapted, x), adapted

    mixed, _ = enable_amp(step, tx)
    monkeypatch.setattr(_errors, "_seen", set())
    monkeypatch.setattr(switch, "_losses_scaled", ContextVar("scaled", default=0))
    with pytest.warns(AmpWarning, match="stands around a gradient.*`tx.value_and"):
        mixed(w, tx.init(w), x)
    monkeypatch.setattr(_errors, "_seen", set())
    mixed, _ = enable_amp(adapting, tx)
    mixed(w, x)


def test_gradients_that_a_mask_leaves_out_are_no_updates_of_all():
    optimizer = loss_scale_optimizer(optax.sgd(1.0))
    masked = optax.masked(optimizer, {"a": True, "b": False})
    state = masked.init(w)
    grads = optimizer.grad(loss, state)(w, x)
    updates, _ = masked.update(grads, state, w)
    optax.apply_updates(w, updates)
    by_hand = jax.tree.map(lambda g: -0.1 * g, grads)
    assert optax.apply_updates(w, by_hand)["a"].shape == w["a"].shape
    with pytest.raises(TypeError, match="`apply_updates` was given gradients"):
        optax.apply_updates(w, grads)


def test_policy_in_the_order_of_jmp():
    for dtypes in (("float32", "float16", "float16"), (jnp.float32, jnp.bfloat16)):
        with pytest.raises(ValueError, match=r"jmp\.Policy.*Policy\(compute_dtype="):
            Policy(*dtypes)
    Policy("float16", "float32", "float32")
    Policy(None, "bfloat16")
    Policy(compute_dtype="float32", param_dtype="bfloat16")


def test_policy_that_only_casts_parameters():
    with pytest.warns(AmpWarning, match="lowers nothing: it has neither"):
        _ = amp(loss, amp_policy=Policy(param_dtype="bfloat16"))
    _ = amp(loss, amp_policy=Policy())
    _ = amp(loss, amp_policy=Policy(param_dtype="bfloat16"), compute_dtype="bfloat16")
    _ = amp(loss, amp_policy=Policy(output_dtype="bfloat16"))


@pytest.mark.parametrize("state", [DynamicScalerState(), optax.adam(1e-3).init(w)])
def test_states_cast_with_the_parameters(state):
    policy = Policy("float16", param_dtype="float16")
    with pytest.warns(AmpWarning, match="Cast the parameters alone"):
        policy.cast_to_param({"params": w, "state": state})
    policy.cast_to_param({"params": w, "state": optax.sgd(0.1).init(w)})
    Policy("float16", param_dtype="float32").cast_to_param((w, state))


class OverLayer(keras.Model):
    """Calls a layer by a function of it; as an attribute, Keras finds the layer."""

    def __init__(self, wrap, is_held):
        super().__init__()
        self.first = keras.layers.Dense(8)
        layer = keras.layers.Dense(1)
        layer.build((None, 8))
        self.last = wrap(layer)
        self.held = layer if is_held else None

    def call(self, x):
        return self.last(self.first(x))


@pytest.mark.parametrize("is_held", [False, True])
@pytest.mark.parametrize("wrap", [amp_stop, lambda f: amp(f, **bfloat16)])
def test_layer_that_keras_does_not_find(wrap, is_held):
    model = OverLayer(wrap, is_held)
    model(x)

    def predict(variables, x):
        return model.stateless_call(variables, [], x)[0]

    values = [v.value for v in model.trainable_variables]
    if is_held:
        jax.eval_shape(amp(predict, **bfloat16), values, x)
    else:
        with pytest.warns(AmpWarning, match="never trained: Keras finds the layers"):
            jax.eval_shape(predict, values, x)


def test_low_bit_state_of_parameters_without_a_copy():
    params = jnp.ones((64, 128), "bfloat16")
    with pytest.warns(AmpWarning, match="is rounded away, and training stands still"):
        storage.low_bit_state(optax.adam(1e-3)).init(params)
    inner = storage.update_in_float32(optax.adam(1e-3))
    storage.low_bit_state(inner).init(params)


def test_policy_map_of_keras():
    of_keras: Any = keras.dtype_policies.DTypePolicyMap(default_policy="mixed_bfloat16")
    with pytest.raises(TypeError, match=r"Keras' DTypePolicyMap.*`PolicyMap\("):
        amp(loss, amp_policy=of_keras)


def test_scale_and_interval_by_position():
    with pytest.warns(AmpWarning, match="looks like a scale"):
        DynamicScalerState(2**15, 2000)
    DynamicScalerState(2048, 2.0)


@pytest.mark.parametrize("tree", [loss, "nan", optax.sgd])
def test_all_finite_of_no_numbers(tree):
    with pytest.raises(TypeError, match="`tree` must hold numbers, but was given"):
        all_finite(tree)
    assert all_finite({"name": "mlp", "fn": loss}) and all_finite(())


def test_scaler_that_is_no_state():
    class_itself: Any = DynamicScalerState
    with pytest.raises(TypeError, match=r"Call it: `DynamicScalerState\(\)`"):
        loss_scale_optimizer(optax.sgd(0.1), class_itself)
    of_flax: Any = DynamicScale()
    with pytest.raises(TypeError, match="Flax' DynamicScale"):
        loss_scale_optimizer(optax.sgd(0.1), of_flax)
