"""Deterministic measures of a traced program: FLOPs by dtype, casts, saved bytes.

They are read off the jaxpr, so they are the same on every machine, and they share no
code with the rewrite that they judge."""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from math import prod
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

CONTRACTIONS = ("dot_general", "conv_general_dilated", "ragged_dot_general")


def subjaxprs(params: dict[str, Any]) -> Iterator[Any]:
    """Yields the open jaxprs among an equation's parameters."""
    for value in params.values():
        if hasattr(value, "in_avals_flat"):  # the object of a hi-primitive
            yield from subjaxprs(value.params)
            continue
        for item in value if isinstance(value, tuple | list) else (value,):
            # What was traced holds a closed jaxpr, and that an open one.
            inner = getattr(item, "jaxpr", item)
            inner = getattr(inner, "jaxpr", inner)
            if hasattr(inner, "eqns"):
                yield inner


def walk(jaxpr: Any, times: int = 1) -> Iterator[tuple[Any, int]]:
    """Yields `(eqn, times)` for every equation at any depth.

    `times` is how often the equation runs: scans multiply it by their length. A while
    loop counts once, and each branch of a cond counts once."""
    jaxpr = getattr(jaxpr, "jaxpr", jaxpr)
    for eqn in jaxpr.eqns:
        yield eqn, times
        inner = times * eqn.params["length"] if eqn.primitive.name == "scan" else times
        for sub in subjaxprs(eqn.params):
            yield from walk(sub, inner)


def flops(eqn: Any) -> int:
    """Multiply-adds of a contraction, times two."""
    lhs, rhs = (v.aval for v in eqn.invars[:2])
    out = eqn.outvars[0].aval
    if eqn.primitive.name == "conv_general_dilated":
        return 2 * conv_products(eqn.params, lhs.shape, rhs.shape, out.shape)
    if eqn.primitive.name == "ragged_dot_general":
        numbers = eqn.params["ragged_dot_dimension_numbers"].dot_dimension_numbers
    else:
        numbers = eqn.params["dimension_numbers"]
    (contract, _), _ = numbers
    return 2 * out.size * prod(lhs.shape[axis] for axis in contract)


def conv_products(params: Any, lhs: Any, rhs: Any, out: Any) -> int:
    """The products of a convolution with numbers that are no padding and no holes."""
    numbers = params["dimension_numbers"]
    batch, features, *sizes = (lhs[axis] for axis in numbers.lhs_spec)
    out_features, _, *windows = (rhs[axis] for axis in numbers.rhs_spec)
    count = batch * features * out_features
    count //= params["feature_group_count"] * params["batch_group_count"]
    for axis, (size, window) in enumerate(zip(sizes, windows, strict=True)):
        stride, (before, _) = params["window_strides"][axis], params["padding"][axis]
        holes = params["lhs_dilation"][axis]
        outs = np.arange(out[numbers.out_spec[axis + 2]])[:, None]
        elements = np.arange(window)[None] * params["rhs_dilation"][axis]
        places = outs * stride + elements - before
        inside = (places >= 0) & (places < size * holes) & (places % holes == 0)
        count *= int(inside.sum())
    return count


def operand_dtype(eqn: Any) -> str:
    """The dtype that a contraction computes in: the wider of its two operands'."""
    dtypes = {v.aval.dtype for v in eqn.invars[:2]}
    return max(dtypes, key=lambda dtype: dtype.itemsize).name


def contraction_flops(jaxpr: Any) -> Counter[str]:
    """FLOPs of all contractions, by the dtype that they compute in."""
    count: Counter[str] = Counter()
    for eqn, times in walk(jaxpr):
        if eqn.primitive.name in CONTRACTIONS:
            count[operand_dtype(eqn)] += times * flops(eqn)
    return count


def low_share(jaxpr: Any) -> float:
    """Share of the contraction FLOPs that run in fewer than 32 bits."""
    count = contraction_flops(jaxpr)
    low = sum(n for name, n in count.items() if jnp.dtype(name).itemsize < 4)
    return low / max(sum(count.values()), 1)


def is_float_cast(eqn: Any) -> bool:
    if eqn.primitive.name != "convert_element_type":
        return False
    old, new = eqn.invars[0].aval.dtype, jnp.dtype(eqn.params["new_dtype"])
    is_float = jnp.issubdtype(old, jnp.floating) and jnp.issubdtype(new, jnp.floating)
    return is_float and old != new


def casts(jaxpr: Any) -> int:
    """Casts from one floating dtype to another, as written (a scan's body once)."""
    return sum(is_float_cast(eqn) for eqn, _ in walk(jaxpr))


def size_in_bytes(aval: Any) -> int:
    return aval.size * aval.dtype.itemsize


def saved(
    fn: Callable[..., Any], *args: Any, argnums: Sequence[int] | None = None
) -> list[Any]:
    """The types (avals) of what `fn` keeps for its backward pass.

    Arguments of `fn` are live anyway and don't count.

    Args:
        fn: a function of pytrees of arrays.
        *args: its arguments, or their shapes.
        argnums: the arguments to differentiate; all of them by default. Data that need
            no gradient are best left out, as training leaves them out."""
    chosen = range(len(args)) if argnums is None else argnums

    def residuals(*args):
        def partial_fn(*some):
            full = dict(enumerate(args)) | dict(zip(chosen, some, strict=True))
            return fn(*full.values())

        out, vjp = jax.vjp(partial_fn, *(args[i] for i in chosen))
        return out, jax.tree.leaves(vjp)

    jaxpr = jax.make_jaxpr(residuals)(*args)
    jaxpr = getattr(jaxpr, "jaxpr", jaxpr)
    num_out = len(jax.tree.leaves(jax.eval_shape(fn, *args)))
    live = {*jaxpr.invars, *jaxpr.constvars}
    kept = [v for v in jaxpr.outvars[num_out:] if not hasattr(v, "val")]
    return [v.aval for v in dict.fromkeys(kept) if v not in live]


def saved_bytes(
    fn: Callable[..., Any], *args: Any, argnums: Sequence[int] | None = None
) -> Counter[str]:
    """Bytes that `fn` keeps for its backward pass, by dtype (see `saved`)."""
    count: Counter[str] = Counter()
    for aval in saved(fn, *args, argnums=argnums):
        count[aval.dtype.name] += size_in_bytes(aval)
    return count


def weight_copies(params: Any, avals: Iterable[Any]) -> list[Any]:
    """Those of `avals` that look like a low-precision copy of a parameter.

    They are told by shape and dtype alone, so a workload should give no activation the
    shape of a weight."""
    shapes = {leaf.shape for leaf in jax.tree.leaves(params)}

    def is_copy(aval):
        is_float = jnp.issubdtype(aval.dtype, jnp.floating)
        return is_float and aval.dtype.itemsize < 4 and aval.shape in shapes

    return [aval for aval in avals if is_copy(aval)]
