"""What is trained in too few bits: in float16 without a loss scale, or in int4."""

import functools
import warnings

import equinox as eqx
import jax
import jax.numpy as jnp
import keras
import numpy as np
import optax
import pytest

from jaxamp_like import AmpWarning, _errors, amp, convert, enable_amp, explain
from jaxamp_like.presets import quantised
from jaxamp_like.rules import int4, int8

X, Y = np.ones((4, 8), np.float32), np.zeros((4, 3), np.float32)
Adam, LossScaleOptimizer = keras.optimizers.Adam, keras.optimizers.LossScaleOptimizer


@pytest.fixture(autouse=True)
def says_it_again(monkeypatch):
    monkeypatch.setattr(_errors, "_seen", set())


def told(run, *args):
    """What `run` is told by warnings of this package."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        run(*args)
    return [str(w.message) for w in caught if issubclass(w.category, AmpWarning)]


class ScalingByItself(Adam):
    def scale_loss(self, loss):
        return loss * 1024.0


def mixed_model(dtype, method="compute_loss_and_updates"):
    """A model whose method goes through `amp`."""

    class Mixed(keras.Model):
        def compute_loss(self, x, y, y_pred, sample_weight=None, training=True):
            as_written = super().compute_loss(x, y, y_pred, sample_weight, training)
            return as_written + jnp.mean(y_pred @ jnp.ones((3, 3)))

    def in_low_precision(self, *args, **kwargs):
        as_written = getattr(super(mixed, self), method)
        return amp(as_written, compute_dtype=dtype)(*args, **kwargs)

    mixed = type("mixed", (Mixed,), {method: in_low_precision})
    inputs = keras.Input((8,))
    return mixed(inputs, keras.layers.Dense(3)(inputs))


def fitted(dtype, optimizer, method="compute_loss_and_updates"):
    model = mixed_model(dtype, method)
    model.compile(optimizer, keras.losses.MeanSquaredError())
    return functools.partial(model.fit, X, Y, verbose=0)


@pytest.mark.parametrize("method", ("compute_loss_and_updates", "compute_loss"))
def test_keras_trains_in_float16_without_a_scale(method):
    (message,) = told(fitted("float16", Adam(), method))
    assert "`mixed` was compiled with `Adam`, which does not scale the loss" in message
    assert f"`{method}` (" in message and "first in /" in message
    assert "keras.optimizers.LossScaleOptimizer(Adam(...))" in message
    assert "`compute_dtype='bfloat16'`" in message


@pytest.mark.parametrize(
    "dtype, optimizer",
    (
        ("bfloat16", Adam),
        ("float16", lambda: LossScaleOptimizer(Adam())),
        ("float16", lambda: Adam(loss_scale_factor=1024.0)),
        ("float16", ScalingByItself),
    ),
    ids=("bfloat16", "wrapped", "factor", "own"),
)
def test_keras_trains_as_it_should(dtype, optimizer):
    assert not told(fitted(dtype, optimizer()))


def keras_model_by(method, wrap, around=()):
    """A compiled model, one or two of whose methods go through `amp`."""

    def through_amp(name):
        def mixed(self, *args, **kwargs):
            return wrap(getattr(super(made, self), name))(*args, **kwargs)

        return mixed

    names = method, *around
    made = type("Made", (keras.Model,), {name: through_amp(name) for name in names})
    inputs = keras.Input((8,))
    model = made(inputs, keras.layers.Dense(3)(inputs))
    model.compile(Adam(), keras.losses.MeanSquaredError())
    return functools.partial(model.fit, X, Y, verbose=0)


in_bfloat16 = functools.partial(amp, compute_dtype="bfloat16")


def test_a_loss_of_keras_that_is_given_the_outputs_is_told():
    (message,) = told(keras_model_by("compute_loss", in_bfloat16))
    assert "bfloat16 changes nothing: `compute_loss` of `Made` is given" in message
    assert "`return amp(super().compute_loss_and_updates, compute_dtype='bf" in message


def test_a_training_step_of_keras_in_amp_is_told():
    (message,) = told(keras_model_by("train_step", in_bfloat16))
    assert "`train_step` of `Made` takes the gradient inside of `amp`" in message
    assert "Override `compute_loss_and_updates`" in message


RIGHT = {
    "the method": keras_model_by("compute_loss_and_updates", in_bfloat16),
    "both": keras_model_by("compute_loss", in_bfloat16, ("compute_loss_and_updates",)),
    "the step too": keras_model_by(
        "compute_loss_and_updates", in_bfloat16, ("train_step",)
    ),
    "float32": keras_model_by("compute_loss", lambda f: amp(f, amp_policy="float32")),
}


@pytest.mark.parametrize("fit", RIGHT.values(), ids=RIGHT)
def test_methods_of_keras_that_are_right_are_not_told_of(fit):
    assert not told(fit)


@pytest.mark.parametrize("method", ("compile", "fit", "predict"))
def test_a_function_that_was_a_model_of_keras_says_how_to_train(method):
    inputs = keras.Input((8,))
    mixed = in_bfloat16(keras.Model(inputs, keras.layers.Dense(3)(inputs)))
    assert mixed(X).shape == (4, 3)
    with pytest.raises(TypeError, match=r"made a function of the `Functional`.*overr"):
        getattr(mixed, method)(X)


def test_keras_is_told_that_an_optimizer_is_of_optax():
    inputs = keras.Input((8,))
    model = keras.Model(inputs, keras.layers.Dense(3)(inputs))
    _, tx = enable_amp(lambda w: w, optax.adam(1e-3))
    with pytest.raises(ValueError, match=r"an Optax optimizer.*a training loop of"):
        model.compile(tx)
    assert "Keras" not in repr(tx)


@pytest.mark.rest
def test_a_model_of_keras_that_is_not_trained_by_fit():
    model = mixed_model("float16")
    model.compile(Adam(), keras.losses.MeanSquaredError())
    assert not told(functools.partial(model.evaluate, X, Y, verbose=0))
    groups = model.trainable_variables, model.non_trainable_variables
    w, state, metrics = (
        *([v.value for v in group] for group in groups),
        [v.value for v in model.metrics_variables],
    )

    def loss(w):
        found, _ = model.compute_loss_and_updates(w, state, metrics, X, Y, None)
        return found

    assert not told(explain(loss), w)  # nothing differentiates it
    mixed, tx = enable_amp(loss, optax.adam(1e-3), compute_dtype="float16")
    assert not told(lambda: tx.value_and_grad(mixed, tx.init(w))(w))
    assert len(told(jax.grad(loss), w)) == 1


def loss(w, x):
    with jax.named_scope("dense"):
        return jnp.mean(jnp.tanh(x @ w["base"]) + (x @ w["left"]) @ w["right"])


W = {
    "base": jnp.ones((64, 32)),
    "left": jnp.ones((64, 4)),
    "right": jnp.ones((4, 32)),
}
TEXT = jnp.ones((2, 64))


def in_4_bits(fn, rule=None):
    return amp(fn, compute_dtype="bfloat16", amp_policy=quantised(rule or int4()))


@pytest.mark.rest
@pytest.mark.sample(2)
@pytest.mark.parametrize(
    "transform",
    (
        jax.grad,
        lambda fn: lambda w, x: jax.vjp(fn, w, x),
        lambda fn: lambda w, x: jax.jvp(fn, (w, x), (w, x)),
        lambda fn: jax.jit(jax.grad(jax.checkpoint(fn))),
    ),
    ids=("grad", "vjp", "jvp", "checkpoint"),
)
def test_a_weight_that_is_trained_in_int4(transform):
    train = transform(in_4_bits(loss))
    (message,) = told(train, W, TEXT)
    assert "`int4` (in scope 'dense') rounds a weight" in message
    assert "give the policy with `int4` to `convert` afterwards" in message
    assert not told(train, W, TEXT)


@pytest.mark.rest
def test_int4_as_it_should_be():
    assert not told(in_4_bits(loss), W, TEXT)
    assert not told(explain(in_4_bits(loss)), W, TEXT)
    assert not told(jax.grad(in_4_bits(loss), argnums=1), W, TEXT)
    policy = quantised(int4())
    assert not told(lambda: convert(loss, W, TEXT, amp_policy=policy)(TEXT))
    assert not told(jax.grad(in_4_bits(loss, int8(where=None))), W, TEXT)
    # The weights that are trained are elsewhere: the base is frozen.
    policy = quantised(int4(where=lambda site: site.avals[1].shape == (64, 32)))
    mixed = amp(loss, compute_dtype="bfloat16", amp_policy=policy)
    trained, frozen = eqx.partition(W, {"base": False, "left": True, "right": True})
    assert "int4" in str([op.why for op in explain(mixed)(W, TEXT).now.ops])
    assert not told(
        jax.grad(lambda some, x: mixed(eqx.combine(some, frozen), x)), trained, TEXT
    )


@pytest.mark.parametrize("in_a_loop", (False, True))
def test_a_frozen_weight_is_read_in_a_loop(in_a_loop):
    def looped(w, x):
        def body(x, _):
            return jnp.tanh(x @ w["base"]) @ w["base"].T + x * w["bias"], None

        if in_a_loop:
            return jnp.sum(jax.lax.scan(body, x, None, length=2)[0])
        return jnp.sum(body(x, None)[0])

    mixed = in_4_bits(looped)

    def of_bias(bias):
        return mixed({"base": W["base"], "bias": bias}, TEXT)

    assert not told(jax.grad(of_bias), jnp.ones(64))
    assert told(jax.grad(mixed), {"base": W["base"], "bias": jnp.ones(64)}, TEXT)
