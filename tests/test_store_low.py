"""Store low, compute full: the default policy against an oracle of its definition.

What it computes is the program with the operands and results of its contractions
rounded, and nothing else. `Low` runs a program so, equation by equation, with no code
in common with the package."""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from jaxamp_like import amp
from jaxamp_like.presets import full_precision

from .fuzz.oracle import CONTRACTIONS, Evaluator
from .programs import (
    checkpointed,
    eps,
    error,
    every_dtype,
    layer_norm,
    lstm,
    masked_softmax,
    scanned_blocks,
    stream,
    values,
)

pytestmark = pytest.mark.sample(5)


class Low(Evaluator):
    """Runs contractions in `dtype`, all else as it stands."""

    def __init__(self, dtype: str):
        super().__init__()
        self.dtype = jnp.dtype(dtype)

    def literal(self, value: Any) -> Any:
        return value

    def apply(self, step: Any, args: list[Any]) -> Sequence[Any]:
        eqn = step.eqn
        params = eqn.params
        is_low = eqn.primitive.name in CONTRACTIONS
        if is_low:
            args = [lax.convert_element_type(x, self.dtype) for x in args]
            params = params | {"preferred_element_type": self.dtype}
        outs = eqn.primitive.bind(*args, **params)
        outs = outs if eqn.primitive.multiple_results else [outs]
        pairs = zip(outs, eqn.outvars, strict=True)
        if is_low:
            return [lax.convert_element_type(x, v.aval.dtype) for x, v in pairs]
        return outs


def oracle(fn: Callable[..., Any], dtype: str) -> Callable[..., Any]:
    """`fn` with its contractions in `dtype`."""

    def low(*args):
        jaxpr, out = jax.make_jaxpr(fn, return_shape=True)(*args)
        results = Low(dtype).run(jaxpr, jax.tree.leaves(args))
        return jax.tree.unflatten(jax.tree.structure(out), results)

    return low


def mlp(ws, x):
    for w in ws:
        x = jax.nn.gelu(x @ w + w[0])
    return x @ ws[0]


def attention(ws, x, mask):
    q, k, v = (x @ w for w in ws[:3])
    y = masked_softmax(q @ k.T / 3, mask, -1e9) @ v
    return (x + jax.nn.relu(y @ ws[3])) @ ws[4]


def normed(ws, x):
    for w in ws:
        x = x + jnp.tanh(layer_norm(x, 1.5, 0.1) @ w)
    return x


def cached(w, cache, x):
    """A step of a decoder: what is written beside the others is not theirs."""

    def step(cache, i):
        row = lax.dynamic_slice_in_dim(x, i, 1) @ w
        cache = lax.dynamic_update_slice(cache, row, (i, 0))
        return cache, jax.nn.softmax(row @ cache.T) @ cache

    return lax.scan(step, cache, jnp.arange(3))


def gated(w, xs):
    """A recurrence whose decay is near 1."""

    def step(h, x):
        h = jax.nn.sigmoid(7 + x @ w) * h + x @ w
        return h, None

    return lax.scan(step, xs[0], xs)[0]


def gated_tree(w, xs):
    def combine(a, b):
        return a[0] * b[0], b[0] * a[1] + b[1]

    gates, steps = jax.nn.sigmoid(7 + xs @ w), xs @ w
    return lax.associative_scan(combine, (gates, steps))[1]


def small_steps(w, x):
    y = x
    for _ in range(100):
        y = y + 1e-3 * jnp.tanh(y @ w)
    return y - x


def inner_steps(w, x):
    """Learns a few steps on one batch, and is judged by another (MAML)."""

    def loss(w, x, y):
        return jnp.mean((jnp.tanh(x @ w) - y) ** 2)

    for _ in range(5):
        w = w - 1e-2 * jax.grad(loss)(w, x, x[::-1])
    return loss(w, 2 * x, x), w


def by_argument(w, x, epsilon):
    h = x @ w
    return h / (jnp.sum(jnp.abs(0 * h), -1, keepdims=True) + epsilon) @ w


def by_array(w, x):
    return by_argument(w, x, np.full(8, 1e-8, np.float32))


def by_branch(w, x, small):
    epsilon = lax.cond(small, lambda: 1e-8, lambda: 1e-6)
    return by_argument(w, x, epsilon)


def outer(w, x):
    return jnp.sin(jnp.outer(x[:, 0], x[0])) @ w


def branching(w, x):
    def body(carry):
        i, x = carry
        return i + 1, lax.cond(i % 2 == 0, jnp.tanh, jnp.sin, x @ w)

    return lax.while_loop(lambda carry: carry[0] < 5, body, (0, x))[1]


X, W = values(4, 8), values(8, 8, scale=0.4)
WS = values(5, 8, 8, scale=0.4)
MASK = np.tri(4, dtype=bool)
XS = values(20, 4, 8)
ZEROS = jnp.zeros((4, 8))

MODELS: dict[str, tuple[Callable[..., Any], tuple[Any, ...]]] = {
    "mlp": (mlp, (WS, X)),
    "attention": (attention, (WS, X, MASK)),
    "layer norm": (normed, (WS, X)),
    "lstm": (
        lstm,
        (values(8, 32, scale=0.3), values(8, 32, seed=1, scale=0.3), XS),
    ),
    "residual blocks": (lambda ws, x: scanned_blocks(x, ws), (WS, X)),
    "cache": (cached, (W, 1e5 + values(6, 8), X)),
    "gates": (gated, (W, XS)),
    "gates, in a tree": (gated_tree, (W, XS)),
    "small steps": (small_steps, (W, X)),
    "inner steps": (inner_steps, (W, X)),
    "epsilon, argument": (by_argument, (W, X, 1e-8)),
    "epsilon, array": (by_array, (W, X)),
    "epsilon, branch": (by_branch, (W, X, True)),
    "outer": (outer, (W, X)),
    "loop and branches": (branching, (W, X)),
}
# Infinite, or of a loop that has no reverse mode.
NO_GRADIENTS = {
    "epsilon, argument",
    "epsilon, array",
    "epsilon, branch",
    "loop and branches",
}


@pytest.mark.sample(6)
@pytest.mark.cross("name", dtype=2)
@every_dtype
@pytest.mark.parametrize("name", MODELS)
def test_the_forward_pass_is_that_with_rounded_contractions(name, dtype):
    fn, args = MODELS[name]
    with jax.disable_jit():  # so that both round every op alike
        ours = amp(fn, compute_dtype=dtype)(*args)
        true = oracle(fn, dtype)(*args)
    assert jax.tree.structure(ours) == jax.tree.structure(true)
    for a, b in zip(jax.tree.leaves(ours), jax.tree.leaves(true), strict=True):
        bound = 4 * eps("float32") * float(jnp.abs(b).max())
        np.testing.assert_allclose(a, b, rtol=0, atol=bound)


@pytest.mark.sample(6)
@pytest.mark.parametrize("name", sorted(MODELS.keys() - NO_GRADIENTS))
def test_gradients_are_as_good_as_with_rounded_contractions(name):
    """What is kept low costs at most a tenth more than contractions do."""
    fn, (weights, *rest) = MODELS[name]

    def loss(fn, weights, shift, scale):
        outs = fn(weights, rest[0] + shift, *rest[1:])
        return sum(jnp.sum(jnp.cos(3 * scale * x)) for x in jax.tree.leaves(outs))

    def grads(fn):
        # As written: XLA would leave out roundings of one of them, not of the other.
        options = {"xla_allow_excess_precision": False}
        gradient = jax.grad(functools.partial(loss, fn))
        return jax.jit(gradient, compiler_options=options)

    full, ours, theirs = map(
        grads, (fn, amp(fn, compute_dtype="bfloat16"), oracle(fn, "bfloat16"))
    )
    errors = []
    for seed in range(8):
        draw = values(*np.shape(rest[0]), seed=seed + 1, scale=0.1), 1 + 0.1 * seed
        exact = full(weights, *draw)
        errors.append([error(x(weights, *draw), exact) for x in (ours, theirs)])
    mine, least = np.sqrt(np.mean(np.square(errors), axis=0))
    assert mine <= 1.1 * least


# What 16 bits between contractions have done to programs, by numbers.


@every_dtype
def test_what_is_moved_beside_a_low_value_keeps_every_bit(dtype):
    buffer = jnp.full((3, 8), 123456.78)

    def set_rows(w, x, b):
        return b.at[:1].set(x[:1] @ w)

    writes: list[Callable[..., Any]] = [
        set_rows,
        lambda w, x, b: lax.dynamic_update_slice(b, x[:1] @ w, (0, 0)),
        lambda w, x, b: jnp.concatenate([x[:1] @ w, b[1:]]),
        lambda w, x, b: jnp.stack([(x @ w)[0], b[1], b[2]]),
        lambda w, x, b: jnp.where(jnp.arange(3)[:, None] < 1, x[:1] @ w, b),
    ]
    for write in writes:

        def fn(w, x, b, write=write):
            b = write(w, x, b)
            return b, b @ w

        moved, _ = amp(fn, compute_dtype=dtype)(W, X, buffer)
        np.testing.assert_array_equal(moved[1:], buffer[1:])


@every_dtype
@pytest.mark.parametrize("fn", (small_steps, inner_steps), ids=("steps", "maml"))
def test_loops_in_python_lose_no_increments(fn, dtype):
    def change(w, x):
        out = fn(w, x)
        return out[1] - w if isinstance(out, tuple) else out

    assert error(amp(change, compute_dtype=dtype)(W, X), change(W, X)) < 4 * eps(dtype)


@pytest.mark.sample(8)
@every_dtype
@pytest.mark.parametrize("fn", (gated, gated_tree), ids=("scan", "tree"))
def test_gates_near_1(fn, dtype):
    xs = values(1000, 4, 8)
    exact = fn(W, xs)
    assert error(amp(fn, compute_dtype=dtype)(W, xs), exact) < 2 * eps(dtype)


@every_dtype
@pytest.mark.parametrize("name", ("argument", "array", "branch"))
def test_no_epsilon_vanishes(name, dtype):
    fn, (w, *rest) = MODELS[f"epsilon, {name}"]
    # Over 1e-8 and still in the range of float16.
    small = 1e-6 * w
    actual, exact = amp(fn, compute_dtype=dtype)(small, *rest), fn(small, *rest)
    assert np.isfinite(actual).all() and np.isfinite(exact).all()


@pytest.mark.rest
@every_dtype
def test_a_force_field(dtype):
    """A loss that holds a gradient taken inside: of an energy by places."""
    places, wanted = values(12, 3, scale=2.0), values(12, 3, seed=1)
    embed, hidden, out = (values(*s, seed=3) / 3 for s in ((8, 16), (16, 16), (16, 1)))

    def energy(params, places):
        apart = places[:, None] - places[None]
        away = jnp.sqrt(jnp.sum(apart**2, -1) + 1e-6)
        centres = jnp.linspace(0.0, 5.0, 8)
        waves = jnp.exp(-4.0 * (away[..., None] - centres) ** 2)
        near = 0.5 * (jnp.cos(jnp.pi * jnp.minimum(away, 5.0) / 5.0) + 1)
        messages = jax.nn.silu(waves @ params[0]) * near[..., None]
        atoms = jnp.sum(messages, axis=1)
        for _ in range(2):
            atoms = atoms + jax.nn.silu(atoms @ params[1])
        return jnp.sum(atoms @ params[2])

    def loss(params):
        return jnp.mean((-jax.grad(energy, argnums=1)(params, places) - wanted) ** 2)

    params = (embed, hidden, out)
    exact = loss(params)
    ours = error(amp(loss, compute_dtype=dtype)(params), exact)
    theirs = error(oracle(loss, dtype)(params), exact)
    assert ours < max(1.1 * theirs, eps(dtype) / 2)


def test_a_checkpoint_without_a_contraction_is_left_alone():
    """Its carry is kept as written: a low copy of it would spare nothing."""

    def program(fn):
        return str(jax.make_jaxpr(fn)(WS, X))

    passes = functools.partial(checkpointed, lambda x, w: x + jnp.sin(w[:4]))
    assert program(amp(passes, compute_dtype="bfloat16")) == program(passes)
    block = functools.partial(checkpointed, stream)
    options = {"compute_dtype": "bfloat16", "amp_policy": full_precision()}
    assert program(amp(block, **options)) == program(block)
