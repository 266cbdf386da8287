"""A quantised contraction where JAX transposes it.

In an author's derivative rule, which may contract tangents, and in a linear function
that is given to `jax.linear_transpose`, JAX transposes contractions that it has not
differentiated, and neither rounding nor a maximum has a transpose. So the result of a
contraction goes through a primitive that hands it on, and whose transpose is that of
the contraction in the compute dtype."""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from .._dtypes import cast
from .._jax import (
    Jaxpr,
    Literal,
    Zero,
    is_linear_operand,
    new_primitive,
    raw,
    replace_subjaxprs,
    subjaxprs,
)
from .._rules.constant import no_series
from .._rules.passes import CastPass, pulled_back
from .stored import ROUNDED


def transposable(
    fn: Callable[..., Any], passes: Sequence[CastPass], rest: int = 0
) -> Callable[..., Any]:
    """`fn(lhs, rhs, ...)`, transposed by `passes`, one for each operand.

    The passes also read as many further operands as `rest` says.

    `fn` is jitted, and so one equation. Its result gets no cotangent, so that a
    transpose leaves that equation out."""
    program = jax.jit(fn)

    def call(lhs, rhs, *more):
        value = program(lhs, rhs, *more)
        return RESULT_OF.bind(value, lhs, rhs, *more[:rest], passes=tuple(passes))

    return call


def without_transposes(jaxpr: Jaxpr) -> Jaxpr:
    """`jaxpr` without `RESULT_OF`, which only a program that is transposed needs.

    `ROUNDED`, which only reports need, is left out too: it reads weights in full."""
    inner, eqns, same = raw(jaxpr), [], {}

    def now(atom: Any) -> Any:
        return atom if isinstance(atom, Literal) else same.get(atom, atom)

    for eqn in inner.eqns:
        if eqn.primitive in (RESULT_OF, ROUNDED):
            same[eqn.outvars[0]] = now(eqn.invars[0])
            continue
        new = {id(one): without_transposes(one) for one in subjaxprs(eqn.params)}
        eqn = replace_subjaxprs(eqn, new) if new else eqn
        eqns.append(eqn.replace(invars=list(map(now, eqn.invars))))
    inner = inner.replace(eqns=eqns, outvars=list(map(now, inner.outvars)))
    return inner if raw(jaxpr) is jaxpr else jaxpr.replace(jaxpr=inner)


def _run(value: Any, *_: Any, passes: Any) -> Any:
    del passes
    return value


def _jvp(primals: Any, tangents: Any, *, passes: Any) -> Any:
    value, *operands = primals
    out = RESULT_OF.bind(*primals, passes=passes)
    rest = operands[2:]
    moves = [
        cast(passes[i](t, operands[1 - i], *rest), value.dtype)
        for i, t in enumerate(tangents[1:3])
        if not isinstance(t, Zero)
    ]
    return out, sum(moves[1:], moves[0]) if moves else Zero(jax.typeof(value))


def _transpose(ct: Any, value: Any, *operands: Any, passes: Any) -> Any:
    cts = [Zero(x.aval) if is_linear_operand(x) else None for x in (value, *operands)]
    i = next(i for i in (0, 1) if is_linear_operand(operands[i]))
    if not isinstance(ct, Zero):
        others = operands[1 - i], *operands[2:]
        cts[1 + i] = pulled_back(passes[i], operands[i].aval, ct, *others)
    return cts


def _batch(args: Any, dims: Any, *, passes: Any) -> Any:
    value, *operands = args
    at, *ats = dims
    size = next(x.shape[d] for x, d in zip(args, dims, strict=True) if d is not None)
    if at is None:
        value = jnp.broadcast_to(value, (size, *value.shape))
    else:
        value = jnp.moveaxis(value, at, 0)
    mapped = [
        made.mapped(*([one[i], one[1 - i], *one[2:]] for one in (operands, ats)))[0]
        for i, made in enumerate(passes)
    ]
    return RESULT_OF.bind(value, *operands, passes=tuple(mapped)), 0


RESULT_OF = new_primitive(
    "amp_result_8bit",
    compute=_run,
    aval=lambda value, *_, passes: value,
    jvp=_jvp,
    transpose=_transpose,
    batch=_batch,
    series=no_series,
)
"""Its first operand, as the result of a contraction of the two others."""
