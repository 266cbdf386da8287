"""What other packages' own test suites found: rules, references and memory."""

import gc

import jax
import jax.numpy as jnp
import pytest
from flax.linen import fp8_ops
from jax.experimental.ode import odeint

from jaxamp_like import amp

from . import constructs
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


@pytest.mark.rest
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


@jax.custom_vjp
def scaled(ref, x):
    return ref[...] * x


scaled.defvjp(
    lambda ref, x: (ref[...] * x, (ref[...], x)),
    lambda res, g: (g * res[1], g * res[0]),
)


@jax.custom_vjp
def scaling(ref, x):
    ref[...] = ref[...] * x
    return ref[...] * x


def _scaling_fwd(ref, x):
    before = ref[...]
    return scaling(ref, x), (before, x)


scaling.defvjp(_scaling_fwd, lambda res, g: (g * res[1] ** 2, 2 * g * res[0] * res[1]))


@jax.custom_vjp
def read_late(ref, x):
    return ref[...] * x


read_late.defvjp(
    lambda ref, x: (ref[...] * x, (ref, x)),
    lambda res, g: (g * res[1], g * res[0][...]),
)


def _given(x):
    return scaled(constructs.new_ref(x), x)


def _written(x):
    ref = constructs.new_ref(2 * x)
    y = jnp.sin(scaling(ref, x))
    ref[...] = ref[...] * y
    return y + scaled(ref, x)


def _late(x):
    return read_late(constructs.new_ref(x), x)


def _in_a_scan(x):
    ref = constructs.new_ref(x)
    return jax.lax.scan(lambda c, _: (c + scaled(ref, c), None), x, None, 3)[0]


def _batched(x):
    return jax.vmap(_given)(jnp.arange(3.0) + x).sum()


@pytest.mark.sample(3)
@pytest.mark.skipif(not hasattr(jax, "new_ref"), reason="JAX has no rules on them")
@pytest.mark.parametrize(
    "loss",
    (_given, _written, _late, _in_a_scan, _batched)
    + tuple(map(jax.checkpoint, (_given, _written, _in_a_scan, _batched))),
)
def test_what_stands_in_a_reference_has_its_cotangent_from_a_rule(loss):
    grads = {
        "plain": jax.grad(loss),
        "outside": jax.grad(as_is(loss)),
        "inside": as_is(jax.grad(loss)),
        "compiled": jax.jit(jax.grad(as_is(loss))),
    }
    if loss is not _late:  # docs/limits.md
        grads["around a jit"] = jax.grad(jax.jit(as_is(loss)))
    assert len({float(grad(3.0)) for grad in grads.values()}) == 1


@pytest.mark.rest
@pytest.mark.parametrize(
    "settings", ({"amp_policy": {}}, {"compute_dtype": "bfloat16"})
)
@pytest.mark.parametrize("wrap", (lambda fn: fn, jax.jit))
def test_cotangents_may_be_of_an_extended_dtype(wrap, settings):
    """Flax's scales of float8: the sum of their cotangents is the largest of them."""
    largest = fp8_ops.fp32_max_grad

    def loss(x, history, scale):
        history, scale = (
            jax.lax.convert_element_type(a, largest) for a in (history, scale)
        )

        def step(x, _):
            x = fp8_ops.in_qdq(jnp.float32, jnp.float8_e4m3fn, x, scale, history)
            return x, None

        return jax.lax.scan(step, x, None, 3)[0].sum()

    args = jnp.array([2.0]), jnp.zeros(3), jnp.ones(1)
    expected = wrap(jax.grad(loss, (0, 1, 2)))(*args)
    ours = wrap(jax.grad(amp(loss, **settings), (0, 1, 2)))(*args)
    assert jax.tree.all(jax.tree.map(jnp.array_equal, ours, expected))
    assert expected[1].tolist() == [2.0, 0.0, 0.0]
