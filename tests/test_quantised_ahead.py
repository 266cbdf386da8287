"""Weights of 8 bits are rounded once, before the loops that read them."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import export, lax
from jax.ad_checkpoint import checkpoint_name

from benchmarks.measure import subjaxprs
from jaxamp_like import AmpError, amp, explain
from jaxamp_like._rewrite.bind import Binder
from jaxamp_like.presets import quantised
from jaxamp_like.rules import float8, int8, mxfp8, nvfp4
from tests.programs import values

pytestmark = [pytest.mark.rest, pytest.mark.sample(5)]

ROUNDS = {"float8_e4m3fn", "float8_e5m2", "int8"}


def low(fn, rule):
    return amp(fn, compute_dtype="bfloat16", amp_policy=quantised(rule))


def roundings(fn, *args):
    """Shapes of what is cast to 8 bits: outside of loops, and in each of them."""
    found = {False: [], True: []}

    def walk(jaxpr, in_loop):
        jaxpr = getattr(jaxpr, "jaxpr", jaxpr)
        for eqn in jaxpr.eqns:
            if eqn.primitive.name == "convert_element_type":
                if eqn.outvars[0].aval.dtype.name in ROUNDS:
                    found[in_loop].append(eqn.outvars[0].aval.shape)
            for sub in subjaxprs(eqn.params):
                walk(sub, in_loop or eqn.primitive.name in ("scan", "while"))

    walk(jax.make_jaxpr(fn)(*args), False)
    return sorted(found[False]), sorted(found[True])


def recurrent(w, x):
    return lax.fori_loop(0, 3, lambda _, x: jnp.tanh(x @ w.T), x)


def of_stack(ws, x):
    @jax.checkpoint
    def block(x, w):
        return jnp.tanh(x @ w)

    return lax.scan(lambda x, w: (block(x, w), None), x, ws)[0]


def shared_and_stacked(both, x):
    w, ws = both

    @jax.checkpoint
    def block(x, v):
        @jax.jit
        def inner(x):
            return jnp.tanh(jnp.tanh(x @ w.T) @ v)

        return inner(x)

    return lax.scan(lambda x, v: (block(x, v), None), x, ws)[0]


def microbatches(ws, x):
    def one(total, x):
        return total + of_stack(ws, x).sum(), None

    return lax.scan(one, 0.0, jnp.stack([x, 2 * x]))[0]


def until(w, x):
    def goes_on(state):
        return state[0] < 3

    return lax.while_loop(goes_on, lambda s: (s[0] + 1, jnp.tanh(s[1] @ w[0])), (0, x))[
        1
    ]


X, W, WS = (8, 16), (16, 16), (3, 16, 16)

# Of each: arguments, what is rounded before loops, and what in them.
CASES = {
    recurrent: (W, [W], [X]),
    of_stack: (WS, [WS], [X]),
    shared_and_stacked: ((W, WS), [W, WS], [X, X]),
    microbatches: (WS, [WS], [X]),
    until: (WS, [W], [X]),
}


def arguments(shapes):
    if isinstance(shapes[0], tuple):
        return tuple(map(arguments, shapes))
    return values(*shapes)


RULES = (
    float8(where=None),
    float8(where=None, granularity="row"),
    int8(where=None),
    int8(where=None, weight_only=True),
)


@pytest.mark.sample(6)
@pytest.mark.parametrize("rule", RULES, ids=repr)
@pytest.mark.parametrize("fn", CASES, ids=lambda fn: fn.__name__)
def test_weights_are_rounded_before_loops(fn, rule, monkeypatch):
    shapes, before, inside = CASES[fn]
    w, x = arguments(shapes), values(*X)
    inside = [] if "weight_only" in repr(rule) else inside
    assert roundings(low(fn, rule), w, x) == (sorted(before), inside)
    now = jax.jit(low(fn, rule))(w, x)
    monkeypatch.setattr(Binder, "hoist_weights", lambda *_: ({}, {}))
    assert roundings(low(fn, rule), w, x)[0] == []
    np.testing.assert_array_equal(now, jax.jit(low(fn, rule))(w, x))


def mean(fn):
    return lambda w, x: jnp.mean(fn(w, x) ** 2)


@pytest.mark.parametrize("fn", (recurrent, of_stack, shared_and_stacked))
def test_gradients_read_the_same_numbers(fn, monkeypatch):
    shapes, before, _ = CASES[fn]
    w, x = arguments(shapes), values(*X)

    def steps():
        inside = jax.value_and_grad(low(mean(fn), RULES[0]))
        return inside, low(jax.value_and_grad(mean(fn)), RULES[0])

    inside, outside = steps()
    assert [s for s in roundings(inside, w, x)[1] if len(s) != 2 or s == W] == []
    # Forward and backward: the same operation on the same array, which XLA merges.
    assert set(roundings(outside, w, x)[0]) == set(before)
    assert W not in roundings(outside, w, x)[1]
    now = [jax.jit(step)(w, x) for step in (inside, outside)]
    monkeypatch.setattr(Binder, "hoist_weights", lambda *_: ({}, {}))
    then = [jax.jit(step)(w, x) for step in steps()]
    jax.tree.map(np.testing.assert_array_equal, now, then)


def times_rounded(fn, *args):
    """How many arrays a program rounds to blocks: outside of loops, and in them."""
    found = {False: 0, True: 0}

    def walk(jaxpr, in_loop):
        for eqn in getattr(jaxpr, "jaxpr", jaxpr).eqns:
            if eqn.primitive.name == "convert_element_type":
                dtype = eqn.outvars[0].aval.dtype.name
                found[in_loop] += dtype in ("float8_e4m3fn", "float4_e2m1fn") and (
                    eqn.outvars[0].aval.size > 100  # no scales
                )
            for sub in subjaxprs(eqn.params):
                walk(sub, in_loop or eqn.primitive.name in ("scan", "while"))

    walk(jax.make_jaxpr(fn)(*args), False)
    return found[False], found[True]


@pytest.mark.parametrize("make", (mxfp8, nvfp4))
@pytest.mark.parametrize("fn", (recurrent, of_stack))
def test_blocks_of_gradients_are_rounded_before_loops_too(fn, make, monkeypatch):
    """A weight has blocks along two axes: gradients read those along the other one."""
    rule = make(where=None, emulate=True)
    w, x = arguments(CASES[fn][0]), values(*X)

    def step():
        # A `jax.grad` outside of `amp` rounds by derivatives of contractions.
        return jax.grad(low(mean(fn), rule), (0, 1))

    # In loops: an activation along both of its axes, and its cotangent. A checkpoint
    # rounds the activation once more.
    again = fn is of_stack
    assert times_rounded(step(), w, x) == (2, 4 + again)
    now = jax.jit(step())(w, x)
    per_example = jax.jit(jax.vmap(step(), (None, 0)))(w, jnp.stack([x, 2 * x]))
    monkeypatch.setattr(Binder, "hoist_weights", lambda *_: ({}, {}))
    assert times_rounded(step(), w, x)[1] > 4 + again
    jax.tree.map(np.testing.assert_array_equal, now, jax.jit(step())(w, x))
    then = jax.jit(jax.vmap(step(), (None, 0)))(w, jnp.stack([x, 2 * x]))
    jax.tree.map(np.testing.assert_array_equal, per_example, then)


def maxima(fn, *args):
    """Shapes that a maximum is taken of, in loops."""
    found = []

    def walk(jaxpr, in_loop):
        for eqn in getattr(jaxpr, "jaxpr", jaxpr).eqns:
            if in_loop and eqn.primitive.name == "reduce_max":
                found.append(eqn.invars[0].aval.shape)
            for sub in subjaxprs(eqn.params):
                walk(sub, in_loop or eqn.primitive.name == "scan")

    walk(jax.make_jaxpr(fn)(*args), False)
    return found


@pytest.mark.parametrize(
    "policy", (None, jax.checkpoint_policies.save_only_these_names("h"))
)
def test_checkpoints_keep_scales(policy):
    def fn(ws, x):
        @functools.partial(jax.checkpoint, policy=policy)
        def block(x, w):
            return jnp.tanh(checkpoint_name(x @ w, "h"))

        x, _ = lax.scan(lambda x, w: (block(x, w), None), x, ws)
        return jnp.mean(x**2)

    step = jax.value_and_grad(low(fn, RULES[0]))
    # Of what goes in, once; of the cotangent, for both gradients.
    expected = [X, X, X]
    if getattr(jax.config, "jax_remat3", False):
        expected.append(X)  # docs/limits.md
    assert maxima(step, values(*WS), values(*X)) == expected


@pytest.mark.parametrize("fn", (recurrent, of_stack))
def test_second_derivatives_are_refused(fn):
    w, x = arguments(CASES[fn][0]), values(*X)
    gradient = jax.grad(low(mean(fn), RULES[0]))
    with pytest.raises(AmpError, match="second derivative"):
        jax.jvp(lambda w: gradient(w, x), (w,), (w,))
    by_input = jax.grad(low(mean(fn), RULES[0]), 1)
    with pytest.raises(AmpError, match="second derivative"):
        jax.jvp(lambda w: by_input(w, x), (w,), (w,))


@pytest.mark.skipif(
    jax.__version_info__ < (0, 7), reason="JAX 0.6 can't transpose the loop as written"
)
@pytest.mark.parametrize("side", (0, 1))
def test_transposes_of_loops(side):
    args = [values(*W), values(*X)]

    def linear(w, x):
        return lax.scan(lambda x, _: (x, x @ w), x, None, length=2)[1]

    def by(arg):
        return low(linear, RULES[0])(*args[:side], arg, *args[side + 1 :])

    ct = jnp.ones((2, *X))
    (now,) = jax.linear_transpose(by, args[side])(ct)
    expected = (
        2 * args[0].sum(1) * jnp.ones(X),
        2 * args[1].sum(0)[:, None] * jnp.ones(W),
    )
    np.testing.assert_allclose(now, expected[1 - side], rtol=0.02, atol=0.05)


def test_examples_have_scales_of_their_own():
    w, x = values(2, *W), values(2, *X)
    mapped = jax.vmap(low(recurrent, RULES[0]))(w, x)
    alone = [low(recurrent, RULES[0])(*one) for one in zip(w, x, strict=True)]
    np.testing.assert_array_equal(mapped, jnp.stack(alone))


def test_where_the_body_may_not_run_the_weight_is_rounded_there():
    def fn(w, x):
        def body(x, go):
            return lax.cond(go, lambda x: x @ w, lambda x: x, x), None

        return lax.scan(body, x, jnp.array([True, False]))[0]

    args = values(*W), values(*X)
    assert roundings(low(fn, RULES[0]), *args) == ([], [X, W])


def as_long_as(w, steps, x):
    """Steps of which the loop reads nothing, but how many there are."""
    return lax.scan(lambda x, _: (jnp.tanh(x @ w), None), x, steps)[0]


@pytest.mark.parametrize("rule", [float8(where=None), int8(where=None)], ids=str)
def test_a_loop_of_symbolic_length(rule):
    def loss(w, ws, steps, x):
        return of_stack(ws, jax.checkpoint(as_long_as)(w, steps, x)).sum()

    fn = jax.jit(low(jax.value_and_grad(loss, argnums=(0, 1)), rule))
    args = values(*W), values(3, *W), jnp.zeros(2), values(*X)
    n, m = export.symbolic_shape("n, m")
    shapes = W, (n, *W), (m,), X
    exported = export.export(fn)(*(jax.ShapeDtypeStruct(s, "float32") for s in shapes))
    jax.tree.map(
        functools.partial(np.testing.assert_allclose, rtol=1e-6, atol=1e-6),
        exported.call(*args),
        fn(*args),
    )


def test_what_explain_counts_stays():
    report = explain(low(of_stack, RULES[0]))(values(*WS), values(*X))
    (op,) = [op for op in report.now.ops if op.operands]
    assert op.place.times == 3
