"""Scopes in every phase: what JAX makes of an equation stays in the author's scopes."""

import random
import re
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax import lax

from benchmarks.measure import operand_dtype
from jaxamp_like import PolicyMap, amp
from jaxamp_like._jax import raw, scopes, subjaxprs, to_classic
from jaxamp_like._rewrite.hoisted_by_jax import Hoisted

F32, BF16 = "float32", "bfloat16"
scope = jax.named_scope

# A contraction is known by the length of the axis that it makes, sums over or keeps.
LENGTHS = (11, 13, 17, 19, 23, 29, 31, 37, 41, 43)


# Programs: functions `(ws, x)`, with the scopes of their contractions by length.


class Program:
    """A random nest of scopes and transforms around contractions."""

    def __init__(self, seed: int, depth: int = 5):
        self.random = random.Random(seed)
        self.paths: dict[int, tuple[str, ...]] = {}
        self.text: list[str] = []
        self.fn = self._some((), depth)

    def _some(self, path: tuple[str, ...], depth: int) -> Any:
        """One or two functions, one after the other."""
        fns = [self._one(path, depth) for _ in range(self.random.choice((1, 1, 2)))]

        def some(ws, x):
            for fn in fns:
                x = fn(ws, x)
            return x

        return some

    def _one(self, path: tuple[str, ...], depth: int) -> Any:
        is_full = len(self.paths) == len(LENGTHS)
        if is_full:
            return lambda ws, x: x
        if depth == 0:
            return self._leaf(path)
        if self.random.random() < 0.45:
            name = self.random.choice("abc")
            self.text.append(name)
            inner = self._some((*path, name), depth - 1)
            return scope(name)(inner)
        kind = self.random.choice(list(WRAPPERS))
        self.text.append(kind)
        if kind == "scan":  # with a name for its body, as frameworks give it
            path = (*path, "body")
        return WRAPPERS[kind](self._some(path, depth - 1))

    def _leaf(self, path: tuple[str, ...]) -> Any:
        n = LENGTHS[len(self.paths)]
        self.paths[n] = path
        self.text.append(f"{n}: {'/'.join(path)}")

        is_of_weights = self.random.random() < 0.3  # and so the same in all iterations

        def leaf(ws, x):
            u, v = ws[n]
            if is_of_weights:
                return jnp.tanh(x @ jnp.tanh(u @ v))
            return jnp.tanh(jnp.tanh(x @ u) @ v)

        return leaf

    def args(self):
        lengths = self.paths
        ws = {n: (jnp.full((3, n), 0.1), jnp.full((n, 3), 0.1)) for n in lengths}
        return ws, jnp.ones((2, 3))


def scanned(fn):
    def scanned(ws, x):
        @scope("body")
        def body(x, _):
            return jnp.sin(fn(ws, x)), None

        return lax.scan(body, x, None, 2)[0]

    return scanned


def batched(fn):
    return lambda ws, x: jax.vmap(fn, (None, 0))(ws, jnp.stack([x, -x])).sum(0)


def branched(fn):
    return lambda ws, x: lax.cond(x.sum() > 0, fn, lambda ws, x: x, ws, x)


def by_rule(fn):
    ruled = jax.custom_vjp(fn)
    ruled.defvjp(
        lambda ws, x: (fn(ws, x), (ws, x)),
        lambda args, ct: jax.vjp(fn, *args)[1](ct),
    )
    return ruled


def by_tangent_rule(fn):
    ruled = jax.custom_jvp(fn)
    ruled.defjvp(lambda primals, tangents: jax.jvp(fn, primals, tangents))
    return ruled


def differentiated(fn):
    def step(ws, x):
        of_ws, of_x = jax.grad(loss_of(fn), (0, 1))(ws, x)
        return x + of_x + sum(map(jnp.sum, jax.tree.leaves(of_ws)))

    return step


def saving_dots(fn):
    return jax.checkpoint(fn, policy=jax.checkpoint_policies.dots_saveable)


WRAPPERS = {
    "checkpoint": jax.checkpoint,
    "checkpoint again": jax.checkpoint,
    "checkpoint but dots": saving_dots,
    "jit": jax.jit,
    "scan": scanned,
    "vmap": batched,
    "cond": branched,
    "custom_vjp": by_rule,
    "custom_jvp": by_tangent_rule,
    "grad": differentiated,
}


def loss_of(fn):
    return lambda ws, x: jnp.sum(fn(ws, x))


def forward_mode(fn):
    return lambda *args: jax.jvp(loss_of(fn), args, args)


def linearized(fn):
    return lambda *args: jax.linearize(loss_of(fn), *args)[1](*args)


DERIVATIVES = {
    "grad": lambda fn: jax.grad(loss_of(fn)),
    "value_and_grad": lambda fn: jax.value_and_grad(loss_of(fn), (0, 1)),
    "jit of grad": lambda fn: jax.jit(jax.grad(loss_of(fn))),
    "grad of jit": lambda fn: jax.grad(jax.jit(loss_of(fn))),
    "grad of checkpoint": lambda fn: jax.grad(loss_of(jax.checkpoint(fn))),
    "jvp": forward_mode,
    "linearize": linearized,
}


# What stands where.


def all_contractions(jaxpr):
    """The contractions of a program at any depth, each with its scopes."""
    return contractions_in(to_classic(jaxpr), ())


def contractions_in(jaxpr, path):
    for eqn in raw(jaxpr).eqns:
        inner = path + scopes(eqn)
        if eqn.primitive.name == "dot_general":
            yield eqn, inner
        for sub in subjaxprs(eqn.params):
            yield from contractions_in(sub, inner)


def contractions(jaxpr):
    """Those of a random program, which are known."""
    return [pair for pair in all_contractions(jaxpr) if length_of(pair[0])]


def length_of(eqn) -> Any:
    shapes = [v.aval.shape for v in (*eqn.invars, *eqn.outvars)]
    lengths = {n for shape in shapes for n in shape} & {*LENGTHS}
    return min(lengths, default=None)


# Seed 3 has no scopes.
SEEDS = [n if n < 10 else pytest.param(n, marks=pytest.mark.rest) for n in range(40)]
SEEDS.pop(3)


@pytest.fixture
def without_names_of_others():
    """A program without the names that JAX remembers of others.

    With `jax_remat3` and `jax_custom_vjp3`, JAX keeps what it traced of a checkpoint
    around a function with a derivative rule, with the names of where that stood."""
    flags = "jax_remat3", "jax_custom_vjp3"
    if all(getattr(jax.config, flag, False) for flag in flags):
        jax.clear_caches()


@pytest.mark.usefixtures("without_names_of_others")
@pytest.mark.parametrize("seed", SEEDS)
def test_every_phase_is_in_the_scopes_of_its_author(seed):
    program = Program(seed)
    kind = [*DERIVATIVES][seed % len(DERIVATIVES)]
    jaxpr = jax.make_jaxpr(DERIVATIVES[kind](program.fn))(*program.args())
    for eqn, path in contractions(Hoisted().put_back(to_classic(jaxpr))):
        assert path == program.paths[length_of(eqn)], (kind, program.text, eqn)


@pytest.mark.usefixtures("without_names_of_others")
@pytest.mark.parametrize("seed", SEEDS)
def test_every_phase_gets_the_rule_of_its_scope(seed):
    """A path, its names as a tuple, and an expression of the whole path."""
    program = Program(seed)
    kind = [*DERIVATIVES][seed % len(DERIVATIVES)]
    paths = [path for path in program.paths.values() if path]
    chosen = paths[seed % len(paths)]
    keys = "/".join(chosen), chosen, re.compile(re.escape("/".join(chosen)))
    policy = PolicyMap("mixed_bfloat16", {keys[seed % 3]: F32})
    step = amp(DERIVATIVES[kind](program.fn), amp_policy=policy)
    jaxpr = jax.make_jaxpr(step)(*program.args())
    for eqn, _ in contractions(jaxpr):
        path = program.paths[length_of(eqn)]
        inside = [path[i : i + len(chosen)] for i in range(len(path))]
        is_full = path[: len(chosen)] == chosen if seed % 3 == 2 else chosen in inside
        assert operand_dtype(eqn) == (F32 if is_full else BF16), (program.text, path)


def dense(w, x, name="inner"):
    with scope(name):
        return jnp.tanh(x @ w)


def nested_checkpoints(w, x):
    with scope("outer"):

        def middle(w, x):
            with scope("middle"):
                return jax.checkpoint(dense)(w, x)

        return jnp.sum(jax.checkpoint(middle)(w, x))


def same_name_twice(w, x):
    with scope("a"):
        x = jax.checkpoint(lambda w, x: dense(w, x, "a"))(w, x)
        return jnp.sum(dense(w, x, "b"))


def injected(w, x):
    """A recurrence with an input that JAX multiplies before the loop."""
    with scope("cell"):

        def step(h, _):
            return jnp.tanh(h @ w + x @ w), None

        return jnp.sum(lax.scan(step, x, None, 3)[0])


@pytest.mark.parametrize(
    "loss, key, low",
    (
        (nested_checkpoints, "outer/middle", 0),
        (nested_checkpoints, ("middle", "inner"), 0),
        (nested_checkpoints, re.compile("outer/middle/inner"), 0),
        (same_name_twice, "a/a", 3),
        (same_name_twice, "a/b", 4),
        (same_name_twice, "a", 0),
        (injected, "cell", 0),
    ),
)
@pytest.mark.parametrize("transform", (amp, lambda fn, **how: jax.jit(amp(fn, **how))))
def test_a_key_reaches_what_is_made_again(loss, key, low, transform):
    policy = PolicyMap("mixed_bfloat16", {key: F32})
    step = transform(jax.value_and_grad(loss, (0, 1)), amp_policy=policy)
    jaxpr = jax.make_jaxpr(step)(jnp.eye(4), jnp.ones((2, 4)))
    dtypes = [operand_dtype(eqn) for eqn, _ in all_contractions(jaxpr)]
    assert dtypes.count(BF16) == low and len(dtypes) > low


def test_a_derivative_that_is_taken_elsewhere():
    def step(w, x):
        with scope("forward"):
            out, vjp = jax.vjp(nested_checkpoints, w, x)
        with scope("backward"):
            return vjp(jnp.ones_like(out))

    jaxpr = jax.make_jaxpr(step)(jnp.eye(4), jnp.ones((2, 4)))
    paths = {path for _, path in all_contractions(jaxpr)}
    rest = ("outer", "middle", "inner")
    before = ("forward",) * (
        jax.__version_info__ < (0, 7)
    )  # see `_without_repetitions`
    assert paths == {("forward", *rest), ("backward", *before, *rest)}
