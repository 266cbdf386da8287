"""Calls as other libraries have them are answered by what to write here."""

import inspect
import itertools
import pickle
import re
from types import SimpleNamespace
from typing import Any, NamedTuple

import equinox as eqx
import flax.serialization
import haiku as hk
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen, nnx
from flax.training.train_state import TrainState

import jaxamp_like
from jaxamp_like import (
    AmpError,
    AmpWarning,
    DynamicScalerState,
    Policy,
    amp,
    calibrate,
    default_amp_policy,
    disable_amp,
    dynamic_scale_grad,
    enable_amp,
    explain,
    get_policy,
    guard_step,
    loss_scale_optimizer,
    presets,
    rules,
    scaling,
    storage,
)
from jaxamp_like._suggestions import ELSEWHERE, WRITTEN
from jaxamp_like.inference import ArtifactError
from jaxamp_like.scaling import (
    ScalerLog,
    Unscaled,
    check_scaler,
    overflowed_leaves,
    restore_scaler,
    scale_loss,
    unscale_grads,
)

pytestmark = pytest.mark.quick

w, x = {"in": jnp.ones((4, 2))}, jnp.ones((3, 4))
adam = optax.adam(1e-3)


def loss(w, x):
    return jnp.mean(x @ w["in"])


mixed = amp(loss)
tx = loss_scale_optimizer(adam)
scaler = DynamicScalerState()
FOUND = SimpleNamespace(policy=Policy("bfloat16"))  # as of `calibrate`
dense = linen.Dense(2)
transformed = hk.transform(lambda x: hk.Linear(2)(x))


gradient = Unscaled(jnp.ones(3))
NO_ARRAY = "is marked as one, and is no array"
READ = (
    *(
        (f"'Unscaled' object has no attribute {name!r}", AttributeError, read)
        for name, read in {
            "mean": lambda: gradient.mean(),
            "at": lambda: gradient.at[0].set(1),
            "item": lambda: gradient.item(),
        }.items()
    ),
    (f"{NO_ARRAY} to", TypeError, lambda: gradient * 2),
    (NO_ARRAY, TypeError, lambda: np.ones(3) * gradient),
    ("A gradient", TypeError, lambda: float(Unscaled(jnp.float32(1)))),
    ("gradient of a", TypeError, lambda: len(gradient)),
    ("of a `loss_scale", TypeError, lambda: gradient > 0),
    ("loss_scale_optimizer", TypeError, lambda: gradient == 0),
    ("marked as one", TypeError, lambda: 1 if gradient else 0),
    ("no array to compute", TypeError, lambda: f"{gradient:.3f}"),
)


def say(make, error, *parts):
    return pytest.param(make, error, parts, id=parts[0])


@pytest.mark.parametrize(
    ("make", "error", "parts"),
    (
        say(lambda: amp(dense), TypeError, "Dense without", "`amp(model.apply)"),
        say(lambda: amp(transformed), TypeError, "Transformed without", "model.apply"),
        say(
            lambda: amp(loss, compute_dtype="int8"),
            TypeError,
            "'int8'",
            "amp_policy='float8_from_mixed_bfloat16'",
        ),
        say(
            lambda: amp(loss, compute_dtype="float8"),
            TypeError,
            "'float8'. Contractions in 8 bits",
        ),
        *(
            say(
                lambda name=name: amp(loss, compute_dtype=name),
                TypeError,
                f"got '{name}'. It is a format of contractions alone",
                f"`amp_policy='{name}_from_mixed_bfloat16'`",
            )
            for name in ("mxfp8", "nvfp4")
        ),
        say(
            lambda: amp(loss, compute_dtype="fp8"),
            TypeError,
            "'fp8'. Contractions in 8 bits",
        ),
        say(
            lambda: get_policy("O1"),
            ValueError,
            "'O1'. Did you mean 'mixed_float16'?",
        ),
        say(
            lambda: amp(loss, amp_policy="bf16-mixed"),
            ValueError,
            "Did you mean 'mixed_bfloat16'?",
        ),
        say(
            lambda: enable_amp(adam, loss),
            TypeError,
            "`loss_fn` is an optimizer",
            "`enable_amp(loss_fn, optimizer)`",
        ),
        say(lambda: enable_amp(loss), TypeError, "`enable_amp` can't", "'optimizer'"),
        say(
            lambda: enable_amp(loss, adam, loss_scale=1024.0),
            TypeError,
            "Did you mean `scaler` by `loss_scale`?",
        ),
        say(
            lambda: enable_amp(loss, adam, dtype="bfloat16"),
            TypeError,
            "Did you mean `compute_dtype` by `dtype`?",
        ),
        say(
            lambda: enable_amp(loss, optax.adam),
            TypeError,
            "function adam",
            "a call such as `optax.adam(1e-3)`",
        ),
        say(lambda: loss_scale_optimizer("adam"), TypeError, "str 'adam'"),
        say(
            lambda: loss_scale_optimizer(adam, init_scale=2.0),
            TypeError,
            "Did you mean `scaler` by `init_scale`?",
        ),
        say(
            lambda: tx.value_and_grad(mixed)(w, x),
            TypeError,
            "missing a required argument: 'opt_state'",
            "`tx.value_and_grad(loss_fn, opt_state)(params, batch)`",
        ),
        say(
            lambda: tx.value_and_grad(mixed, tx.init(w), w, x),
            TypeError,
            "`tx.value_and_grad` can't be called so: too many",
        ),
        say(lambda: tx.grad(mixed), TypeError, "`tx.grad` can't", "tx.grad(loss_fn,"),
        say(
            lambda: DynamicScalerState(init_scale=1024),
            TypeError,
            "Did you mean `scaler` by `init_scale`?",
            "DynamicScalerState(scaler=2.0**15",
        ),
        say(
            lambda: DynamicScalerState(growth_interval=100),
            TypeError,
            "Did you mean `patience` by `growth_interval`?",
        ),
        say(
            lambda: DynamicScalerState(backoff_factor=0.5),
            TypeError,
            "Did you mean `adjust_factor` by `backoff_factor`?",
        ),
        say(
            lambda: DynamicScalerState(2.0**10),
            TypeError,
            "`patience` of a `DynamicScalerState` must be an integer",
            "name it: `scaler=2.0**15`",
        ),
        *(
            say(read, error, what, "`jax.tree.map(lambda g: ...", "`grads.value`")
            for what, error, read in READ
        ),
        say(
            lambda: tx.grad(loss, tx.init(w))({"in": jnp.ones((4, 2), int)}, x),
            TypeError,
            "holds no floating-point array to differentiate by, but int",
            "`jnp.asarray(x, jnp.float32)`",
            "`filter=False, allow_int=True`",
        ),
        say(
            lambda: dynamic_scale_grad(jnp.sin)(2.0, dynamic_scaler_state=scaler),
            TypeError,
            "but float.\n",
            "Make arrays of Python numbers",
        ),
        say(
            lambda: calibrate(loss, [(w, x)], budget=1),
            ValueError,
            "`budget` is 1, a relative error of 100%",
            "One percent is 0.01",
            "`Budget(gradients=1)`",
        ),
        say(
            lambda: calibrate(lambda w, x: x @ w["in"], [(w, x)], budget=5),
            ValueError,
            "`budget` is 5, a relative error of 500%",
            "`Budget(outputs=5)`",
        ),
        say(
            lambda: jax.jit(check_scaler)(DynamicScalerState()),
            TypeError,
            "while a function is traced",
            "read it outside",
        ),
        say(
            lambda: check_scaler(jax.eval_shape(DynamicScalerState)),
            TypeError,
            "holds shapes, not numbers",
            "Give the state that a step has returned",
        ),
        say(
            lambda: jax.jit(lambda s: ScalerLog(s).record(s))(DynamicScalerState()),
            TypeError,
            "was to be read while a function is traced",
        ),
        say(
            lambda: amp().__enter__(),
            TypeError,
            "no context manager",
            "`mixed = amp(loss_fn)`",
        ),
        say(
            lambda: explain(jax.jit(loss).lower(w, x).compile()),
            TypeError,
            "a Compiled program",
            "the function that it was made of",
        ),
        say(
            lambda: amp(loss, amp_policy=FOUND),
            TypeError,
            "It holds a Policy: give its `.policy`",
        ),
        say(
            lambda: scaler.update({"w": jnp.nan}),
            TypeError,
            "was given dict",
            "`scaler.update(all_finite(grads))`",
        ),
        say(lambda: scaler.update(jnp.nan), TypeError, "was given float32[]"),
        say(lambda: scaler.update([True]), TypeError, "was given list"),
        say(
            lambda: unscale_grads(tx.grad(loss, tx.init(w))(w, x), tx.init(w)),
            TypeError,
            "`grads['in']`) are unscaled already",
            "Give them to `tx.update` as they are",
        ),
        say(
            lambda: scaler.unscale(tx.grad(loss, tx.init(w))(w, x)),
            TypeError,
            "are unscaled already: `tx.value_and_grad`",
        ),
        say(
            lambda: tx.init(eqx.nn.MLP(2, 2, 2, 1, key=jax.random.key(0))),
            TypeError,
            "`params.activation` is a",
            "`eqx.filter(model, eqx.is_inexact_array)`",
        ),
        say(
            lambda: tx.grad(loss, adam.init(w)),
            ValueError,
            "but holds 0",
            "`tx.init(params)._replace(inner_state=...)`",
        ),
        say(
            lambda: restore_scaler(tx.init(w)),
            TypeError,
            "is the state of an optimizer",
            "restore_scaler(saved.scaler)",
        ),
        say(lambda: restore_scaler(adam.init(w)), TypeError, "was given a tuple."),
        say(
            lambda: jax.jit(overflowed_leaves)(w),
            TypeError,
            "Gradients were to be read while",
            "ask outside",
        ),
        say(
            lambda: guard_step(lambda x, s: s.scaler.scaler)(x, tx.init(w)),
            TypeError,
            "No loss scale was found in the state",
        ),
        say(
            lambda: guard_step(lambda s: s["scaler"])({"scaler": scaler}),
            TypeError,
            "a batch comes after it",
        ),
        say(
            lambda: jaxamp_like.autocast,
            AttributeError,
            "'autocast'. Did you mean 'amp'? Write `mixed = amp(loss_fn)`.",
        ),
        say(
            lambda: jaxamp_like.GradScaler,
            AttributeError,
            "'GradScaler'. Did you mean 'enable_amp'?",
        ),
        say(
            lambda: jaxamp_like.DynamicLossScale,
            AttributeError,
            "Did you mean 'DynamicScalerState'?",
        ),
        say(
            lambda: jaxamp_like.explian,
            AttributeError,
            "Did you mean 'explain'?",
        ),
    ),
)
def test_a_mistake_is_answered_by_what_to_write(make, error, parts):
    with pytest.raises(error) as raised:
        make()
    for part in parts:
        assert part in str(raised.value)


def test_numpy_reads_a_gradient_as_an_array():
    found = np.asarray(gradient)
    assert found.dtype == np.float32 and found.shape == (3,)
    assert np.asarray(gradient, "float64").dtype == np.float64
    assert np.linalg.norm(gradient) == np.sqrt(np.float32(3)) and np.ndim(gradient) == 1
    assert np.isfinite(gradient).all()
    assert (gradient.shape, gradient.ndim, gradient.size) == ((3,), 1, 3)
    assert gradient.dtype == np.float32 and not hasattr(gradient, "T")
    np.testing.assert_allclose(gradient, np.ones(3))
    assert isinstance(pickle.loads(pickle.dumps(gradient)), Unscaled)


def test_a_scale_in_the_place_of_patience_is_told():
    with pytest.warns(AmpWarning, match="Write .*scaler=1024.*or `patience=1024`"):
        DynamicScalerState(2**10)
    for state in (DynamicScalerState(2000), DynamicScalerState(patience=1024)):
        assert state._replace(count=3).scaler == 2**15
    DynamicScalerState(1024, 2.0)  # who gives two fields by their places knows them


def test_parameters_beside_integers_are_differentiated_by():
    params = {"w": jnp.ones(2), "step": jnp.array(3)}
    tx = loss_scale_optimizer(optax.sgd(0.1))
    grads = tx.grad(lambda p: jnp.sum(p["w"]) * p["step"], tx.init(params))(params)
    assert grads["step"] is None and (grads["w"].value == 3).all()
    model = nnx.Linear(4, 2, rngs=nnx.Rngs(0))
    tx.grad(lambda m: m(x).sum(), tx.init(nnx.state(model)))(model)


def curved(w, x):
    return jnp.mean(jnp.tanh(x @ w["in"]) ** 2)


@pytest.mark.parametrize("dtype", ("float16", "bfloat16"))
@pytest.mark.parametrize("wrap", (lambda fn: fn, jax.jit), ids=("eager", "jitted"))
def test_an_optimizer_of_enable_amp_that_is_given_another_loss(dtype, wrap):
    _, tx = enable_amp(curved, adam, compute_dtype=dtype)
    opt_state = tx.init(w)
    forgotten = wrap(lambda w, state: tx.grad(lambda w: curved(w, x), state)(w))
    with pytest.warns(AmpWarning, match="`amp` never saw.*tx.value_and_grad.mixed"):
        forgotten(w, opt_state)
    forgotten(w, opt_state)  # told once
    _, tx = enable_amp(curved, adam, compute_dtype=dtype)
    with pytest.warns(AmpWarning, match="`amp` never saw.*This is of `curved`"):
        tx.value_and_grad(curved, opt_state)(w, x)


def test_an_optimizer_of_enable_amp_whose_loss_calls_no_model():
    """A criterion alone, around which the model stays in float32."""
    criterion, tx = enable_amp(
        lambda out, y: jnp.mean((out - y) ** 2), adam, compute_dtype="bfloat16"
    )

    def loss(w):
        return criterion(x @ w["in"], 1.0)

    with pytest.warns(AmpWarning, match="products `amp` never saw.*calls the model"):
        tx.grad(loss, tx.init(w))(w)
    norm, tx = enable_amp(lambda w: jnp.sum(w["in"] ** 2), adam)
    tx.grad(norm, tx.init(w))(w)  # there is nothing to lower


@pytest.mark.rest
def test_losses_that_are_low_or_on_purpose_in_full_are_not_told_of():
    def fresh():
        _, tx = enable_amp(curved, adam)
        return tx, tx.init(w)

    def by_hand(w, x):
        return curved(
            jax.tree.map(lambda x: x.astype("float16"), w), x.astype("float16")
        )

    compiled = jax.jit(mixed_curved := amp(curved))
    jax.grad(compiled)(w, x)  # so that `amp` has no more to do with it
    model = amp(eqx.nn.Linear(4, 2, key=jax.random.key(0)))
    for fun in (
        mixed_curved,
        compiled,
        lambda w, x: compiled(w, x),
        by_hand,
        lambda w, x: jnp.sum(w["in"] ** 2),  # has nothing to lower
        lambda w, x: jnp.mean(jax.vmap(model)(x @ w["in"] @ w["in"].T)),
    ):
        tx, opt_state = fresh()
        tx.grad(fun, opt_state)(w, x)
    tx, opt_state = fresh()
    amp(lambda w: tx.value_and_grad(curved, opt_state)(w, x)[0])(w)  # the whole step
    with disable_amp():
        tx.grad(curved, opt_state)(w, x)
        _, off = enable_amp(curved, adam)
    off.grad(curved, off.init(w))(w, x)
    plain = loss_scale_optimizer(adam)  # says nothing of `amp`
    plain.grad(curved, plain.init(w))(w, x)


def curved_of(model, x):
    return jnp.mean(jax.vmap(model)(x) ** 2)


LINEAR = eqx.nn.Linear(4, 2, key=jax.random.key(0))
HALF = linen.Dense(2, dtype=jnp.float16)
IN_16_BITS = HALF.init(jax.random.key(0), x)


@pytest.mark.parametrize(
    "warns",
    (
        lambda: eqx.filter_grad(amp(curved_of, amp_policy="bfloat16"))(LINEAR, x),
        lambda: eqx.filter_jit(eqx.filter_grad(amp(curved_of, amp_policy="bfloat16")))(
            LINEAR, x
        ),
        lambda: jax.grad(amp(curved, amp_policy="bfloat16"))(w, x),
        lambda: jax.jit(jax.grad(amp(HALF.apply, amp_policy="bfloat16")))(
            IN_16_BITS, x
        ),
        lambda: amp(HALF.apply, compute_dtype="bfloat16")(IN_16_BITS, x),
        lambda: nnx.jit(amp(lambda m, x: m(x), compute_dtype="bfloat16"))(
            nnx.Linear(4, 2, dtype=jnp.float16, rngs=nnx.Rngs(0)), x
        ),
        lambda: enable_amp(curved, adam)[1].grad(curved, tx.init(w))(w, x),
        lambda: loss_scale_optimizer(optax.chain(optax.sgd(0.1))).init(
            jax.tree.map(lambda x: x.astype("bfloat16"), w)
        ),
    ),
)
def test_a_warning_names_a_line_of_the_user(warns):
    with pytest.warns(AmpWarning) as told:
        try:
            warns()
        except TypeError as e:  # `jax.grad` of what is no scalar, after the warning
            assert "scalar" in str(e)
    (one,) = [x for x in told if x.category is AmpWarning]
    assert one.filename == __file__


@pytest.mark.parametrize(
    "policy",
    ("bfloat16", "float16", "p=f32,c=bf16,o=bf16", Policy(output_dtype="bfloat16")),
    ids=("bfloat16", "float16", "spelt out", "output"),
)
def test_a_loss_that_its_policy_rounds_is_told(policy):
    rounded = amp(curved, amp_policy=policy)
    with pytest.warns(AmpWarning, match="`output_dtype`.*'mixed_bfloat16'.*`curved`"):
        value, grads = jax.jit(jax.value_and_grad(rounded))(w, x)
    assert value.dtype.itemsize == 2 and grads["in"].dtype == jnp.float32
    np.testing.assert_allclose(value, curved(w, x), rtol=0.02)
    amp(curved, amp_policy=policy)(w, x)  # a number, of which nothing is known
    with pytest.raises(AmpError, match="rounded to"):
        jax.grad(amp(curved, amp_policy=policy, strict=True))(w, x)
    for other in ("mixed_bfloat16", "p=f32,c=bf16,o=f32", "float32"):
        jax.grad(amp(curved, amp_policy=other, strict=True))(w, x)
    logits = amp(lambda w, x: x @ w["in"], amp_policy=policy)
    jax.grad(lambda w: jnp.sum(logits(w, x).astype(jnp.float32)))(w)  # no loss


def test_a_step_of_a_batch_and_nnx_objects_begins_with_the_objects():
    model = nnx.Linear(4, 2, rngs=nnx.Rngs(0))
    optimizer = nnx.Optimizer(model, tx, wrt=nnx.Param)

    @guard_step
    def step(x, model, optimizer):
        grads = tx.grad(lambda m, x: m(x).mean(), optimizer)(model, x)
        optimizer.update(model, grads)
        return x.mean()

    with pytest.raises(TypeError, match=r"it was float32\[3, 4\].*\n.*begin with one"):
        step(x, model, optimizer)


def nnx_step():
    mixed, tx = enable_amp(lambda m, x: jnp.mean(m(x) ** 2), adam)
    model = nnx.Linear(4, 2, rngs=nnx.Rngs(0))

    def step(model, optimizer, x):
        value, grads = tx.value_and_grad(mixed, optimizer)(model, x)
        optimizer.update(model, grads)
        return value

    return model, nnx.Optimizer(model, tx, wrt=nnx.Param), step


@pytest.mark.parametrize("jit", (jax.jit, eqx.filter_jit))
def test_a_guarded_step_of_nnx_objects_under_another_jit(jit):
    """It would train copies of the objects, and nobody would see that."""
    model, optimizer, step = nnx_step()
    lost = r"NNX objects \(Linear, Optimizer\) under a transform(.|\n)*`@nnx.jit` above"
    with pytest.raises(TypeError, match=lost):
        jit(guard_step(step))(model, optimizer, x)


@pytest.mark.rest
def test_a_guarded_step_of_nnx_objects_whose_changes_are_kept():
    model, optimizer, step = nnx_step()
    guarded = guard_step(step)
    explain(guarded)(model, optimizer, x)

    @jax.jit
    @guard_step
    def returning(model, optimizer, x):
        return model, optimizer, step(model, optimizer, x)

    @jax.jit
    def of_states(states, x):
        objects = nnx.merge(graph, states)
        value = guarded(*objects, x)
        return nnx.state(objects), value

    values = [guarded(model, optimizer, x), nnx.jit(guarded)(model, optimizer, x)]
    *objects, value = returning(model, optimizer, x)
    graph, states = nnx.split(tuple(objects))
    states, last = of_states(states, x)
    values += [value, last, guarded(*nnx.merge(graph, states), x)]
    assert all(b < a for a, b in itertools.pairwise(values))  # each step was kept


class Adapted(nnx.Module):
    def __init__(self, rngs):
        self.base = nnx.Linear(4, 2, rngs=rngs)
        self.adapter = nnx.LoRA(2, 2, 2, rngs=rngs)

    def __call__(self, x):
        x = self.base(x)
        return x + self.adapter(x)


@pytest.mark.parametrize("filter", (True, False))
def test_variables_that_an_nnx_diff_state_names(filter):
    model = Adapted(nnx.Rngs(0))
    mixed, tx = enable_amp(lambda m, x: jnp.mean(m(x) ** 2), adam)
    optimizer = nnx.Optimizer(model, tx, wrt=nnx.LoRAParam)
    wanted = nnx.DiffState(0, nnx.LoRAParam)
    of_optimizer = tx.grad(mixed, optimizer, argnums=wanted, filter=filter)(model, x)
    scaled = dynamic_scale_grad(mixed, argnums=wanted, filter=filter)
    _, plain = scaled(model, x, dynamic_scaler_state=scaler)
    true = nnx.grad(mixed, argnums=wanted)(model, x)
    assert {path[0] for path, _ in nnx.to_flat_state(plain)} == {"adapter"}
    # Of a scale that is a power of two, gradients have the same bits.
    for found in (plain, jax.tree.map(jnp.asarray, of_optimizer, is_leaf=is_unscaled)):
        assert jax.tree.all(jax.tree.map(lambda a, b: (a == b).all(), found, true))
    a = of_optimizer["adapter"]["lora_a"]
    assert isinstance(a[...], jax.Array) and (np.asarray(a) == a[...]).all()
    with pytest.raises(TypeError, match=r"`grads\[...\]` of a variable of NNX"):
        a * 2
    optimizer.update(model, of_optimizer)
    with pytest.raises(ValueError, match="argument 0, a Adapted, which holds none"):
        tx.grad(mixed, optimizer, argnums=nnx.DiffState(0, nnx.BatchStat))(model, x)
    with pytest.raises(ValueError, match="Pass `filter=False`"):
        tx.grad(mixed, optimizer, argnums=nnx.DiffState(1, nnx.LoRAParam))


def is_unscaled(x):
    return isinstance(x, Unscaled)


def test_variables_of_keras_are_given_by_their_values():
    import keras

    model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(2)])
    with pytest.raises(TypeError, match=r"`params\[0\]` is a Variable.*\n.*\[v.value "):
        tx.init(model.trainable_variables)
    tx.init([v.value for v in model.trainable_variables])


def test_amp_of_what_amp_has_made_in_another_dtype():
    made_already = r"made already.*in float16: bfloat16 changes nothing"
    with pytest.warns(AmpWarning, match=made_already):
        _ = amp(mixed, compute_dtype="bfloat16")
    with pytest.warns(AmpWarning, match=made_already):
        enable_amp(amp(lambda w, x: loss(w, x)), adam, compute_dtype="bfloat16")
    with pytest.raises(AmpError, match="Use `amp` or `enable_amp` once"):
        amp(mixed, amp_policy="mixed_bfloat16", strict=True)
    _ = amp(jax.grad(mixed), compute_dtype="bfloat16", strict=True)  # holds more
    low = amp(loss, compute_dtype="bfloat16")
    assert amp(low)(w, x) == low(w, x)  # nothing was said of another dtype
    assert explain(low)(w, x).now.totals.flops_by_dtype.keys() == {"bfloat16"}


@pytest.mark.parametrize(
    ("by_hand", "asked"), (("float16", "bfloat16"), ("bfloat16", "float16"))
)
def test_layers_that_are_in_16_bits_as_written(by_hand, asked):
    """They stay so: whatever is asked for changes nothing."""
    half = linen.Dense(2, dtype=by_hand)
    params = half.init(jax.random.key(0), x)
    scale = r".*In float16, a loss wants a scale" if by_hand == "float16" else ""
    told = (
        rf"{asked} changes nothing.*linear.py.* {by_hand} as written.*`dtype=`.*"
        rf"`hk.mixed_precision`.*`cast_to_compute`{scale}"
    )
    with pytest.warns(AmpWarning, match=told):
        amp(half.apply, compute_dtype=asked)(params, x)
    with pytest.warns(AmpWarning, match=told):
        mixed, tx = enable_amp(
            lambda p, x: jnp.mean(half.apply(p, x)), adam, compute_dtype=asked
        )
        tx.grad(mixed, tx.init(params))(params, x)
    low = jax.tree.map(lambda x: x.astype(by_hand), {"in": w["in"], "x": x})
    with pytest.warns(AmpWarning, match=f"{asked} changes nothing"):
        amp(lambda p: p["x"] @ p["in"], compute_dtype=asked)(low)
    with pytest.warns(AmpWarning, match=f"{by_hand} changes nothing.* {by_hand} as wr"):
        amp(lambda p, x: half.apply(p, x), compute_dtype=by_hand)(params, x)
    mixed_by_hand = amp(lambda p, x: half.apply(p, x @ x.T @ x), compute_dtype=asked)
    some = f"1 of 3 contractions run in {by_hand}, beside {asked}.*linear.py"
    mixed_by_hand(params, x)  # that may be meant
    (note,) = explain(mixed_by_hand)(params, x).notes
    assert re.match(some, note)
    within = amp(lambda p, x: half.apply(p, x), compute_dtype=by_hand)
    with pytest.warns(AmpWarning, match="changes nothing"):  # the inner one
        nested = amp(lambda p, x: within(p, x @ x.T @ x), compute_dtype=asked)
        assert explain(nested)(params, x).notes == ()


def test_functions_of_float64_alone_are_told():
    jax.config.update("jax_enable_x64", True)
    try:
        wide = {"in": jnp.ones((4, 2))}
        with pytest.warns(AmpWarning, match="bfloat16 changes nothing.* is float64 as"):
            amp(curved, compute_dtype="bfloat16")(wide, jnp.ones((3, 4)))
        amp(curved, compute_dtype="bfloat16")(w, x)
    finally:
        jax.config.update("jax_enable_x64", False)


def test_a_precision_that_all_layers_ask_for_is_told():
    exact = linen.Dense(2, precision="highest")
    params = exact.init(jax.random.key(0), x)
    asks = (
        r"bfloat16 changes nothing.*linear.py.*`precision=`.*{scope: use_compute_prec"
    )
    with pytest.warns(AmpWarning, match=asks):
        amp(exact.apply, compute_dtype="bfloat16")(params, x)
    low = amp(
        exact.apply,
        compute_dtype="bfloat16",
        amp_policy=jaxamp_like.default_amp_policy
        | {"Dense": rules.use_compute_precision},
    )
    assert explain(low)(params, x).now.totals.flops_by_dtype.keys() == {"bfloat16"}
    with jax.default_matmul_precision("highest"):  # of the whole program: not of amp
        amp(dense.apply, compute_dtype="bfloat16")(params, x)


def test_moments_in_float16_are_told():
    low = {"in": w["in"].astype(jnp.float16)}
    with pytest.warns(AmpWarning, match=r"\.mu\['in'\].*`param_dtype` alone"):
        tx.init(low)


def holding_float32(optimizer):
    """An optimizer that keeps a float32 copy of parameters, and updates that."""

    def wide(tree):
        return jax.tree.map(lambda x: x.astype(jnp.float32), tree)

    def init(params):
        return wide(params), optimizer.init(wide(params))

    def update(grads, state, params):
        copy, inner = state
        updates, inner = optimizer.update(wide(grads), inner, copy)
        copy = optax.apply_updates(copy, updates)
        return jax.tree.map(jnp.subtract, copy, wide(params)), (copy, inner)

    return optax.GradientTransformation(init, update)


@pytest.mark.parametrize("dtype", (jnp.bfloat16, jnp.float16))
@pytest.mark.parametrize("wrap", (lambda fn: fn, jax.jit), ids=("eager", "jitted"))
def test_parameters_that_are_updated_in_16_bits_are_told(dtype, wrap):
    low = {"in": jnp.ones((4, 2), dtype), "out": jnp.ones(3)}
    share = 256 if dtype == jnp.bfloat16 else 2048
    updated = rf"{jnp.dtype(dtype)} parameters \(`params\['in'\]`.* 1/{share} .*float32"
    with pytest.warns(AmpWarning, match=updated):
        wrap(loss_scale_optimizer(optax.sgd(0.1)).init)(low)
    wrap(loss_scale_optimizer(optax.sgd(0.1)).init)(low)  # told once
    with pytest.warns(AmpWarning, match="`param_dtype` alone"):
        wrap(enable_amp(loss, optax.lion(0.1))[1].init)({"other": low["in"]})


def test_parameters_in_16_bits_that_lose_no_update_are_not_told():
    low = {"in": jnp.ones((4, 2), jnp.bfloat16), "out": jnp.ones(3)}
    step = optax.chain(optax.clip_by_global_norm(1.0), optax.adam(1e-3))
    frozen = optax.partition(
        {"train": step, "freeze": optax.set_to_zero()}, {"in": "freeze", "out": "train"}
    )
    for optimizer in (frozen, holding_float32(adam)):
        loss_scale_optimizer(optimizer).init(low)
        jax.jit(loss_scale_optimizer(optimizer).init)(low)
    with pytest.warns(AmpWarning, match="holds no float32 copy"):  # a moment is none
        loss_scale_optimizer(optax.adam(1e-3, mu_dtype=jnp.float32)).init(low)


def test_a_state_without_a_scale_in_an_optimizer_that_scales_is_told():
    _, unscaled = enable_amp(loss, adam, compute_dtype="bfloat16")
    with pytest.warns(AmpWarning, match=r"_replace\(scaler=DynamicScalerState"):
        tx.grad(mixed, unscaled.init(w))
    unscaled.grad(mixed, tx.init(w))  # the other way round costs nothing


def test_an_error_of_a_call_that_fits_is_its_own():
    """A setting of the wrong kind is not told as a call of the wrong form."""
    with pytest.raises(TypeError, match="must be a real scalar"):
        DynamicScalerState(scaler="large")


def test_a_loss_in_float16_that_nothing_scales_is_told():
    half = amp(lambda w, x: curved(w, x), compute_dtype="float16")
    _, tx = enable_amp(curved, adam, compute_dtype="bfloat16")
    with pytest.warns(
        AmpWarning, match="without a loss scale.*compute_dtype='float16'"
    ):
        tx.grad(half, tx.init(w))(w, x)
    tx.grad(half, tx.init(w))(w, x)  # told once
    for scale in ("auto", 1024.0):
        mixed, tx = enable_amp(curved, adam, compute_dtype="float16", scaler=scale)
        tx.grad(mixed, tx.init(w))(w, x)
    mixed, tx = enable_amp(curved, adam, compute_dtype="bfloat16", scaler="dynamic")
    tx.grad(half, tx.init(w))(w, x)
    with pytest.warns(AmpWarning, match="Loss scaling is off"):  # and no more
        mixed, tx = enable_amp(curved, adam, compute_dtype="float16", scaler=None)
    tx.grad(mixed, tx.init(w))(w, x)


def test_what_is_elsewhere_is_suggested_only_where_it_is_here():
    others = {name.lower() for name in ELSEWHERE}
    for name in (*ELSEWHERE.values(), *(WRITTEN.keys() - others)):
        assert hasattr(jaxamp_like, name)


@pytest.mark.parametrize(
    ("name", "told"),
    (
        ("GradScaler", "Did you mean 'enable_amp'? Write `mixed, tx = enable_amp(loss"),
        ("autocast", "Did you mean 'amp'? Write `mixed = amp(loss_fn)`"),
        ("LossScaleOptimizer", "Write `tx = loss_scale_optimizer(optimizer)`"),
        ("expain", "Did you mean 'explain'?"),
        ("Amp", "Did you mean 'amp'?"),
        ("dynamicscalerstate", "Did you mean 'DynamicScalerState'?"),
        ("nothing_of_the_kind", "cannot import name 'nothing_of_the_kind'"),
    ),
)
def test_an_import_of_a_name_of_another_library_is_answered(name, told):
    with pytest.raises(ImportError) as raised:
        exec(f"from jaxamp_like import {name}")
    assert told in str(raised.value)
    assert not hasattr(jaxamp_like, name) and name not in dir(jaxamp_like)


@pytest.mark.parametrize(
    "optimizer",
    (adam, optax.adamw(1e-3), optax.sgd(0.1, momentum=0.9)),
    ids=("adam", "adamw", "sgd"),
)
def test_a_state_that_is_given_to_the_wrapped_optimizer_is_told(optimizer):
    _, scaled = enable_amp(loss, optimizer)
    low = storage.low_bit_state(optimizer, min_size=0)
    for one in (scaled, low):
        state = one.init(w)
        kind = type(state).__name__
        told = rf"was given a {kind}.*`updates, opt_state = tx\.update\(grads"
        with pytest.raises(TypeError, match=told):
            optimizer.update(w, state, w)
        assert len([*state]) == len(state) == 2  # for everybody else
        for tree in (state, optax.chain(one).init(w)):
            optax.tree_utils.tree_map_params(one, lambda x: x + 1, state)
            assert jax.tree.structure(jax.jit(lambda s: s)(tree)) == (
                jax.tree.structure(tree)
            )


def test_an_optimizer_that_scales_within_one_that_does_not_is_told():
    with pytest.warns(AmpWarning, match=r"enable_amp\(loss_fn, low_bit_state\(optimi"):
        storage.low_bit_state(tx)


NET = eqx.nn.MLP(4, 2, 4, 1, key=jax.random.key(0))


class Scaled(eqx.Module):
    """A loss that holds an array, which is not trained."""

    factor: jax.Array

    def __call__(self, model, x):
        return self.factor * jnp.mean(jax.vmap(model)(x))


OF_EQUINOX = "ignore:(?s).Possibly assigning a JAX-transformed:UserWarning"


@pytest.mark.filterwarnings(OF_EQUINOX)
@pytest.mark.parametrize("model", (NET, nnx.Linear(4, 2, rngs=nnx.Rngs(0))))
def test_a_model_that_is_given_for_the_loss_is_told(model):
    mixed, tx = enable_amp(model, adam)
    params = eqx.filter(model, eqx.is_inexact_array) if model is NET else model
    opt_state = tx.init(params if model is NET else nnx.state(model))
    told = "which holds parameters, and .*\n.*`def loss_fn\\(model, x, y\\)`"
    for args in ((model, x, x), (model,)):
        with pytest.raises(TypeError, match=told):
            tx.grad(mixed, opt_state)(*args)
    with pytest.raises(TypeError, match="If it is the model that is to be trained"):
        tx.grad(mixed, opt_state)(x[0])


@pytest.mark.filterwarnings(OF_EQUINOX)
def test_a_model_may_be_a_loss():
    mixed, tx = enable_amp(Scaled(jnp.float32(2)), adam)
    opt_state = tx.init(params := eqx.filter(NET, eqx.is_inexact_array))
    grads = tx.grad(mixed, opt_state)(NET, x)
    tx.update(grads, opt_state, params)
    with pytest.raises(TypeError, match=r"can't be called so: .*positional"):
        tx.grad(mixed, opt_state)(NET, x, x)


class Counted(eqx.Module):
    inner: eqx.nn.Linear
    count: jax.Array

    def __call__(self, x):
        return self.inner(x)


@pytest.mark.parametrize("dtype", ("float16", "bfloat16"))
def test_a_state_of_other_leaves_than_the_gradients_have_is_told(dtype):
    model = Counted(LINEAR, jnp.array(0))
    floats = eqx.filter(model, eqx.is_inexact_array)
    part = eqx.tree_at(lambda m: m.inner.bias, floats, None)
    mixed, tx = enable_amp(curved_of, adam, compute_dtype=dtype)
    grads = tx.grad(mixed, tx.init(floats))(model, x)
    filtered = r"[^:]*: (.*)\n.*`eqx.filter\(model, eqx.is_inexact_array\)`"
    for made_of, params, where in (
        (eqx.filter(model, eqx.is_array), floats, r"`\[0\].mu.count`"),
        (eqx.filter(model, eqx.is_array), None, r"`\[0\].mu.count`"),
        (part, part, "`grads` holds .* `params` does not hold: `.inner.bias`"),
        (part, floats, r"`\[0\].mu.inner.bias`, `\[0\].nu.inner.bias`."),
    ):
        with pytest.raises(ValueError, match=where) as raised:
            tx.update(grads, tx.init(made_of), params)
        assert re.search(filtered, str(raised.value))
    scoped = tx.grad(mixed, tx.init(floats))(jaxamp_like.scope_modules(model), x)
    with pytest.raises(ValueError, match="in objects of other classes"):
        tx.update(scoped, tx.init(floats), floats)
    tx.update(grads, tx.init(floats), floats)


def test_loops_of_keras_are_refused():
    import keras

    class Own(keras.Model):
        def __init__(self):
            super().__init__()
            self.dense = keras.layers.Dense(2)

        def call(self, x):
            return self.dense(x)

        def predict(self, x):  # may be traced, unlike that of Keras
            return self(x)

    model = Own()
    model(x)
    for method in (model.fit, model.evaluate, model.train_on_batch):
        with pytest.raises(TypeError, match="`compute_loss_and_updates` calls"):
            amp(method)
    assert amp(model.predict, compute_dtype="bfloat16")(x).shape == (3, 2)


def in_a_layer(w, x):
    with jax.named_scope("mlp"), jax.named_scope("layers"), jax.named_scope("0"):
        return jnp.mean(x @ w["in"])


@pytest.mark.parametrize(
    ("key", "told"),
    (
        ("mlp.layers[0]", "Did you mean 'mlp/layers/0' "),
        ("mlp['layers'].0", "Did you mean 'mlp/layers/0' "),
        (re.compile("mlp.layers[0]"), "Did you mean 'mlp/layers/0' "),
        (
            "matmul",
            "is a function of JAX: write the primitive that it binds, `jax.lax.dot_g",
        ),
        (
            "softmax",
            'give the name of that a rule: `default_amp_policy | {name: "float',
        ),
        ("float32", "The scopes of the function are 'mlp', 'mlp/layers', "),
    ),
    ids=str,
)
def test_a_key_that_matches_nothing_is_answered(key, told):
    policy = jaxamp_like.default_amp_policy | {key: "float32"}
    with pytest.raises(AmpError) as raised:
        amp(in_a_layer, amp_policy=policy, strict=True)(w, x)
    assert told in str(raised.value)


def test_bound_modules_of_linen_are_functions():
    class Net(linen.Module):
        @linen.compact
        def __call__(self, x):
            return amp(linen.Dense(2), compute_dtype="bfloat16")(x)

    params = dense.init(jax.random.key(0), x)
    variables = {"params": {"Dense_0": params["params"]}}
    inside = Net().apply(variables, x)
    bound = amp(dense.bind(params), compute_dtype="bfloat16")(x)
    assert (inside == bound).all()


class Inside(linen.Module):
    @linen.compact
    def __call__(self, x):
        return amp(linen.Dense(2))(x)


class Closing(linen.Module):
    @linen.compact
    def __call__(self, x):
        layer = linen.Dense(2)
        return amp(lambda x: layer(x))(x)


class Below(linen.Module):
    @linen.compact
    @amp
    def __call__(self, x):
        return linen.Dense(2)(x)


class Above(linen.Module):
    @amp
    @linen.compact
    def __call__(self, x):
        return linen.Dense(2)(x)


class WithSetup(linen.Module):
    def setup(self):
        self.layer = linen.Dense(2, name="Dense_0")

    @amp
    def __call__(self, x):
        return self.layer(x)


@pytest.mark.parametrize("kind", (Inside, Closing, Below, Above, WithSetup))
def test_amp_in_a_module_that_is_being_initialised(kind):
    """Parameters that were made in the trace of `amp` would be of no use outside."""
    variables = kind().init(jax.random.key(0), x)
    inner = {"params": variables["params"]["Dense_0"]}
    out = kind().apply(variables, x)
    assert (out == amp(dense.apply)(inner, x)).all()
    report = explain(lambda v, x: kind().apply(v, x))(variables, x)
    assert report.now.totals.flops_by_dtype.keys() == {"float16"}


class Counting(linen.Module):
    @linen.compact
    @amp
    def __call__(self, x):
        return linen.BatchNorm(use_running_average=False)(linen.Dense(2)(x))


def test_a_module_that_writes_its_variables_inside_of_amp_is_refused():
    variables = Counting().init(jax.random.key(0), x)
    lost = r"A Counting writes its variables \(batch_stats\) .*wrap the loss"
    with pytest.raises(TypeError, match=lost):
        Counting().apply(variables, x, mutable=["batch_stats"])
    with pytest.raises(TypeError, match=r"\(params\)"):
        Counting().apply({}, x, mutable=True, rngs={"params": jax.random.key(0)})


def test_amp_within_a_function_of_haiku():
    def net(x):
        return amp(hk.Linear(2))(x)

    model = hk.transform(net)
    params = model.init(jax.random.key(0), x)
    plain = hk.transform(lambda x: hk.Linear(2)(x))
    assert jax.tree.structure(params) == jax.tree.structure(
        plain.init(jax.random.key(0), x)
    )
    out = model.apply(params, None, x)
    assert (out == amp(plain.apply)(params, None, x)).all()


def test_what_a_function_of_haiku_writes_inside_of_amp_is_refused():
    """The state would be of tracers, and the next key one, too."""

    @hk.transform_with_state
    def normalised(x):
        return amp(hk.BatchNorm(True, True, 0.9))(x, is_training=True)

    params, state = normalised.init(jax.random.key(0), x)
    with pytest.raises(
        TypeError, match=r"\(batch_norm/~/mean_ema\).*`amp\(model.apply"
    ):
        normalised.apply(params, state, None, x)
    random = hk.transform(amp(lambda x: x + jax.random.normal(hk.next_rng_key())))
    random.init(jax.random.key(0), x)
    with pytest.raises(TypeError, match=r"the keys of `hk\.next_rng_key`"):
        random.apply({}, jax.random.key(0), x)
    noisy = hk.transform(lambda x: x + jax.random.normal(hk.next_rng_key()))
    assert amp(noisy.apply)({}, jax.random.key(0), x).shape == x.shape


def test_what_a_model_of_keras_writes_inside_of_amp_is_refused():
    """And the model stays usable, which would otherwise hold tracers for good."""
    import keras

    layers = keras.layers.Dense(2), keras.layers.BatchNormalization()
    model = keras.Sequential([keras.Input((4,)), *layers])
    lost = r"A Sequential of Keras .*moving_mean.*`model\.stateless_call`"
    closing = amp(lambda x: model(x, training=True))
    for mixed in (amp(model), closing):
        with pytest.raises(TypeError, match=lost):
            mixed(x, training=True) if mixed is not closing else mixed(x)
        assert jnp.isfinite(model(x)).all()
    assert amp(model)(x).shape == (3, 2)  # writes nothing
    with pytest.raises(TypeError, match="Call the model once before"):
        amp(keras.layers.Dense(2))(x)

    class Mixed(keras.Model):
        def __init__(self):
            super().__init__()
            self.dense = keras.layers.Dense(2)

        @amp
        def call(self, x):
            return self.dense(x)

    trained = Mixed()
    trained.compile("sgd", "mse")
    trained.fit(np.ones((3, 4)), np.ones((3, 2)), verbose=0)
    assert trained(x).shape == (3, 2)


@pytest.mark.parametrize("jitted", [False, True])
@pytest.mark.parametrize("mixed", [False, True])
def test_a_loss_is_not_scaled_twice(jitted, mixed):
    tx = loss_scale_optimizer(optax.sgd(0.1), 1024)

    def gradient(w, opt_state):
        def loss(w):
            return scale_loss(jnp.sum(w * w), opt_state)

        loss = amp(loss, compute_dtype="float16") if mixed else loss
        return tx.value_and_grad(loss, opt_state)(w)

    opt_state = tx.init(w := jnp.ones(3))
    with pytest.raises(TypeError, match="Return the loss as it is"):
        (jax.jit(gradient) if jitted else gradient)(w, opt_state)


def test_a_gradient_within_a_loss_is_scaled_by_the_state():
    tx = loss_scale_optimizer(optax.sgd(0.1), 1024)
    opt_state = tx.init(w := jnp.ones(3))

    def penalty(w):
        scaler = opt_state.scaler
        inner = jax.grad(lambda w: scaler.scale(jnp.sum(w**3)))(w)
        return jnp.sum(scaler.unscale(inner))

    _, grads = tx.value_and_grad(penalty, opt_state)(w)
    assert (grads.value == 6).all()


W, X = {"a": jnp.ones((4, 3))}, jnp.ones((2, 4))


def objective(w, x):
    with jax.named_scope("net"):
        return jnp.mean(jnp.tanh(x @ w["a"]) ** 2)


class Attending(eqx.Module):
    attn: eqx.nn.Linear

    def __call__(self, x):
        return self.attn(x)


def within(context):
    with context:
        return objective(W, X)


class PolicyOfAnother(NamedTuple):
    param_dtype: Any = jnp.float32
    compute_dtype: Any = jnp.float16
    output_dtype: Any = jnp.float32


KNOWN = {
    **{name: getattr(jaxamp_like, name) for name in jaxamp_like.__all__},
    **{name: getattr(rules, name) for name in rules.__all__},
    **{name: getattr(scaling, name) for name in scaling.__all__},
    **{name: getattr(presets, name) for name in presets.__all__},
    "vector": lambda w, x: x @ w["a"],
    "attending": Attending(eqx.nn.Linear(4, 2, key=jax.random.key(0))),
    "policy": jaxamp_like.default_amp_policy,
    "optimizer": loss_scale_optimizer(adam),
    "of_another": PolicyOfAnother(),
    "low_bit_state": storage.low_bit_state,
    "inference": jaxamp_like.inference,
    "jaxamp_like": jaxamp_like,
    "adam": adam,
    "optax_adam": optax.adam,
    "taking": lambda fn: KNOWN["optimizer"].value_and_grad(fn, KNOWN["state"])(W, X),
}
for name in (
    "adam W X eqx jax jnp linen objective optax within jaxamp_like rules scaler "
    "scaling presets"
).split():
    KNOWN[name] = globals()[name]
KNOWN["state"] = KNOWN["optimizer"].init(W)
KNOWN["grads"] = KNOWN["optimizer"].grad(objective, KNOWN["state"])(W, X)

KNOWN["linen"], KNOWN["nnx"] = linen, nnx
KNOWN["nnx_model"] = nnx.Linear(4, 2, rngs=nnx.Rngs(0))
KNOWN["plain_nnx"] = nnx.Optimizer(KNOWN["nnx_model"], adam, wrt=nnx.Param)
KNOWN["plain_train"] = TrainState.create(apply_fn=objective, params=W, tx=adam)
KNOWN["read_back"] = {"scaler": {"scaler": 1024.0}, "inner_state": [{}, {}]}
KNOWN["scaled_apart"] = dynamic_scale_grad(objective)(
    W, X, dynamic_scaler_state=scaler
)[1]

# What is written, and a part of the answer: most often what to write instead.
ANSWERS = {
    # amp: what comes first.
    "amp('bfloat16')(objective)": "`amp(fn, compute_dtype='bfloat16')`, or `@amp(comp",
    "amp(jnp.bfloat16)(objective)": "got the dtype 'bfloat16'. Write `amp(fn, compute",
    "amp('mixed_bfloat16')": "`@amp(amp_policy='mixed_bfloat16')` above its definition",
    "amp(Policy('bfloat16'))": "got a policy. Write `amp(fn, amp_policy=...)`",
    "amp(policy)(objective)": "got a policy. Write `amp(fn, amp_policy=...)`",
    "amp(W)": "got dict. Write `amp(fn)(x)`, not `amp(fn(x))`",
    "amp(objective(W, X))": "Write `amp(fn)(x)`, not `amp(fn(x))`",
    "amp('objective')": "but got str 'objective'. Write `amp(fn)(x)`, not",
    "amp([objective])": "`fn` must be callable, but got list",
    "amp()(3)": "`fn` must be callable, but got int",
    "amp()(W, X)": "What the function itself is called with comes after",
    "amp(jax.jit)(objective)": "Write `jit(amp(fn))`, not `amp(jit)(fn)`",
    "amp(jax.grad)(objective)": "Write `grad(amp(fn))`, not `amp(grad)(fn)`",
    "amp(jax.vmap)(objective)": "Write `vmap(amp(fn))`, not `amp(vmap)(fn)`",
    "amp(amp)(objective)": "returns a function, which computes when it is called",
    "amp(adam)": "`fn` must be callable, but got Gradient",
    "explain('bfloat16')": "Write `explain(fn, compute_dtype='bfloat16')`.",
    "trace_numerics(W)": "Write `trace_numerics(fn)(x)`, not",
    "within(amp())": "`amp` is no context manager",
    "within(amp(compute_dtype='float16'))": "Write `mixed = amp(loss_fn)` and call",
    # amp: its arguments.
    "amp(objective, compute_dtype=16)": "must be a floating dtype such as 'bfloat16'",
    "amp(objective, compute_dtype='int32')": "but got 'int32'",
    "amp(objective, compute_dtype='BF16')": "Did you mean 'bf16'?",
    "amp(objective, compute_dtype='Float16')": "Did you mean 'float16'?",
    "amp(objective, compute_dtype='float64')": "with x64 enabled. Call `jax.config",
    "amp(objective, compute_dtype=True)": "such as 'bfloat16', 'float16' or 'float32'",
    "amp(objective, compute_dtype='')": "but got ''",
    "amp(objective, compute_dtype=['bfloat16'])": "but got ['bfloat16']",
    "amp(objective, enabled=False)": "`with disable_amp():` around the code that calls",
    "amp(objective, opt_level='O1')": "'O1' is `amp_policy='mixed_float16'`",
    "amp(objective, loss_scale='dynamic')": "`enable_amp(loss, optimizer)`",
    "amp(objective, optimizer=adam)": "`enable_amp(loss, optimizer)`",
    "amp(objective, device_type='cuda')": "`amp` rewrites for all of them",
    "amp(objective, cast_model_outputs=1)": "`Policy(output_dtype=...)`",
    "amp(objective, x64=True)": "The arguments are fn, compute_dtype, amp_policy",
    "amp(objective, argnums='w')": "must be an integer or a tuple of integers",
    "amp(objective, argnums=5)(W, X)": "`argnums` names argument 5, but 'objective' wa",
    "amp(objective, gather_once='yes')": "`gather_once` must be True or False",
    # Policies.
    "amp(objective, amp_policy=of_another)": "write `Policy(compute_dtype='float16', p",
    "get_policy(of_another)": "`Policy(compute_dtype='float16', param_dtype='float32',",
    "amp(objective, amp_policy='')": "There is no policy called ''. Known names are",
    "amp(objective, amp_policy='mixed_float17')": "Did you mean 'mixed_float16'?",
    "amp(objective, amp_policy=['net'])": 'For example: `default_amp_policy | {"atten',
    "amp(objective, amp_policy={'net'})": "but got set. For example",
    "amp(objective, amp_policy={'net': 'float23'})": "Did you mean 'float32'?",
    "amp(objective, amp_policy={'net': None})": "must be a rule such as `use_compute_p",
    "amp(objective, amp_policy={'net': 32})": "a dtype such as 'float32'",
    "amp(objective, amp_policy={'net': Policy('float32')})": "`PolicyMap` gives whole",
    "amp(objective, amp_policy={'net': float8})": "write `float8()`",
    "amp(objective, amp_policy={'net': int8})": "write `int8()`",
    "amp(objective, amp_policy={'net': lambda a, b: a})(W, X)": "in scope 'net'",
    "amp(objective, amp_policy={3: 'float32'})": "A key of `amp_policy` must be a prim",
    "amp(objective, amp_policy={eqx.nn.Linear: 'float32'})": "`scope_modules(model)` n",
    "amp(objective, amp_policy={linen.Dense: 'float32'})": "names, such as 'Dense_0'",
    "amp(objective, amp_policy={jax.lax.dot_general: 'float32'})": "dot_general_p`.",
    "amp(objective, amp_policy={jax.lax.tanh_p: int8()})": "is a rule for contractions",
    "amp(attending, amp_policy=policy | {'attn': 'float32'}, strict=True)(X[0])": (
        "are scopes where it is called as `scope_modules(model)(x)`"
    ),
    "amp(objective, amp_policy=policy | {'Net': 'float32'}, strict=True)(W, X)": (
        "Did you mean 'net' ("
    ),
    "amp(objective, amp_policy=policy | {'net.*': 'float32'}, strict=True)(W, X)": (
        "an expression is compiled: `re.compile('net.*')`"
    ),
    "amp(objective, amp_policy='int8')": "'int8_from_mixed_bfloat16'",
    "amp(objective, amp_policy='fp8_from_bf16')": "are called by 'int8', 'float8', 'm",
    "amp(objective, amp_policy='float8_from_mixed_bfloat17')": "Did you mean 'mixed_bf",
    "Policy('mixed_bfloat16')": "A policy is made of its name by `get_policy`",
    "Policy(dtype='bfloat16')": "Did you mean `compute_dtype`?",
    "Policy('int8')": "`amp_policy='float8_from_mixed_bfloat16'`",
    "Policy('bfloat16', param_dtype='mixed')": "`param_dtype` must be a floating dtype",
    "Policy(rules=['net'])": "must be a dict that maps primitives or scope names",
    "PolicyMap()": "Write `PolicyMap('mixed_bfloat16', {path: policy})`",
    "PolicyMap('mixed_bfloat16', ['net'])": "must be a dict of paths or regular expr",
    "PolicyMap('mixed_bfloat16', {'[': 'float32'})": "escape it: `re.escape('[')`",
    "PolicyMap('mixed_bfloat16', {jax.lax.exp_p: 'float32'})": "rules=default_amp_poli",
    "PolicyMap('mixed_bfloat16', {3: 'float32'})": "must be a path of scopes",
    "PolicyMap('mixed_bfloat16', {'*net*': 'float32'})": "the expression '.*net.*'",
    "PolicyMap('mixed_bfloat16', {'**/net': 'float32'})": "the expression '.*/net'",
    "PolicyMap(policy, {'net': 'float32'})": "`PolicyMap(Policy('bfloat16', rules=...)",
    "PolicyMap({'net': use_compute_precision})": "but got a dict of rules",
    "amp(linen.Dense)": "`fn` is the class 'Dense', which makes objects",
    "amp(nnx.Linear)": "`fn` is the class 'Linear', which makes objects",
    "enable_amp(objective, adam, scaler='none')": '`enable_amp` also takes "auto"',
    "optimizer.value_and_grad(objective, plain_nnx)": "`nnx.Optimizer(model, tx, wrt=",
    "optimizer.value_and_grad(objective, plain_train)": "This TrainState holds the st",
    "optimizer.value_and_grad(objective, nnx_model)(plain_nnx, X)": (
        "`tx.value_and_grad(loss_fn, optimizer)(model, batch)`"
    ),
    "optimizer.value_and_grad(objective, read_back)": "restore(path, tx.init(params))",
    "optimizer.value_and_grad(objective, [1, read_back])": "as dicts and lists",
    "optimizer.update(grads, read_back, W)": "`checkpointer.restore(path, tx.init(pa",
    "optimizer.update(scaled_apart, state, W)": "`dynamic_scale_value_and_grad` has a",
    "guard_step(lambda s: (s[0] + 1, s[1]))((X, state))": (
        "the `opt_state` that `tx.update` returns second"
    ),
    "policy | PolicyMap('mixed_bfloat16')": "Write `policies | {path: policy}`",
    "PolicyMap('mixed_bfloat16') | policy": "`PolicyMap(Policy('bfloat16', rules=def",
    "amp(objective, amp_policy={'net': 'keep_inputs'})": "`jaxamp_like.rules.keep_inp",
    "amp(objective, amp_policy={'net': 'int8'})": "`jaxamp_like.rules.int8()`",
    "amp(objective, amp_policy={'net': sums_more_than(4)})": "given to `when(predicate",
    "amp(objective, amp_policy={'net': lambda x: x})": "A rule is `rule(compute_dtype,",
    "amp(objective, amp_policy={'net': objective})(W, X)": "the operands and all",
    "saving_low(objective)": "`saving_low` wraps no function that computes",
    "saving_low(objective)(W, X)": "which goes into a policy under the name of a scope",
    "saving_low('int8')(objective)": "neither wraps a function nor is called with arr",
    "saving_low('int8')(W, X)": "Put it into a policy, under the name of a scope",
    "float8()(objective)": "`float8()` is a rule, which a policy gives to equations",
    "use_compute_precision(W, X)": "`amp(fn, amp_policy=default_amp_policy | {",
    "use_compute_precision(W, (X.dtype,), X)": "`rule(compute_dtype, original_dtypes,",
    "amp(int8())": '`amp(fn, amp_policy=default_amp_policy | {"encoder": rule})`',
    "int8(where=objective)": "`where` is <function objective",
    "when(objective, 'float32', 'float16')": "A predicate takes a `Site`, which tells",
    "when(use_compute_precision, sums_more_than(4), 'float32')": "`when(predicate, rul",
    "when(use_compute_precision, 'float32', 'float32')": "`predicate` is the rule",
    "PolicyMap('mixed_bfloat16', {'a': use_compute_precision})": "In `policy_map['a']`",
    "get_policy()": "Write `get_policy('mixed_bfloat16')`",
    "get_policy(3)": "as a name such as 'mixed_bfloat16' or as a string such as 'p=f32",
    "get_policy('p=f32,c=bf17')": "Did you mean 'bf16'?",
    "get_policy('compute=bf16;output=f32')": "malformed at position 8",
    "get_policy('mixed_bfloat16', amax_history_length=8)": "or leave it out",
    "set_global_policy(compute_dtype='f16')": "Write `set_global_policy('mixed_bfloat1",
    "set_global_policy('bf17')": "Did you mean 'bf16'?",
    "set_global_policy(policy)": "Rules alone say no dtype: `Policy('bfloat16', rules=",
    "within(using_policy('bf17'))": "Did you mean 'bf16'?",
    "disable_amp(objective)": "Write `with disable_amp():`",
    # enable_amp and its optimizer.
    "enable_amp(objective, adam, W)": "Write `enable_amp(loss_fn, optimizer, compute_d",
    "enable_amp(objective(W, X), adam)": "`loss_fn` must be a function",
    "enable_amp(objective, adam, scaler='static')": '"dynamic", a number, a state or',
    "enable_amp(objective, adam, scaler=-1.0)": "must be finite and above 0",
    "enable_amp(objective, adam, scaler={'a': scaler})": "are for `dynamic_scale_grad`",
    "enable_amp(objective, optimizer)": "Wrap the outermost optimizer only, and once",
    "optimizer.init()": "Write `tx.init(params)`",
    "optimizer.init(W, X)": "Write `tx.init(params)`",
    "optimizer.update(grads)": "missing a required argument: 'state'. Write `tx.update",
    "optimizer.update(grads, W)": "`updates, opt_state = tx.update(grads, opt_state, p",
    "optimizer.update(grads, attending)": "but it was given a Attending.\nWrite `updat",
    "optimizer.update(grads, W, state)": "The parameters come last: `tx.update(grads,",
    "optimizer.update(grads, None, W)": "given a NoneType.\nWrite `updates, opt_state",
    "optimizer.update(None, state, W)": "was given None",
    "optimizer.update((1.0, grads), state, W)": "a pair.\n`tx.value_and_grad(loss_fn, ",
    "optimizer.update(((X[0, 0], 3), grads), state, W)": "give the gradients alone",
    "optimizer.update(jax.grad(objective)(W, X), state, W)": "Take gradients from `tx.",
    "optimizer.step(grads)": "Write `updates, opt_state = tx.update(grads, opt_state, ",
    "optimizer.scale(X)": "Write `loss, grads = tx.value_and_grad(loss_fn, opt_state)",
    "optimizer.minimize(objective)": "Write `loss, grads = tx.value_and_grad(loss_fn, ",
    "optimizer.value_and_grad(objective, W)": "must hold one loss scale, but holds 0",
    "optimizer.value_and_grad(objective, state.scaler)": "or `tx.update` returned",
    "optimizer.value_and_grad(state, objective)": "have changed places: the loss comes",
    "optimizer.value_and_grad(objective(W, X), state)": "Give the loss itself, not wha",
    "optimizer.value_and_grad(objective, state, argnums=1)": "Pass `filter=False`",
    "optimizer.value_and_grad(objective, state, axis=1)": "keywords that it takes",
    "optimizer.value_and_grad(vector, state)(W, X)": "for example by `.mean()`",
    "optimizer.value_and_grad(objective, state, has_aux=True)(W, X)": "`(loss, aux)`",
    "optimizer.value_and_grad(lambda w: 3, state)(W)": "a floating-point scalar as its",
    "optimizer.value_and_grad(lambda w: None, state)(W)": "but returned NoneType",
    "enable_amp(objective, adam)[0].init(W)": "Write `mixed, tx = enable_amp(loss_fn, ",
    "taking(jax.value_and_grad(objective))": "as `jax.value_and_grad(loss_fn)` returns",
    "taking(jax.grad(objective))": "a tree like its first argument, as `jax.grad(loss",
    "taking(lambda w, x: (objective(w, x), x))": "pass `has_aux=True`",
    "optimizer.value_and_grad(objective, state._asdict())": "from_state_dict(tx.init(",
    "optimizer.update(grads, state._asdict(), W)": "`restore_scaler(saved['scaler'])`",
    "optimizer.update(grads, optimizer.init({'b': X}), W)": (
        "`tx.init(params).inner_state` does not hold: `[0].mu['b']`, `[0].nu['b']`."
    ),
    "state.scale": "The scale is `opt_state.scaler.scaler`, and the state of the wrap",
    "state.loss_scale": "The scale is `opt_state.scaler.scaler`",
    "state.hyperparams": "the state of the wrapped optimizer `opt_state.inner_state`",
    "state.mu": "'LossScaleState' has no attribute 'mu'. The scale",
    "state.update(grads)": "Write `updates, opt_state = tx.update(grads, opt_state, pa",
    "state.value_and_grad(objective)": "`loss, grads = tx.value_and_grad(loss_fn, opt_",
    "state.scaler.loss_scale": "Did you mean `scaler`?",
    "state.scaler.growth_interval": "Did you mean `patience`?",
    "NoScaler().scaler": "`amp_metrics(opt_state)` reads what there is, with a scale",
    "NoScaler().skipped": "Loss scaling is off, as `enable_amp` leaves it in bfloat16",
    # guard_step and dynamic scaling.
    "guard_step()": "Write `guard_step(step)`",
    "guard_step(3)": "`@guard_step` above the training step, below `@jax.jit`",
    "guard_step(adam)": "`step` must be callable, but was given Gradient",
    "guard_step(lambda s: None)(state)": "return the next state, or a tuple that begin",
    "guard_step(lambda w, s: w)(W, state)": "It is in another argument. Put all that",
    "guard_step(lambda s: (W, s['s']))({'w': W, 's': state})": (
        "The first argument is a dict of ('w', 's'), but the step returned a tuple of "
        "(dict, LossScaleState)."
    ),
    "guard_step(lambda s: ({}, s[1]))((W, state))": (
        "The first argument holds arrays that the next state does not hold: `[0]['a']`."
    ),
    "guard_step(lambda s: s)((W, adam.init(W)))": "leave out `guard_step`",
    "guard_step(lambda s: s)(W)": "Put the `DynamicScalerState`, or the state of",
    "dynamic_scale_grad(objective)(W, X)": "Begin with `DynamicScalerState()`",
    "dynamic_scale_grad(objective)(W, X, scaler)": "given by its name: `step(params, ",
    "dynamic_scale_grad(objective, scaler)": "Write `dynamic_scale_grad(loss_fn)`",
    "dynamic_scale_grad(objective)(W, X, dynamic_scaler_state=state)": "its `.scaler`",
    "dynamic_scale_grad(objective)(W, X, dynamic_scaler_state=8.0)": "given a float",
    "dynamic_scale_grad(objective(W, X))": "Give the loss itself, not what it returns",
    "dynamic_scale_grad(objective, redo_on_nan=-1)": "must be 0 or more",
    "dynamic_scale_grad(objective, redo_on_nan=True)": "must be an integer",
    "dynamic_scale_grad(objective, argnums=(0, 1))": "put what to differentiate by",
    "dynamic_scale_grad(objective, axis='d')": "unexpected keyword argument 'axis'",
    "dynamic_scale_tx(adam)": "wrapped by `loss_scale_optimizer(optimizer)`",
    "dynamic_scale_tx(jax.jit)(objective)": "a transform that is called as `jax.grad`",
    "dynamic_scale_tx(3)": "Give a transform, such as `jax.grad`",
    "DynamicScalerState(scaler=0)": "must be finite and above 0, such as 2.0**15",
    "DynamicScalerState(patience=0)": "must be 1 or more",
    "DynamicScalerState(adjust_factor=0.5)": "must be a finite number above 1",
    "DynamicScalerState(min_scaler=8, max_scaler=4)": "no less than `min_scaler`",
    "DynamicScalerState(scaler=jnp.ones(2))": "must be a scalar, but was given shape",
    "scaler.update(grads)": "Write `scaler.update(all_finite(grads))`",
    "scaler.update()": "missing a required argument: 'finite'. Write `scaler.update(",
    "scaler.step(adam)": "write `updates, opt_state = tx.update(grads, opt_state, par",
    "scaler.unscale_(grads)": "write `loss, grads = tx.value_and_grad(loss_fn, opt_st",
    "scaler.scale(jnp.ones(2))": "Reduce an array to one number",
    "scaler.unscale(grads)": "are unscaled already",
    "static_scaler('dynamic')": "Give a Python number or an array of shape ()",
    "check_scaler(W)": "the state of an optimizer made by `loss_scale_optimizer`",
    "ScalerLog(3)": "Give a state, a tree of states, or",
    # Reports, calibration, conversion, certificates.
    "explain()": "missing a required argument: 'fn'",
    "trace_numerics(objective)(W, jax.ShapeDtypeStruct((2, 4), 'float32'))": (
        "`explain` takes shapes"
    ),
    "jax.jit(trace_numerics(objective))(W, X)": "Call it outside of `jax.jit`",
    "calibrate(objective, [(W, X)])": "Write `calibrate(fn, [(params, batch), ...], bu",
    "calibrate(objective, [(X,)], budget=0.01)": "a batch is all arguments of `fn`, p",
    "calibrate(objective, (W, X), budget=0.01)": "Write `[(params, batch) for batch in",
    "calibrate(objective, [], budget=0.01)": "`batches` is empty",
    "calibrate(objective, [(W, X)], budget='small')": "`Budget(loss=0.001, gradients=",
    "calibrate(amp(objective), [(W, X)], budget=0.1)": "Give the function as it is wri",
    "calibrate(objective(W, X), [(W, X)], budget=0.1)": "where `fn(*batch)` is the los",
    "calibrate(objective, [(W, X)], budget=0.1, objective='speed')": "must be one of",
    "calibrate(objective, [(W, X)], budget=0.1, granularity='layer')": "but got 'layer",
    "calibrate(objective, [(W, X)], budget=0.1, candidates='bf17')": "or one of 'float",
    "calibrate(objective, [(W, X * jnp.nan)], budget=0.1)": "leave the batch out",
    "Budget()": "A `Budget` needs a limit on an error: `Budget(gradients=0.01)`",
    "convert(objective)": "missing a required argument: 'params'",
    "convert(W, objective, X)": "first: `convert(fn, params, *example_inputs)`",
    "convert(objective, W, X, quantise=True)": "The arguments are fn, params",
    "convert(objective, W, X, excluded_scopes='net')": "such as ['decoder/head']",
    "convert(objective, W, X, excluded_scopes=['nett'])": "Did you mean 'net'?",
    "convert(objective, W, X, target_ops=['matmul'])": "`jax.lax.dot_general_p`",
    "convert(objective, W, X, float32_ops=['softmax'])": "binds several primitives",
    "convert(objective, W, X, widest_ops=['expo'])": "Did you mean 'exp'",
    "convert(objective, W, X, keep_inputs=['b'])": "There are 1: a",
    "load('/nowhere', 'abc')": "Write `load(path, digest=digest)`",
    "inference.export(objective, W, X)": "Write `convert(fn, params, x).save(path)`",
    "inference.quantise(objective, W, X)": "amp_policy='int8_from_mixed_bfloat16')`",
    "load('/nowhere')": "Give the folder that `Converted.save` wrote",
    "certify(objective)": "can't be called with 0 arguments: missing a required argu",
    "certify(objective, W, x=X)": "`certify(functools.partial(step, x=...))`",
    "certify(objective, W, X, devise='cpu')": "Did you mean `device`?",
    "certify(objective, W, X, lock=state)": "Write the file by `certificate.save(pa",
    "certify(objective(W, X))": "Write `certify(step, x)`, not `certify(step(x))`",
    "certify(objective, W, X, compute_dtype='float16')": "Write `certify(amp(step, com",
    "certify(objective, W, X, lock='/nowhere/lock')": "`certificate.save(path)`",
    # 8 bits, rules and scopes.
    "low_bit_state(adam, where=False)": "`where` must be a function of the path and",
    "low_bit_state(adam).value_and_grad(objective)": "`mixed, tx = enable_amp(loss_fn,",
    "low_bit_state(adam.init(W))": "was given tuple.\nWrite `low_bit_state(optax.adam(",
    "low_bit_state(optax_adam)": "was given <function adam",
    "saving_low('int9')": "Did you mean 'int8'?",
    "saving_low('flaot32')": "which is no floating dtype",
    "jax.grad(amp_with_state(objective))(jnp.float32(1), W, X)": (
        "`amp_with_state(jax.value_and_grad(loss))`"
    ),
    "float8('e4m3')": "Its arguments are `grad_dtype`, `weight_gradient`",
    "float8(where='big')": "such as `worth_eight_bits(side=512)`",
    "float8(amax_history_length=8)": "Give `delayed=True` too",
    "int8(8)": "Its arguments are `weight_only`",
    "int8(bits=4)": "unexpected keyword argument 'bits'. Its arguments are",
    "use_precision_by_pass(forwards='float32')": "Its arguments are `forward`",
    "quantised('int8')": "a rule that quantises, such as `float8()` or `int8()`",
    "amp_with_state(objective)(W, X)": "Write `out, state = step(state, *args)`",
    "init_amp_state(amp(objective), W, X)": "Write `step = amp_with_state(",
    "scope_modules(objective)": "around other code put `jax.named_scope`",
    "send_low()": "write it without `()`",
    "not_divisible_by(0)": "must be a positive integer, but got 0",
    "use_dot_algorithm('BF16')": "Did you mean 'BF16_BF16_BF16'?",
    "pytorch_autocast('bfloat16')": "`device_type` must be 'cuda' or 'cpu'",
    "amp_stop('net')": "Use `@amp_stop` or `with amp_stop():`",
    "amp_stop(objective, 'float32')": "Write `amp_stop(fn)`",
    "amp_stop()(X)": "Use `@amp_stop` or `with amp_stop():`",
    "optimizer.update(jnp.float32(1), state, W)": "If it is the loss, give the",
    "optimizer.apply_updates(W, W)": "optax.apply_updates(params, updates)",
    "amp(objective, amp_policy='bfloat16_mixed')": "Did you mean 'mixed_bfloat16'?",
    "policy + {'net': 'float32'}": "`default_amp_policy | {key: rule}`",
    "explain(objective)(W, X).low_share": "Write `report.now.totals`",
    "explain(objective)(W, X).to_html": "Write `report.save_html(path)`",
    "explain(objective)(W, X).memory_saved": "Did you mean 'memory'?",
    "explain(objective)(W, X).nan": "`trace_numerics(fn)(...)` runs the function",
    "trace_numerics(objective)(W, X).nan": "Write `report.first_nonfinite`",
    "global_policy('mixed_bfloat16')": "write `set_global_policy(policy)`",
    "enable_amp(objective, adam, has_aux=True)": "opt_state, has_aux=True)`",
    "enable_amp(objective, adam, lean=True)": "`lean` belongs to `amp`",
    "guard_step(objective, donate_argnums=0)": "`donate_argnums` belongs to `jax.jit`",
    "{jax.lax.dot_general_p: 'float32'} | policy": "default's rules come last",
    "amp(objective, amp_policy=policy | {'net': 'float8_e4m3fn'})": "rule `float8()`",
    "amp(objective, amp_policy=policy | {'net': 'amp_stop'})": "use_original_precision",
    "optimizer.zero_grad": "loss, grads = tx.value_and_grad(loss_fn, opt_state)",
    "optimizer.get_scale": "jaxamp_like.reports.amp_metrics(opt_state)",
    "optimizer.value_and_grad(objective, state, redo_on_nan=2)": "repeats no step",
    "optimizer.grad(objective, state._replace(scaler=2.0))": "state.scaler._replace(",
    "scaler.mu": "What the optimizer keeps is in `opt_state.inner_state`",
    "optax.apply_updates(W, grads)": "updates, opt_state = tx.update(grads, opt_state",
    "loss_scale_optimizer(objective, adam)": "`enable_amp(loss_fn, optimizer)`",
    "low_bit_state(enable_amp(objective, adam))": "It comes within: `mixed, tx =",
    "enable_amp(objective, adam, argnums=nnx.DiffState(0, nnx.Param))": "tx.value_and",
    "rules.quantised": "It is in `jaxamp_like.presets`",
    "scaling.amp_metrics": "It is in `jaxamp_like.reports`",
    "convert(jax.tree_util.Partial(objective, W), X)(X)": "without example inputs",
    "jaxamp_like.Autocast": "Write `mixed = amp(loss_fn)`",
    "convert(objective, W, X, train=False)": "model.apply(params, x, train=...)",
}


@pytest.mark.parametrize("code", ANSWERS)
def test_what_is_written_is_answered(code):
    errors = TypeError, ValueError, AmpError, AttributeError, OSError, ArtifactError
    with pytest.raises(errors) as raised:
        eval(code, KNOWN)
    assert ANSWERS[code] in str(raised.value)


def test_what_is_no_report_yet_says_so():
    called = "explain(objective)(w, x)"
    for fn in (objective, amp(objective), jax.jit(amp(objective))):
        assert repr(explain(fn)).endswith(f" when it is called: {called}>")
    with pytest.raises(AttributeError) as raised:
        explain(objective).save_html("page.html")
    assert str(raised.value).endswith(called) and "'save_html'" in str(raised.value)
    numerics = jaxamp_like.trace_numerics(LINEAR)
    assert "trace_numerics(Linear)(x)" in repr(numerics)
    assert inspect.signature(explain(objective)) == inspect.signature(objective)


LARGE = {"a": jax.ShapeDtypeStruct((4096, 4096), jnp.float32)}


@pytest.mark.parametrize(
    ("policy", "shown"),
    (
        ("float32", "net: 'float32'"),
        ("mxfp8_from_mixed_bfloat16", "net: 'mxfp8_from_mixed_bfloat16'"),
        (
            Policy("bfloat16", rules=jaxamp_like.default_amp_policy | {"a": "float32"}),
            "net: Policy(compute_dtype='bfloat16', rules=...), a: use_precision('f",
        ),
        (
            Policy("bfloat16").excluding("a"),
            "net: Policy(compute_dtype='bfloat16', limit=...), a: excluding",
        ),
    ),
    ids=("named", "quantised", "rules", "limited"),
)
@pytest.mark.filterwarnings("ignore:The key 'a' of")
def test_the_head_of_a_report_shows_policies_in_a_few_words(policy, shown):
    by_scope = jaxamp_like.PolicyMap("mixed_bfloat16", {"net": policy})
    head = str(explain(objective, amp_policy=by_scope)(LARGE, LARGE["a"]))
    assert shown in head.partition("\n")[0]


def test_a_report_of_a_format_says_what_runs_where_it_is_not_native():
    low = amp(objective, amp_policy="mxfp8_from_mixed_bfloat16")
    shown = str(explain(low)(LARGE, LARGE["a"]))
    assert "100.0 % mxfp8" in shown
    assert "mxfp8: native on Blackwell GPUs; " in shown
    assert "bfloat16 on other devices\n" in shown
    plain = str(explain(objective, compute_dtype="bfloat16")(LARGE, LARGE["a"]))
    assert len(plain.splitlines()) == 4


def test_a_global_policy_that_comes_too_late_is_told():
    def early(w, x):
        return objective(w, x)

    low = amp(early)
    explain(early)(W, X)  # wraps nothing

    def set_policy(name):
        jaxamp_like.set_global_policy(name)
        jaxamp_like.global_policy()  # asked for, as by `amp`

    try:
        with pytest.warns(AmpWarning, match="has wrapped `early` .*in float16. Call"):
            set_policy("mixed_bfloat16")
        set_policy("float32")  # told once
        assert explain(low)(W, X).now.totals.flops_by_dtype.keys() == {"float16"}
        jaxamp_like.set_global_policy(None)
        said = amp(early, amp_policy="mixed_bfloat16"), amp(early, compute_dtype="f16")
        with jaxamp_like.using_policy("mixed_bfloat16"):
            said += (amp(early),)
        _ = amp(early)
        del _  # is gone by now
        set_policy("mixed_bfloat16")
        assert len(said) == 3
    finally:
        jaxamp_like.set_global_policy(None)


def test_settings_of_a_scale_are_fields_of_its_state():
    told = (
        r"`{}\(\.\.\., scaler=DynamicScalerState\(scaler=\.\.\., patience=\.\.\.\)\)`"
    )
    settings: Any = {"init_scale": 2.0**16, "growth_interval": 500}
    with pytest.raises(TypeError, match=told.format("enable_amp")):
        enable_amp(loss, adam, **settings)
    with pytest.raises(TypeError, match=told.format("loss_scale_optimizer")):
        loss_scale_optimizer(adam, **settings)


def test_the_optimizer_of_nnx_is_made_of_what_comes_back():
    model = nnx.Linear(4, 2, rngs=nnx.Rngs(0))
    optimizer: Any = nnx.Optimizer(model, adam, wrt=nnx.Param)
    told = r"(?s)was given Optimizer\.\n.*`nnx\.Optimizer\(model, tx, wrt=nnx.Param\)`"
    with pytest.raises(TypeError, match=told):
        enable_amp(loss, optimizer)


def test_a_scale_in_a_checkpoint_for_an_optimizer_without_one_is_told():
    mixed, scaling_tx = enable_amp(loss, adam, compute_dtype="float16")
    _, tx = enable_amp(loss, adam, compute_dtype="bfloat16")
    saved = flax.serialization.to_bytes(scaling_tx.init(w))
    state = flax.serialization.from_bytes(tx.init(w), saved)
    told = r"holds a loss scale.*this optimizer has none.*`opt_state._replace\(scaler="
    with pytest.raises(TypeError, match=rf"(?s){told}"):
        tx.value_and_grad(mixed, state)(w, x)
    state = state._replace(scaler=scaling.NoScaler())
    mixed, _ = enable_amp(loss, adam, compute_dtype="bfloat16")
    _, grads = tx.value_and_grad(mixed, state)(w, x)
    assert jnp.isfinite(grads["in"].value).all()


class Trainer:
    def __init__(self, guard):
        self.mixed, self.tx = enable_amp(loss, adam, compute_dtype="float16")
        if guard:
            self.step = jax.jit(guard_step(self._step))

    def _step(self, state, x):
        w, opt_state = state
        value, grads = self.tx.value_and_grad(self.mixed, opt_state)(w, x)
        updates, opt_state = self.tx.update(grads, opt_state, w)
        return (optax.apply_updates(w, updates), opt_state), value

    guarded = guard_step(_step)


def test_the_self_of_a_guarded_method_is_no_state():
    trainer = Trainer(guard=True)
    state = w, trainer.tx.init(w)
    told = r"`self` of a method.*`self.step = jax.jit\(guard_step\(self._step\)\)`"
    with pytest.raises(TypeError, match=told):
        trainer.guarded(state, x)
    (trained, _), _ = trainer.step(state, x)
    assert (trained["in"] < w["in"]).all()


def test_other_states_than_objects_are_not_told_of_methods():
    trainer = Trainer(guard=False)
    with pytest.raises(TypeError, match="structure of its first") as error:
        guard_step(lambda state: trainer._step(state, x)[1])((w, trainer.tx.init(w)))
    assert "`self`" not in str(error.value)


def test_gradients_by_another_argument_are_told():
    mixed, tx = enable_amp(lambda x, w: loss(w, x), adam)
    opt_state = tx.init(w)
    _, grads = tx.value_and_grad(mixed, opt_state)(x, w)
    with pytest.raises(ValueError, match=r"(?s)by the first argument.*`tx.value_and_g"):
        tx.update(grads, opt_state, w)
    by_second = tx.value_and_grad(mixed, opt_state, filter=False, argnums=1)
    tx.update(by_second(x, w)[1], opt_state, w)


def test_gradients_beside_another_tree_say_what_to_mark():
    mixed, tx = enable_amp(loss, adam)
    grads = tx.grad(mixed, tx.init(w))(w, x)
    with pytest.raises(
        TypeError, match=r"`total = jax.tree.map\(lambda p: jaxamp_like"
    ):
        jax.tree.map(lambda a, b: a + b / 2, jax.tree.map(jnp.zeros_like, w), grads)
    plain = jax.grad(loss)(w, x)
    with pytest.raises(
        ValueError, match=r"for plain arrays, to compare, `jax.tree.map"
    ):
        jax.tree.map(jnp.subtract, grads, plain)
    arrays = jax.tree.map(
        lambda g: g.value, grads, is_leaf=lambda g: isinstance(g, Unscaled)
    )
    np.testing.assert_allclose(arrays["in"], plain["in"], rtol=1e-3)


def test_one_of_several_functions_of_haiku_is_wrapped():
    def init():
        first, second = hk.Linear(4), hk.Linear(8)
        return lambda x: second(first(x)), (first, second)

    net: Any = hk.multi_transform(init)
    with pytest.raises(
        TypeError, match=r"`apply` holds 2 functions.*`amp\(fn\.apply\["
    ):
        amp(net)
    low = amp(net.apply[0], compute_dtype="bfloat16")
    assert low(net.init(jax.random.key(0), x), None, x).shape == (3, 4)


def test_layers_of_a_scan_share_a_scope():
    def net(w, x):
        def layer(x, w):
            with jax.named_scope("block"):
                return x @ w, None

        with jax.named_scope("blocks"):
            return jax.lax.scan(layer, x, w)[0]

    stack = jnp.ones((3, 4, 4))
    for key, told in {"blocks/2": "the key 'blocks'", "blocks/x": "Did you"}.items():
        policy = default_amp_policy | {key: "float32"}
        with pytest.warns(AmpWarning, match=f"{key}.*matched nothing.*{told}"):
            amp(net, compute_dtype="bfloat16", amp_policy=policy)(stack, x)


@pytest.mark.parametrize(
    ("name", "told"),
    (
        ("static_argnums", "Nothing is needed"),
        ("donate_argnums", "the `jax.jit` around"),
    ),
)
def test_arguments_of_jit_belong_there(name, told):
    options: Any = {name: (1,)}
    with pytest.raises(TypeError, match=told):
        amp(loss, **options)
    power = amp(lambda w, n: w["in"] ** n, compute_dtype="bfloat16")
    assert (power(w, 2) == 1).all()


def test_there_are_many_answers():
    assert len(ANSWERS) >= 190


def test_layers_of_keras_are_no_policies():
    """Though they have a compute dtype."""
    import keras

    layer = keras.layers.Dense(2)
    layer.build((None, 4))
    assert amp(layer, compute_dtype="bfloat16")(X).shape == (2, 2)


def test_a_pair_of_gradients_is_a_tree_of_gradients():
    tx = loss_scale_optimizer(optax.sgd(0.5))
    params = jnp.array([3]), jnp.ones(2)  # the derivative by integers is None
    opt_state = tx.init(params)
    grads = tx.grad(lambda p: jnp.sum(p[1]) * p[0][0], opt_state)(params)
    assert grads[0] is None
    updates, _ = tx.update(grads, opt_state, params)
    np.testing.assert_array_equal(updates[1], [-1.5, -1.5])
    both = jnp.ones(2), jnp.ones(2)
    opt_state = tx.init(both)
    grads = tx.grad(lambda p: jnp.sum(p[1] + p[0]), opt_state)(both)
    assert len(tx.update(grads, opt_state, both)[0]) == 2


def test_models_and_partials_may_be_results():
    model = amp(lambda m: eqx.tree_at(lambda m: m.bias, m, m.bias + 1))
    made = model(eqx.nn.Linear(2, 2, key=jax.random.key(0)))
    assert isinstance(made, eqx.nn.Linear)


def test_integers_that_are_differentiated_are_told():
    with pytest.raises(TypeError) as raised:
        amp(jax.grad(objective))({"a": jnp.ones((4, 3), int)}, X)
    assert "`jnp.asarray(w, jnp.float32)`" in raised.value.__notes__[-1]


def test_the_place_of_what_jax_contracts_itself_is_not_left_empty():
    w = jnp.eye(8) + 0.1
    # JAX 0.6 names the line of the call.
    place = "(a function of JAX that the code calls|/.*test_newcomers.py:.*)"
    told = f"changes nothing.*The first, in {place}, asks"
    with pytest.warns(AmpWarning, match=told):
        amp(lambda w: jnp.linalg.lstsq(w, w[0])[0], compute_dtype="bfloat16")(w)
