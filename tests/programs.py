"""Programs that say much about a policy, and what was decided for them.

`expect` compares every op that makes floats, in order and at any depth, with a list in
which L stands for the compute dtype and F for float32. Casts and ops that only change a
shape are left out of it: where they are is told by the dtypes of the others."""

from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from benchmarks.measure import subjaxprs
from jaxamp_like import amp

DTYPES = ("float16", "bfloat16")
every_dtype = pytest.mark.parametrize("dtype", DTYPES)
FLOAT32_MIN = float(jnp.finfo(jnp.float32).min)

SHAPE_ONLY = """convert_element_type reshape transpose squeeze copy copy_p
    stop_gradient broadcast_in_dim name reduce_precision amp_in_front""".split()


def ops(jaxpr: Any) -> Iterator[tuple[str, str]]:
    """The `(primitive, dtype of its result)` of each op that makes floats, in order."""
    jaxpr = getattr(jaxpr, "jaxpr", jaxpr)
    for eqn in jaxpr.eqns:
        inner = list(subjaxprs(eqn.params))
        for sub in inner:
            yield from ops(sub)
        dtype = eqn.outvars[0].aval.dtype if eqn.outvars else jnp.dtype(bool)
        is_op = not inner and eqn.primitive.name not in SHAPE_ONLY
        if is_op and jnp.issubdtype(dtype, jnp.floating):
            yield eqn.primitive.name, dtype.name


def expect(
    fn: Callable[..., Any], dtype: str, expected: str, *args: Any, policy: Any = None
) -> None:
    """`expected` is like "L dot_general tanh F exp": L and F hold from there on."""
    wanted, now = [], ""
    for word in expected.split():
        if word in ("L", "F"):
            now = dtype if word == "L" else "float32"
        else:
            wanted.append((word, now))
    mixed = amp(fn, compute_dtype=dtype, amp_policy=policy)
    assert list(ops(jax.make_jaxpr(mixed)(*args))) == wanted


def eps(dtype: str) -> float:
    return float(jnp.finfo(dtype).eps)


def error(actual: Any, exact: Any) -> float:
    """The distance of two pytrees, relative to the length of `exact`."""
    flat = [
        np.concatenate(
            [np.ravel(np.asarray(x, np.float64)) for x in jax.tree.leaves(t)]
        )
        for t in (actual, exact)
    ]
    assert np.isfinite(flat[0]).all()
    return float(np.linalg.norm(flat[0] - flat[1]) / np.linalg.norm(flat[1]))


def values(*shape: int, seed: int = 0, scale: float = 1.0) -> jax.Array:
    normal = np.random.default_rng([seed, *shape]).normal(size=shape)
    # Put there as it is: converting would compile a program for each shape.
    return jax.device_put((normal * scale).astype(np.float32))


W = values(8, 8, scale=8**-0.5)
X = values(4, 8)
GAIN, BIAS = values(2, 8)
MASK = jax.device_put(np.tri(4, 8, 2, dtype=bool) & (np.arange(4) > 0)[:, None])
ONE = jnp.ones((1, 1))
WS = jnp.stack([values(8, 8, seed=i, scale=0.3) for i in range(5)])


def between(fn: Callable[..., Any]) -> Callable[..., Any]:
    """`fn` between two contractions: its input is low, its result is read low."""
    return lambda w, x, *args: fn(x @ w, *args) @ w


def layer_norm(x, gain=1.0, bias=0.0):
    mean = jnp.mean(x, -1, keepdims=True)
    variance = jnp.mean((x - mean) ** 2, -1, keepdims=True)
    return (x - mean) * lax.rsqrt(variance + 1e-5) * gain + bias


def masked_softmax(x, mask, fill):
    return jax.nn.softmax(jnp.where(mask, x, fill))


def cross_entropy(logits, labels):
    log_p = jax.nn.log_softmax(logits)
    return -jnp.mean(jnp.take_along_axis(log_p, labels[:, None], 1))


def blocks(h, ws):
    for w in ws:
        h = h + jnp.tanh(h @ w) @ w
    return h


def scanned_blocks(h, ws):
    return lax.scan(lambda h, w: (h + jnp.tanh(h @ w) @ w, None), h, ws)[0]


def lstm(wi, wh, xs):
    def step(carry, x):
        h, c = carry
        i, f, g, o = jnp.split(x @ wi + h @ wh, 4, -1)
        c = jax.nn.sigmoid(f) * c + jax.nn.sigmoid(i) * jnp.tanh(g)
        h = jax.nn.sigmoid(o) * jnp.tanh(c)
        return (h, c), h

    start = jnp.zeros((xs.shape[1], wh.shape[0]))
    return lax.scan(step, (start, start), xs)[1]


def checkpointed(block, ws, x, **options):
    body = jax.checkpoint(block, **options)
    return jnp.sum(lax.scan(lambda x, w: (body(x, w), None), x, ws)[0] ** 2)


def stream(x, w):
    mean = jnp.mean(x, -1, keepdims=True)
    return x + jnp.tanh((x - mean) * lax.rsqrt(jnp.var(x, -1, keepdims=True)) @ w)


@jax.custom_jvp
def waves(x):
    return jnp.sin(x) * x


@waves.defjvp
def _(primals, tangents):
    (x,), (t,) = primals, tangents
    return waves(x), (jnp.sin(x) + jnp.cos(x) * x) * t


@jax.custom_vjp
def dense(x, w):
    return jnp.tanh(x @ w)


def dense_bwd(residuals, ct):
    x, w, y = residuals
    ct = ct * (1 - y * y)
    return ct @ w.T, x.T @ ct


dense.defvjp(lambda x, w: (dense(x, w), (x, w, dense(x, w))), dense_bwd)
