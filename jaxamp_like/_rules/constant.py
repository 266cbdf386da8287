"""Values of which no derivative may be taken, and what notices where one is.

A rounded value has no derivative; the contraction that reads it has one. If a
contraction keeps rounded operands, its second derivative would silently lack what
depends on them. So a scale that is kept is tied to the operand: its derivative is 0,
but is made from the operand's, so that it is seen and refused."""

from collections.abc import Callable
from typing import Any, NoReturn

import jax.numpy as jnp

from .._errors import AmpError
from .._jax import (
    Primitive,
    Zero,
    is_linear_operand,
    new_identity,
    new_primitive,
    tangent_aval,
)


def constant(x: Any) -> Any:
    """`x`, of which no derivative is taken."""
    return _CONSTANT.bind(x)


def tied_zeros(tangent: Any, like: Any) -> Any:
    """Zeros like an array, which depend linearly on a tangent.

    Reverse mode would drop a constant 0, since that depends on nothing. A symbolic zero
    stays one."""
    is_none = isinstance(tangent, Zero)
    return Zero(tangent_aval(like)) if is_none else _NOTHING.bind(tangent, like)


def tied(scale: Any, operand: Any) -> Any:
    """`scale`, with a derivative where `operand` has one, so that it can be refused."""
    return _TIED.bind(scale, operand)


def no_derivative(*_: Any, **__: Any) -> NoReturn:
    """The derivative and the transpose of what reads values of `constant` alone."""
    raise AssertionError("No derivative is taken of rounded numbers: see `constant`.")


def no_series(*_: Any, **__: Any) -> NoReturn:
    """Refuses the Taylor series of what is rounded to 8 bits."""
    raise AmpError(
        "`jet` takes the Taylor series of a contraction that a rule quantises. It goes "
        "by no derivative rules but its own, and rounding has no series. Put `amp` "
        "around it, `amp(lambda ...: jet(fn, ...))`, where its contractions are "
        "ordinary ones, or what it is taken of under `amp_stop`."
    )


def _constant_jvp(primals: Any, tangents: Any) -> Any:
    del tangents
    out = constant(*primals)
    return out, Zero(tangent_aval(out))


def _tied_jvp(primals: Any, tangents: Any) -> Any:
    out = tied(*primals)
    moves = [t for t in tangents if not isinstance(t, Zero)]
    return out, tied_zeros(moves[0] if moves else tangents[0], out)


def _nothing_jvp(primals: Any, tangents: Any) -> Any:
    out = _NOTHING.bind(*primals)
    if isinstance(tangents[0], Zero):
        return out, Zero(tangent_aval(out))
    return out, _NOTHING.bind(tangents[0], primals[1])


def _nothing_batch(args: Any, dims: Any) -> Any:
    """Zeros of the scale, which has an axis for the examples if it is mapped."""
    return _NOTHING.bind(*args), dims[1]


def first_operand(name: str, jvp: Callable[..., Any]) -> Primitive:
    """A primitive that returns its first operand, and gives no operand a cotangent.

    A transposed loop hands back arrays of 0 for its constants, not symbolic zeros."""
    return new_identity(
        name,
        jvp=jvp,
        transpose=lambda ct, *operands, **_: [Zero(x.aval) for x in operands],
        series=no_series,
    )


_CONSTANT = first_operand("amp_constant", _constant_jvp)
_TIED = first_operand("amp_tied", _tied_jvp)
_NOTHING = new_primitive(
    "amp_no_derivative",
    compute=lambda tangent, scale: jnp.zeros_like(scale),
    aval=lambda tangent, scale: scale,
    jvp=_nothing_jvp,
    transpose=lambda ct, tangent, scale: [
        Zero(x.aval) if is_linear_operand(x) else None for x in (tangent, scale)
    ],
    batch=_nothing_batch,
    series=no_series,
)
"""Zeros like its second operand, as a linear function of the first."""
