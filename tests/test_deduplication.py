"""Code that is alike is made once; the program is as it would be otherwise."""

import cProfile

import jax
import jax.numpy as jnp
import pytest
from hypothesis import given, settings, strategies as st
from jax import lax

from benchmarks import jaxprs, measure
from benchmarks.workloads import WORKLOADS
from jaxamp_like import amp
from jaxamp_like._jax import EqnContext, raw, scopes, source_line, subjaxprs
from jaxamp_like._rewrite.deduplication import Deduplicated
from jaxamp_like._rewrite.record import STEP_SCOPE, Recorder, recording

pytestmark = pytest.mark.quick

REGIONS = ("checkpoint", "remat2")
SHAPE = (8, 8)
W, X = jnp.ones(SHAPE), jnp.ones(SHAPE)


def program(fn, *args):
    return jax.make_jaxpr(jax.grad(amp(fn, compute_dtype="bfloat16")))(*args)


def regions(jaxpr):
    """What is run again in the backward pass, but for casts of a contraction."""
    for eqn, _ in measure.walk(raw(jaxpr)):
        if eqn.primitive.name in REGIONS:
            made = {
                inner.primitive.name for inner, _ in measure.walk(eqn.params["jaxpr"])
            }
            if "dot_general" not in made:
                yield eqn.params["jaxpr"]


def distinct(jaxpr):
    return len({*map(id, regions(jaxpr))})


def told(jaxpr):
    """All of a program but the names of its variables, with the lines of its author."""
    lines = [line for line in jaxprs.lines(jaxpr) if " at 0x" not in line]
    return lines, list(places(raw(jaxpr)))


def places(jaxpr):
    for eqn in jaxpr.eqns:
        yield source_line(eqn)
        for inner in subjaxprs(eqn.params):
            yield from places(raw(inner))


def apart(*call):
    """The program if nothing is alike."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Deduplicated, "__call__", lambda self, code, make: make())
        return program(*call)


def stacked(layer, number):
    def fn(ws, x):
        for i, w in enumerate(ws):
            x = layer(i, w, x)
        return jnp.sum(x @ ws[0])

    return fn, [W] * number, X


def gelu(i, w, x):
    return jax.nn.gelu(x @ w)


def test_equal_layers_are_made_once():
    few, many = (program(*stacked(gelu, number)) for number in (4, 9))
    assert len([*regions(few)]) < len([*regions(many)])
    assert distinct(few) == distinct(many)


def scoped(i, w, x):
    with jax.named_scope(f"layer_{i}"):
        return gelu(i, w, x)


def by_number(i, w, x):
    return jax.nn.gelu(x @ w + (0.0, -0.0, 1.0)[i])


def by_parameter(i, w, x):
    return jnp.exp(lax.integer_pow(x @ w, i + 3))


def by_primitive(i, w, x):
    return jnp.exp((lax.neg_p, lax.abs_p, lax.sign_p)[i].bind(x @ w))


def by_program(i, w, x):
    return jnp.exp(PROGRAMS[i](x @ w))


PROGRAMS = [jax.jit(lambda x, n=n: x * n) for n in (1.5, 2.5, 3.5)]


def by_operand(i, w, x):
    a, b = jnp.sin(x @ w), jnp.cos(x @ w)
    return jnp.exp(lax.sub(*((a, a), (a, b), (b, a))[i]))


def by_result(i, w, x):
    y = jnp.exp(x @ w)
    a, b = jnp.sin(y), jnp.cos(y)
    return lax.dot((y, a, b)[i], w) + a * b


def by_line(i, w, x):
    if i == 0:
        return jax.nn.gelu(x @ w)
    if i == 1:
        return jax.nn.gelu(x @ w)
    return x


DIFFERENT = (
    scoped,
    by_number,
    by_parameter,
    by_primitive,
    by_program,
    by_operand,
    by_result,
    by_line,
)


@pytest.mark.parametrize("layer", (gelu, *DIFFERENT), ids=lambda layer: layer.__name__)
def test_what_differs_stays_apart(layer):
    call = stacked(layer, 3)
    assert told(program(*call)) == told(apart(*call))
    number, most = distinct(program(*call)), distinct(apart(*call))
    assert number == most if layer in DIFFERENT else number < most


@pytest.mark.rest
@pytest.mark.sample(3)
@pytest.mark.parametrize("name", ("GPT unrolled", "GPT RoPE", "ViT"))
def test_workloads(name):
    workload = WORKLOADS[name]
    call = workload.loss, *workload.shapes("toy")
    assert told(program(*call)) == told(apart(*call))
    assert distinct(program(*call)) < distinct(apart(*call))


def looped(w, x):
    return lax.scan(lambda x, _: (jnp.cos(jnp.exp(x @ w)), None), x, None, 2)[0]


KINDS = (
    looped,
    jax.jit(lambda w, x: x + jnp.tanh(x @ w) ** 2),
    jax.checkpoint(lambda w, x: jax.nn.gelu(x @ w) * jnp.sin(x)),
    lambda w, x: jax.nn.softmax(x @ w),
    lambda w, x: x + jax.nn.gelu((x - jnp.mean(x, -1, keepdims=True)) @ w.T),
    lambda w, x: jnp.exp(x @ w[::-1]) * jax.nn.silu(x @ w + w[0]),
    lambda w, x: jnp.maximum(x @ w, 0.1) / 3,
    lambda w, x: jax.nn.relu(x * w[0]),
)


@pytest.mark.rest
@settings(max_examples=8)
@given(st.lists(st.sampled_from(KINDS), min_size=2, max_size=6), st.booleans())
def test_any_stack(layers, is_shared):
    def fn(ws, x):
        for i, layer in enumerate(layers):
            x = layer(ws[0 if is_shared else i], x)
        return jnp.sum(x)

    call = fn, [W] * len(layers), X
    assert told(program(*call)) == told(apart(*call))


def test_a_parameter_without_hash_is_like_no_other():
    made, deduplicated = [], Deduplicated()
    for _ in range(2):
        deduplicated(("code", [1]), lambda: made.append(None))
    assert len(made) == 2


def test_a_report_tells_equal_layers_apart():
    """Each equation is marked with the step that it comes from, in every layer."""
    with recording(Recorder()):
        eqns = [eqn for eqn, _ in measure.walk(raw(program(*stacked(gelu, 3))))]
    made = {scopes(eqn)[-1] for eqn in eqns if eqn.primitive.name == "tanh"}
    assert len(made) == 3 and all(mark.startswith(STEP_SCOPE) for mark in made)


def test_places_differ_by_what_is_written_there():
    def fn(x):
        for _ in range(2):
            x = jnp.sin(x)
        with jax.named_scope("here"):
            return jnp.sin(x)

    first, again, scoped = map(EqnContext, jax.make_jaxpr(fn)(1.0).eqns)
    assert first == again and hash(first) == hash(again)
    assert first != scoped and first != "here"


def normed(i, w, x):
    mean, var = jnp.mean(x, -1, keepdims=True), jnp.var(x, -1, keepdims=True)
    return x + jax.nn.gelu((x - mean) * lax.rsqrt(var + 1e-5) @ w + w[0])


def num_calls(wrap, number):
    """Of functions while a gradient is traced: they vary less than time does."""
    fn, *args = stacked(normed, number)
    with cProfile.Profile() as profile:
        jax.make_jaxpr(jax.grad(wrap(fn)))(*args)
    return sum(entry.callcount for entry in profile.getstats())


@pytest.mark.rest
def test_another_layer_costs_about_what_it_costs_as_written():
    """A rewrite traces, plans and binds: 3 times as many calls, were none alike."""

    def added(wrap):
        num_calls(wrap, 3)  # what is called but once in a process
        return num_calls(wrap, 6) - num_calls(wrap, 3)

    ours = added(lambda fn: amp(fn, compute_dtype="bfloat16"))
    assert ours <= 1.5 * added(lambda fn: fn)
