"""Slices of programs: what some results of an equation are made of."""

import jax
import jax.numpy as jnp
import pytest
from jax import lax

from jaxamp_like._rewrite.flow import Flows
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


def bodies(eqn, scope=()):
    handler = STRUCTURAL.get(eqn.primitive.name)
    return handler.bodies(eqn) if handler else []


def shifted(xs):
    return [jnp.tanh(xs[0]), *(0.9 * x for x in xs[:-1])]


@pytest.mark.parametrize("step", (shifted, jax.jit(shifted)), ids=("", "jit"))
def test_each_equation_is_looked_at_once(step):
    """However long the way is from carry to carry."""

    def looked_at(count):
        eqn = loop_of(lambda xs: tuple(step(xs)), [jnp.ones(3)] * count)
        looks = []
        flows = Flows(bodies, lambda eqn, scope: looks.append(eqn) or False)
        flow = flows.through(bodies(eqn), ())
        assert flow.inputs == frozenset(range(count))
        return len(looks)

    # What is remembered of a call is found apart from what is then found of it.
    assert looked_at(40) - looked_at(20) <= 2 * 20


def test_only_what_results_are_made_of():
    def step(xs):
        a, b, _, d = xs
        return a + b, b @ jnp.eye(3), jnp.tanh(d), d * 2

    eqn = loop_of(step, [jnp.eye(3)] * 4)
    flows = Flows(bodies, lambda eqn, scope: eqn.primitive.name == "dot_general")
    condition = flows.through(bodies(eqn), ())
    assert condition == ({3}, False)
    assert flows.through(bodies(eqn), (), outs=[2]) == ({3}, False)
    assert flows.through(bodies(eqn), (), outs=[0]) == ({0, 1, 3}, True)
    ending = Flows(bodies, flows.is_low, lambda eqn, outs: eqn.primitive.name == "add")
    assert ending.through(bodies(eqn), (), outs=[0]) == ({3}, False)


def test_what_is_written_to_a_reference_is_read_with_it():
    def fn(x, w):
        ref = new_ref(jnp.zeros(()))

        def step(i, c):
            ref[...] = jnp.sum(jnp.tanh(x @ w))
            return c + ref[...]

        return lax.fori_loop(0, 3, step, 0.0)

    jaxpr = jax.make_jaxpr(fn)(jnp.ones((2, 3)), jnp.ones((3, 3)))
    eqn = next(e for e in jaxpr.jaxpr.eqns if e.primitive.name in ("scan", "while"))
    flows = Flows(bodies, lambda eqn, scope: eqn.primitive.name == "dot_general")
    last = len(eqn.outvars) - 1
    assert flows.through(bodies(eqn), (), outs=[last]).is_low
