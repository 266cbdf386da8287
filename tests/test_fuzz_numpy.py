"""The fuzzer's NumPy against JAX: indexing, and functions that are more than a name."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import Mesh, PartitionSpec as P

from .fuzz.oracle import Evaluator, as_numpy

X = np.arange(24, dtype=np.float32).reshape(4, 3, 2) - 7.5
ROWS = np.array([2, 0, 2, 9, -1], np.int32)
NEW = np.cos(np.arange(30, dtype=np.float32)).reshape(5, 3, 2)
BATCH = np.stack([X, 2 * X])
MODES = ["clip", "fill", "promise_in_bounds"]


def agree(fn, *args):
    jaxpr = jax.make_jaxpr(fn)(*args)
    got = Evaluator().run(jaxpr, list(map(as_numpy, args)))
    want = jax.tree.leaves(jax.jit(fn)(*args))
    for x, y in zip(got, want, strict=True):
        assert isinstance(x, np.ndarray) and x.dtype == y.dtype and x.shape == y.shape
        np.testing.assert_allclose(x, y, rtol=2e-5, atol=1e-6)


@pytest.mark.parametrize("mode", MODES[:2])
def test_gathers(mode):
    def fn(x, rows):
        return (
            x.at[rows].get(mode=mode),
            x.at[:, rows].get(mode=mode),
            x.at[rows, rows % 3].get(mode=mode),
            x.at[rows, :, 1].get(mode=mode, fill_value=3.0),
            jax.vmap(lambda x, i: x.at[i].get(mode=mode))(x, rows[:4]),
            jnp.take_along_axis(x, jnp.argsort(x, 0), 0, mode=mode),
        )

    agree(fn, X, ROWS)
    agree(jax.vmap(fn), BATCH, np.stack([ROWS, ROWS[::-1]]))


@pytest.mark.parametrize("mode", MODES[:2])
@pytest.mark.parametrize("kind", ["set", "add", "mul", "min", "max"])
def test_scatters(mode, kind):
    def fn(x, rows, new):
        def put(where, new):
            return getattr(where, kind)(new, mode=mode)

        # Which of two updates of one place is the last is nobody's business.
        rows = rows[1:4] if kind == "set" else rows
        new = new[: len(rows)]
        return (
            put(x.at[rows], new),
            put(x.at[:, 1], new[0, 0]),
            put(x.at[rows, 1], new[:, 0]),
            jax.vmap(lambda x, i, y: put(x.at[i], y[0]))(x[:3], rows[:3], new[:3]),
        )

    agree(fn, X, ROWS, NEW)
    agree(jax.vmap(fn), BATCH, np.stack([ROWS, ROWS]), np.stack([NEW, -NEW]))


def test_gradients_of_indexing():
    def loss(x, rows):
        picked = lax.dynamic_slice(x, (rows[0], 0, 0), (2, 3, 1))
        return jnp.sum(jnp.sin(x[rows % 4])) + jnp.sum(picked**3) + jnp.sum(x[1:3] ** 2)

    agree(jax.grad(loss), X, ROWS)
    agree(jax.hessian(lambda x: loss(x, ROWS)), X)


@pytest.mark.parametrize("lower", [True, False])
@pytest.mark.parametrize("options", [{}, {"left_side": True}, {"transpose_a": True}])
def test_other_functions(lower, options):
    def fn(a, b):
        solve = lax.linalg.triangular_solve
        return (
            solve(a + 5 * jnp.eye(3), b, lower=lower, **options),
            lax.cumsum(a, 1, reverse=lower),
            lax.cummax(b, 0),
            jnp.split(a, [1], axis=1),
            jnp.argmax(a, 0),
            jnp.argmin(b),
        )

    a, b = NEW[:3, :, 0], NEW[:3, :, 1]
    agree(fn, a, b)


def test_devices():
    mesh = Mesh(np.array(jax.devices()[:2]), ("data",))

    def body(w, x):
        y = jnp.where(lax.axis_index("data") > 0, jnp.sin(x @ w), x)
        return y + lax.psum(jnp.sum(x), "data"), lax.psum(y, "data")

    def fn(w, x):
        specs = {"in_specs": (P(), P("data")), "out_specs": (P("data"), P())}
        return jax.shard_map(body, mesh=mesh, **specs)(w, x)

    w, x = NEW[0, :, :1] * NEW[1, :, 1], NEW[:4, :, 0]
    agree(fn, w, x)
    agree(jax.grad(lambda *a: sum(jnp.sum(y**2) for y in fn(*a)), (0, 1)), w, x)
