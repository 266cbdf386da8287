"""Tracebacks show the user's lines, and hardly any frame of the package."""

import traceback
from pathlib import Path

import equinox as eqx
import jax
import jax.numpy as jnp
import optax
import pytest

import jaxamp_like
from jaxamp_like import (
    AmpError,
    DynamicScalerState,
    Policy,
    PolicyMap,
    amp,
    amp_stop,
    calibrate,
    certify,
    convert,
    default_amp_policy,
    dynamic_scale_grad,
    enable_amp,
    explain,
    get_policy,
    guard_step,
    init_amp_state,
    trace_numerics,
)
from jaxamp_like._rewrite.planner import Planner

HOME = str(Path(jaxamp_like.__file__).parent)
w, x = jnp.ones((4, 3)), jnp.ones((2, 4))


def fails(w, x):
    return x @ w.T  # the user's line


def loss(w, x):
    return jnp.sum(fails(w, x))


def in_scan(w, x):
    def body(carry, _):
        return fails(w, carry), None

    return jnp.sum(jax.lax.scan(body, x, None, 3)[0])


def in_while(w, x):
    return jax.lax.while_loop(lambda x: True, lambda x: fails(w, x), x)


@jax.custom_vjp
def by_rule(x):
    return jnp.sum(x)


by_rule.defvjp(lambda x: (jnp.sum(x), x), lambda x, ct: (fails(w, x),))


def step_of(transform):
    mixed, tx = enable_amp(loss, optax.sgd(0.1))

    @transform
    @guard_step
    def step(state, x):
        w, opt_state = state
        value, grads = tx.value_and_grad(mixed, opt_state)(w, x)
        updates, opt_state = tx.update(grads, opt_state, w)
        return (optax.apply_updates(w, updates), opt_state), value

    return step((w, tx.init(w)), x)


def a_model():
    class Model(eqx.Module):
        w: jax.Array

        def __call__(self, x):
            return fails(self.w, x)

    return amp(Model(w))(x)


SCALER = DynamicScalerState()
CALLS = {
    "value": lambda: amp(loss)(w, x),
    "jit": lambda: jax.jit(amp(loss))(w, x),
    "grad": lambda: jax.grad(amp(loss))(w, x),
    "jit of grad": lambda: jax.jit(jax.grad(amp(loss)))(w, x),
    "amp of grad": lambda: amp(jax.grad(loss))(w, x),
    "scan": lambda: jax.grad(amp(in_scan))(w, x),
    "while": lambda: amp(in_while)(w, x),
    "checkpoint": lambda: jax.grad(amp(jax.checkpoint(loss)))(w, x),
    "vmap": lambda: jax.vmap(amp(fails), (None, 0))(w, x),
    "rule": lambda: jax.grad(amp(by_rule))(x),
    "stop": lambda: amp(amp_stop(loss))(w, x),
    "model": a_model,
    "step": lambda: step_of(lambda step: step),
    "jitted step": lambda: step_of(jax.jit),
    "dynamic": lambda: dynamic_scale_grad(amp(loss))(w, x, dynamic_scaler_state=SCALER),
    "explain": lambda: explain(loss, compute_dtype="float16")(w, x),
    "explain grad": lambda: explain(jax.grad(amp(loss)))(w, x),
    "trace_numerics": lambda: trace_numerics(jax.grad(amp(loss)))(w, x),
    "certify": lambda: certify(jax.grad(amp(loss)), w, x),
    "convert": lambda: convert(loss, w, x),
    "calibrate": lambda: calibrate(loss, [(w, x)], budget=0.1),
}


def frames_of(error):
    """The files and lines of code of a traceback, and of those before it."""
    told = traceback.TracebackException.from_exception(error)
    shown = []
    while told is not None:
        shown += [(frame.filename, frame.line) for frame in told.stack]
        told = told.__cause__ or told.__context__
    return shown


@pytest.mark.parametrize("call", CALLS)
def test_an_error_of_the_function_shows_the_users_lines(call):
    with pytest.raises(TypeError) as raised:
        CALLS[call]()
    shown = frames_of(raised.value)
    if call == "rule":
        # JAX runs the rule when `amp` has returned. The traceback that JAX 0.6 puts
        # before it, of the call of the function, is made by JAX alone.
        files = [frame.filename for frame in traceback.extract_tb(raised.tb)]
        assert sum(file.startswith(HOME) for file in files) <= 2
    else:
        assert not any(file.startswith(HOME) for file, _ in shown)
    assert (__file__, "return x @ w.T  # the user's line") in shown


KEY = default_amp_policy | {"zzz": "float32"}
OURS = {
    "strict": (AmpError, lambda: amp(jnp.dot, amp_policy=KEY, strict=True)(x, w)),
    "under jit": (
        AmpError,
        lambda: jax.jit(amp(jnp.dot, amp_policy=KEY, strict=True))(x, w),
    ),
    "dtype": (TypeError, lambda: amp(loss, compute_dtype="float7")),
    "keyword": (TypeError, lambda: amp(loss, dtype="float16")),
    "policy": (TypeError, lambda: amp(loss, amp_policy=3)),
    "class": (TypeError, lambda: Policy("float7")),
    "map": (TypeError, lambda: PolicyMap({"a": "float32"})),
    "name": (ValueError, lambda: get_policy("O7")),
    "order": (TypeError, lambda: enable_amp(optax.sgd(0.1), loss)),
    "state": (TypeError, lambda: init_amp_state(loss, w, x)),
    "scaler": (TypeError, lambda: dynamic_scale_grad(loss)(w, x)),
    "stop": (TypeError, lambda: amp_stop(3)),
}


@pytest.mark.parametrize("mistake", OURS)
def test_an_error_of_the_package_ends_in_the_users_line(mistake):
    kind, make = OURS[mistake]
    with pytest.raises(kind) as raised:
        make()
    assert [file for file, _ in frames_of(raised.value)][-1] == __file__


def test_a_fault_of_the_package_keeps_its_frames(monkeypatch):
    def faulty(self, *_, **__):
        raise KeyError("of the package")

    faulty.__code__ = faulty.__code__.replace(co_filename=f"{HOME}/_rewrite/planner.py")
    monkeypatch.setattr(Planner, "plan", faulty)
    with pytest.raises(KeyError) as raised:
        amp(jnp.dot)(x, w)
    assert sum(file.startswith(HOME) for file, _ in frames_of(raised.value)) > 3


def test_jax_has_a_setting_that_shows_all_frames():
    before = jax.config.jax_traceback_filtering
    jax.config.update("jax_traceback_filtering", "off")
    try:
        with pytest.raises(TypeError) as raised:
            amp(loss)(w, x)
    finally:
        jax.config.update("jax_traceback_filtering", before)
    assert sum(file.startswith(HOME) for file, _ in frames_of(raised.value)) >= 4
