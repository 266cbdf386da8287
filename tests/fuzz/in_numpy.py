"""Common primitives in NumPy: no compiling, and a tenth of the time of a dispatch.

Both of two programs that are compared run through the same code, so that equal
equations give equal bits. What is not here is bound in JAX."""

import functools
import math
from collections.abc import Callable
from typing import Any

import numpy as np
from scipy import special

from .indexing import gather, put, scatter

Array = Any


def _in_single(fn: Callable[[Array], Array]) -> Callable[[Array], Array]:
    """Functions of 16-bit numbers are computed in 32 bits, and rounded once."""

    def apply(x):
        if x.dtype.itemsize > 2 or x.dtype.kind in "biu":
            return fn(x)
        return fn(x.astype(np.float32)).astype(x.dtype)

    return apply


def _dot_general(eqn: Any) -> Callable[..., Array]:
    """A product of two arrays, as one of stacks of matrices."""
    (x_sum, y_sum), (x_batch, y_batch) = eqn.params["dimension_numbers"]
    x, y = (v.aval for v in eqn.invars)
    x_free = [i for i in range(x.ndim) if i not in (*x_sum, *x_batch)]
    y_free = [i for i in range(y.ndim) if i not in (*y_sum, *y_batch)]
    batch = [x.shape[i] for i in x_batch]
    summed = math.prod(x.shape[i] for i in x_sum)
    x_shape = [x.shape[i] for i in x_free]
    y_shape = [y.shape[i] for i in y_free]
    x_axes, y_axes = (*x_batch, *x_free, *x_sum), (*y_batch, *y_sum, *y_free)
    x_matrix = [*batch, math.prod(x_shape), summed]
    y_matrix = [*batch, summed, math.prod(y_shape)]
    shape = [*batch, *x_shape, *y_shape]
    preferred = eqn.params.get("preferred_element_type")

    def apply(x, y):
        out = preferred or np.result_type(x.dtype, y.dtype)
        # Formats of 8 bits have no common dtype; sums of integers have the result's.
        dtypes = [np.float32 if z.dtype.itemsize == 1 else z.dtype for z in (x, y)]
        wide = np.result_type(np.float32, *dtypes) if _is_real(x) else np.dtype(out)
        a = x.transpose(x_axes).astype(wide).reshape(x_matrix)
        b = y.transpose(y_axes).astype(wide).reshape(y_matrix)
        return np.matmul(a, b).reshape(shape).astype(out)

    return apply


def _is_real(x: Array) -> bool:
    return x.dtype.kind not in "biuc"


def _broadcast_in_dim(x: Array, *, shape: Any, broadcast_dimensions: Any, **_: Any):
    axes = dict(zip(broadcast_dimensions, x.shape, strict=True))
    return np.broadcast_to(
        np.reshape(x, [axes.get(i, 1) for i in range(len(shape))]), shape
    )


def _slice(x: Array, *, start_indices: Any, limit_indices: Any, strides: Any) -> Array:
    strides = strides or (1,) * x.ndim
    where = zip(start_indices, limit_indices, strides, strict=True)
    return x[tuple(slice(*s) for s in where)]


def _at(x: Array, starts: Any, sizes: Any) -> tuple[slice, ...]:
    ranges = zip(starts, sizes, x.shape, strict=True)
    first = [(int(np.clip(i, 0, n - size)), size) for i, size, n in ranges]
    return tuple(slice(i, i + size) for i, size in first)


def _dynamic_slice(x: Array, *starts: Any, slice_sizes: Any) -> Array:
    return x[_at(x, starts, slice_sizes)]


def _dynamic_update_slice(x: Array, update: Array, *starts: Any) -> Array:
    x = x.copy()
    x[_at(x, starts, update.shape)] = update
    return x


def _select_n(which: Array, *cases: Array) -> Array:
    if which.dtype != bool:
        which = which.astype(bool)
    return np.where(which, cases[1], cases[0])


def _convert(x: Array, *, new_dtype: Any, **_: Any) -> Array:
    if x.dtype.kind == "c" and np.dtype(new_dtype).kind != "c":
        x = x.real
    if np.dtype(new_dtype) == bool:
        return x != 0
    return x.astype(new_dtype)


def _pad(x: Array, value: Array, *, padding_config: Any) -> Array:
    shape = [
        low + high + n + max(n - 1, 0) * inner
        for n, (low, high, inner) in zip(x.shape, padding_config, strict=True)
    ]
    source, target = [], []
    for n, m, (low, _, inner) in zip(x.shape, shape, padding_config, strict=True):
        places = [low + i * (inner + 1) for i in range(n)]
        inside = [i for i, place in enumerate(places) if 0 <= place < m]
        source.append(inside)
        target.append([places[i] for i in inside])
    out = np.full(shape, value, x.dtype)
    if x.ndim:
        out[np.ix_(*target)] = x[np.ix_(*source)]
    else:
        out[()] = x
    return out


def _reduce(fn: Callable[..., Array]) -> Callable[..., Array]:
    def apply(x, *, axes, **params):
        if x.dtype.itemsize == 2:
            return fn(x.astype(np.float32), axis=axes).astype(x.dtype)
        return np.asarray(fn(x, axis=axes)).astype(x.dtype)

    return apply


def _unary(fn: Callable[[Array], Array]) -> Callable[..., Array]:
    single = _in_single(fn)
    return lambda x, **_: single(x)


def _binary(fn: Callable[[Array, Array], Array]) -> Callable[..., Array]:
    return lambda x, y, **_: fn(x, y)


def _div(x: Array, y: Array, **_: Any) -> Array:
    return None if x.dtype.kind in "iu" else np.divide(x, y)


def _mul(x: Array, y: Array, **params: Any) -> Array:
    return None if params.get("out_dtype") is not None else np.multiply(x, y)


def _integer_pow(x: Array, *, y: int) -> Array:
    if y not in (2, 3):
        return None
    return x * x if y == 2 else x * x * x


def _rsqrt(x: Array) -> Array:
    return (1 / np.sqrt(x)).astype(x.dtype)


def _logistic(x: Array) -> Array:
    return (1 / (1 + np.exp(-x))).astype(x.dtype)


def _iota(*, dtype: Any, shape: Any, dimension: int, **_: Any) -> Array:
    ramp = np.arange(shape[dimension]).astype(dtype)
    places = [-1 if i == dimension else 1 for i in range(len(shape))]
    return np.broadcast_to(ramp.reshape(places), shape)


def _clamp(low: Array, x: Array, high: Array) -> Array:
    return np.minimum(np.maximum(low, x), high)


def _split(x: Array, *, sizes: Any, axis: int) -> list[Array]:
    return np.split(x, np.cumsum(sizes)[:-1], axis)


def _argument(fn: Callable[..., Array]) -> Callable[..., Array]:
    def apply(x, *, axes, index_dtype):
        (axis,) = axes
        return fn(x.astype(np.float32) if x.dtype.itemsize == 2 else x, axis).astype(
            index_dtype
        )

    return apply


def _cumulative(fn: Any) -> Callable[..., Array]:
    def apply(x, *, axis, reverse):
        x = np.flip(x, axis) if reverse else x
        wide = x.astype(np.float32) if x.dtype.itemsize == 2 else x
        out = fn(wide, axis=axis).astype(x.dtype)
        return np.flip(out, axis) if reverse else out

    return apply


def _triangular_solve(a: Array, b: Array, **params: Any) -> Array | None:
    if a.dtype != np.float32 or params["conjugate_a"]:
        return None
    a = np.tril(a) if params["lower"] else np.triu(a)
    if params["unit_diagonal"]:
        n = np.arange(a.shape[-1])
        a[..., n, n] = 1
    if params["transpose_a"]:
        a = np.swapaxes(a, -1, -2)
    try:
        if params["left_side"]:
            return np.linalg.solve(a, b)
        b = np.swapaxes(b, -1, -2)
        return np.swapaxes(np.linalg.solve(np.swapaxes(a, -1, -2), b), -1, -2)
    except np.linalg.LinAlgError:
        return None


def _real_only(fn: Callable[..., Array]) -> Callable[..., Array]:
    """Functions that NumPy, or SciPy, has for float32 alone."""

    def apply(*xs, **_):
        if any(x.dtype.kind in "biuc" for x in xs):
            return None
        if xs[0].dtype.itemsize > 2:
            return fn(*xs)
        return fn(*(x.astype(np.float32) for x in xs)).astype(xs[0].dtype)

    return apply


def _bitcast(x: Array, *, new_dtype: Any) -> Array | None:
    same = x.dtype.itemsize == np.dtype(new_dtype).itemsize
    return np.ascontiguousarray(x).reshape(x.shape).view(new_dtype) if same else None


def _shift_right(x: Array, y: Array) -> Array | None:
    in_range = x.dtype.kind == "u" and (y < 8 * x.dtype.itemsize).all()
    return np.right_shift(x, y) if in_range else None


VERSIONS: dict[str, Callable[..., Array]] = {
    "broadcast_in_dim": _broadcast_in_dim,
    "slice": _slice,
    "dynamic_slice": _dynamic_slice,
    "dynamic_update_slice": _dynamic_update_slice,
    "select_n": _select_n,
    "convert_element_type": _convert,
    "pad": _pad,
    "iota": _iota,
    "clamp": _clamp,
    "tile": lambda x, *, reps: np.tile(x, reps),
    "stack": lambda *xs, axis: np.stack(xs, axis),
    "div": _div,
    "mul": _mul,
    "integer_pow": _integer_pow,
    "reshape": lambda x, *, new_sizes, dimensions=None, **_: np.reshape(
        x if dimensions is None else np.transpose(x, dimensions), new_sizes
    ),
    "squeeze": lambda x, *, dimensions: np.reshape(
        x, [n for i, n in enumerate(x.shape) if i not in dimensions]
    ),
    "expand_dims": lambda x, *, dimensions: np.expand_dims(x, dimensions),
    "transpose": lambda x, *, permutation: x.transpose(permutation),
    "rev": lambda x, *, dimensions: np.flip(x, dimensions),
    "concatenate": lambda *xs, dimension: np.concatenate(xs, dimension),
    "copy": lambda x: x,
    "copy_p": lambda x: x,
    "name": lambda x, **_: x,
    "reshard": lambda x, **_: x,
    "mesh_cast": lambda x, **_: x,
    "stop_gradient": lambda x: x,
    "reduce_sum": _reduce(np.sum),
    "reduce_prod": _reduce(np.prod),
    "reduce_max": _reduce(np.max),
    "reduce_min": _reduce(np.min),
    "reduce_and": _reduce(np.all),
    "reduce_or": _reduce(np.any),
    "add": _binary(np.add),
    "add_any": _binary(np.add),
    "sub": _binary(np.subtract),
    "max": _binary(np.maximum),
    "min": _binary(np.minimum),
    "atan2": _binary(np.arctan2),
    "eq": _binary(np.equal),
    "ne": _binary(np.not_equal),
    "lt": _binary(np.less),
    "le": _binary(np.less_equal),
    "gt": _binary(np.greater),
    "ge": _binary(np.greater_equal),
    "and": _binary(np.bitwise_and),
    "or": _binary(np.bitwise_or),
    "not": lambda x: np.invert(x),
    "neg": lambda x: np.negative(x),
    "abs": lambda x: np.abs(x),
    "sign": _unary(np.sign),
    "floor": _unary(np.floor),
    "ceil": _unary(np.ceil),
    "is_finite": lambda x: np.isfinite(x),
    "square": lambda x: x * x,
    "tanh": _unary(np.tanh),
    "exp": _unary(np.exp),
    "exp2": _unary(np.exp2),
    "expm1": _unary(np.expm1),
    "log": _unary(np.log),
    "log1p": _unary(np.log1p),
    "sin": _unary(np.sin),
    "cos": _unary(np.cos),
    "sqrt": _unary(np.sqrt),
    "rsqrt": _unary(_rsqrt),
    "logistic": _unary(_logistic),
    "gather": gather,
    "scatter": scatter(put),
    "scatter-add": scatter(np.add.at),
    "scatter_add": scatter(np.add.at),
    "scatter-mul": scatter(np.multiply.at),
    "scatter_mul": scatter(np.multiply.at),
    "scatter-min": scatter(np.minimum.at),
    "scatter_min": scatter(np.minimum.at),
    "scatter-max": scatter(np.maximum.at),
    "scatter_max": scatter(np.maximum.at),
    "split": _split,
    "argmax": _argument(np.argmax),
    "argmin": _argument(np.argmin),
    "cumsum": _cumulative(np.cumsum),
    "cumprod": _cumulative(np.cumprod),
    "cummax": _cumulative(np.maximum.accumulate),
    "cummin": _cumulative(np.minimum.accumulate),
    "triangular_solve": _triangular_solve,
    "bitcast_convert_type": _bitcast,
    "shift_right_logical": _shift_right,
    "pow": _real_only(np.power),
    "rem": _real_only(np.fmod),
    "tan": _real_only(np.tan),
    "asin": _real_only(np.arcsin),
    "acos": _real_only(np.arccos),
    "atan": _real_only(np.arctan),
    "sinh": _real_only(np.sinh),
    "cosh": _real_only(np.cosh),
    "asinh": _real_only(np.arcsinh),
    "acosh": _real_only(np.arccosh),
    "atanh": _real_only(np.arctanh),
    "cbrt": _real_only(np.cbrt),
    "erf": _real_only(special.erf),
    "erfc": _real_only(special.erfc),
    "erf_inv": _real_only(special.erfinv),
    "lgamma": _real_only(special.gammaln),
    "digamma": _real_only(special.digamma),
    "bessel_i0e": _real_only(special.i0e),
    "bessel_i1e": _real_only(special.i1e),
}


def version(eqn: Any) -> Callable[..., Array | None] | None:
    """A function of an equation's operands, if NumPy knows it.

    It gives nothing for operands that JAX has to be asked about."""
    name = eqn.primitive.name
    if name == "dot_general":
        return _dot_general(eqn)
    known = VERSIONS.get(name)
    return None if known is None else functools.partial(known, **eqn.params)
