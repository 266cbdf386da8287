"""The gradient is that of the value: nothing that the backward pass reads is rounded
unless a contraction reads it, or made all of it.

Each program is written with the product `dot` as an argument. The oracle's `dot` rounds
its operands, its result, their cotangents and nothing else; the gradient of the mixed
program may err by twice as much as the oracle's, leaf by leaf. Both are compared with
float64. What is tested are sizes: offsets, phases and shifts that a rounded copy of the
sum would carry into the gradient, and cotangents that cancel."""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from benchmarks import measure
from jaxamp_like import amp

from .fuzz.runtime import with_backward

DTYPES = ("bfloat16", "float16")
enable_x64 = (
    jax.enable_x64 if hasattr(jax, "enable_x64") else jax.experimental.enable_x64
)
FACTOR = 2.0  # of the oracle's error
FLOOR = 4  # half units in the last place, for a leaf in which the oracle is lucky

Dot = Callable[[Any, Any], Any]


def rounding_dot(dtype: str) -> Dot:
    """A product whose operands, result and cotangents are rounded to `dtype`."""
    info = jnp.finfo(dtype)

    def low(x: Any) -> Any:
        return lax.reduce_precision(x, info.nexp, info.nmant)

    @jax.custom_vjp
    def dot(a, b):
        return low(low(a) @ low(b))

    def bwd(operands, cotangent):
        vjp = jax.vjp(jnp.matmul, *map(low, operands))[1]
        return tuple(map(low, vjp(low(cotangent))))

    dot.defvjp(lambda a, b: (dot(a, b), (a, b)), bwd)
    return dot


def values(*shape: int, seed: int = 0, scale: float = 1.0) -> jax.Array:
    normal = np.random.default_rng([seed, *shape]).normal(size=shape)
    return jax.device_put((normal * scale).astype(np.float32))


def layer_norm(x):
    mean = jnp.mean(x, -1, keepdims=True)
    return (x - mean) * lax.rsqrt(jnp.var(x, -1, keepdims=True) + 1e-5)


P = {
    "in": values(16, 16, seed=1, scale=0.4),
    "out": values(16, 16, seed=2, scale=0.4),
    "pair": values(16, 2, seed=3, scale=0.4),
    "point": values(16, 3, seed=4, scale=0.4),
}
X = values(8, 16, seed=5)
IMAGE = np.asarray(values(260, 260, seed=6))
WEIGHTS = np.linspace(1, 2, 16)


# ------------------------------------------------------- sums that are not rounded


def bilinear(dot, p, x):
    """Sampling an image near pixel (180, 240), as for optical flow."""
    at = x[:, :2] + jnp.array([180.0, 240.0]) + dot(jnp.tanh(x), p["pair"])
    corner = jnp.floor(at)
    (u, v), (i, j) = (at - corner).T, corner.T.astype(int)
    image = jnp.asarray(IMAGE, x.dtype)
    near = (1 - u) * image[i, j] + u * image[i + 1, j]
    far = (1 - u) * image[i, j + 1] + u * image[i + 1, j + 1]
    return jnp.mean(((1 - v) * near + v * far) ** 2)


def phase(dot, p, x):
    """A phase that has turned 100 times."""
    angle = x + 200 * np.pi
    for _ in range(4):
        angle = angle + dot(jnp.tanh(dot(jnp.sin(angle), p["in"])), p["out"])
    return jnp.mean(jnp.sin(angle) * WEIGHTS.astype(x.dtype))


def residual(offset: float, loop: str):
    """A residual stream whose rows have a mean, read by norms."""

    def block(h, w, dot):
        return h + dot(jax.nn.gelu(dot(layer_norm(h), w[0])), w[1])

    def program(dot, p, x):
        h, w = x + offset, (p["in"], p["out"])
        if loop == "unrolled":
            for _ in range(4):
                h = block(h, w, dot)
        else:
            step = jax.checkpoint(block, static_argnums=2) if loop == "remat" else block
            ws = jax.tree.map(lambda a: jnp.stack([a] * 4), w)
            h = lax.scan(lambda h, w: (step(h, w, dot), None), h, ws)[0]
        return jnp.mean(dot(layer_norm(h), p["out"]) ** 2)

    return program


def shifted_cross_entropy(dot, p, x):
    logits = 4 * dot(jnp.tanh(dot(x, p["in"])), p["out"]) + 1000
    log_p = jax.nn.log_softmax(logits + dot(x, p["in"]))
    return -jnp.mean(log_p[jnp.arange(8), jnp.arange(8)])


def neighbours(dot, p, x):
    """Differences of neighbours far from zero, in a scan."""

    def step(h, _):
        nearby = jnp.tanh(h - jnp.roll(h, 1, -1))
        return h + dot(jnp.tanh(dot(nearby, p["in"])), p["out"]), None

    h = lax.scan(step, x + 30, None, length=6)[0]
    return jnp.mean((h - jnp.roll(h, 1, -1)) ** 2)


def distances(q):
    apart = q[:, None] - q[None]
    return jnp.sqrt(jnp.sum(apart**2, -1) + 1e-2)


def coordinates(dot, p, x):
    """Points some 60 from the origin, refined three times by their distances."""
    q = x[:, :3] * 3 + 60
    for _ in range(3):
        near = jnp.tile(jnp.exp(-distances(q) / 4), 2)
        q = q + dot(jnp.tanh(dot(near, p["in"])), p["point"])
    return jnp.mean(distances(q))


def hidden_markov(dot, p, x):
    """Log-probabilities that grow in size with every step."""
    emission = 4 * dot(jnp.tanh(jnp.tile(x, (12, 1))), p["in"]) - 5
    transition = jax.nn.log_softmax(p["out"])

    def step(a, e):
        return jax.nn.logsumexp(a[:, None] + transition, 0) + e, None

    return jax.nn.logsumexp(lax.scan(step, emission[0], emission[1:])[0]) / 10


def chain(dot, p, x):
    """A linear-chain CRF: the score of a path less that of all paths."""
    scores = dot(jnp.tanh(jnp.tile(x, (6, 1))), p["in"])
    moves, tags = p["out"], jnp.arange(48) % 16

    def step(a, e):
        return jax.nn.logsumexp(a[:, None] + moves, 0) + e, None

    every = jax.nn.logsumexp(lax.scan(step, scores[0], scores[1:])[0])
    path = jnp.sum(scores[jnp.arange(48), tags]) + jnp.sum(moves[tags[:-1], tags[1:]])
    return (every - path) / 48


def adapted(loss):
    """A small change that is added to a product, set against the product itself."""

    def program(dot, p, x):
        before = dot(x, 8 * p["in"])
        return loss(before, before + dot(dot(x, p["pair"]), p["pair"].T / 8))

    return program


def preferred(dot, p, x):
    """A model set against a frozen one with the same weights, and a small change."""
    before = lax.stop_gradient(jax.nn.log_softmax(dot(x, 8 * p["in"])))
    after = dot(x, 8 * p["in"]) + dot(dot(x, p["pair"]), p["pair"].T / 8)
    ratio = jnp.exp((jax.nn.log_softmax(after) - before)[:, 3])
    return -jnp.mean(jnp.minimum(ratio * x[:, 0], jnp.clip(ratio, 0.8, 1.2) * x[:, 0]))


def divergence(before, after):
    p, q = jax.nn.log_softmax(after), jax.nn.log_softmax(before)
    return jnp.mean(jnp.sum(jnp.exp(p) * (p - q), -1))


def ratio(before, after):
    before = lax.stop_gradient(jax.nn.log_softmax(before)[:, 3])
    ratio = jnp.exp(jax.nn.log_softmax(after)[:, 3] - before)
    return -jnp.mean(jnp.minimum(ratio, jnp.clip(ratio, 0.8, 1.2)))


def running_sum(dot, p, x):
    """The differences of the steps of a sum, which are small beside it."""
    sums = [x]
    for k in range(4):
        sums.append(sums[-1] + dot(jnp.cos(x + k), p["in"]))
    pairs = zip(sums[1:], sums[:-1], strict=True)
    return sum(
        jnp.mean(jnp.tanh(2 * (a - b)) * WEIGHTS.astype(x.dtype)) for a, b in pairs
    )


SUMS = {
    "divergence": adapted(divergence),
    "ratio": adapted(ratio),
    "excess": adapted(lambda a, b: jnp.mean(jnp.exp(5 * (jnp.maximum(a, b) - a)))),
    "preferred": preferred,
    "running sum": running_sum,
    "bilinear": bilinear,
    "phase": phase,
    **{
        f"residual, {loop}, mean {offset}": residual(offset, loop)
        for loop in ("unrolled", "scan", "remat")
        for offset in (0, 30, 300, 1000)
    },
    "shifted cross entropy": shifted_cross_entropy,
    "neighbours": neighbours,
    "coordinates": coordinates,
    "hidden Markov": hidden_markov,
    "chain": chain,
}


# ------------------------------------------------- cotangents of what many ops read


def transport(loop: bool):
    """Sinkhorn's iterations, all of which read one matrix of costs."""

    def program(dot, p, x):
        cost = 3 * dot(jnp.tanh(dot(x, p["in"])), p["out"])

        def step(potentials, _):
            f, g = potentials
            f = -jax.nn.logsumexp(g[None] - cost, 1)
            return (f, -jax.nn.logsumexp(f[:, None] - cost, 0)), None

        potentials = (jnp.zeros(8, x.dtype), jnp.zeros(16, x.dtype))
        if loop:
            potentials = lax.scan(step, potentials, None, length=12)[0]
        else:
            for _ in range(12):
                potentials, _ = step(potentials, None)
        f, g = potentials
        return jnp.sum(jnp.exp(f[:, None] + g[None] - cost) * cost)

    return program


@jax.custom_vjp
def by_rule(c, k):
    return jnp.mean(jnp.sin(c * k))


def _by_rule_bwd(operands, g):
    c, k = operands
    return g * k * jnp.cos(c * k) / c.size, jnp.zeros_like(k)


by_rule.defvjp(lambda c, k: (by_rule(c, k), (c, k)), _by_rule_bwd)


@jax.custom_jvp
def by_tangent(c, k):
    return jnp.mean(jnp.sin(c * k))


by_tangent.defjvp(
    lambda primals, tangents: (
        by_tangent(*primals),
        jnp.mean(tangents[0] * primals[1] * jnp.cos(primals[0] * primals[1])),
    )
)


def wave(dot, p, c, k):
    return jnp.mean(jnp.sin(c * k))


def wave_and_dot(dot, p, c, k):
    def fn(c, w):
        return jnp.mean(jnp.tanh(dot(c, w)) + jnp.sin(c * k))

    return fn, (c, p["out"] * k)


def called(transform):
    def read(dot, p, c, k):
        fn, args = wave_and_dot(dot, p, c, k)
        return transform(fn)(*args)

    return read


def in_branch(dot, p, c, k):
    return lax.cond(p["in"][0, 0] > -99, lambda c: wave(dot, p, c, k), jnp.sum, c)


def in_scan(dot, p, c, k):
    def step(s, _):
        return s + jnp.mean(jnp.sin(c * k + s / 10)), None

    return lax.scan(step, jnp.zeros((), c.dtype), None, length=3)[0]


def in_slices(dot, p, c, k):
    def step(s, row):
        return s + jnp.mean(jnp.sin(row * k + s / 10)), None

    return lax.scan(step, jnp.zeros((), c.dtype), c)[0]


READS = {
    "elementwise": wave,
    "contraction": lambda dot, p, c, k: jnp.mean(jnp.tanh(dot(c, p["out"] * k))),
    "jit": called(jax.jit),
    "remat": called(jax.checkpoint),
    "custom_vjp": lambda dot, p, c, k: by_rule(c, jnp.asarray(k, c.dtype)),
    "custom_jvp": lambda dot, p, c, k: by_tangent(c, jnp.asarray(k, c.dtype)),
    "cond": in_branch,
    "scan": in_scan,
    "slices of a scan": in_slices,
    "slices": lambda dot, p, c, k: jnp.mean(jnp.sin(c[:, :12] * k) - c[:, 4:] * k),
    "normed": lambda dot, p, c, k: jnp.mean(jnp.tanh(dot(layer_norm(c), p["out"] * k))),
}


def read_often(read, times: int = 10):
    """Many readers whose cotangents nearly cancel."""

    def program(dot, p, x):
        c = dot(x, p["in"])
        return sum((-1) ** i * read(dot, p, c, 1 + i / 41) for i in range(times))

    return program


def beside_a_bias(dot, p, x):
    c = dot(x, p["in"])
    moved = jnp.zeros(16, c.dtype) - c
    return jnp.mean(jnp.sin(moved) + 1.01 * jnp.sin(c) + 0.01 * c)


def in_a_stream(dot, p, x):
    c = dot(x, p["in"])
    stream = 0.01 * jnp.sin(jnp.cumsum(p["in"], 0)[: len(c)])
    return jnp.mean(jnp.sin(stream + c) * jnp.cos(stream) - 1.01 * jnp.sin(c + 0.01))


SIGNS = (-1.0) ** np.arange(64)
FREQUENCIES = 1 + np.arange(64) / 97


def repeated(repeat, low: bool):
    """One value that is shown 64 times."""

    def program(dot, p, x):
        c = repeat(dot(x, p["in"]))
        waves = jnp.tanh(dot(c, p["out"])) if low else jnp.sin(c)
        scale = (SIGNS * FREQUENCIES).astype(x.dtype)[:, None, None]
        return jnp.mean(waves.reshape(64, 8, 16) ** 2 * scale + waves.sum() / 64)

    return program


def over_loop(loop):
    """All iterations read one value."""

    def program(dot, p, x):
        c = dot(x, p["in"])
        ks = jnp.asarray(np.stack([SIGNS, FREQUENCIES], 1), x.dtype)
        return loop(lambda k: k[0] * jnp.mean(jnp.sin(c * k[1])), ks)

    return program


SHARED = {
    "transport in a scan": transport(True),
    "transport": transport(False),
    **{f"read often, {name}": read_often(read) for name, read in READS.items()},
    "beside a bias": beside_a_bias,
    "in a stream": in_a_stream,
    "read 96 times": read_often(wave, 96),
    **{
        f"{name}, {'contracted' if low else 'computed with'}": repeated(repeat, low)
        for low in (False, True)
        for name, repeat in {
            "gather": lambda c: c[np.arange(512) % 8],
            "broadcast": lambda c: jnp.tile(c[None], (64, 1, 1)).reshape(512, 16),
        }.items()
    },
    "vmap": over_loop(lambda fn, ks: jnp.sum(jax.vmap(fn)(ks))),
    "map": over_loop(lambda fn, ks: jnp.sum(lax.map(fn, ks))),
    "fori_loop": over_loop(
        lambda fn, ks: lax.fori_loop(
            0, 64, lambda i, s: s + fn(ks[i]), jnp.zeros((), ks.dtype)
        )
    ),
}


# ------------------------------------- what looks exact, and what is read out of sight

START = np.asarray(values(8, 16, seed=9)) * 30 + 300
START[0, 0] = 16384.0  # the largest number, and exact in 16 bits
TABLE = jax.device_put(START.astype(np.float16))


def from_constants(dot, p, x):
    """A loop that starts from numbers of which the largest is exact in 16 bits."""

    def step(h, _):
        return dot(h, p["in"]), jnp.sum(jnp.sin(h) * x)

    return jnp.sum(lax.scan(step, jnp.asarray(START, x.dtype), None, length=1)[1])


def beside_a_table(put_together):
    """A product beside a table of float16 numbers, the largest of them exact."""

    def program(dot, p, x):
        table = TABLE.astype(x.dtype)
        both = put_together(dot(x, p["in"]), table)
        return jnp.sum(jnp.sin(both[..., :4, :8]) * jnp.sin(both[..., :4, -8:]))

    return program


PUT_TOGETHER = {
    "where": lambda a, table: jnp.where(np.arange(16) % 3 == 0, a, table),
    "concatenate": lambda a, table: jnp.concatenate([table, a], 1),
    "update": lambda a, table: lax.dynamic_update_slice(table, a[:, :2], (0, 3)),
}


def ruled(dot, differentiated):
    """A product by a rule that reads the cosine of what the function multiplies."""

    def forward(h, w):
        return dot(h, w)

    def rule(h, w, cotangent):
        return dot(cotangent, w.T) * jnp.cos(h), dot(h.T, cotangent)

    return differentiated(forward, rule)


def by_author(differentiated):
    def program(dot, p, x):
        product = ruled(dot, differentiated)
        return jnp.sum(jnp.tanh(product(jnp.sin(x) * 30 + 300, p["in"]) / 300))

    return program


def by_gradient(forward, rule):
    @jax.custom_gradient
    def fn(h, w):
        return forward(h, w), lambda ct: rule(h, w, ct)

    return fn


def by_jvp(forward, rule):
    fn = jax.custom_jvp(forward)

    @fn.defjvp
    def _(args, moves):
        return fn(*args), moves[0] * jnp.cos(args[0])

    return fn


def in_a_scan(differentiated):
    def program(dot, p, x):
        product = ruled(dot, differentiated)

        def step(h, _):
            return 300 + 30 * jnp.tanh(product(h, p["in"]) / 300), None

        h = lax.scan(step, x + 300, None, length=3)[0]
        return jnp.sum(h * WEIGHTS.astype(x.dtype))

    return program


def in_the_rule_alone(dot, p, x):
    """An operand that the function leaves out, and a product elsewhere reads."""

    def forward(h, w):
        return w[0] * jnp.ones_like(h)

    def rule(h, w, cotangent):
        return cotangent * jnp.cos(h), jnp.sum(cotangent * jnp.cos(h), 0)[None] * w

    read = with_backward(forward, rule)

    def step(s, h):
        return s + jnp.sum(dot(h, p["out"]) / 300), jnp.sum(read(h, p["in"]))

    large = jnp.sin(x)[None] * jnp.arange(10.0, 13.0)[:, None, None] * 10 + 300
    total, sums = lax.scan(step, jnp.zeros((), x.dtype), large)
    return total + jnp.sum(sums)


def by_residual(made):
    """A forward rule that hands on something made, which only a product reads there."""

    def program(dot, p, x):
        def forward(h, w):
            kept = made(h)
            return dot(kept.reshape(h.shape), w), (kept, w)

        def backward(residuals, cotangent):
            kept, w = residuals
            h = kept.reshape(cotangent.shape)
            return dot(cotangent, w.T) * jnp.cos(h), dot(h.T, cotangent)

        product = jax.custom_vjp(lambda h, w: forward(h, w)[0])
        product.defvjp(forward, backward)
        return jnp.sum(jnp.tanh(product(jnp.sin(x) * 30 + 300, p["in"]) / 300))

    return program


MADE = {
    "reshaped": lambda h: h.reshape(4, 2, 16),
    "jit": jax.jit(lambda h: h[:, None]),
    "remat": jax.checkpoint(lambda h: h[:, None]),
    "scan": lambda h: lax.scan(lambda _, row: (None, row), None, h)[1],
}

RULES = {
    "custom_vjp": with_backward,
    "custom_gradient": by_gradient,
    "custom_jvp": by_jvp,
}


def nearly_equal(choose):
    """The larger of numbers that are close, which only a product reads."""

    def program(dot, p, x):
        a, b = dot(x, p["in"]), dot(x, p["out"])
        close = jnp.stack([jax.nn.sigmoid(a + k * b / 100) for k in range(3)])
        return jnp.sum(dot(choose(close), p["in"]) * WEIGHTS.astype(x.dtype))

    return program


CHOOSE = {
    "max": lambda close: jnp.maximum(close[0], close[1]),
    "min": lambda close: jnp.minimum(close[0], close[1]),
    "reduce_max": lambda close: jnp.max(close, 0),
    "clip": lambda close: jnp.clip(close[0], close[1], 1.01 * close[2]),
    "cummax": lambda close: lax.cummax(close)[-1],
    "reduce_window_max": lambda close: lax.reduce_window(
        close, -jnp.inf, lax.max, (3, 1, 1), (3, 1, 1), "VALID"
    )[0],
}


def normed_over_axis(dot, p, x):
    """A batch norm with a mean over a mapped axis."""

    def norm(x):
        h = dot(x[None], p["in"])[0]
        mean = lax.pmean(h, "batch")
        variance = lax.pmean(h * h, "batch") - mean * mean
        return (h - mean) * lax.rsqrt(variance + 1e-5)

    normed = jax.vmap(norm, axis_name="batch")(x + 3)
    return jnp.mean(dot(normed, p["out"]) ** 2)


READ = {
    "from constants": from_constants,
    **{f"table, {k}": beside_a_table(put) for k, put in PUT_TOGETHER.items()},
    **{f"rule, {k}": by_author(rule) for k, rule in RULES.items()},
    **{f"rule in a scan, {k}": in_a_scan(rule) for k, rule in RULES.items()},
    "read in a rule alone": in_the_rule_alone,
    **{f"residual, {k}": by_residual(made) for k, made in MADE.items()},
    **{f"nearly equal, {k}": nearly_equal(choose) for k, choose in CHOOSE.items()},
    "normed over an axis": normed_over_axis,
}


# ------------------------------------------------------- `amp` inside of `jax.vmap`


def looked_up(wrap, dot, p, x):
    """A product that all examples share, of which each reads a row."""

    def one(p, i):
        table = dot(p["in"], p["out"])
        return jnp.sum(dot(table[i][None], p["pair"]))

    ids = jnp.arange(4000) % 3
    return jnp.mean(jax.vmap(wrap(one), (None, 0))(p, ids))


def averaged(wrap, dot, p, x):
    """A mean over a mapped axis, of a product that has another reader."""

    def one(p, x):
        h = dot(x[None], p["in"])[0]
        return jnp.sin(lax.pmean(h, "batch")) * h

    rows = jnp.tile(x, (200, 1)) + 3
    mapped = jax.vmap(wrap(one), (None, 0), axis_name="batch")
    return jnp.sum(mapped(p, rows) ** 2 * WEIGHTS.astype(x.dtype)) / 256


def summed(wrap, dot, p, x):
    """The same of a product that nothing else reads."""

    def one(p, x):
        return lax.psum(dot(x[None], p["in"])[0], "batch") / 1600

    rows = jnp.tile(x, (200, 1))
    mapped = jax.vmap(wrap(one), (None, 0), axis_name="batch")
    return jnp.sum(jnp.sin(20 * mapped(p, rows))) / 16


MAPPED = {
    "looked up": looked_up,
    "averaged": averaged,
    "summed": summed,
}


# ------------------------------------------------------------------------- the tests


def gradient_errors(
    program: Any, dtype: str, inside: bool = False, **options: Any
) -> tuple[Any, Any]:
    """The error of each leaf's gradient: of the mixed program, and of the oracle's.

    A program that has `amp` `inside` of it is given what to wrap by."""

    def gradient(dot, wrap=lambda fn: fn):
        def fn(p, x):
            return program(wrap, dot, p, x) if inside else program(dot, p, x)

        return jax.jit(jax.grad(fn if inside else wrap(fn), (0, 1)))

    with enable_x64(True):
        wide = jax.tree.map(lambda a: a.astype(np.float64), (P, X))
        exact = gradient(jnp.matmul)(*wide)
    mixed = gradient(jnp.matmul, lambda fn: amp(fn, compute_dtype=dtype, **options))(
        P, X
    )
    oracle = gradient(rounding_dot(dtype))(P, X)

    def errors(found):
        pairs = zip(jax.tree.leaves(found), jax.tree.leaves(exact), strict=True)
        return np.array([_distance(a, b) for a, b in pairs])

    return errors(mixed), errors(oracle)


def _distance(found: Any, exact: Any) -> float:
    size = np.linalg.norm(exact)
    gap = np.linalg.norm(np.asarray(found, np.float64) - np.asarray(exact))
    return float(gap / size) if size else float(gap)


def is_as_good(program: Any, dtype: str, **options: Any) -> None:
    mixed, oracle = gradient_errors(program, dtype, **options)
    assert np.isfinite(oracle).all() and oracle.max() < 0.3, "an ill-posed program"
    floor = FLOOR * float(jnp.finfo(dtype).eps) / 2
    assert (mixed <= FACTOR * np.maximum(oracle, floor)).all(), (mixed, oracle)


@pytest.mark.sample(8)
@pytest.mark.parametrize("program", SUMS.values(), ids=SUMS.keys())
@pytest.mark.parametrize(
    "dtype", ["bfloat16", pytest.param("float16", marks=pytest.mark.rest)]
)
def test_sums_are_not_rounded(program, dtype):
    is_as_good(program, dtype)


@pytest.mark.sample(8)
@pytest.mark.parametrize("program", SHARED.values(), ids=SHARED.keys())
@pytest.mark.parametrize(
    "dtype", ["bfloat16", pytest.param("float16", marks=pytest.mark.rest)]
)
def test_cotangents_add_up_in_full(program, dtype):
    is_as_good(program, dtype)


@pytest.mark.sample(5)
@pytest.mark.parametrize("program", READ.values(), ids=READ.keys())
@pytest.mark.parametrize("dtype", DTYPES)
def test_what_reads_a_value_reads_it_as_it_is(program, dtype):
    is_as_good(program, dtype)


@pytest.mark.parametrize("program", MAPPED.values(), ids=MAPPED.keys())
@pytest.mark.parametrize("dtype", DTYPES)
def test_sums_over_a_mapped_axis_are_made_in_full(program, dtype):
    is_as_good(program, dtype, inside=True)


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_condition_that_ranks_its_carry_reads_it_as_it_is(dtype):
    close = jnp.full((1, 16), 300.0).at[0, 3].add(0.01)  # all the same in 16 bits

    def fn(w, h):
        def goes_on(state):
            i, h = state
            return (i < 10) & (jnp.argmax(h[0]) != 3)

        def step(state):
            i, h = state
            return i + 1, h @ w

        return lax.while_loop(goes_on, step, (0, h))[0]

    assert amp(fn, compute_dtype=dtype)(jnp.eye(16), close) == 0


def in_a_carry(w, x):
    return lax.scan(lambda h, _: (h @ w + x[:16] @ w, None), w @ w, None, length=2)[0]


MOVED = {
    "concatenate": lambda w, x: jnp.concatenate([w @ w, x @ w]),
    "stack": lambda w, x: jnp.stack([w @ w, x @ w]),
    "where": lambda w, x: jnp.where(x > 0, w @ w, x @ w),
    "update": lambda w, x: lax.dynamic_update_slice(x @ w, (w @ w)[:2], (1, 0)),
    "update of it": lambda w, x: lax.dynamic_update_slice(w @ w, (x @ w)[:2], (1, 0)),
    "index": lambda w, x: (w @ w)[jnp.argmax(x[0])][None],
    "cond": lambda w, x: lax.cond(x[0, 0] > 0, lambda: w @ w, lambda: x @ w),
    "carry": in_a_carry,
}


def by_arguments(mixed, one, w, x):
    return jax.vmap(mixed(one), (None, 0))(w, x)


def closed_over(mixed, one, w, x):
    return jax.vmap(mixed(lambda x: one(w, x)))(x)


def by_integers(mixed, one, w, x):
    return jax.vmap(mixed(lambda w, i: one(w, x[i])), (None, 0))(w, jnp.arange(8))


def in_two_maps(mixed, one, w, x):
    inner = jax.vmap(mixed(one), (None, 0))
    return jax.vmap(inner, (0, None))(jnp.stack([w, 2 * w]), x)


@jax.custom_jvp
def as_it_is(x):
    return x


as_it_is.defjvp(lambda primals, tangents: (primals[0], tangents[0]))


def known_to_the_map(mixed, one, w, x):
    return jax.vmap(lambda x: mixed(one)(as_it_is(w), x))(x)


WAYS = (by_arguments, closed_over, by_integers, in_two_maps, known_to_the_map)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("move", MOVED.values(), ids=MOVED.keys())
def test_cotangents_of_what_all_examples_share_add_up_in_full(move, way):
    """Whatever is done with it, over the whole batch of a `jax.vmap` around `amp`."""
    mixed = functools.partial(amp, compute_dtype="bfloat16")

    def one(w, x):
        return jnp.sum(move(w, jnp.tile(x, (16, 1))) @ w)

    def loss(w, x):
        return jnp.mean(way(mixed, one, w, x))

    eqns = measure.walk(jax.make_jaxpr(jax.grad(loss))(P["in"], X))
    sums = {
        eqn.outvars[0].aval.dtype.name
        for eqn, _ in eqns
        if "sum" in eqn.primitive.name or "scatter-add" in eqn.primitive.name
    }
    assert sums == {"float32"}


def test_gradients_of_single_examples_keep_what_they_keep_alone():
    """A gradient inside of the `jax.vmap` sums over no examples."""

    def one(w, x):
        return jnp.sum(jnp.where(x > 0, w @ w, jnp.tile(x, (16, 1)) @ w) @ w)

    gradient = jax.grad(amp(one, compute_dtype="bfloat16"))
    mapped = jax.make_jaxpr(jax.vmap(gradient, (None, 0)))(P["in"], X)
    alone = jax.make_jaxpr(gradient)(P["in"], X[0])
    assert measure.casts(mapped) == measure.casts(alone)


@pytest.mark.parametrize("stride", [1, 2, 3])
def test_cotangents_of_windows_add_up_in_full_where_they_overlap(stride):
    def fn(w, x):
        pooled = lax.reduce_window(
            x @ w, -jnp.inf, lax.max, (3, 3), (stride, stride), "SAME"
        )
        return jnp.sum((pooled @ w[: pooled.shape[1]]) ** 2)

    gradient = jax.make_jaxpr(jax.grad(amp(fn, compute_dtype="bfloat16")))
    (made,) = (
        eqn.outvars[0].aval
        for eqn, _ in measure.walk(gradient(P["in"], X))
        if eqn.primitive is lax.select_and_scatter_add_p
    )
    assert made.dtype == ("bfloat16" if stride == 3 else "float32")


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("bias", [True, False], ids=["bias", "stream"])
def test_tangents_are_not_rounded(dtype, bias):
    """In forward mode, what is added to a product moves as it is."""

    def fn(x, b):
        h = jnp.tanh(x @ P["in"])
        stream = jnp.cos(h) * b * 1e-3
        moved = h @ P["out"] + b
        out = layer_norm(moved if bias else stream + moved)
        return out + jnp.sin(stream)

    b = jnp.linspace(-1, 1, 16)
    moves = jnp.zeros_like(X), 300 + b

    def tangent(fn):
        return jax.jit(lambda: jax.jvp(fn, (X, b), moves)[1])()

    mixed, exact = tangent(amp(fn, compute_dtype=dtype)), tangent(fn)
    assert _distance(mixed, exact) < 4 * jnp.finfo(dtype).eps


@pytest.mark.parametrize("dtype", DTYPES)
def test_all_readers_of_a_result_read_one_number(dtype):
    """Also in the compiled program: a loss, and the same loss made outside of it."""

    def cross_entropy(logits):
        return jax.nn.logsumexp(logits, -1) - jnp.max(logits, -1)

    def fn(p, x):
        logits = 8 * (jnp.tanh(x @ p["in"]) @ p["out"])
        return jnp.mean(cross_entropy(logits)), logits

    mixed = jax.value_and_grad(amp(fn, compute_dtype=dtype), has_aux=True)
    (loss, logits), _ = jax.jit(mixed)(P, X)
    np.testing.assert_allclose(loss, jnp.mean(cross_entropy(logits)), rtol=1e-5)


def test_cotangents_are_rounded_by_casts_alone():
    """A TPU fuses these with the contractions that read them."""

    def fn(w, x):
        return jnp.sum(jnp.tanh(jnp.tanh(x @ w) @ w))

    mixed = amp(fn, compute_dtype="bfloat16")
    w, x = jnp.eye(3), jnp.ones((2, 3))

    def roundings(fn):
        eqns = (eqn for eqn, _ in measure.walk(jax.make_jaxpr(fn)(w, x)))
        return sum(eqn.primitive.name == "reduce_precision" for eqn in eqns)

    assert roundings(mixed) == roundings(jax.grad(mixed, (0, 1))) == 2


@pytest.mark.parametrize("dtype", DTYPES)
def test_what_the_backward_pass_keeps_of_sums(dtype):
    """Results of contractions are kept low; of sums, only those that gates read."""

    def kept(fn):
        low = measure.saved(amp(fn, compute_dtype=dtype), P, X)
        return {a.dtype.name for a in low if a.shape == (8, 16) and a is not X}

    def gates(p, x):
        gate = jax.nn.sigmoid(x @ p["in"] + jnp.tanh(x) @ p["out"])
        return jnp.mean(jnp.sin(jnp.exp(gate)))

    def stream(p, x):
        return jnp.mean(jnp.sin(jnp.exp(jnp.cos(x) + jnp.tanh(x) @ p["out"])))

    assert kept(gates) == {dtype}
    assert "float32" in kept(stream)
