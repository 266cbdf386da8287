"""Inputs that lie on several devices, which only shows when a program is lowered.

The backward pass casts a parameter a second time, and looks up rows of a table again,
since the input is in memory anyway (see `_rewrite.placement`). Where the parameter is
split over devices, each of these reads has to fetch what the device does not have, and
XLA does not see that all of them fetch the same. If only the `in_shardings` of a `jit`
around `amp` place the parameter, tracing can't know. The lowering does know that it
compiles for several devices: it then merges the reads, as if the program had read once.
On one device it changes nothing."""

from typing import Any

from .._jax import (
    Zero,
    has_backward_pass,
    is_linear_operand,
    is_tracer,
    merging_reads,
    new_identity,
)


def read_once(x: Any) -> Any:
    """An input whose reads are merged where a program is lowered for several devices.

    Only a backward pass reads it again, so a program without one has no such mark."""
    return _READ.bind(x) if is_tracer(x) and has_backward_pass(x) else x


def _jvp(primals: Any, tangents: Any) -> Any:
    (x,), (tangent,) = primals, tangents
    return x, _beside(tangent, x)


def _cotangent_jvp(primals: Any, tangents: Any) -> Any:
    (_, x), (tangent, _) = primals, tangents
    return _COTANGENT.bind(*primals), _beside(tangent, x)


def _beside(tangent: Any, x: Any) -> Any:
    """A tangent or a cotangent of an input, beside that input."""
    return tangent if isinstance(tangent, Zero) else _COTANGENT.bind(tangent, x)


def _cotangent_transpose(ct: Any, tangent: Any, x: Any) -> list[Any]:
    """The input itself may be linear; then it has no value to stand beside."""
    out = ct if is_linear_operand(x) else _beside(ct, x)
    return [out if is_linear_operand(tangent) else None, None]


_READ = new_identity("amp_read", jvp=_jvp, transpose=lambda ct, x: [ct])

# A cotangent of an input comes after all that reads the input, so that its lowering
# finds these reads. Beside it stands the input itself.
_COTANGENT = new_identity(
    "amp_read_cotangent", jvp=_cotangent_jvp, transpose=_cotangent_transpose
)
merging_reads(_COTANGENT)
