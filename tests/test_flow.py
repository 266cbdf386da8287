"""What reaches what an equation makes, or decides, by way of the programs in it."""

import jax
import jax.numpy as jnp
import pytest
from jax import lax

from jaxamp_like._rewrite.flow import Flow
from jaxamp_like._rewrite.inlined import InlinedProgram
from jaxamp_like._rewrite.reach import LOW, of_input
from jaxamp_like._structural import STRUCTURAL

from .constructs import new_ref


def loop_of(step, carries):
    """The `while` of a step whose condition reads the last carry."""

    def loop(*xs):
        def go(c):
            return jnp.sum(c[-1]) > 0

        return lax.while_loop(go, lambda c: step(list(c)), xs)

    jaxpr = jax.make_jaxpr(loop)(*carries)
    return next(e for e in jaxpr.jaxpr.eqns if e.primitive.name == "while")


def handler(eqn, scope=()):
    return STRUCTURAL.get(eqn.primitive.name)


def is_contraction(eqn, scope):
    return eqn.primitive.name == "dot_general"


def inputs(eqn):
    return [of_input(i) for i in range(len(eqn.invars))]


def which(reach):
    """The inputs that reach something, and whether anything low does."""
    inputs = {i for i in range(reach.bit_length()) if reach & of_input(i)}
    return inputs, bool(reach & LOW)


def condition(flow, eqn):
    bodies = flow.bodies(eqn, ())
    return which(
        flow.control(bodies, (), flow.of_operands(eqn, bodies, (), inputs(eqn)))
    )


def results(flow, eqn):
    return list(map(which, flow.of_equation(eqn, (), inputs(eqn))))


def shifted(xs):
    return [jnp.tanh(xs[0]), *(0.9 * x for x in xs[:-1])]


@pytest.mark.parametrize("step", (shifted, jax.jit(shifted)), ids=("", "jit"))
def test_each_equation_is_looked_at_once(step):
    """However long the way is from carry to carry."""

    def looked_at(count):
        eqn = loop_of(lambda xs: tuple(step(xs)), [jnp.ones(3)] * count)
        looks = []
        flow = Flow(handler, lambda eqn, scope: looks.append(eqn) or False)
        assert condition(flow, eqn) == ({*range(count)}, False)
        return len(looks)

    assert looked_at(40) - looked_at(20) == 20


def test_only_what_results_are_made_of():
    def step(xs):
        a, b, _, d = xs
        return a + b, b @ jnp.eye(3), jnp.tanh(d), d * 2

    eqn = loop_of(step, [jnp.eye(3)] * 4)
    flow = Flow(handler, is_contraction)
    assert condition(flow, eqn) == ({3}, False)
    a, _, c, _ = results(flow, eqn)
    assert a == ({0, 1, 3}, True)
    assert c == ({3}, False)


def test_what_is_asked_that_is_not_how_large_numbers_are():
    def step(xs):
        a, b, c = xs
        largest = jnp.argmax(b @ jnp.eye(3), axis=1)
        return jnp.isfinite(a @ a).all() * a, c[largest], c

    eqn = loop_of(step, [jnp.eye(3)] * 3)
    assert [low for _, low in results(Flow(handler, is_contraction), eqn)][1]
    a, b, _ = results(Flow(handler, is_contraction, by_size=True), eqn)
    assert a == ({0, 2}, False)
    assert b == ({2}, False)


def test_what_is_written_to_a_reference_is_read_with_it():
    def fn(x, w):
        ref = new_ref(jnp.zeros(()))

        def step(i, c):
            ref[...] = jnp.sum(jnp.tanh(x @ w))
            return c + ref[...]

        return lax.fori_loop(0, 3, step, 0.0)

    jaxpr = jax.make_jaxpr(fn)(jnp.ones((2, 3)), jnp.ones((3, 3)))
    eqn = next(e for e in jaxpr.jaxpr.eqns if e.primitive.name in ("scan", "while"))
    *_, (_, is_low) = results(Flow(handler, is_contraction), eqn)[: len(eqn.outvars)]
    assert is_low


def test_a_map_is_another_value_than_what_it_maps():
    def fn(x):
        return lax.map(lambda row: row.any(0), x), x.any(0)

    jaxpr = jax.make_jaxpr(fn)(jnp.zeros((2, 2, 2), bool))
    values = InlinedProgram(Flow(handler, is_contraction), 1)
    mapped, whole = values.run(jaxpr, (), [0])
    assert mapped != whole
