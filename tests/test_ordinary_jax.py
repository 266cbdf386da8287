"""What comes out of amp is ordinary JAX: whatever takes the function takes it too."""

import functools

import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
import pytest
from jax import lax
from jax.custom_batching import custom_vmap
from jax.experimental import sparse
from jax.experimental.jet import jet
from jax.experimental.ode import odeint
from jax.sharding import AxisType, PartitionSpec as P

from benchmarks import measure
from jaxamp_like import AmpError, amp

from .constructs import CONSTRUCTS, identity
from .hi_primitives import flags
from .test_structure import loss

pytestmark = [pytest.mark.rest, pytest.mark.sample(5)]

W = jr.normal(jr.key(0), (8, 8)) / 4
X = jr.normal(jr.key(1), (16, 8))

# Its place since JAX 0.8, and the one before.
enable_x64 = (
    jax.enable_x64 if hasattr(jax, "enable_x64") else jax.experimental.enable_x64
)

ways = pytest.mark.parametrize("is_lean", (False, True), ids=("amp", "lean"))


def low(fn, is_lean=False):
    return amp(fn, compute_dtype="bfloat16", lean=is_lean)


def assert_near(ours, true, share=0.05):
    assert jax.tree.structure(ours) == jax.tree.structure(true)
    for a, b in zip(jax.tree.leaves(ours), jax.tree.leaves(true), strict=True):
        assert a.dtype == b.dtype and a.shape == b.shape
        np.testing.assert_allclose(a, b, rtol=0, atol=share * np.max(np.abs(b)))


def contraction_dtypes(fn, *args):
    return set(measure.contraction_flops(jax.make_jaxpr(fn)(*args)))


# Views: of literals, and at places that are only known when they are read.


def sharded(fn, check_vma=True):
    mesh = jax.make_mesh((2,), ("i",), axis_types=(AxisType.Auto,))
    return jax.shard_map(
        fn, mesh=mesh, in_specs=(P(), P("i")), out_specs=P("i"), check_vma=check_vma
    )


BETWEEN = {
    "gelu": jax.nn.gelu,
    "relu": jax.nn.relu,
    "multiple": lambda h: 2.0 * h,
    "maximum": lambda h: jnp.maximum(h, 0.0),
}


@pytest.mark.sample(3)
@ways
@pytest.mark.parametrize("between", BETWEEN.values(), ids=BETWEEN)
def test_a_literal_that_is_marked_as_varying(between, is_lean):
    """Inside of `shard_map` a literal is first made to vary over the mesh."""
    fn = sharded(lambda w, x: between(x @ w) @ w)
    mixed = low(fn, is_lean)
    assert contraction_dtypes(mixed, W, X) == {"bfloat16"}
    assert_near(jax.jit(mixed)(W, X), jax.jit(fn)(W, X))


def test_a_literal_that_is_broadcast():
    def fn(w, x):
        return (x @ w * jnp.ones((1,))) @ w

    assert_near(low(fn)(W, X), fn(W, X))


def microbatches(w, x):
    def step(i, total):
        part = lax.dynamic_slice(x, (4 * i, 0), (4, 8))
        return total + jnp.sin(part @ w[:, :6])

    return jnp.sum(lax.fori_loop(0, 4, step, jnp.zeros((4, 6))))


def layers(ws, x):
    return jnp.sum(lax.fori_loop(0, 3, lambda i, x: jnp.sin(x @ ws[i]), x))


SLICED = {
    "data": (microbatches, (W, X), (4, 4, 8)),
    "layers": (layers, (jnp.stack([W] * 3), X), (3, 8, 8)),
}


@ways
@pytest.mark.parametrize(("fn", "args", "slices"), SLICED.values(), ids=SLICED)
def test_a_loop_over_slices(fn, args, slices, is_lean):
    mixed = low(fn, is_lean)
    assert contraction_dtypes(mixed, *args) == {"bfloat16"}
    ours, true = (jax.jit(jax.grad(f, argnums=(0, 1)))(*args) for f in (mixed, fn))
    assert_near(ours, true)
    # Neither the slices of all iterations nor their casts: both can be had again.
    assert slices in [aval.shape for aval in measure.saved(fn, *args)]
    assert slices not in [aval.shape for aval in measure.saved(mixed, *args)]


# Derivative rules of the author in sharded code.


@pytest.mark.sample(2)
@pytest.mark.parametrize("check_vma", (True, False))
def test_a_reverse_rule_with_an_unused_result_in_shard_map(check_vma):
    @jax.custom_vjp
    def product(a, b):
        return a @ b, jnp.sum(a)

    def backward(residuals, cotangents):
        a, b = residuals
        ct, unused = cotangents
        return 2 * ct @ b.T + unused, 2 * a.T @ ct

    product.defvjp(lambda a, b: (product(a, b), (a, b)), backward)
    fn = sharded(lambda w, x: product(x, w * jnp.ones_like(x[:1, :1]))[0], check_vma)
    mixed = low(fn)
    assert_near(mixed(W, X), jax.jit(fn)(W, X))  # not even jitted

    def grad(fn):
        return jax.grad(lambda w, x: jnp.sum(fn(w, x) ** 2), argnums=(0, 1))

    true = jax.jit(grad(fn))(W, X)
    assert_near(jax.jit(grad(mixed))(W, X), true)
    assert contraction_dtypes(grad(mixed), W, X) == {"bfloat16"}


# Other interpreters of programs.

LEAK_FREE = "plain jit scan cond remat custom_jvp custom_vjp custom_vmap_batched"


@pytest.mark.sample(4)
@pytest.mark.cross("case", is_lean=2)
@ways
@pytest.mark.parametrize(
    "case", [c for c in CONSTRUCTS if c.name in LEAK_FREE.split()], ids=str
)
def test_nothing_is_held_beyond_its_trace(case, is_lean):
    with jax.checking_leaks():
        fn = low(case.build(identity), is_lean)
        jax.eval_shape(fn, *case.args())
        if case.differentiable:
            grad = jax.grad(lambda *args: loss(fn(*args)), case.argnums())
            jax.eval_shape(jax.jit(grad), *case.args())


def looped(w, x):
    return lax.scan(lambda x, _: (x @ w, None), x, length=3)[0]


@ways
@pytest.mark.parametrize("fn", (looped, lambda w, x: x @ w @ w), ids=("scan", "plain"))
def test_linear_transpose(fn, is_lean):
    def transposed(fn):
        def of(w, ct):
            return jax.linear_transpose(functools.partial(fn, w), ct)(ct)[0]

        return jax.jit(of)

    mixed = transposed(low(fn, is_lean))
    assert_near(mixed(W, X), transposed(fn)(W, X))
    assert contraction_dtypes(mixed, W, X) == {"bfloat16"}


def test_grad_through_a_solve_with_a_linear_loop():
    def solution(fn):
        def of(w):
            b = jnp.ones(8)
            operator = lambda v: v + 0.1 * fn(w, v[None])[0]  # noqa: E731
            return jnp.sum(jax.scipy.sparse.linalg.gmres(operator, b, tol=1e-2)[0])

        return jax.jit(jax.grad(of))

    assert_near(solution(low(looped))(W), solution(looped)(W), share=0.1)


INTERPRETED = {
    "plain": lambda w, x: jnp.tanh(x @ w) @ w,
    "jit": lambda w, x: jax.jit(lambda x: jnp.tanh(x @ w))(x) @ w,
    "residual": lambda w, x: x + jnp.exp(-jnp.square(x @ w)) @ w.T,
}


@ways
@pytest.mark.parametrize("fn", INTERPRETED.values(), ids=INTERPRETED)
def test_jet(fn, is_lean):
    def terms(fn):
        series = ((jnp.cos(X), jnp.zeros_like(X)),)
        return jax.jit(lambda w: jet(functools.partial(fn, w), (X,), series))(W)

    assert_near(terms(low(fn, is_lean)), terms(fn), share=0.1)


def streamed(w, x):
    return jnp.sum(INTERPRETED["residual"](w, x) ** 2)


def normed(w, x):
    h = jnp.tanh(x @ w)
    h = h - jnp.mean(h, -1, keepdims=True)
    h = h * lax.rsqrt(jnp.mean(h * h, -1, keepdims=True) + 1e-5)
    return jnp.sum(jax.nn.gelu(h @ w) ** 2)


@pytest.mark.sample(2)
@ways
@pytest.mark.parametrize("fn", (streamed, normed))
def test_jet_of_a_gradient(fn, is_lean):
    """Goes through what `amp` makes for the backward pass, with its own primitives."""

    def terms(fn):
        series = ((jnp.cos(X), jnp.zeros_like(X)),)
        gradient = jax.grad(fn, argnums=1)
        return jax.jit(lambda w: jet(lambda x: gradient(w, x), (X,), series))(W)

    (value, series), (exact, others) = terms(low(fn, is_lean)), terms(fn)
    for made, want in zip((value, *series), (exact, *others), strict=True):
        assert_near(made, want, share=0.1)


@pytest.mark.sample(2)
@ways
@pytest.mark.parametrize("layout", (sparse.BCOO, sparse.BCSR))
# That a backend has no sparse kernel for 16 bits, and takes another.
@pytest.mark.filterwarnings("ignore::jax.experimental.sparse.SparseEfficiencyWarning")
def test_sparsify(layout, is_lean):
    matrix = layout.fromdense(jnp.where(X > 0, X, 0))

    def fn(w, x):
        return (x @ w) * 2.0

    ours = jax.jit(sparse.sparsify(low(fn, is_lean)))(W, matrix)
    assert_near(ours, jax.jit(sparse.sparsify(fn))(W, matrix))


# Rules of the author for `vmap`.


def test_the_rule_of_a_custom_vmap_is_rewritten():
    @custom_vmap
    def product(w, x):
        return x @ w, jnp.sum(w)

    @product.def_vmap
    def _(size, batched, w, x):
        assert batched == [False, True] and x.dtype == jnp.float32
        doubled = 2 * (x.reshape(-1, 8) @ w)  # to tell it from the function
        return (doubled.reshape(size, -1, 8), jnp.sum(w)), (True, False)

    def mapped(fn):
        return jax.vmap(fn, (None, 0), (0, None))

    def grad(fn):
        return jax.grad(lambda *args: jnp.sum(jnp.sin(mapped(fn)(*args)[0])), (0, 1))

    mixed, x = low(product), X.reshape(4, 4, 8)
    for transform in (mapped, grad):
        ours, true = transform(mixed), transform(product)
        assert contraction_dtypes(ours, W, x) == {"bfloat16"}
        assert_near(ours(W, x), true(W, x))
    assert contraction_dtypes(jax.jit(mapped(jax.jit(mixed))), W, x) == {"bfloat16"}


# Weak types.

WEAK = {
    "contraction": lambda s, w: jnp.full((3, 3), 2.0) @ jnp.full((3, 3), 2.0),
    "after a contraction": lambda s, w: jnp.tanh(jnp.dot(s, s)) * s,
    "scalar": lambda s, w: jnp.sin(s) * 2.0,
    "strong": lambda s, w: (w @ w) * s,
    "literal": lambda s, w: jnp.asarray(2.0),
    "jit": lambda s, w: jax.jit(lambda s: (s * 2, jnp.dot(s, s)))(s),
    "remat": lambda s, w: jax.checkpoint(lambda s, w: (s * 2, w @ w * s))(s, w),
    "cond": lambda s, w: lax.cond(w[0, 0] > 0, lambda s: jnp.dot(s, s), lambda s: s, s),
    "scan": lambda s, w: lax.scan(
        lambda c, _: ((c[0] * 0.5, c[1] @ w), c[0] + 1), (s, w), length=3
    ),
}


@ways
@pytest.mark.parametrize("fn", WEAK.values(), ids=WEAK)
def test_weak_types_survive(fn, is_lean):
    s = jnp.asarray(2.0)
    assert s.weak_type

    def types(fn):
        def total(s, w):
            return sum(jnp.sum(x) for x in jax.tree.leaves(fn(s, w)))

        out = jax.make_jaxpr(lambda *args: (fn(*args), jax.grad(total, (0, 1))(*args)))
        return [aval.str_short() + str(aval.weak_type) for aval in out(s, W).out_avals]

    assert types(low(fn, is_lean)) == types(fn)


# What a function with a derivative rule of its author closes over.

TABLE = jnp.linspace(0, 1, 32).reshape(4, 8)


def with_table(table):
    """A function with a rule in which `table` has no part."""

    @jax.custom_vjp
    def fn(w):
        return jnp.sum((w @ table.T) ** 2)

    fn.defvjp(lambda w: (fn(w), w), lambda w, ct: (ct * 3.0 * w,))
    return fn


@ways
@pytest.mark.parametrize("wrap", (identity, jax.jit, jax.checkpoint))
def test_a_rule_that_closes_over_an_array(wrap, is_lean):
    fn = wrap(with_table(TABLE))
    for ours in (jax.grad(low(fn, is_lean)), low(jax.grad(fn), is_lean)):
        np.testing.assert_array_equal(ours(W), 3.0 * W)


def test_a_rule_that_closes_over_what_is_differentiated():
    def fn(w):
        return with_table(TABLE * w[0, 0])(w)

    with pytest.raises(AmpError, match="closes over"):
        jax.grad(low(fn))(W)


def solved(w, x, w_is_given=True):
    """A fixed point with implicit differentiation, as jaxopt makes one."""

    def step(z, *ws):
        return jnp.tanh(x @ (ws[0] if ws else w) + z)

    @jax.custom_vjp
    def solve(z, *ws):
        return lax.fori_loop(0, 3, lambda _, z: step(z, *ws), z)

    def bwd(residuals, ct):
        z, *ws = residuals
        return ct, *jax.vjp(lambda *ws: step(z, *ws), *ws)[1](ct)

    solve.defvjp(lambda z, *ws: (solve(z, *ws), (solve(z, *ws), *ws)), bwd)
    return jnp.sum(solve(jnp.zeros_like(x @ w), *((w,) * w_is_given)))


def test_a_rule_that_closes_over_a_value_of_the_function():
    """The value is gone when the rule runs, under `jax.jit` too."""
    with pytest.raises(AmpError, match=r"`amp\(jax.grad\(fn\)\)`"):
        jax.grad(low(solved))(W, X)
    np.testing.assert_allclose(
        low(jax.grad(solved))(W, X), jax.grad(solved)(W, X), rtol=0.05, atol=0.05
    )


def test_a_rule_that_closes_over_what_is_differentiated_within():
    gradient = low(jax.grad(lambda w, x: solved(w, x, w_is_given=False)))
    with flags(), pytest.raises(jax.errors.UnexpectedTracerError) as caught:
        gradient(W, X)  # with these on, JAX says itself what to do
    assert any("as an argument" in note for note in caught.value.__notes__)


def test_gradient_through_odeint():
    def loss(w, y):
        times = jnp.linspace(0.0, 1.0, 3)
        return jnp.sum(odeint(lambda y, t, w: jnp.tanh(w @ y) - y, y, times, w))

    ours, true = jax.jit(jax.grad(low(loss))), jax.jit(jax.grad(loss))
    assert_near(ours(W, X[0]), true(W, X[0]))


# Operands of two dtypes in one contraction.


@pytest.mark.filterwarnings("ignore:bfloat16 changes nothing")
@pytest.mark.parametrize("other", ("float64", "complex64", "complex128"))
@pytest.mark.parametrize("swap", (False, True))
def test_beside_a_wider_operand_float32_stays(other, swap):
    with enable_x64(True):
        x = X.astype(other)

        def product(w, x):
            return w.T @ x.T if swap else x @ w

        out = low(product)(W, x)
        assert out.dtype == other
        np.testing.assert_array_equal(out, product(W, x))
