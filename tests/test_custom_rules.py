"""Derivative rules by authors are given what JAX promises them."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.custom_derivatives import SymbolicZero

from jaxamp_like import amp, explain

from .constructs import arrays, identity
from .fuzz.runtime import with_backward

bf16 = functools.partial(amp, compute_dtype="bfloat16")


def outside(wrap, fn):
    return wrap(jax.grad(fn))


def around_the_loss(wrap, fn):
    return jax.grad(wrap(fn))


def jitted(wrap, fn):
    return jax.grad(wrap(jax.jit(fn)))


def checkpointed(wrap, fn):
    return jax.grad(wrap(jax.checkpoint(fn)))


WAYS = (outside, around_the_loss, jitted, checkpointed)


@pytest.mark.parametrize("way", WAYS, ids=lambda f: f.__name__)
def test_a_backward_rule_is_given_symbolic_zeros(way):
    """A result that nobody differentiates has no cotangent, and not one of zeros."""
    x, w = arrays("x", "w")
    seen = []

    @jax.custom_vjp
    def two(x, w):
        return jnp.tanh(x @ w), x @ w, jnp.argmax(x)

    def forward(x, w):
        return two(x.value, w.value), (x.value, w.value, x.perturbed, w.perturbed)

    def backward(residuals, cotangents):
        x, w, *_ = residuals
        seen.append([isinstance(ct, SymbolicZero) for ct in cotangents])
        _, ct, _ = cotangents
        return ct @ w.T, x.T @ ct * (1 if seen[-1][0] else jnp.nan)

    two.defvjp(forward, backward, symbolic_zeros=True)

    def loss(w):
        return jnp.sum(two(x, w)[1])

    expected = way(identity, loss)(w)
    as_written = seen[-1]
    assert as_written == [True, False, True]
    seen.clear()
    np.testing.assert_allclose(way(bf16, loss)(w), expected, rtol=0.02, atol=0.02)
    # The rule may also be traced to learn what it makes of arrays.
    assert as_written in seen


def test_a_forward_rule_is_given_numbers():
    """A primal may be a number of Python, also where the rule reads it."""

    @jax.custom_jvp
    def scaled(x, factor):
        return x * factor

    @functools.partial(scaled.defjvp, symbolic_zeros=True)
    def _(primals, tangents):
        (x, factor), (dx, dfactor) = primals, tangents
        assert isinstance(dfactor, SymbolicZero)
        return scaled(x, factor), factor * dx

    for fn in (lambda x: scaled(x, 3.0), jax.jit(lambda x: scaled(x, 3.0))):
        assert jax.jvp(bf16(fn), (2.0,), (1.0,)) == (6.0, 3.0)
    assert jax.jvp(lambda x: bf16(scaled)(x, 3.0), (2.0,), (1.0,)) == (6.0, 3.0)
    assert jax.grad(lambda x: bf16(scaled)(x, 3.0))(2.0) == 3.0


def backward(residuals, ct):
    x, w = residuals
    ct = ct * (1 - jnp.tanh(x @ w) ** 2)
    return ct @ w.T, x.T @ ct


@jax.custom_vjp
def ruled(x, w):
    return jnp.tanh(x @ w)


ruled.defvjp(lambda x, w: (ruled(x, w), (x, w)), backward)


@jax.custom_vjp
def asking(x, w):
    return jnp.tanh(x @ w)


asking.defvjp(
    lambda x, w: (jnp.tanh(x.value @ w.value), (x.value, w.value)),
    backward,
    symbolic_zeros=True,
)


def by_cond(fn):
    return lambda x, w: jax.lax.cond(True, fn, fn, x, w)


@pytest.mark.sample(4)
@pytest.mark.parametrize("size", (3, 4))
@pytest.mark.parametrize("around", (jax.jit, jax.checkpoint, by_cond))
@pytest.mark.parametrize("fn", (ruled, asking), ids=("ruled", "asking"))
def test_a_rule_is_used_twice_with_other_operands_mapped(fn, around, size):
    """One traced function, of which now one operand is differentiated, now the other.

    With as many examples as rows, an axis in the wrong place has the right shape."""
    _, w = arrays("x", "w")
    xs = jnp.stack([w * factor for factor in np.linspace(-1, 1.5, size)])
    weights = jnp.arange(16.0).reshape(4, 4)

    def gradients(wrap):
        def both(x, w):
            used = around(fn)
            return used(x, w) + used(w, x)

        def loss(xs):
            return jnp.sum(jax.vmap(wrap(both), (0, None))(xs, w) * weights)

        return jax.grad(loss)(xs)

    expected = gradients(identity)
    # Each of three contractions rounds operands and a result to 8 bits.
    bound = 3 * 3 * 2**-8 * float(jnp.max(jnp.abs(expected)))
    np.testing.assert_allclose(gradients(bf16), expected, rtol=0, atol=bound)


@jax.custom_jvp
def doubled(x):
    return jnp.sin(x)


@doubled.defjvp
def _(primals, tangents):
    (x,), (dx,) = primals, tangents
    return jnp.sin(x), 2 * jnp.cos(x) * dx


@jax.custom_vjp
def tripled(x):
    return jnp.sin(x)


tripled.defvjp(lambda x: (jnp.sin(x), x), lambda x, ct: (3 * jnp.cos(x) * ct,))


def outside_of_both(wrap, fn):
    return wrap(forward_over_reverse(fn))


def inside_of_both(wrap, fn):
    return forward_over_reverse(wrap(fn))


def inside_of_both_with_checkpoint(wrap, fn):
    return forward_over_reverse(wrap(jax.checkpoint(fn)))


def between(wrap, fn):
    return along_itself(wrap(jax.grad(fn)))


def forward_over_reverse(fn):
    return along_itself(jax.grad(fn))


def along_itself(fn):
    return lambda x: jax.jvp(fn, (x,), (x,))[1]


ORDERS = (outside_of_both, inside_of_both, inside_of_both_with_checkpoint, between)


@pytest.mark.parametrize("lean", (False, True))
@pytest.mark.parametrize("order", ORDERS, ids=lambda f: f.__name__)
@pytest.mark.parametrize("ruled", (doubled, tripled), ids=lambda f: f.__name__)
def test_a_second_derivative_is_that_of_what_the_rule_returns(ruled, order, lean):
    """The rule's value is differentiated next as it is written, and not by the rule."""
    x, w = arrays("x", "w")

    def loss(x):
        return jnp.sum(jnp.sin(ruled(jnp.exp(0.3 * ruled(x)) @ w) @ w))

    try:
        expected = order(identity, loss)(x)
    except TypeError as e:  # with `jax_remat3` on, and `jax_custom_vjp3` not
        assert "can't apply forward-mode autodiff" in str(e)
        pytest.skip("JAX can't differentiate the function as written twice.")
    bound = 0.02 * float(jnp.max(jnp.abs(expected)))
    by_amp = order(functools.partial(bf16, lean=lean), loss)(x)
    np.testing.assert_allclose(by_amp, expected, rtol=0, atol=bound)


@pytest.mark.parametrize("is_outside", (False, True))
def test_a_rule_that_optimizes_remat_is_low(is_outside):
    """JAX wraps its forward rule into a primitive that holds a program."""
    x, w = arrays("x", "w")

    @jax.custom_vjp
    def layer(x, w):
        return jnp.tanh(x @ w)

    layer.defvjp(lambda x, w: (jnp.tanh(x @ w), (x, w)), backward, optimize_remat=True)

    def loss(w):
        return jnp.sum(layer(layer(x, w), w) ** 2)

    mixed = bf16(jax.grad(loss)) if is_outside else jax.grad(bf16(loss))
    ops = [op for op in explain(mixed)(w).now.ops if op.flops]
    assert {op.dtype for op in ops} == {"bfloat16"}
    expected = jax.grad(loss)(w)
    bound = 0.02 * float(jnp.max(jnp.abs(expected)))
    np.testing.assert_allclose(mixed(w), expected, rtol=0, atol=bound)


def counted_rule(calls):
    """A product whose rules say when they are called."""

    @jax.custom_vjp
    def product(x, w):
        return x @ w

    def forward(x, w):
        calls.append("forward")
        return x @ w, (x, w)

    def backward(residuals, ct):
        calls.append("backward")
        x, w = residuals
        return (ct @ w.T) * jnp.cos(x), x.T @ ct

    product.defvjp(forward, backward)
    return product


def test_rules_are_called_as_often_as_they_are_plainly():
    """An author may count calls, or hand something from rule to rule by himself."""
    x, w = jnp.ones((3, 4)), jnp.ones((4, 4))
    counts = []
    for wrap in (lambda fn: fn, amp):
        product = counted_rule(calls := [])

        def loss(w, product=product):
            return jnp.sum(product(jnp.sin(x), w))

        jax.grad(wrap(loss))(w)
        counts.append(calls)
    assert counts[0] == counts[1] == ["forward", "backward"]


def test_rules_in_rules_are_not_traced_over_and_over():
    """Recursive halving: each rule differentiates the function of half the depth."""

    def halved(depth, calls):
        if depth == 0:
            return lambda a, w: a + jnp.tanh(a) @ w
        half = halved(depth - 1, calls)

        def whole(a, w):
            return half(half(a, w), w)

        def backward(residuals, ct):
            calls.append(depth)
            a, w = residuals
            middle, pull = jax.vjp(half, a, w)
            ct, second = jax.vjp(half, middle, w)[1](ct)
            ct, first = pull(ct)
            return ct, first + second

        fn = jax.custom_vjp(whole)
        fn.defvjp(lambda a, w: (whole(a, w), (a, w)), backward)
        return fn

    x, w = jnp.ones((3, 4)), jnp.ones((4, 4)) / 8
    counts = []
    for wrap in (lambda fn: fn, amp):
        fn = halved(4, calls := [])

        def loss(w, fn=fn):
            return jnp.sum(fn(x, w))

        jax.make_jaxpr(jax.grad(wrap(loss)))(w)
        counts.append(len(calls))
    plainly, mixed = counts
    assert mixed <= 2 * plainly


def test_a_backward_rule_may_name_a_mapped_axis():
    product = with_backward(
        jnp.matmul, lambda x, w, ct: (ct @ w.T, lax.psum(x.T @ ct, "batch"))
    )

    def loss(wrap):
        fn = jax.vmap(wrap(product), (0, None), axis_name="batch")
        return lambda w: jnp.sum(jnp.sin(fn(xs, w)))

    xs, w = jnp.linspace(-1, 1, 24).reshape(2, 3, 4), jnp.eye(4) / 2
    mixed = jax.grad(loss(functools.partial(amp, compute_dtype="bfloat16")))(w)
    np.testing.assert_allclose(mixed, jax.grad(loss(lambda fn: fn))(w), atol=0.05)
