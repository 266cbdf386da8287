"""Floating dtypes: which are lowered, which constants survive that, and the cast."""

import functools
import re
from collections.abc import Iterable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.typing import DTypeLike

from ._errors import AmpError
from ._jax import on_mesh_of
from ._suggestions import did_you_mean

DType = np.dtype


@functools.cache
def is_float(dtype: Any) -> bool:
    """Whether `dtype` is a real floating dtype (PRNG keys and float0 are not)."""
    return jnp.issubdtype(dtype, jnp.floating)


NAMES = ("float16", "bfloat16", "float32", "float64")
SHORT_NAMES = {
    "f16": "float16",
    "fp16": "float16",
    "bf16": "bfloat16",
    "f32": "float32",
    "fp32": "float32",
    "f64": "float64",
    "fp64": "float64",
    "full": "float32",
}


def in_words(x: Any) -> str:
    """An array in words, as "float32[2, 3]"; of anything else, the name of its type."""
    if not (hasattr(x, "dtype") and hasattr(x, "shape")):
        return type(x).__name__
    return f"{x.dtype}{[*x.shape]}"


def full_name(name: str) -> str:
    """The name of a dtype for a short name of it; other strings are left alone."""
    name = name.strip()
    if name == "half":  # this initialises JAX's backends, so it is only done here
        return "bfloat16" if jax.default_backend() == "tpu" else "float16"
    return SHORT_NAMES.get(name, name)


_EIGHT_BITS = re.compile(r"(u?int|float|fp|mxfp)[48]\b")  # these are no compute dtypes
_BLOCK_SCALED = re.compile(r"mxfp8|nvfp4")


def as_float_dtype(value: DTypeLike, argument: str) -> DType:
    """Returns `value` as a floating dtype, or says which `argument` was wrong."""
    try:
        dtype = jnp.dtype(full_name(value) if isinstance(value, str) else value)
    except (TypeError, ValueError):
        dtype = None
    # NumPy's float128 (longdouble) is a floating dtype that JAX does not have.
    if dtype is None or not is_float(dtype) or dtype.itemsize > 8:
        is_name = isinstance(value, str)
        hint = did_you_mean(value, (*NAMES, *SHORT_NAMES)) if is_name else ""
        if is_name and _BLOCK_SCALED.match(value):
            hint = (
                " It is a format of contractions alone, which a policy names: "
                f"`amp_policy='{value[:5]}_from_mixed_bfloat16'`."
            )
        elif str(value).lower() in ("tf32", "tensorfloat32"):
            hint = (
                " TF32 is a way to multiply float32 numbers, which a rule asks for: "
                "`amp_policy={jax.lax.dot_general_p: "
                "use_dot_algorithm('TF32_TF32_F32')}`."
            )
        elif _EIGHT_BITS.match(str(value)):
            hint = (
                " Contractions in 8 bits are a policy: "
                "`amp_policy='float8_from_mixed_bfloat16'`, or 'int8_from_...'."
            )
        raise TypeError(
            f"`{argument}` must be a floating dtype such as 'bfloat16', 'float16' or "
            f"'float32', but got {value!r}.{hint}"
        )
    if dtype.itemsize == 8 and not jax.config.jax_enable_x64:  # type: ignore[attr-defined]
        raise ValueError(
            f"`{argument}` is float64, which JAX only has with x64 enabled. Call "
            "`jax.config.update('jax_enable_x64', True)` first, or ask for float32."
        )
    return dtype


def as_compute_dtype(value: DTypeLike, argument: str) -> DType:
    """Like `as_float_dtype`, but also raises for dtypes of fewer than 16 bits."""
    dtype = as_float_dtype(value, argument)
    if bits(dtype) < 16:
        info = jnp.finfo(dtype)
        raise AmpError(
            f"`{argument}` is {dtype.name!r}, which holds {float(info.tiny):.2g} to "
            f"{float(info.max):.3g}: numbers need scales in it, or gradients vanish. "
            "Compute in 'bfloat16' or 'float16', with contractions in float8 that have "
            "scales: `amp_policy='float8_from_mixed_bfloat16'`, or the rule `float8()` "
            "for some of them."
        )
    return dtype


@functools.cache
def bits(dtype: DType) -> int:
    return jnp.finfo(dtype).bits


def widest(dtypes: Iterable[DType]) -> DType:
    """The widest of `dtypes`; float32 if two different ones are equally wide.

    float16 lacks the range of bfloat16, and bfloat16 the precision of float16."""
    known = set(dtypes)
    best = max(known, key=bits)
    rivals = [dtype for dtype in known if bits(dtype) == bits(best)]
    return best if len(rivals) == 1 else np.dtype(np.float32)


def lowered(author: DType, dtype: DType) -> DType:
    """The dtype that a value written in `author` has when `dtype` is asked for.

    It never has more bits than the author wrote. float64 is left alone, for nobody
    writes it by accident."""
    if not is_float(author) or author.itemsize == 8 or bits(dtype) >= bits(author):
        return author
    return dtype


def holds(dtype: DType, other: DType) -> bool:
    """Whether every number of `other` is one of `dtype` too.

    float16 and bfloat16 don't hold each other."""
    new, old = jnp.finfo(dtype), jnp.finfo(other)
    has_range = new.maxexp >= old.maxexp and new.minexp <= old.minexp
    return has_range and new.nmant >= old.nmant


def has_range(dtype: DType, other: DType) -> bool:
    """Whether the largest exponent of `dtype` is at least that of `other`."""
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
    if x.dtype == dtype:
        return x
    with on_mesh_of(x):
        return lax.convert_element_type(x, dtype)


def cast_as(x: Any, aval: Any) -> Any:
    """Casts an array to the dtype of `aval`, and to its `weak_type`."""
    now = jax.typeof(x)
    if (now.dtype, now.weak_type) == (aval.dtype, aval.weak_type):
        return x
    # JAX's public functions only make weak types of the default dtypes.
    with on_mesh_of(x):
        return lax.convert_element_type_p.bind(
            x, new_dtype=aval.dtype, weak_type=aval.weak_type, sharding=None
        )


def cast_all(values: Iterable[Any], dtypes: Iterable[DType | None]) -> list[Any]:
    """Casts each value to its dtype; a value whose dtype is `None` is left alone."""
    pairs = zip(values, dtypes, strict=True)
    return [x if dtype is None else cast(x, dtype) for x, dtype in pairs]
