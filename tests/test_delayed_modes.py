"""Delayed scaling where 64 bits are on, or JAX promotes nothing by itself."""

import contextlib
import importlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxamp_like import AmpWarning, Policy, amp_with_state, init_amp_state
from jaxamp_like.presets import quantised
from jaxamp_like.rules import float8
from tests.programs import values

pytestmark = pytest.mark.sample(6)


@contextlib.contextmanager
def x64():
    if hasattr(jax, "enable_x64"):
        with jax.enable_x64(True):
            yield
        return
    with importlib.import_module("jax.experimental").enable_x64():
        yield


def strict():
    return jax.numpy_dtype_promotion("strict")


@contextlib.contextmanager
def both():
    with x64(), strict():
        yield


def policy(dtype="bfloat16", **options):
    rule = float8(delayed=True, amax_history_length=4, where=None, **options)
    return Policy(dtype, rules=quantised(rule))


def layers(ws, x):
    """A scan of checkpointed layers, a branch and a loop."""

    @jax.checkpoint
    def layer(x, w):
        with jax.named_scope("layer"):
            return x + jnp.tanh(x @ w)

    x, _ = jax.lax.scan(lambda x, w: (layer(x, w), None), x, ws)
    with jax.named_scope("last"):
        go = jnp.sum(x) > jnp.float32(0)
        x = jax.lax.cond(go, lambda x: x @ ws[0], lambda x: x, x)
    return jnp.mean(x**2)


def looped(w, x):
    def step(state):
        i, x = state
        return i + 1, jnp.tanh(x @ w)

    return jax.lax.while_loop(lambda s: s[0] < 3, step, (jnp.int32(0), x))[1]


WS, X = values(2, 8, 8) / 2, values(4, 8, seed=1)

PROGRAMS = {
    "gradient": (jax.value_and_grad(layers), WS),
    "loop": (looped, WS[0]),
}


def train(name, by, mode):
    fn, w = PROGRAMS[name]
    with mode():
        step = jax.jit(amp_with_state(fn, amp_policy=by))
        state = init_amp_state(step, w, X)
        for _ in range(2):
            out, state = step(state, w, X)
    return out, state


@pytest.mark.parametrize("mode", (strict, x64, both))
@pytest.mark.parametrize("options", ({}, {"power_of_two": False}), ids=("2^n", "exact"))
@pytest.mark.parametrize("name", PROGRAMS)
def test_steps_and_states_are_the_same(name, options, mode):
    by = policy(**options)
    expected, now = (train(name, by, m) for m in (contextlib.nullcontext, mode))
    assert jax.tree.structure(now) == jax.tree.structure(expected)
    for x, y in zip(jax.tree.leaves(now), jax.tree.leaves(expected), strict=True):
        assert x.dtype == y.dtype
        np.testing.assert_allclose(x, y, rtol=2**-6, atol=2**-8)


@pytest.mark.parametrize("dtype", ("float16", "float32"))
def test_other_compute_dtypes(dtype):
    out, state = train("gradient", policy(dtype), both)
    assert {x.dtype.name for x in jax.tree.leaves((out, state))} == {"float32"}


def test_a_state_of_32_bits_goes_on_where_64_are_on():
    fn, w = PROGRAMS["loop"]
    _, state = train("loop", policy(), contextlib.nullcontext)
    expected, _ = amp_with_state(fn, amp_policy=policy())(state, w, X)
    with both():
        out, after = amp_with_state(fn, amp_policy=policy())(state, w, X)
    assert {x.dtype.name for x in jax.tree.leaves(after)} == {"float32"}
    np.testing.assert_allclose(out, expected, rtol=2**-6)


def test_numbers_of_64_bits_are_left_alone_and_told_of():
    with both():
        w, x = jnp.asarray(WS[0], jnp.float64), jnp.asarray(X, jnp.float64)
        with pytest.warns(AmpWarning, match="64 bits|32 bits or less|nothing to rem"):
            out, state = amp_with_state(looped, amp_policy=policy())({}, w, x)
        assert out.dtype == jnp.float64 and state == {}
