"""Floating dtypes: which may be lowered, what survives it, and the cast itself."""

from collections.abc import Iterable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.typing import DTypeLike

DType = np.dtype


def is_float(dtype: Any) -> bool:
    """Whether `dtype` is a real floating dtype (PRNG keys and float0 are not)."""
    return jnp.issubdtype(dtype, jnp.floating)


def as_float_dtype(value: DTypeLike, argument: str) -> DType:
    """Returns `value` as a floating dtype, or says which `argument` was wrong."""
    try:
        dtype = jnp.dtype(value)
    except TypeError:
        dtype = None
    # NumPy's float128 (longdouble) is a floating dtype that JAX does not have.
    if dtype is None or not is_float(dtype) or dtype.itemsize > 8:
        raise TypeError(
            f"`{argument}` must be a floating dtype such as 'bfloat16', 'float16' or "
            f"'float32', but got {value!r}."
        )
    if dtype.itemsize == 8 and not jax.config.jax_enable_x64:  # type: ignore[attr-defined]
        raise ValueError(
            f"`{argument}` is float64, which JAX only has with x64 enabled. Call "
            "`jax.config.update('jax_enable_x64', True)` first, or ask for float32."
        )
    return dtype


def bits(dtype: DType) -> int:
    return jnp.finfo(dtype).bits


def widest(dtypes: Iterable[DType]) -> DType:
    """The dtype that holds all of `dtypes`: of two that are equally wide, neither.

    float16 has not the range of bfloat16, nor bfloat16 the resolution of float16."""
    known = set(dtypes)
    best = max(known, key=bits)
    rivals = [dtype for dtype in known if bits(dtype) == bits(best)]
    return best if len(rivals) == 1 else np.dtype(np.float32)


def lowered(author: DType, dtype: DType) -> DType:
    """The dtype that a value written in `author` has when `dtype` is asked for.

    Never more bits than the author wrote, and float64 is left alone: nobody writes it
    by accident."""
    if not is_float(author) or author.itemsize == 8 or bits(dtype) >= bits(author):
        return author
    return dtype


def holds(dtype: DType, other: DType) -> bool:
    """Whether every number of `other` is one of `dtype` too.

    Of two that are equally wide, neither holds the other."""
    new, old = jnp.finfo(dtype), jnp.finfo(other)
    has_range = new.maxexp >= old.maxexp and new.minexp <= old.minexp
    return has_range and new.nmant >= old.nmant


def has_range(dtype: DType, other: DType) -> bool:
    """Whether a number of `other` may be rounded to `dtype` without an overflow."""
    return jnp.finfo(dtype).maxexp >= jnp.finfo(other).maxexp


def survives(value: float, dtype: DType) -> bool:
    """Whether a constant still does its job when it is cast to `dtype`.

    A mask of -1e9 must not become -inf, an epsilon of 1e-8 must not become 0, and a
    decay of 0.999 must not become 1."""
    info = jnp.finfo(dtype)
    if not np.isfinite(value) or value in (0.0, 1.0):
        return True
    magnitude = abs(value)
    if not float(info.tiny) <= magnitude <= float(info.max):
        return False
    return abs(1 - magnitude) >= float(info.eps)


def exact_in(value: float, dtype: DType) -> bool:
    """Whether a constant is one of the numbers of `dtype`."""
    with np.errstate(over="ignore"):
        return float(np.asarray(value).astype(dtype)) == value


def cast(x: Any, dtype: DType) -> Any:
    """Casts a float array to `dtype`, and leaves it alone if that is what it has."""
    return x if x.dtype == dtype else lax.convert_element_type(x, dtype)


def cast_all(values: Iterable[Any], dtypes: Iterable[DType | None]) -> list[Any]:
    """Casts each value that has a dtype given."""
    pairs = zip(values, dtypes, strict=True)
    return [x if dtype is None else cast(x, dtype) for x, dtype in pairs]
