"""Calls as other libraries have them are answered by what to write here."""

import haiku as hk
import jax
import jax.numpy as jnp
import optax
import pytest
from flax import linen

import jaxamp_like
from jaxamp_like import (
    DynamicScalerState,
    amp,
    enable_amp,
    get_policy,
    loss_scale_optimizer,
)
from jaxamp_like.scaling import ScalerLog, check_scaler

pytestmark = pytest.mark.quick

w, x = {"in": jnp.ones((4, 2))}, jnp.ones((3, 4))
adam = optax.adam(1e-3)


def loss(w, x):
    return jnp.mean(x @ w["in"])


mixed = amp(loss)
tx = loss_scale_optimizer(adam)
dense = linen.Dense(2)
transformed = hk.transform(lambda x: hk.Linear(2)(x))


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
            lambda: jax.jit(check_scaler)(DynamicScalerState()),
            TypeError,
            "while a function is traced",
            "read it outside",
        ),
        say(
            lambda: jax.jit(lambda s: ScalerLog(s).record(s))(DynamicScalerState()),
            TypeError,
            "was to be read while a function is traced",
        ),
        say(
            lambda: jaxamp_like.autocast,
            AttributeError,
            "'autocast'. Did you mean 'amp'?",
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


def test_an_error_of_a_call_that_fits_is_its_own():
    """A setting of the wrong kind is not told as a call of the wrong form."""
    with pytest.raises(TypeError, match="must be a real scalar"):
        DynamicScalerState(scaler="large")


def test_what_is_elsewhere_is_suggested_only_where_it_is_here():
    for name in jaxamp_like._ELSEWHERE.values():
        assert hasattr(jaxamp_like, name)


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


class Unwary(linen.Module):
    @linen.compact
    def __call__(self, x):
        return amp(linen.Dense(2))(x)


class Wary(linen.Module):
    @linen.compact
    def __call__(self, x):
        layer = linen.Dense(2)
        return (layer if self.is_initializing() else amp(layer))(x)


def test_a_module_that_is_being_initialised_is_refused():
    with pytest.raises(TypeError, match=r"inside of `init`.*self.is_initializing\(\)"):
        Unwary().init(jax.random.key(0), x)
    variables = Wary().init(jax.random.key(0), x)
    assert (Wary().apply(variables, x) == Unwary().apply(variables, x)).all()
