"""A contraction of which each of the three that training makes has its own precision.

JAX's own transposes copy the dtype of the result from one to the next, so that the
precisions of the three hang together. Here each is a `Pass` of its own."""

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from .._dtypes import DType, bits, cast, lowered
from .._jax import (
    Eqn,
    Literal as JaxprLiteral,
    SymbolicZero,
    Zero,
    bind_flat,
    evaluate,
    is_linear_operand,
    new_primitive,
    raw,
    subjaxprs,
    trace,
)
from .._primitives import CONTRACTIONS, MOVING_VIEWS
from .._primitives.matmul_precision import settled_bind
from .base import Site
from .computing import wide_contraction


class Pass(NamedTuple):
    """A choice, for one contraction."""

    make: Callable[[DType], Callable[..., Any]]  # the contraction with such results
    reads: tuple[DType, DType]
    out: DType  # of a result that is not wide
    wide: bool


def pass_of(site: Site, dtype: DType, wide: bool = False) -> Pass:
    """A pass that reads its operands in `dtype`, but none in more than as written."""
    lhs, rhs, out = (
        author and lowered(author, dtype)
        for author in (*site.authors[:2], site.out_authors[0])
    )
    is_low = (lhs, rhs) != site.authors[:2]

    def make(out):
        params = site.params | {"preferred_element_type": out}
        return settled_bind(site.primitive, params, is_low)

    return Pass(make, (lhs, rhs), out, wide)  # type: ignore[arg-type]


def contraction_by_pass(
    forward: Pass, gradients: Sequence[Pass], out: DType
) -> Callable[..., Any]:
    """The contraction with a derivative whose two halves are made by `gradients`."""

    @jax.custom_jvp
    def contraction(*operands):
        return _contract(*operands, made=forward, out=out)

    def jvp(primals, tangents):
        moves = []
        for i, made in enumerate(gradients):
            if isinstance(tangents[i], SymbolicZero):
                continue
            # What is kept for the backward pass is no wider than what reads it.
            operands = [
                x if j > 1 else cast(x, lowered(x.dtype, made.reads[j]))
                for j, x in enumerate(primals)
            ]
            operands[i] = tangents[i]
            moves.append(_contraction_p.bind(*operands, made=made, out=out))
        return contraction(*primals), functools.reduce(lax.add, moves)

    contraction.defjvp(jvp, symbolic_zeros=True)
    return lambda *operands: contraction(*map(jnp.asarray, operands))


def _contract(lhs: Any, rhs: Any, *rest: Any, made: Pass, out: DType) -> Any:
    result = max(made.out, out, key=bits) if made.wide else made.out
    operands = map(cast, (lhs, rhs), made.reads)
    return cast(made.make(result)(*operands, *rest), out)


def _contraction_aval(*avals: Any, **params: Any) -> Any:
    jaxpr = trace(functools.partial(_contract, **params), avals)
    return raw(jaxpr).outvars[0].aval


def _contraction_jvp(primals: Any, tangents: Any, **params: Any) -> Any:
    moves = []
    for i in (0, 1):
        if not isinstance(tangents[i], Zero):
            operands = [*primals[:i], tangents[i], *primals[i + 1 :]]
            moves.append(_contraction_p.bind(*operands, **params))
    return _contraction_p.bind(*primals, **params), functools.reduce(lax.add, moves)


def _contraction_transpose(ct: Any, *operands: Any, made: Pass, out: DType) -> Any:
    i = next(i for i in (0, 1) if is_linear_operand(operands[i]))
    aval = operands[i].aval
    cts: list[Any] = [None] * len(operands)
    if isinstance(ct, Zero):
        return [*cts[:i], Zero(aval), *cts[i + 1 :]]
    values = list(operands)
    values[1 - i] = cast(operands[1 - i], made.reads[1 - i])
    low = made.reads[i]

    def contraction(x):
        return made.make(made.out)(*values[:i], x, *values[i + 1 :])

    def transposed(ct):
        example = aval.update(dtype=low, weak_type=False)
        return jax.linear_transpose(contraction, example)(ct)[0]

    ct = cast(ct, made.out)
    if made.wide and bits(aval.dtype) > bits(low):
        gradient = _with_wide_results(transposed, ct, aval.dtype)
    else:
        gradient = transposed(ct)
    cts[i] = cast(gradient, aval.dtype)
    return cts


def _contraction_batch(args: Any, dims: Any, *, made: Pass, out: DType) -> Any:
    def make(dtype):
        return jax.vmap(made.make(dtype), in_axes=tuple(dims))

    return _contraction_p.bind(*args, made=made._replace(make=make), out=out), 0


# A contraction whose transposes cast the cotangent that they read, and need not round
# their result. No composition of JAX's own primitives has such transposes and is
# mapped by `vmap` as contractions are: with the sum over examples inside.
_contraction_p = new_primitive(
    "amp_contraction",
    compute=_contract,
    aval=_contraction_aval,
    jvp=_contraction_jvp,
    transpose=_contraction_transpose,
    batch=_contraction_batch,
)


def _with_wide_results(fn: Callable[..., Any], x: Any, dtype: DType) -> Any:
    """Computes `fn(x)` with results of contractions in `dtype`; also of `fn`, mostly.

    Their operands stay as they are. Ops around them move data, and a later JAX may add
    others: these read the dtypes that they were traced with."""
    jaxpr = trace(fn, [jax.typeof(x)])

    def bind(eqn: Eqn, values: list[Any]) -> Sequence[Any]:
        name, params = eqn.primitive.name, eqn.params
        if name not in MOVING_VIEWS:
            values = [
                x if isinstance(atom, JaxprLiteral) else cast(x, atom.aval.dtype)
                for x, atom in zip(values, eqn.invars, strict=True)
            ]
        inner = list(subjaxprs(params))
        if name in ("jit", "pjit") and len(inner) == 1:
            return evaluate(inner[0], values, bind)
        if name in CONTRACTIONS:
            return [wide_contraction(eqn.primitive, params, dtype)(*values)]
        return bind_flat(eqn.primitive, values, params)

    (out,) = evaluate(jaxpr, [x], bind)
    return out
