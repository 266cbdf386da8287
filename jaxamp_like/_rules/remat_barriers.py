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

from .._jax import Zero, new_identity, new_primitive


def behind_barrier(x: Any) -> Any:
    """`x` as a value of its own, so that XLA doesn't merge what is made of it."""
    return x if _is_opaque(x) else _BARRIER.bind(x)


def with_cotangent_barrier(x: Any) -> Any:
    """`x`, whose cotangent goes through `behind_barrier` on its way back."""
    return x if _is_opaque(x) else _COTANGENT_BARRIER.bind(x)


def _is_opaque(x: Any) -> bool:
    """Whether `x` holds no numbers, but PRNG keys."""
    return jnp.issubdtype(x.dtype, jax.dtypes.extended)


def saved(x: Any) -> Any:
    """`x`, as `keeps_statistics` keeps it."""
    return _SAVED.bind(x)


def saved_on_tpus(x: Any) -> Any:
    """On TPUs `x` as `keeps_statistics` keeps it, elsewhere `x` as it is made again.

    XLA drops the one that the platform doesn't use."""
    return _SAVED_ON_TPUS.bind(_SAVED.bind(x), x)


def keeps_statistics(primitive: Any, *avals: Any, **params: Any) -> bool:
    """A policy for a `jax.checkpoint`."""
    del avals, params
    return primitive is _SAVED


def _barrier_transpose(ct: Any, x: Any) -> list[Any]:
    del x
    return [ct if isinstance(ct, Zero) else _BARRIER.bind(ct)]


def _cotangent_barrier_jvp(primals: Any, tangents: Any) -> Any:
    (tangent,) = tangents
    out = tangent if isinstance(tangent, Zero) else _COTANGENT_BARRIER.bind(tangent)
    return _COTANGENT_BARRIER.bind(*primals), out


_BARRIER = new_identity(
    "amp_apart",
    compute=lax.optimization_barrier,
    # Cotangents go by without a barrier: XLA may merge them with what they add to.
    jvp=lambda primals, tangents: (_BARRIER.bind(*primals), tangents[0]),
    transpose=_barrier_transpose,
    on={"tpu": lambda x: x},
    series=lambda x: x,
)

_COTANGENT_BARRIER = new_identity(
    "amp_begun_apart", jvp=_cotangent_barrier_jvp, transpose=_barrier_transpose
)

_SAVED = new_identity(
    "amp_kept",
    jvp=lambda primals, tangents: (_SAVED.bind(*primals), tangents[0]),
    transpose=lambda ct, x: [ct],
)

_SAVED_ON_TPUS = new_primitive(
    "amp_kept_or_made",
    compute=lambda kept, made: made,
    aval=lambda kept, made: made,
    jvp=lambda primals, tangents: (_SAVED_ON_TPUS.bind(*primals), tangents[1]),
    transpose=lambda ct, kept, made: [None, ct],
    on={"tpu": lambda kept, made: kept},
)
