"""What other packages' own test suites found: rules, references and memory."""

import gc

import jax
import jax.numpy as jnp
import pytest
from jax.experimental.ode import odeint

from jaxamp_like import amp

from .hi_primitives import flags

X = jnp.ones((4, 4))


def as_is(fn):
    return amp(fn, amp_policy={})


@pytest.mark.parametrize("is_outside", (False, True))
def test_what_a_function_closes_over_is_freed(is_outside):
    def run():
        data = jnp.ones((7, 13))

        def fn(x):
            return jnp.sum(x @ data)

        grad = jax.jit(as_is(jax.grad(fn)) if is_outside else jax.grad(as_is(fn)))
        grad(jnp.ones((3, 7)))
        grad.clear_cache()

    run()
    gc.collect()
    assert not [x for x in jax.live_arrays() if x.shape == (7, 13)]


def test_a_rule_under_vmap_may_hold_constants():
    def loss(y):
        t = jnp.array([0.0, 1.0])
        return jax.vmap(lambda y: odeint(lambda y, t: -y, y, t))(y).sum()

    y = jnp.ones((2, 3))
    assert jnp.allclose(jax.grad(as_is(loss))(y), jax.grad(loss)(y))


def test_the_cotangent_that_a_rule_has_not_stays_a_zero():
    @jax.custom_vjp
    def gate(x, m):
        return x * m

    gate.defvjp(lambda x, m: (gate(x, m), m), lambda m, g: (g * m, None))

    def loss(w, x):
        return jnp.sum(gate(x, jnp.tanh(x @ w) @ w))

    def contractions(fn):
        return str(jax.make_jaxpr(jax.grad(fn))(X, X)).count("dot_general")

    assert contractions(as_is(loss)) == contractions(loss)


def test_a_rule_is_given_the_symbolic_zero_of_another():
    kinds = []

    @jax.custom_jvp
    def f(x, y):
        return y

    def rule(primals, tangents):
        kinds.append(type(tangents[1]).__name__)
        return primals[1], tangents[1]

    f.defjvp(rule, symbolic_zeros=True)
    jax.jvp(as_is(lambda x: f(x, f(x, 1.0))), (1.0,), (1.0,))
    assert set(kinds) == {"SymbolicZero"}


def test_a_checkpoint_runs_the_function_of_a_rule_that_optimizes_remat():
    @jax.custom_vjp
    def f(x):
        return jnp.tan(x)

    f.defvjp(
        lambda x: (jnp.sin(x), x), lambda x, g: (jnp.cos(x) * g,), optimize_remat=True
    )

    def checkpointed(x):
        return jax.checkpoint(f)(x)

    with flags():  # with these on, the forward rule runs: docs/limits.md
        ours = jax.value_and_grad(as_is(checkpointed))(3.2)
        assert ours == jax.value_and_grad(checkpointed)(3.2)
