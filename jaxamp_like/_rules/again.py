"""What the backward pass computes again, kept apart from the forward pass.

XLA would merge equal values of the two passes, and so keep what was to be computed
again. On GPUs and CPUs optimization barriers prevent that, and each kernel computes
again all that it reads. On TPUs barriers cost more than they save: they cut fusions,
and it is costly to store float32 values between the smaller fusions. There XLA may
merge values, and sums over many numbers are kept instead, since each takes a pass over
an array.

Which of the two holds is only known when a program is lowered: a program that was
traced once may be compiled for several platforms."""

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from .._jax import Zero, new_primitive


def apart(x: Any) -> Any:
    """`x` as a value of its own, so that XLA doesn't merge what is made of it."""
    return x if _is_opaque(x) else _APART.bind(x)


def begun_apart(x: Any) -> Any:
    """`x`, whose cotangent goes through `apart` on its way back."""
    return x if _is_opaque(x) else _BEGUN_APART.bind(x)


def _is_opaque(x: Any) -> bool:
    """Whether `x` holds no numbers, but PRNG keys."""
    return jnp.issubdtype(x.dtype, jax.dtypes.extended)


def kept_or_made(x: Any) -> Any:
    """On TPUs `x` as `keeps_statistics` keeps it, elsewhere `x` as it is made again.

    XLA drops the one that the platform doesn't use."""
    return _KEPT_OR_MADE.bind(_KEPT.bind(x), x)


def keeps_statistics(primitive: Any, *avals: Any, **params: Any) -> bool:
    """A policy for a `jax.checkpoint`."""
    del avals, params
    return primitive is _KEPT


def _apart_transpose(ct: Any, x: Any) -> list[Any]:
    del x
    return [ct if isinstance(ct, Zero) else _APART.bind(ct)]


def _begun_jvp(primals: Any, tangents: Any) -> Any:
    (tangent,) = tangents
    moves = tangent if isinstance(tangent, Zero) else _BEGUN_APART.bind(tangent)
    return _BEGUN_APART.bind(*primals), moves


def _kept_batch(args: Any, dims: Any) -> Any:
    (size,) = {x.shape[i] for x, i in zip(args, dims, strict=True) if i is not None}

    def in_front(x: Any, i: int | None) -> Any:
        if i is None:
            return jnp.broadcast_to(x, (size, *x.shape))
        return jnp.moveaxis(x, i, 0)

    return _KEPT_OR_MADE.bind(*map(in_front, args, dims)), 0


_APART = new_primitive(
    "amp_apart",
    compute=lax.optimization_barrier,
    aval=lambda x: x,
    # Cotangents go by without a barrier: XLA may merge them with what they add to.
    jvp=lambda primals, tangents: (_APART.bind(*primals), tangents[0]),
    transpose=_apart_transpose,
    batch=lambda args, dims: (_APART.bind(*args), dims[0]),
    on_tpu=lambda x: x,
    series=lambda x: x,
)

_BEGUN_APART = new_primitive(
    "amp_begun_apart",
    compute=lambda x: x,
    aval=lambda x: x,
    jvp=_begun_jvp,
    transpose=_apart_transpose,
    batch=lambda args, dims: (_BEGUN_APART.bind(*args), dims[0]),
)

_KEPT = new_primitive(
    "amp_kept",
    compute=lambda x: x,
    aval=lambda x: x,
    jvp=lambda primals, tangents: (_KEPT.bind(*primals), tangents[0]),
    transpose=lambda ct, x: [ct],
    batch=lambda args, dims: (_KEPT.bind(*args), dims[0]),
)

_KEPT_OR_MADE = new_primitive(
    "amp_kept_or_made",
    compute=lambda kept, made: made,
    aval=lambda kept, made: made,
    jvp=lambda primals, tangents: (_KEPT_OR_MADE.bind(*primals), tangents[1]),
    transpose=lambda ct, kept, made: [None, ct],
    batch=_kept_batch,
    on_tpu=lambda kept, made: kept,
)
