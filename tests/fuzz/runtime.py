"""What a generated program needs to run: its transforms, as functions of `(f, args)`.

A case is printed with these functions in front, so that its file stands alone. Each
transform gives the new function and the arguments for it."""

# ruff: noqa: F401
import functools
import re
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jax.custom_batching import custom_vmap
from jax.experimental.jet import jet
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P


def split(values, n):
    return tuple(values[:n]), tuple(values[n:])


def is_float(x):
    return jnp.issubdtype(jnp.result_type(x), jnp.floating)


def floats(args):
    return tuple(i for i, x in enumerate(args) if is_float(x))


def weights(x):
    """Numbers of a value's shape that are all different."""
    n = np.size(x)
    w = np.cos(1.0 + np.arange(n)).reshape(np.shape(x))
    return jnp.asarray(w, jnp.result_type(x))


def scalar(tree):
    """A loss: every float in a tree counts, each with another weight."""
    leaves = [x for x in jax.tree.leaves(tree) if is_float(x)]
    return sum([jnp.sum(jnp.asarray(x, jnp.float32) * weights(x)) for x in leaves], 0.0)


def placed_weights(x):
    """The same, split over devices as `x` is, where that is a part of its type."""
    mesh = jax.sharding.get_abstract_mesh()
    if mesh.empty or jax.sharding.AxisType.Explicit not in mesh.axis_types:
        return weights(x)
    return weights(x) + jnp.zeros_like(x)


def tangents(args):
    def tangent(x):
        if not is_float(x):
            return np.zeros(np.shape(x), jax.dtypes.float0)
        return placed_weights(x)

    return tuple(map(tangent, args))


def jitted(f, args):
    return jax.jit(f), args


def grad(f, args, argnums=None):
    argnums = floats(args) if argnums is None else argnums
    return jax.grad(lambda *a: scalar(f(*a)), argnums), args


def value_and_grad(f, args):
    def loss(*a):
        out = f(*a)
        return scalar(out), out

    return jax.value_and_grad(loss, floats(args), has_aux=True), args


def vjp(f, args):
    def pulled(*a):
        nums = floats(a)

        def of_floats(*xs):
            full = list(a)
            for i, x in zip(nums, xs, strict=True):
                full[i] = x
            return [x for x in jax.tree.leaves(f(*full)) if is_float(x)]

        out, pull = jax.vjp(of_floats, *(a[i] for i in nums))
        return out, pull([placed_weights(x) for x in out])

    return pulled, args


def jvp(f, args):
    return lambda *a: jax.jvp(f, a, tangents(a)), args


def linearized(f, args):
    def both(*a):
        out, push = jax.linearize(f, *a)
        return out, push(*tangents(a))

    return both, args


def jacfwd(f, args):
    i = floats(args)[0]

    def jacobian(*a):
        def of_one(x):
            out = f(*a[:i], x, *a[i + 1 :])
            return [y for y in jax.tree.leaves(out) if is_float(y)]

        return jax.jacfwd(of_one)(a[i])

    return jacobian, args


def hvp(f, args):
    """The Hessian times a vector: forward over reverse."""
    nums = floats(args)

    def loss(*a):
        return scalar(f(*a))

    return lambda *a: jax.jvp(jax.grad(loss, nums), a, tangents(a)), args


def grad_of_grad(f, args):
    nums = floats(args)

    def inner(*a):
        return scalar(jax.grad(lambda *a: scalar(f(*a)), nums)(*a))

    return jax.grad(inner, nums), args


def two_of(x):
    """A batch: the value, and another like it."""
    x = np.asarray(x, jnp.result_type(x))
    return np.stack([x, np.asarray(0.5 * x, x.dtype) if is_float(x) else x])


def vmapped(f, args, axes=None):
    axes = axes[: len(args)] if axes else (0,) * len(args)
    args = tuple(
        x if axis is None else two_of(x) for x, axis in zip(args, axes, strict=True)
    )
    return jax.vmap(f, in_axes=axes), args


def mapped(f, args):
    return lambda *a: lax.map(lambda xs: f(*xs), a), tuple(map(two_of, args))


def scanned(f, args):
    """In a scan that closes over the arguments."""

    def loop(*a):
        return lax.scan(lambda c, _: (c + 1, f(*a)), jnp.int32(0), None, length=2)[1]

    return loop, args


def in_cond(f, args):
    def chosen(*a):
        flag = jnp.asarray(a[0]).reshape(-1)[0] > -1e30
        return lax.cond(flag, f, lambda *a: jax.tree.map(jnp.zeros_like, f(*a)), *a)

    return chosen, args


def remat(f, args, policy=None):
    policies = jax.checkpoint_policies
    if policy == "names":
        found = policies.save_only_these_names("saved")
    else:
        found = policy and getattr(policies, policy)
    return jax.checkpoint(f, policy=found), args


def partial_eval(f, args):
    """Some arguments fixed beforehand: constants of what is traced."""
    return functools.partial(f, *args[:1]), args[1:]


def closed_over(f, args):
    """The last argument is closed over by a function that another transform holds."""

    def outer(*a):
        return jax.jit(lambda *rest: f(*rest, a[-1]))(*a[:-1])

    return outer, args


def linear_transposed(f, args):
    """The transpose of a function that is linear in its first argument."""

    def transposed(*a):
        fn = lambda x: f(x, *a[1:])  # noqa: E731
        out = jax.eval_shape(fn, a[0])
        return jax.linear_transpose(fn, a[0])(jax.tree.map(weights_of, out))

    return transposed, args


def weights_of(x):
    return weights(np.zeros(x.shape, x.dtype))


def jets(f, args):
    nums = floats(args)

    def taylor(*a):
        def of_floats(*xs):
            full = list(a)
            for i, x in zip(nums, xs, strict=True):
                full[i] = x
            return [x for x in jax.tree.leaves(f(*full)) if is_float(x)]

        xs = tuple(a[i] for i in nums)
        series = tuple([weights(x), jnp.zeros_like(x)] for x in xs)
        return jet(of_floats, xs, series)

    return taylor, args


def exported(f, args):
    f = jax.jit(lambda *a: jax.tree.leaves(f(*a)))
    return jax.export.deserialize(jax.export.export(f)(*args).serialize()).call, args


def sharded(f, args, specs=None, devices=2, check_vma=True):
    """In a `shard_map`, each device with a batch of one; or one value for all."""
    mesh = Mesh(np.array(jax.devices()[:devices]), ("data",))
    specs = specs[: len(args)] if specs else (True,) * len(args)
    where = tuple(P("data") if split else P() for split in specs)

    def body(*a):
        a = [x[0] if split else x for x, split in zip(a, specs, strict=True)]
        return jax.tree.map(lambda x: jnp.asarray(x)[None], f(*a))

    args = tuple(
        jnp.stack([jnp.asarray(x)] * devices) if split else x
        for x, split in zip(args, specs, strict=True)
    )
    options = {"mesh": mesh, "in_specs": where, "out_specs": P("data")}
    return jax.shard_map(body, check_vma=check_vma, **options), args


def two_devices():
    """A mesh whose axis is a part of the types of what is split over it."""
    kinds = (jax.sharding.AxisType.Explicit,)
    return jax.make_mesh((2,), ("data",), axis_types=kinds)


def in_mesh():
    set_mesh = getattr(jax, "set_mesh", None) or jax.sharding.use_mesh  # up to 0.6
    return set_mesh(two_devices())


def explicit(f, args):
    """Batches whose first axis is split over two devices, as a part of their types.

    To be run `in_mesh()`."""
    sharding = NamedSharding(two_devices(), P("data"))
    args = tuple(jax.device_put(two_of(x), sharding) for x in args)
    return jax.vmap(f), args


LARGE = 300 + 30 * np.cos(np.arange(9, dtype=np.float32)).reshape(3, 3)
LARGE[0, 0] = 16384.0  # which 16 bits hold, and the others they don't


def distances(y):
    """Between the rows of a matrix."""
    return jnp.sqrt(jnp.sum((y[:, None] - y[None]) ** 2, -1) + 1e-2)


def interpolated(y):
    """Of a table of a few hundred numbers, at places that are no integers."""
    table = jnp.sin(0.7 * jnp.arange(400.0))
    i = jnp.clip(jnp.floor(y).astype(jnp.int32), 0, 398)
    return table[i] * (i + 1 - y) + table[i + 1] * (y - i)


def with_jvp(f, jitted=False):
    """`f` with a derivative rule of its own, which is deliberately not its own."""
    f = jax.jit(f) if jitted else f
    g = jax.custom_jvp(f)

    @g.defjvp
    def _(primals, tangents):
        outs, ts = jax.jvp(f, primals, tangents)
        return outs, jax.tree.map(lambda t: 2 * t, ts)

    return g


def with_vjp(f, scale=1.0):
    g = jax.custom_vjp(f)

    def backward(pull, cotangents):
        return jax.tree.map(lambda x: scale * x, pull(cotangents))

    g.defvjp(lambda *args: jax.vjp(f, *args), backward)
    return g


def with_backward(f, backward):
    """`f` with a backward rule of its operands and the cotangent of its result."""
    g = jax.custom_vjp(f)
    g.defvjp(lambda x, w: (f(x, w), (x, w)), lambda kept, g: backward(*kept, g))
    return g


@jax.tree_util.register_dataclass
@dataclass
class Record:
    first: Any
    rest: Any


def contained(kind, xs):
    """A batch: arrays in a container."""
    if kind == "dict":
        return {f"array {i}": x for i, x in enumerate(xs)}
    if kind == "record":
        return Record(xs[0], tuple(xs[1:]))
    if kind == "nested":
        return {"a": list(xs[:1]), "b": (tuple(xs[1:]), None)}
    return {"tuple": tuple, "list": list}[kind](xs)


def in_container(wrap, f, kind):
    """What `wrap` makes of `f` where all arguments but the first are one."""
    wrapped = wrap(lambda first, batch: f(first, *jax.tree.leaves(batch)))
    return lambda first, *rest: wrapped(first, contained(kind, rest))


def with_vmap(f):
    g = custom_vmap(f)

    @g.def_vmap
    def _(axis_size, in_batched, *args):
        del axis_size
        axes = tuple(0 if batched else None for batched in in_batched)
        outs = jax.vmap(f, in_axes=axes)(*args)
        return outs, jax.tree.map(lambda _: True, outs)

    return g
