"""Inputs that lie on several devices, which only shows when a program is lowered.

The backward pass casts a parameter a second time, and looks up rows of a table again,
since the input is in memory anyway (see `_rewrite.placement`). Where the parameter is
split over devices, each of these reads has to fetch what the device does not have, and
XLA does not see that all of them fetch the same. If only the `in_shardings` of a `jit`
around `amp` place the parameter, tracing can't know. The lowering does know that it
compiles for several devices: it then merges the reads, as if the program had read once.
On one device it changes nothing.

Two equations with the same tag tell this to the lowering. The first one, which has no
results, says which value is the input. The second one hands on the cotangent of the
input, and so says that the input has been read. The input itself is no operand of the
second one, or JAX would take the cotangent for a function of the input. It could then
not transpose a program that is linear in the input, such as the gradient of a linear
function times that input."""

from typing import Any

from .._jax import (
    Zero,
    has_backward_pass,
    is_tracer,
    merging_reads,
    new_identity,
    new_note,
)


def read_once(x: Any) -> Any:
    """An input whose reads are merged where a program is lowered for several devices.

    Only a backward pass reads it again, so a program without one has no such mark."""
    if not is_tracer(x) or not has_backward_pass(x):
        return x
    tag = object()
    _INPUT.bind(x, tag=tag)
    return _READ.bind(x, tag=tag)


def _jvp(primals: Any, tangents: Any, *, tag: object) -> Any:
    (x,), (tangent,) = primals, tangents
    return x, _cotangent(tangent, tag)


def _cotangent_jvp(primals: Any, tangents: Any, *, tag: object) -> Any:
    (ct,), (tangent,) = primals, tangents
    return _cotangent(ct, tag), _cotangent(tangent, tag)


def _cotangent(ct: Any, tag: object) -> Any:
    return ct if isinstance(ct, Zero) else _COTANGENT.bind(ct, tag=tag)


_INPUT = new_note("amp_input")
_READ = new_identity("amp_read", jvp=_jvp, transpose=lambda ct, x, tag: [ct])
_COTANGENT = new_identity(
    "amp_read_cotangent",
    jvp=_cotangent_jvp,
    transpose=lambda ct, x, tag: [_cotangent(ct, tag)],
)
merging_reads(_INPUT, _COTANGENT)
