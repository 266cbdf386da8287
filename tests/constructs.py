"""One small function for each way in which JAX nests a program inside a program.

A construct is a *builder*: it takes a wrapper and puts it around each piece of ordinary
code that the construct holds. Built with the identity it is the function as written;
`build(amp)` has amp inside of the construct, `amp(build(identity))` outside of it, and
`amp(build(amp))` both.

Where a construct hands values on (to a carry, a kernel, a callback, a reference), they
come out of a contraction, so that they are low precision under amp and a construct that
can't take them shows it."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, partial
from typing import Any

import equinox as eqx
import equinox.internal as eqxi
import jax
import jax.extend as jex
import jax.numpy as jnp
import jax.random as jr
import numpy as np
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jax.custom_batching import custom_vmap
from jax.custom_derivatives import SymbolicZero, linear_call
from jax.experimental import checkify, io_callback, pallas as pl
from jax.experimental.compute_on import compute_on
from jax.sharding import Mesh, PartitionSpec as P

from .hi_primitives import FLAGS

Fn = Callable[..., Any]
Wrap = Callable[[Fn], Fn]


@dataclass(frozen=True, kw_only=True)
class Construct:
    """A function to build, its arguments, and what amp must make of it.

    - `low`: contractions (equations, at any depth) that must become low precision.
    - `kept`: contractions that stay in the author's dtype: either inside of code that
        can't be rewritten, or asked for by the author with `precision=HIGHEST`.
    - `false_gradient`: the author's derivative rule is deliberately not the derivative,
        so that a gradient shows whose rule made it.
    - `in_solver`: how many of the low ones stand in a linear solve, which the default
      policy leaves as written unless `amp` stands inside of it;
    - `opaque_gradient`: the derivative of an opaque primitive brings contractions that
      nobody wrote, in the dtype of the primitive.
    - `condition`: by how much it amplifies a relative error of what it is given."""

    name: str
    build: Callable[[Wrap], Fn]
    make_args: Callable[[], tuple[Any, ...]]
    low: int
    kept: int
    in_solver: int
    differentiable: bool
    false_gradient: bool
    opaque_gradient: bool
    condition: float

    def args(self) -> tuple[Any, ...]:
        """New arrays each time: a donated argument is deleted by the call."""
        return self.make_args()

    def argnums(self) -> tuple[int, ...]:
        """The arguments that a gradient can be taken of."""
        return tuple(n for n, arg in enumerate(self.args()) if is_float(arg))

    def __str__(self) -> str:
        return self.name


def is_float(x: Any) -> bool:
    dtype = getattr(x, "dtype", None)
    return dtype is not None and jnp.issubdtype(dtype, jnp.floating)


def identity(fn: Fn) -> Fn:
    return fn


CONSTRUCTS: list[Construct] = []

# Before JAX 0.12 some can't be differentiated as written while a flag for
# hi-primitives is on.
TAKES_FLAGS = jax.__version_info__ >= (0, 12) or not any(
    getattr(jax.config, name, False) for name in FLAGS
)


@cache
def values(name: str) -> np.ndarray:
    """Fixed inputs: activations of order 1, and weights that keep them there."""
    rng = np.random.default_rng(0)
    draws = {
        "x": rng.normal(size=(3, 4)),
        "w": rng.normal(size=(4, 4)) / 2,
        "ws": rng.normal(size=(5, 4, 4)) / 2,
        "batch": rng.normal(size=(8, 3, 4)),
        "image": rng.normal(size=(2, 5, 5, 3)),
        "kernel": rng.normal(size=(3, 3, 3, 4)) / 5,
    }
    return draws[name].astype(np.float32)


def default_args() -> tuple[Any, ...]:
    return arrays("x", "w")


def arrays(*names: str) -> tuple[Any, ...]:
    return tuple(jax.device_put(values(name)) for name in names)


def construct(
    make_args: Callable[[], tuple[Any, ...]] = default_args,
    *,
    low: int,
    kept: int = 0,
    in_solver: int = 0,
    differentiable: bool = True,
    false_gradient: bool = False,
    opaque_gradient: bool = False,
    condition: float = 1.0,
    available: bool = True,
) -> Callable[[Callable[[Wrap], Fn]], Callable[[Wrap], Fn]]:
    """Enters a builder into the table."""

    def register(build):
        entry = Construct(
            name=build.__name__,
            build=build,
            make_args=make_args,
            low=low,
            kept=kept,
            in_solver=in_solver,
            differentiable=differentiable,
            false_gradient=false_gradient,
            opaque_gradient=opaque_gradient,
            condition=condition,
        )
        if available:
            CONSTRUCTS.append(entry)
        return build

    return register


def named(name: str) -> Construct:
    (found,) = (entry for entry in CONSTRUCTS if entry.name == name)
    return found


def affine(x, w):
    return jnp.tanh(x @ w)


def dense(cotangent: Any) -> jax.Array:
    """A cotangent that may be a symbolic zero, as an array."""
    if isinstance(cotangent, SymbolicZero):
        return jnp.zeros(cotangent.shape, cotangent.dtype)
    return cotangent


# No structure at all.


@construct(low=1)
def plain(wrap):
    return wrap(affine)


@construct(low=2)
def plain_twice(wrap):
    @wrap
    def fn(x, w):
        with jax.named_scope("first"):
            h = affine(x, w)
        with jax.named_scope("second"):
            return {"out": affine(h, w), "aux": (h, None, x.sum())}

    return fn


@construct(low=1)
def einsum(wrap):
    """The product with a number sums nothing: it is a multiplication."""
    return wrap(lambda x, w: jnp.einsum("ab,bc,->ac", x, w, jnp.float32(0.5)))


@construct(lambda: arrays("batch", "w"), low=2)
def attention(wrap):
    @wrap
    def fn(x, w):
        q, k = x @ w, x
        logits = lax.dot_general(q, k, (((2,), (2,)), ((0,), (0,))))
        mask = jnp.tril(jnp.ones((3, 3), bool))
        return jax.nn.softmax(jnp.where(mask, logits, -1e9), axis=-1)

    return fn


@construct(lambda: arrays("image", "kernel"), low=1)
def conv(wrap):
    @wrap
    def fn(image, kernel):
        return lax.conv_general_dilated(
            image,
            kernel,
            window_strides=(2, 1),
            padding="SAME",
            dimension_numbers=("NHWC", "HWIO", "NHWC"),
        )

    return fn


@construct(lambda: (*arrays("x", "ws"), jnp.array([1, 0, 2, 0, 0])), low=1)
def ragged_dot(wrap):
    return wrap(lambda x, ws, sizes: lax.ragged_dot(x, ws, sizes))


@construct(low=1, kept=1)
def precision_highest(wrap):
    """The author's explicit wish is honoured."""
    return wrap(lambda x, w: jnp.matmul(x @ w, w, precision=lax.Precision.HIGHEST))


# jit.


@construct(low=1)
def jit(wrap):
    return jax.jit(wrap(affine))


@construct(low=2)
def jit_nested(wrap):
    inner = jax.jit(wrap(affine))
    return jax.jit(lambda x, w: inner(inner(x, w), w), keep_unused=True)


@construct(low=1)
def jit_donated(wrap):
    """The derivative needs no value of the donated argument, or none could be taken."""
    return jax.jit(wrap(lambda x, w: x + jnp.tanh(w[:3] @ w)), donate_argnums=0)


@construct(low=2)
def jit_static(wrap):
    @wrap
    def body(x, w, times, activation):
        for _ in range(times):
            x = getattr(jnp, activation)(x @ w)
        return x

    inner = jax.jit(body, static_argnums=2, static_argnames="activation")
    return lambda x, w: inner(x, w, 2, activation="sin")


@construct(low=1)
def jit_shared_literal(wrap):
    """`jnp.where` and its kind are jitted and get their literals as operands."""
    return wrap(lambda x, w: jnp.clip(jnp.where(x > 0, x @ w, -1e9), -2.0, None))


# Loops.


@construct(lambda: arrays("x", "w", "ws"), low=3)
def scan(wrap):
    """Constants, carries and inputs, each of which meets a contraction."""

    @wrap
    def body(carry, w_x, w):
        h, total, n = carry
        h = jnp.tanh(h @ w + h @ w_x)
        return (h, total + h.sum(), n + 1), (h, n)

    def fn(x, w, ws):
        init = wrap(jnp.matmul)(x, w), jnp.zeros(()), 0
        step = partial(body, w=w)
        return lax.scan(lambda c, w_x: step(c, w_x), init, ws)

    return fn


@construct(lambda: arrays("x", "ws"), low=1)
def scan_reversed_unrolled(wrap):
    body = wrap(lambda h, w: (h + jnp.tanh(h @ w), jnp.sum(h)))
    return lambda x, ws: lax.scan(body, x, ws, reverse=True, unroll=2)


@construct(lambda: arrays("ws"), low=1)
def scan_without_carry(wrap):
    body = wrap(lambda _, w: (None, w @ w))
    return lambda ws: lax.scan(body, None, ws)[1]


@construct(low=2)
def scan_of_length_zero(wrap):
    body = wrap(lambda h, _: (h @ jnp.ones((4, 4)), h))

    def fn(x, w):
        return lax.scan(body, wrap(jnp.matmul)(x, w), None, length=0)

    return fn


@construct(lambda: arrays("x", "ws"), low=1)
def scan_nested(wrap):
    inner = wrap(lambda h, w: (jnp.tanh(h @ w), jnp.sum(h)))

    def fn(x, ws):
        def outer(h, scale):
            h, sums = lax.scan(inner, h, ws)
            return h * scale, sums

        return lax.scan(outer, x, jnp.linspace(0.5, 1.0, 3))

    return fn


@construct(lambda: arrays("x", "ws"), low=2)
def scan_swapped_carries(wrap):
    """One step mixes the dtypes of the carries: only a fixed point is consistent."""
    body = wrap(lambda carry, w: ((carry[1], carry[0] @ w, carry[1]), None))

    def fn(x, ws):
        return lax.scan(body, (x, wrap(jnp.matmul)(x, ws[0]), x), ws)[0]

    return fn


@construct(low=2, in_solver=1, differentiable=False)
def while_loop(wrap):
    body = wrap(lambda c: (c[0] + 1, jnp.tanh(c[1] @ c[2]), c[2]))
    cond = wrap(lambda c: (c[0] < 3) & (jnp.max(c[1]) < 10.0))

    def fn(x, w):
        return lax.while_loop(cond, body, (0, wrap(jnp.matmul)(x, w), w))[:2]

    return fn


@construct(low=2, in_solver=1, differentiable=False)
def while_loop_contraction_in_cond(wrap):
    body = wrap(lambda c: (c[0] + 1, c[1] * 0.5))

    def fn(x, w):
        cond = wrap(lambda c: (c[0] < 3) & (jnp.sum(c[1] @ w) < 1e3))
        return lax.while_loop(cond, body, (0, wrap(jnp.matmul)(x, w)))

    return fn


@construct(low=1)
def fori_static(wrap):
    def fn(x, w):
        return lax.fori_loop(0, 3, wrap(lambda i, h: jnp.tanh(h @ w) * i), x)

    return fn


@construct(lambda: (*arrays("x", "w"), jnp.int32(3)), low=1, differentiable=False)
def fori_dynamic(wrap):
    def fn(x, w, n):
        return lax.fori_loop(0, n, wrap(lambda i, h: jnp.tanh(h @ w)), x)

    return fn


@construct(lambda: arrays("x", "ws"), low=2)
def lax_map(wrap):
    """A batch size that doesn't divide the length: a scan, and a rest beside it."""
    body = wrap(lambda x, w: x @ w)
    return lambda x, ws: lax.map(lambda w: body(x, w), ws, batch_size=2)


@construct(lambda: arrays("ws"), low=4)
def associative_scan(wrap):
    return lambda ws: lax.associative_scan(wrap(jnp.matmul), ws)


@construct(low=1, available=TAKES_FLAGS)
def checkpointed_while(wrap):
    """Equinox's while loop with a reverse derivative: scans of custom rules."""

    def fn(x, w):
        body = wrap(lambda c: (c[0] + 1, jnp.tanh(c[1] @ w)))
        return eqxi.while_loop(
            lambda c: c[0] < 3,
            body,
            (jnp.array(0), x),
            max_steps=4,
            kind="checkpointed",
            checkpoints=2,
        )[1]

    return fn


# Branches.


@construct(lambda: (*arrays("x", "w"), jnp.bool_(True)), low=2)
def cond(wrap):
    """One branch makes low values, the other hands on what came in."""
    low = wrap(lambda x, w: (x @ w, jnp.sum(x)))
    full = wrap(lambda x, w: (x, jnp.max(jnp.exp(x))))

    def fn(x, w, pred):
        return lax.cond(pred, low, full, wrap(jnp.matmul)(x, w), w)

    return fn


@construct(lambda: (*arrays("x", "w"), jnp.int32(2)), low=3)
def switch(wrap):
    branches = [
        wrap(lambda x, w: (x @ w, 1)),
        wrap(lambda x, w: (x + 1, 2)),
        wrap(lambda x, w: (jnp.exp(x @ w) @ w, 3)),
    ]
    return lambda x, w, index: lax.switch(index, branches, x, w)


@construct(low=2)
def platform_dependent(wrap):
    cpu = wrap(affine)
    other = wrap(lambda x, w: jnp.sin(x @ w))

    def fn(x, w):
        return lax.platform_dependent(x, w, cpu=cpu, default=other)

    return fn


# Rematerialisation.


@construct(low=1)
def remat(wrap):
    return jax.checkpoint(wrap(affine))


@construct(low=2)
def remat_dots_saveable(wrap):
    fn = wrap(lambda x, w: jnp.sin(affine(x, w) @ w))
    return jax.checkpoint(fn, policy=jax.checkpoint_policies.dots_saveable)


SAVE_HIDDEN = jax.checkpoint_policies.save_only_these_names("hidden")


@construct(low=2)
def remat_saved_names(wrap):
    fn = wrap(lambda x, w: jnp.sin(checkpoint_name(x @ w, "hidden") @ w))
    return jax.checkpoint(fn, policy=SAVE_HIDDEN, prevent_cse=False)


@construct(lambda: arrays("x", "ws"), low=1)
def remat_in_scan(wrap):
    body = jax.checkpoint(wrap(lambda h, w: (h + jnp.tanh(h @ w), None)))
    return lambda x, ws: lax.scan(body, x, ws)[0]


@construct(lambda: arrays("x", "ws"), low=1)
def remat_of_scan(wrap):
    body = wrap(lambda h, w: (h + jnp.tanh(h @ w), None))
    return jax.checkpoint(lambda x, ws: lax.scan(body, x, ws)[0])


# Derivative rules written by the author, all of them deliberately false.


@construct(low=1, false_gradient=True)
def custom_jvp(wrap):
    @jax.custom_jvp
    @wrap
    def fn(x, w):
        return jnp.tanh(x @ w)

    @wrap
    def rule(primals, tangents):
        (x, w), (dx, dw) = primals, tangents
        return jnp.tanh(x @ w), 3 * (dx @ w) - x @ dw

    fn.defjvp(rule)
    return fn


@construct(low=1, false_gradient=True)
def custom_jvp_symbolic_zeros(wrap):
    @partial(jax.custom_jvp, nondiff_argnums=(0,))
    def fn(scale, x, w):
        return wrap(affine)(x, w) * scale

    def rule(scale, primals, tangents):
        (x, w), (dx, dw) = primals, tangents
        assert isinstance(dw, SymbolicZero)
        assert scale == 2
        return fn(scale, x, w), wrap(jnp.matmul)(dx, w)

    fn.defjvp(rule, symbolic_zeros=True)
    return lambda x, w: fn(2, x, lax.stop_gradient(w))


@construct(low=2, false_gradient=True)
def custom_jvp_per_argument(wrap):
    """`defjvps`, an integer argument, and two results of which one is an integer."""

    @jax.custom_jvp
    @wrap
    def fn(x, w, n):
        return (x @ w) @ w * n

    fn.defjvps(
        lambda dx, out, x, w, n: wrap(jnp.matmul)(dx, w),
        None,
        None,
    )
    return lambda x, w: fn(x, w, 2)


@construct(low=1, false_gradient=True)
def custom_vjp(wrap):
    @jax.custom_vjp
    @wrap
    def fn(x, w):
        return jnp.tanh(x @ w)

    @wrap
    def fwd(x, w):
        out = jnp.tanh(x @ w)
        return out, (x, w, out)

    @wrap
    def bwd(res, g):
        x, w, out = res
        assert out.dtype == g.dtype == jnp.float32, "the rule sees the author's dtypes"
        return 3 * (g @ w.T), x.T @ g

    fn.defvjp(fwd, bwd)
    return fn


@construct(low=1, false_gradient=True)
def custom_vjp_nondiff(wrap):
    @partial(jax.custom_vjp, nondiff_argnums=(0, 1))
    def fn(activation, scale, x, w):
        return wrap(lambda x, w: activation(x @ w) * scale)(x, w)

    def fwd(activation, scale, x, w):
        return fn(activation, scale, x, w), (x, w)

    def bwd(activation, scale, res, g):
        return wrap(lambda x, w, g: (scale * g @ w.T, None))(*res, g)

    fn.defvjp(fwd, bwd)
    return lambda x, w: fn(jnp.sin, 3.0, x, w)


@construct(low=1, false_gradient=True)
def custom_vjp_symbolic_zeros(wrap):
    @jax.custom_vjp
    def fn(x, w):
        return wrap(affine)(x, w), x

    def fwd(x, w):
        assert x.perturbed and not w.perturbed
        return fn(x.value, w.value), w.value

    def bwd(w, g):
        return 3 * wrap(jnp.matmul)(dense(g[0]), w.T) + dense(g[1]), None

    fn.defvjp(fwd, bwd, symbolic_zeros=True)
    return lambda x, w: fn(x, lax.stop_gradient(w))[0]


@construct(
    lambda: (*arrays("x", "w"), jnp.array([2, 0, 1])), low=1, false_gradient=True
)
def custom_vjp_integers(wrap):
    """An integer argument, an integer residual and an integer result."""

    @jax.custom_vjp
    @wrap
    def fn(x, w, index):
        return jnp.take(x, index, axis=0) @ w, index + 1

    @wrap
    def fwd(x, w, index):
        return fn(x, w, index), (w, index)

    @wrap
    def bwd(res, g):
        w, index = res
        dx = 3 * jnp.zeros((3, 4)).at[index].add(g[0] @ w.T)
        return dx, jnp.ones_like(w), np.zeros(index.shape, jax.dtypes.float0)

    fn.defvjp(fwd, bwd)
    return fn


@construct(lambda: arrays("x", "ws"), low=1, false_gradient=True)
def custom_vjp_in_scan(wrap):
    fn = custom_vjp(wrap)
    return lambda x, ws: lax.scan(lambda h, w: (fn(h, w), None), x, ws)[0]


@construct(low=1, false_gradient=True)
def custom_vjp_in_remat_in_jit(wrap):
    return jax.jit(jax.checkpoint(custom_vjp(wrap)))


@construct(low=1, false_gradient=True)
def custom_jvp_of_custom_vjp(wrap):
    inner = custom_vjp(wrap)

    @jax.custom_jvp
    def fn(x, w):
        return inner(x, w)

    @fn.defjvp
    def rule(primals, tangents):
        out, dout = jax.jvp(wrap(affine), primals, tangents)
        return out, 5 * dout

    return fn


@construct(low=1, false_gradient=True, available=TAKES_FLAGS)
def filter_custom_vjp(wrap):
    """Equinox's form, with a non-array argument."""

    @eqx.filter_custom_vjp
    def fn(xw, activation):
        return wrap(jnp.matmul)(*xw)

    @fn.def_fwd
    def fwd(perturbed, xw, activation):
        return wrap(jnp.matmul)(*xw), None

    @fn.def_bwd
    def bwd(res, g, perturbed, xw, activation):
        return 3 * wrap(jnp.matmul)(g, xw[1].T), None

    return lambda x, w: fn((x, w), jnp.tanh)


# Functions with more rules of their own.


@construct(lambda: arrays("batch", "w"), low=1)
def custom_vmap_batched(wrap):
    @custom_vmap
    def fn(x, w):
        return wrap(affine)(x, w)

    @fn.def_vmap
    def rule(size, batched, x, w):
        assert batched == [True, False]
        return wrap(affine)(x.reshape(-1, 4), w).reshape(size, -1, 4), True

    return jax.vmap(fn, in_axes=(0, None))


@construct(low=1, differentiable=False)
def custom_vmap_unbatched(wrap):
    @custom_vmap
    def fn(x, w):
        return wrap(affine)(x, w)

    fn.def_vmap(lambda size, batched, x, w: (wrap(affine)(x, w), True))
    return fn


@construct(low=1, kept=2, opaque_gradient=True)
def linear_solve_direct(wrap):
    """The product before is low; the default policy leaves the solver as written."""
    return wrap(lambda x, w: jnp.linalg.solve(w @ w.T + jnp.eye(4), x.T))


@construct(low=5, kept=4, in_solver=4, opaque_gradient=True)
def linear_solve_custom(wrap):
    def fn(x, w):
        matrix = wrap(lambda w: w @ w.T + 2 * jnp.eye(4))(w)
        return lax.custom_linear_solve(
            wrap(lambda v: matrix @ v),
            x[0],
            solve=lambda _, b: wrap(lambda b: jnp.linalg.inv(matrix) @ b)(b),
            symmetric=True,
        )

    return fn


@construct(low=12, kept=8, in_solver=12, opaque_gradient=True)
def conjugate_gradient(wrap):
    """The scalar products of the solver are `precision=HIGHEST`, the matrix's are not.

    The primitive holds `matvec` and the solver, each with its transpose."""

    def fn(x, w):
        def matvec(v):
            return w.T @ (w @ v) + 2 * v

        return jax.scipy.sparse.linalg.cg(wrap(matvec), x[0], maxiter=8)[0]

    return fn


@construct(low=2)
def custom_root(wrap):
    """Solves `y + w y / 4 = x`, by iteration forward and implicitly backward."""

    def fn(x, w):
        residual = wrap(lambda y: y + 0.25 * (y @ w) - x)

        def solve(f, y):
            return lax.fori_loop(0, 12, lambda _, y: y - f(y), y)

        def tangent_solve(g, y):
            return wrap(lambda y: jnp.linalg.solve(jax.jacobian(g)(y), y))(y)

        x = wrap(jnp.matmul)(x, w)[0]
        return lax.custom_root(residual, x, solve, tangent_solve)

    return fn


@construct(low=1, false_gradient=True, opaque_gradient=True)
def linear(wrap):
    """`linear_call`, with a transpose that isn't the transpose.

    JAX calls the transpose only in the backward pass: it stays as written."""

    def fn(x, w):
        def forward(w, x):
            return wrap(jnp.matmul)(x, w)

        def transpose(w, g):
            return 3 * wrap(jnp.matmul)(g, w.T)

        return linear_call(forward, transpose, lax.stop_gradient(w), x)

    return fn


@construct(low=1)
def closed_call(wrap):
    """No public function makes this primitive: it takes the place of a jit."""
    call = jex.core.primitives.closed_call_p

    def fn(x, w):
        inner = jax.make_jaxpr(wrap(affine))(x, w)
        outer = jax.make_jaxpr(jax.jit(affine))(x, w).jaxpr
        (eqn,) = outer.eqns
        eqn = eqn.replace(primitive=call, params={"call_jaxpr": inner})
        closed = jex.core.Jaxpr(
            [], outer.invars, outer.outvars, [eqn], debug_info=outer.debug_info
        )
        (out,) = jax.core.eval_jaxpr(closed, [], x, w)
        return out

    return fn


@construct(low=1)
def named_call(wrap):
    return jax.named_call(wrap(affine), name="a_name")


@construct(low=1)
def optimization_barrier(wrap):
    @wrap
    def fn(x, w):
        h, n, x = lax.optimization_barrier((x @ w, 1, x))
        return h * n + x

    return fn


@construct(
    low=1,
    differentiable=False,
    # A function since 0.12, a context manager before.
    available=jax.__version_info__ < (0, 11),
)
def on_host(wrap):
    def fn(x, w):
        with compute_on("device_host"):
            return wrap(affine)(x, w)

    return jax.jit(fn)


# Many devices.


def mesh_of(size: int) -> Mesh:
    return Mesh(np.array(jax.devices()[:size]), ("i",))


def sharded(wrap: Wrap, size: int, check_vma: bool) -> Fn:
    """Sums over the mesh a contraction of the rows that each device holds."""

    @wrap
    def body(x, w):
        h = jnp.tanh(x @ w)
        return h, lax.psum(h.sum(0) @ w, "i")

    def fn(x, w):
        x = wrap(jnp.matmul)(x, w)
        return jax.shard_map(
            body,
            mesh=mesh_of(size),
            in_specs=(P("i"), P()),
            out_specs=(P("i"), P()),
            check_vma=check_vma,
        )(x.reshape(24, 4), w)

    return fn


@construct(lambda: arrays("batch", "w"), low=3)
def shard_map_one_device(wrap):
    return sharded(wrap, 1, check_vma=True)


@construct(lambda: arrays("batch", "w"), low=3)
def shard_map_unchecked(wrap):
    return sharded(wrap, 1, check_vma=False)


@construct(lambda: arrays("batch", "w"), low=3)
def shard_map_eight_devices(wrap):
    return sharded(wrap, 8, check_vma=True)


@construct(lambda: arrays("batch", "w"), low=3)
def shard_map_eight_unchecked(wrap):
    return sharded(wrap, 8, check_vma=False)


@construct(lambda: arrays("batch", "w"), low=1, available=TAKES_FLAGS)
def shard_map_remat_scan(wrap):
    """Loops and recomputation inside of the mesh."""

    def body(x, w):
        step = jax.checkpoint(wrap(lambda h, w: h + jnp.tanh(h @ w)))
        h, _ = lax.scan(lambda h, _: (step(h, w), None), x, length=2)
        return lax.pmean(h, "i")

    mesh, specs = mesh_of(8), (P("i"), P())
    return jax.jit(jax.shard_map(body, mesh=mesh, in_specs=specs, out_specs=P()))


@construct(lambda: arrays("x", "w"), low=1)
def pmap(wrap):
    body = wrap(lambda x, w: lax.psum(jnp.tanh(x @ w), "i"))
    mapped = jax.pmap(body, axis_name="i", in_axes=(0, None), devices=jax.devices()[:1])
    return lambda x, w: mapped(x[None], w)


@construct(lambda: arrays("batch", "w"), low=1)
def vmap_collective(wrap):
    @wrap
    def body(x, w):
        h = x @ w
        scale = lax.axis_index("i").astype(h.dtype)
        return lax.psum(h, "i"), lax.all_gather(h, "i").mean(0) * scale

    return jax.vmap(body, in_axes=(0, None), axis_name="i")


# Effects, the host and kernels.


@construct(low=2, differentiable=False)
def pure_callback(wrap):
    def on_the_host(x):
        assert x.dtype == np.float32, x.dtype
        return np.asarray(np.cosh(x))

    @wrap
    def fn(x, w):
        h = x @ w
        return jax.pure_callback(on_the_host, jax.typeof(x), h) @ w

    return fn


@construct(low=1)
def debug_callback(wrap):
    def on_the_host(x):
        assert np.asarray(x).dtype == np.float32, x.dtype

    @wrap
    def fn(x, w):
        h = x @ w
        jax.debug.callback(on_the_host, h)
        return h

    return fn


SEEN: list[int] = []


@construct(low=1, differentiable=False)
def ordered_io_callback(wrap):
    """The order is read by the test."""

    def on_the_host(n, x):
        assert np.asarray(x).dtype == np.float32, x.dtype
        SEEN.append(int(n))
        return np.float32(n)

    @wrap
    def body(h, n):
        h = h @ jnp.eye(4)
        n = io_callback(on_the_host, jax.typeof(h[0, 0]), n, h, ordered=True)
        return h * (1 + n), None

    return lambda x, w: lax.scan(body, x, jnp.arange(3))[0]


@construct(low=1, kept=1, differentiable=False)
def pallas(wrap):
    def kernel(x_ref, w_ref, out_ref):
        out_ref[...] = x_ref[...] @ w_ref[...]

    @wrap
    def fn(x, w):
        shape = jax.ShapeDtypeStruct(x.shape, x.dtype)
        return pl.pallas_call(kernel, shape, interpret=True)(x @ w, w)

    return fn


new_ref = getattr(jax, "new_ref", None) or jax.experimental.mutable_array


@construct(low=2, differentiable=False)
def references(wrap):
    @wrap
    def fn(x, w):
        ref = new_ref(jnp.zeros((3, 4)))
        ref[...] = x @ w
        ref[1] += x[0]
        return ref[...] @ w

    return fn


@construct(low=1)
def checked(wrap):
    @wrap
    def body(x, w):
        h = x @ w
        checkify.check(jnp.all(h < 100), "large: {}", h[0, 0])
        return jnp.tanh(h)

    return lambda x, w: checkify.checkify(body)(x, w)[1]


@construct(low=2)
def error_if(wrap):
    @wrap
    def fn(x, w):
        h = x @ w
        return eqx.error_if(h, jnp.any(h > 100), "large") @ w

    return fn


# Primitives that are particular about dtypes.


@construct(lambda: (*default_args(), jr.key(0), jr.PRNGKey(1)), low=1)
def random_bits(wrap):
    @wrap
    def fn(x, w, key, old_key):
        h = x @ w
        keep = jr.bernoulli(key, 0.5, h.shape)
        noise = jr.normal(jr.split(old_key)[0], h.shape, h.dtype)
        return jnp.where(keep, h / 0.5, 0) + noise, jr.fold_in(key, 1)

    return fn


@construct(lambda: (*arrays("w", "w"), jnp.array([[0, 3], [3, 1]])), low=1)
def embedding(wrap):
    return wrap(lambda table, w, tokens: table[tokens] @ w)


@construct(low=1)
def scatter(wrap):
    @wrap
    def fn(x, w):
        h = x @ w
        h = h.at[jnp.array([0, 0, 2])].add(x)
        return h.at[1].set(0.5).at[:, 2].multiply(2).at[0].min(1), h.at[0].get()

    return fn


@construct(low=1)
def sorting(wrap):
    @wrap
    def fn(x, w):
        h = x @ w
        top, where = lax.top_k(h, 2)
        keys, order = lax.sort_key_val(h, jnp.ones(h.shape, jnp.int32).cumsum(1))
        return jnp.sort(h), top, where, keys, order, jnp.argmax(h, 1)

    return fn


@construct(low=1)
def cumulative(wrap):
    @wrap
    def fn(x, w):
        h = jnp.tanh(x @ w)
        return jnp.cumsum(h, 0), lax.cummax(h), lax.cumlogsumexp(h), jnp.cumprod(h, 1)

    return fn


@construct(lambda: arrays("image", "kernel"), low=1)
def windows(wrap):
    @wrap
    def fn(image, kernel):
        numbers = ("NHWC", "HWIO", "NHWC")
        h = lax.conv_general_dilated(
            image, kernel, (1, 1), "SAME", dimension_numbers=numbers
        )
        window = (1, 2, 2, 1)
        largest = lax.reduce_window(h, -jnp.inf, lax.max, window, window, "VALID")
        total = lax.reduce_window(h, 0.0, lax.add, window, window, "SAME")
        return largest, total

    return fn


@construct(low=1, differentiable=False)
def custom_reduction(wrap):
    @wrap
    def fn(x, w):
        def larger(a, b):
            return jnp.where(abs(a[0]) > abs(b[0]), a[0], b[0]), a[1] + b[1]

        return lax.reduce((x @ w, x), (0.0, 0.0), larger, (1,))

    return fn


@construct(low=2, opaque_gradient=True)
def linear_algebra(wrap):
    @wrap
    def fn(x, w):
        matrix = w @ w.T + jnp.eye(4)
        q, r = jnp.linalg.qr(w @ matrix)
        return jnp.linalg.cholesky(matrix), abs(q), abs(r), jnp.linalg.eigvalsh(matrix)

    return fn


@construct(low=1)
def fourier(wrap):
    """Complex numbers pass untouched, and come back real."""
    return wrap(lambda x, w: jnp.fft.irfft(jnp.fft.rfft(x @ w) * 1j, 4))


@construct(low=1, differentiable=False)
def bits(wrap):
    """A bit cast of a low value would change its shape."""

    @wrap
    def fn(x, w):
        bits = lax.bitcast_convert_type(x @ w, jnp.uint32)
        return lax.bitcast_convert_type(bits, jnp.float32), (bits >> 31).astype(bool)

    return fn


@construct(lambda: (*default_args(), jnp.arange(3), jnp.float16(2)), low=2)
def mixed_arguments(wrap):
    """Integers, booleans and what is low already keep their dtypes."""

    @wrap
    def fn(x, w, n, half):
        h = x @ w
        return h, n @ n, n > 1, half * half, (h[:, 0] * n.astype(h.dtype)) @ h, None

    return fn
