"""The passes of a contraction whose operands are quantised: forward, and gradients.

A quantised operand has no derivative: rounding has none. So the gradients are those of
the contraction as it was meant, by two linear functions, one for each operand: JAX sees
them as a primitive, which stands in the tangent program, and whose transpose makes the
contractions of the backward pass."""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NoReturn

import jax
import jax.numpy as jnp
from jax import lax

from .._dtypes import DType, cast
from .._errors import AmpError
from .._jax import SymbolicZero, Zero, is_of_jet, new_primitive, raw, trace
from .alone import Rounding
from .bilinear import (
    Bilinear,
    as_it_is,
    by_scales,
    in_dtype,
    swapped,
    transposed,
)
from .constant import constant, no_series, tied
from .formats import Format, quantised, rescaled, round_up_to_power_of_two
from .linear import transposable

Kind = Literal["kept", "again", "compute"]


@dataclass(frozen=True, eq=False)
class Pass:
    """How one of the contractions is made, as a linear function of one operand.

    Args:
        fn: the contraction.
        kind: "kept": the other operand was quantised in the forward pass and kept so;
            "again": it was kept as it was, and is quantised here; "compute": neither
            is quantised.
        low: the compute dtype, of operands that are not quantised.
        result: the dtype in which products of 8-bit operands are made, if any are.
        formats: of the moving operand, and of the other, if they are quantised.
        by_row: whether each row has its scale; not of what is "kept".
        before: whether scales of a "kept" operand go with the moving operand rather
            than with the result; only if there are many, one for each example."""

    fn: Bilinear
    kind: Kind
    low: DType
    result: DType | None = None
    formats: tuple[Format, ...] = ()
    by_row: bool = False
    before: bool = False

    def __call__(self, moving: Any, other: Any, scale: Any = None) -> Any:
        if self.kind == "compute":
            return self.fn(moving, other, in_dtype(self.low))
        assert self.result is not None
        if self.kind == "again":
            hook = by_scales(self.formats, self.by_row, self.result)
            return self.fn(moving, other, hook)
        if scale.ndim and self.before:
            # By what is left of each scale, which only makes numbers smaller.
            top = round_up_to_power_of_two(jnp.max(scale))
            moving, scale = moving.astype(scale.dtype) * (scale / top), top
        values, own = quantised(_LAST.bind(moving), self.formats[0])
        out = self.fn(values, other, as_it_is(self.result))
        return rescaled(out, own, scale)

    def transposed(self, moving: Any, other: Any) -> "Pass":
        """The transpose, for avals of the operands."""
        fn = transposed(self.fn, moving, other, self.low)
        return dataclasses.replace(self, fn=fn, before=not self.before)

    @property
    def swapped(self) -> "Pass":
        return dataclasses.replace(self, fn=swapped(self.fn))


def with_passes(
    forward: Callable[..., Any],
    gradients: Sequence[Pass],
    roundings: Sequence[Rounding | None],
) -> Callable[..., Any]:
    """`forward(lhs, rhs)`, with a derivative by `gradients`, one for each operand.

    Args:
        forward: makes the result of both operands, and of both as numbers of 8 bits.
        gradients: as linear functions of the operand, each, that read the other.
        roundings: of each operand, if it is rounded without a look at the other. What
            they make is kept for the backward pass, if a gradient reads it.
    Returns:
        A function of both operands, and of what the roundings made of them `alone`
        where that is known; `None` where not."""
    keeps = any(made.kind == "kept" for made in gradients)

    def completed(operands, alone):
        return [
            how(x) if one is None and how is not None else one
            for how, x, one in zip(roundings, operands, alone, strict=True)
        ]

    def forward_of(lhs, rhs, *alone):
        # Also in a `jit`: a Taylor series is refused at the first thing it meets.
        both = constant(lhs), constant(rhs)
        return forward(*both, *completed(both, alone))

    def jvp(primals, tangents):
        both, alone = primals[:2], primals[2:]
        alone = completed(both, alone) if keeps else alone
        out = contraction(*both, *alone)
        moves = []
        for i, made in enumerate(gradients):
            if isinstance(tangents[i], SymbolicZero):
                continue
            others = both[1 - i : 2 - i]
            if made.kind == "kept":
                numbers: Any = alone[1 - i]
                others = numbers._replace(scale=tied(numbers.scale, *others))
            move = _move_p.bind(tangents[i], *others, made=made)
            moves.append(cast(move, out.dtype))
        return out, functools.reduce(lax.add, moves)

    contraction = jax.custom_jvp(transposable(forward_of, gradients))
    contraction.defjvp(jvp, symbolic_zeros=True)

    def bind(*operands, alone=(None, None)):
        if any(map(is_of_jet, operands)):
            no_series()
        return contraction(*map(jnp.asarray, operands), *alone)

    return bind


# The primitive.


def _run(moving: Any, *others: Any, made: Pass) -> Any:
    return made(moving, *others)


def _aval(*avals: Any, made: Pass) -> Any:
    jaxpr = trace(functools.partial(_run, made=made), avals)
    return raw(jaxpr).outvars[0].aval


def _jvp(primals: Any, tangents: Any, *, made: Pass) -> Any:
    out = _move_p.bind(*primals, made=made)
    return out, _tangent(primals, tangents, made, lambda t: isinstance(t, Zero))


def _refuse(*_: Any, **__: Any) -> NoReturn:
    raise AmpError(
        "The contractions of a `float8` rule keep their operands in 8 bits, which "
        "can't be differentiated again, and this is a second derivative. Say "
        "`float8(keep='compute')`, which keeps them in the compute dtype, or put what "
        "is differentiated twice under `amp_stop`."
    )


def _tangent(primals: Any, tangents: Any, made: Pass, is_zero: Any) -> Any:
    moves = []
    if not is_zero(tangents[0]):
        moves.append(_move_p.bind(tangents[0], *primals[1:], made=made))
    if not all(map(is_zero, tangents[1:])):
        if made.kind == "kept":
            _refuse()
        moves.append(_move_p.bind(tangents[1], primals[0], made=made.swapped))
    return functools.reduce(lax.add, moves)


def _transpose(ct: Any, moving: Any, *others: Any, made: Pass) -> Any:
    aval: Any = moving.aval
    if isinstance(ct, Zero):
        return [Zero(aval), *(None for _ in others)]
    back = made.transposed(aval, jax.typeof(others[0]))
    gradient = _straight(back)(cast(ct, made.low), *others)
    return [cast(gradient, aval.dtype), *(None for _ in others)]


def _straight(made: Pass) -> Callable[..., Any]:
    """A pass as ordinary code, which is differentiated as the contraction is."""
    if made.kind == "compute":
        return made

    @jax.custom_jvp
    def contraction(moving, *others):
        return made(moving, *others)

    def jvp(primals, tangents):
        out = contraction(*primals)
        tangent = _tangent(
            primals, tangents, made, lambda t: isinstance(t, SymbolicZero)
        )
        return out, cast(tangent, out.dtype)

    contraction.defjvp(jvp, symbolic_zeros=True)
    return contraction


def _batch(args: Any, dims: Any, *, made: Pass) -> Any:
    moving, other, *scales = args
    at, other_at, *scales_at = dims
    if scales and scales_at[0] is not None:
        size = scales[0].shape[scales_at[0]]
        if other_at is None:
            other, other_at = jnp.broadcast_to(other, (size, *other.shape)), 0
        if made.before and at is None:
            moving, at = jnp.broadcast_to(moving, (size, *moving.shape)), 0

    def fn(moving, other, hook):
        def one(moving, other):
            return made.fn(moving, other, hook)

        return jax.vmap(one, in_axes=(at, other_at))(moving, other)

    if scales:
        along = at if made.before else 0
        if made.before:
            ndim = moving.ndim
        else:
            ndim = jax.eval_shape(
                lambda x, y: fn(x, y, in_dtype(made.low)), moving, other
            ).ndim
        scales = [_aligned(scales[0], scales_at[0], along, ndim)]
    return _move_p.bind(
        moving, other, *scales, made=dataclasses.replace(made, fn=fn)
    ), 0


def _aligned(scale: Any, at: int | None, along: int | None, ndim: int) -> Any:
    """A scale, or that of each example, as it multiplies an array of `ndim` axes.

    Examples are `along` an axis of that array, which is none if they share it."""
    if at is None:
        if scale.ndim == 0 or along is None:
            return scale
        return jnp.expand_dims(scale, along)
    assert along is not None
    scale = jnp.moveaxis(scale, at, 0)
    if scale.ndim == 1:
        scale = scale.reshape(-1, *[1] * (ndim - 1))
    return jnp.moveaxis(scale, 0, along)


_move_p = new_primitive(
    "amp_contraction_8bit",
    compute=_run,
    aval=_aval,
    jvp=_jvp,
    transpose=_transpose,
    batch=_batch,
    series=no_series,
)

_LAST = new_primitive(
    "amp_last_derivative",
    compute=lambda x: x,
    aval=lambda x: x,
    jvp=_refuse,
    transpose=lambda ct, x: [Zero(x.aval)],
    batch=lambda args, dims: (_LAST.bind(*args), dims[0]),
    series=no_series,
)
"""Its operand, which a derivative is made of that has none.

In the backward pass of a loop or a branch, JAX may differentiate what `_straight` made
as the code that it is; of a rounding that would be 0."""
