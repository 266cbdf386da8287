"""`saving_low`: values as without it, derivatives at rounded inputs, less kept."""

import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
import pytest
from jax import lax

from benchmarks import measure
from jaxamp_like import amp, default_amp_policy
from jaxamp_like.rules import saving_low, use_compute_precision, use_original_precision

X = jr.normal(jr.key(0), (5, 7))
FULL = saving_low(use_original_precision)


def mixed(fn, *primitives):
    policy = default_amp_policy | dict.fromkeys(primitives, FULL)
    return amp(fn, compute_dtype="bfloat16", amp_policy=policy)


def rounded(x):
    return x.astype("bfloat16").astype("float32")


def test_values_are_exact_and_derivatives_are_those_at_rounded_inputs():
    def fn(x):
        return jnp.sin(x)

    ours = mixed(fn, lax.sin_p)
    np.testing.assert_array_equal(ours(X), jnp.sin(X))
    grads = jax.vmap(jax.vmap(jax.grad(ours)))(X)
    np.testing.assert_allclose(grads, jnp.cos(rounded(X)), rtol=1e-6)
    tangents = jax.jvp(ours, (X,), (X,))[1]
    np.testing.assert_allclose(tangents, jnp.cos(rounded(X)) * X, rtol=1e-6)


def test_keeps_low_copies():
    def fn(x):
        return jnp.sum(jnp.sin(jnp.cumsum(x, axis=0)))

    assert measure.saved_bytes(fn, X) == {"float32": 4 * X.size}
    assert measure.saved_bytes(mixed(fn, lax.sin_p), X) == {"bfloat16": 2 * X.size}


def test_several_operands_one_of_them_fixed():
    def fn(x, y):
        return jnp.sum(x * lax.stop_gradient(y) + x * y)

    dx, dy = jax.grad(mixed(fn, lax.mul_p), argnums=(0, 1))(X, X + 1)
    np.testing.assert_allclose(dx, 2 * rounded(X + 1), rtol=1e-6)
    np.testing.assert_allclose(dy, rounded(X), rtol=1e-6)


@pytest.mark.parametrize("wrap", (jax.jit, jax.checkpoint, jax.vmap))
def test_composes(wrap):
    def fn(x):
        body = wrap(lambda x: jnp.max(jnp.sin(x) * x, axis=-1))
        return jnp.sum(lax.scan(lambda c, x: (c + body(x), None), x[0, :, 0], x)[0])

    xs = jnp.stack([X, 2 * X, -X])
    ours = mixed(fn, lax.sin_p, lax.mul_p, lax.reduce_max_p)
    grads, true = jax.grad(ours)(xs), jax.grad(fn)(xs)
    np.testing.assert_allclose(grads, true, atol=0.05 * float(jnp.abs(true).max()))


def test_nothing_to_store_lower():
    rule = saving_low(use_compute_precision)
    policy = default_amp_policy | {lax.tanh_p: rule}

    def jaxpr(policy):
        fn = amp(jnp.tanh, compute_dtype="bfloat16", amp_policy=policy)
        return str(jax.make_jaxpr(fn)(X))

    assert jaxpr(policy) == jaxpr(default_amp_policy | {lax.tanh_p: rule.rule})
    assert rule.is_compute


def test_no_rule():
    with pytest.raises(TypeError, match="`rule` must be a rule"):
        saving_low(3)
