"""A value of which no derivative is taken, but by mistake.

What is rounded has no derivative: the contraction that reads it has. Where one that
keeps rounded operands is differentiated twice, that would go unseen, so what it keeps
is tied to the operand: of that, a derivative is an array of zeros, no symbol of zero,
and is refused."""

from typing import Any

from .._jax import Zero, new_primitive, tangent_aval, zeros_like_aval


def constant(x: Any) -> Any:
    """`x`, of which no derivative is taken."""
    return _CONSTANT.bind(x)


def tied(scale: Any, operand: Any) -> Any:
    """The scale of an operand, whose derivative is refused as that of the operand."""
    return _TIED.bind(scale, operand)


def _constant_jvp(primals: Any, tangents: Any) -> Any:
    del tangents
    out = constant(*primals)
    return out, Zero(tangent_aval(out))


def _tied_jvp(primals: Any, tangents: Any) -> Any:
    out = tied(*primals)
    aval = tangent_aval(out)
    is_zero = all(isinstance(t, Zero) for t in tangents)
    return out, Zero(aval) if is_zero else zeros_like_aval(aval)


_CONSTANT = new_primitive(
    "amp_constant",
    compute=lambda x: x,
    aval=lambda x: x,
    jvp=_constant_jvp,
    # A transposed loop hands back 0 for its constants, but no symbol of it.
    transpose=lambda ct, x: [Zero(x.aval)],
    batch=lambda args, dims: (constant(*args), dims[0]),
)
"""Its operand."""

_TIED = new_primitive(
    "amp_tied",
    compute=lambda scale, operand: scale,
    aval=lambda scale, operand: scale,
    jvp=_tied_jvp,
    transpose=lambda ct, scale, operand: [Zero(scale.aval), Zero(operand.aval)],
    batch=lambda args, dims: (tied(*args), dims[0]),
)
"""Its first operand."""
