"""The three contractions of training, each made in a way of its own.

A contraction is made forward, for the gradient of its left operand and for that of its
right one. JAX's own transposes copy the dtype of the result from one to the next, so
that the three can't have precisions of their own, and a rounded operand has no
derivative at all. Here each of the three is a `Pass`. The two gradients are linear
functions of one operand each: JAX sees them as a primitive, which stands in the tangent
program, and whose transpose makes the contraction of the backward pass."""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from .._dtypes import DType, bits, cast, lowered
from .._jax import SymbolicZero, Zero, is_linear_operand, new_primitive, result_aval
from .base import Site
from .bilinear import (
    Bilinear,
    Hook,
    bilinear,
    by_casts,
    in_dtype,
    mapped,
    swapped,
    transposed,
)
from .computing import wide_contraction


@dataclass(frozen=True, eq=False)
class Pass:
    """How one of the contractions is made, as a linear function of one operand.

    A format of numbers that quantises has passes of its own; see `_quantised.passes`.

    Args:
        fn: the contraction.
        moving: the operand, 0 or 1, that it is linear in; called the moving one.
        low: the dtype in which cotangents of the result are read."""

    fn: Bilinear
    moving: int
    low: DType

    def __call__(self, moving: Any, *others: Any) -> Any:
        raise NotImplementedError

    def residuals(
        self, operands: Sequence[Any], numbers: Sequence[Any]
    ) -> Sequence[Any]:
        """What the pass reads beside the moving operand, in the form that is kept.

        `numbers` are the two operands as numbers of a format, if they were rounded."""
        del numbers
        return [operands[1 - self.moving], *operands[2:]]

    @property
    def swapped(self) -> "Pass":
        """The same contraction, as a linear function of its other operand."""
        fn = swapped(self.fn)
        return dataclasses.replace(self, fn=fn, moving=1 - self.moving)

    def mapped(
        self, args: Sequence[Any], axes: Sequence[int | None]
    ) -> tuple["Pass", Sequence[Any]]:
        """The pass mapped by `vmap` along `axes` of its operands, and the operands."""
        return dataclasses.replace(self, fn=mapped(self.fn, axes)), args

    def transposed(self, moving: Any, *others: Any) -> Callable[..., Any]:
        """A function of a cotangent and the others: the moving operand's gradient.

        That function can be differentiated. `moving` and `others` are avals."""
        raise NotImplementedError


@dataclass(frozen=True, eq=False)
class CastPass(Pass):
    """A contraction of operands that are cast, and not otherwise rounded.

    Args:
        reads: the dtypes in which both are read.
        wide: the dtype of a result that is not rounded to `low`. The gradient of the
            moving operand is then not rounded to the dtype in which that is read.
        is_low: whether it is lower than its author wrote it.
        keeps_low: whether the other operand is kept in the dtype in which it is read,
            and not as it came."""

    reads: tuple[DType, DType]
    wide: DType | None = None
    is_low: bool = True
    keeps_low: bool = False

    def __call__(self, moving: Any, *others: Any) -> Any:
        hook = by_casts(self.reads, self.wide or self.low, self.is_low)
        return self.fn(moving, others[0], hook, *others[1:])

    def residuals(
        self, operands: Sequence[Any], numbers: Sequence[Any]
    ) -> Sequence[Any]:
        other, *rest = super().residuals(operands, numbers)
        if self.keeps_low:
            other = cast(other, lowered(other.dtype, self.reads[1 - self.moving]))
        return [other, *rest]

    def transposed(self, moving: Any, *others: Any) -> Callable[..., Any]:
        other, *rest = others
        low, read = self.reads[self.moving], self.reads[1 - self.moving]
        hook = by_casts(self.reads, self.low, self.is_low)
        avals = [in_dtype(moving, low), in_dtype(other, read), *rest]
        fn = transposed(self.fn, avals, hook)
        is_wide = self.wide is not None and bits(moving.dtype) > bits(low)
        made = _beside_cotangent(read, moving.dtype if is_wide else None)
        return lambda ct, other, *rest: fn(ct, other, made, *rest)


def _beside_cotangent(read: DType, wide: DType | None) -> Hook:
    """Casts the operand beside the cotangent; results are as traced, or `wide`."""

    def hook(primitive: Any, params: Any, operands: Any, moving: int) -> Any:
        operands = list(operands)
        operands[1 - moving] = cast(operands[1 - moving], read)
        if wide is not None:
            return wide_contraction(primitive, params, wide)(*operands)
        return primitive.bind(*operands, **params)

    return hook


def cast_pass(
    site: Site, moving: int, dtype: DType, wide: DType | None = None
) -> CastPass:
    """A pass that reads operands in `dtype`, but in no more bits than written.

    A `wide` result has that dtype, or that of the operands if it is wider."""
    lhs, rhs, out = (
        author and lowered(author, dtype)
        for author in (*site.authors[:2], site.out_authors[0])
    )
    return CastPass(
        bilinear(site.primitive, site.params, moving),
        moving,
        out,  # type: ignore[arg-type]
        (lhs, rhs),  # type: ignore[arg-type]
        wide=wide and max(out, wide, key=bits),  # type: ignore[arg-type]
        is_low=(lhs, rhs) != site.authors[:2],
        keeps_low=True,
    )


def in_compute_dtype(site: Site, low: DType) -> tuple[CastPass, CastPass]:
    """The gradients by each operand of a contraction, made of operands in `low`."""
    lhs, rhs = (
        CastPass(bilinear(site.primitive, site.params, i), i, low, (low, low))
        for i in (0, 1)
    )
    return lhs, rhs


def contraction_by_casts(
    forward: CastPass, gradients: Sequence[CastPass], out: DType
) -> Callable[..., Any]:
    """A contraction whose three passes all read operands that are cast."""
    contraction = with_passes(lambda *xs: cast(forward(*xs), out), gradients)
    return lambda *operands: contraction(*map(jnp.asarray, operands))


def with_passes(
    forward: Callable[..., Any],
    gradients: Sequence[Pass],
    read: Callable[..., tuple[Any, Any]] = lambda *operands: (operands, ()),
) -> Callable[..., Any]:
    """`forward(lhs, rhs, ...)`, with a derivative by `gradients`, one for each operand.

    `read` splits the arguments into the operands of the contraction and the numbers of
    a format that were made of them, which `forward` reads too."""

    @jax.custom_jvp
    def contraction(*operands):
        return forward(*operands)

    def jvp(primals, tangents):
        operands, numbers = read(*primals)
        out = contraction(*operands, *numbers)
        moves = [
            PASS.bind(
                tangents[i],
                *made.residuals(operands, numbers),
                made=made,
                out=out.dtype,
            )
            for i, made in enumerate(gradients)
            if not isinstance(tangents[i], SymbolicZero)
        ]
        return out, functools.reduce(lax.add, moves)

    contraction.defjvp(jvp, symbolic_zeros=True)
    return contraction


def straight_through(made: Pass) -> Callable[..., Any]:
    """A pass as a function, whose derivative goes straight through its rounding."""

    @jax.custom_jvp
    def contraction(moving, *others):
        return made(moving, *others)

    def jvp(primals, tangents):
        out = contraction(*primals)
        return out, _tangent(primals, tangents, made, out.dtype, SymbolicZero)

    contraction.defjvp(jvp, symbolic_zeros=True)
    return contraction


def pulled_back(made: Pass, moving: Any, ct: Any, *others: Any) -> Any:
    """The gradient of the moving operand, which is given as an aval, from `ct`."""
    back = made.transposed(moving, *map(jax.typeof, others))
    return cast(back(cast(ct, made.low), *others), moving.dtype)


# The primitive. No composition of JAX's own primitives has transposes that cast the
# cotangent which they read, need not round their result, and are mapped by `vmap` as
# contractions are: with the sum over examples inside. Its result is cast to `out`, so
# that the two terms of a derivative add up in that dtype.


def _run(*operands: Any, made: Pass, out: DType) -> Any:
    return cast(made(*operands), out)


def _aval(*avals: Any, made: Pass, out: DType) -> Any:
    run = functools.partial(_run, made=made, out=out)
    return result_aval(run, avals)


def _jvp(primals: Any, tangents: Any, *, made: Pass, out: DType) -> Any:
    result = PASS.bind(*primals, made=made, out=out)
    return result, _tangent(primals, tangents, made, out, Zero)


def _tangent(primals: Any, tangents: Any, made: Pass, out: DType, zero: type) -> Any:
    """The derivative of a product: one operand moves, then the other."""
    (x, y, *rest), (dx, *others) = primals, tangents
    moves = []
    if not isinstance(dx, zero):
        moves.append(PASS.bind(dx, y, *rest, made=made, out=out))
    if not all(isinstance(t, zero) for t in others):
        moves.append(PASS.bind(others[0], x, *rest, made=made.swapped, out=out))
    return functools.reduce(lax.add, moves)


def _transpose(ct: Any, *operands: Any, made: Pass, out: DType) -> Any:
    del out
    i = next(i for i in (0, 1) if is_linear_operand(operands[i]))
    made, aval = made.swapped if i else made, operands[i].aval
    cts: list[Any] = [None for _ in operands]
    if isinstance(ct, Zero):
        cts[i] = Zero(aval)
        return cts
    cts[i] = pulled_back(made, aval, ct, operands[1 - i], *operands[2:])
    return cts


def _batch(args: Any, dims: Any, *, made: Pass, out: DType) -> Any:
    made, args = made.mapped(args, dims)
    return PASS.bind(*args, made=made, out=out), 0


PASS = new_primitive(
    "amp_contraction",
    compute=_run,
    aval=_aval,
    jvp=_jvp,
    transpose=_transpose,
    batch=_batch,
)
"""Runs a pass on its moving operand and on what else it reads."""
