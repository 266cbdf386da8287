"""Runs a program on inputs that are stored in narrower dtypes than it was traced with.

The casts of these inputs vanish, and equations that only move them move what is stored.
All other equations stay the very same. This is correct because each such input is only
ever read in its narrower dtype, as `uses` has found out before. But a product that is
one number for inputs of these shapes, and is computed in full, reads it widened."""

from collections.abc import Sequence
from typing import Any

import jax

from .._dtypes import DType, bits, cast, cast_all, is_float
from .._errors import AmpError
from .._jax import (
    Eqn,
    Jaxpr,
    bind,
    bind_flat,
    eqn_context,
    evaluate,
    open_jaxpr,
    raw,
    rebind,
    replace_subjaxprs,
    shard_map_options,
    trace,
)
from .._primitives import CONTRACTIONS, EACH_ALONE
from .._rules.bilinear import in_dtype
from .._structural import CALLS, REMAT
from .uses import bodies, is_narrowing

_Dtypes = tuple[DType | None, ...]


def run_stored(jaxpr: Jaxpr, values: Sequence[Any], args: Sequence[Any]) -> list[Any]:
    """Computes `jaxpr` on constants and inputs that may be narrower than it expects."""
    return evaluate(jaxpr, args, _Rewriter().bind, values)


class _Rewriter:
    """Binds programs again, and remembers the inner ones.

    JAX compiles an inner program only once if it is the same object each time."""

    def __init__(self) -> None:
        self._closed: dict[Any, tuple[Jaxpr, Jaxpr]] = {}

    def bind(self, eqn: Eqn, operands: list[Any]) -> Sequence[Any]:
        pairs = list(zip(operands, eqn.invars, strict=True))
        narrow = [x.dtype for x, v in pairs if _is_narrower(x, v)]
        if not narrow:
            return rebind(eqn, operands)
        name = eqn.primitive.name
        if is_narrowing(eqn):
            return operands  # already stored in the narrower dtype
        if bind := _STRUCTURAL.get(name):
            with eqn_context(eqn):
                return bind(self, eqn, operands)
        if name in CONTRACTIONS:  # whose result is one number
            operands = [
                cast(jax.numpy.asarray(x), v.aval.dtype) if _is_narrower(x, v) else x
                for x, v in pairs
            ]
        elif name not in EACH_ALONE:
            # All readers of the result read it in the narrower dtype.
            floats = (x is not None and is_float(v.aval.dtype) for x, v in pairs)
            operands = [
                cast(jax.numpy.asarray(x), narrow[0]) if is_one else x
                for x, is_one in zip(operands, floats, strict=True)
            ]
        if name == "convert_element_type":  # it changes only the weak type
            return operands
        with eqn_context(eqn):
            return bind_flat(eqn.primitive, operands, eqn.params)

    def run(self, eqn: Eqn, operands: Sequence[Any]) -> list[Any]:
        """Runs the one program that an equation holds."""
        (body,) = bodies(eqn)
        return evaluate(body.jaxpr, operands, self.bind)

    def close(self, jaxpr: Jaxpr, dtypes: _Dtypes, outs: _Dtypes | None = None):
        """A closed jaxpr for inputs of these `dtypes`, with results cast to `outs`."""
        key = (id(jaxpr), dtypes, outs)
        if key not in self._closed:

            def rewritten(*args: Any) -> list[Any]:
                results = evaluate(jaxpr, args, self.bind)
                return results if outs is None else cast_all(results, outs)

            avals = [
                v.aval if d is None else in_dtype(v.aval, d)
                for v, d in zip(raw(jaxpr).invars, dtypes, strict=True)
            ]
            # The old program is held as well, so that no other one can get its `id`.
            self._closed[key] = (trace(rewritten, avals), jaxpr)
        return self._closed[key][0]


def _is_narrower(x: Any, var: Any) -> bool:
    author, now = getattr(var.aval, "dtype", None), getattr(x, "dtype", None)
    if author is None or now is None or not is_float(author) or not is_float(now):
        return False
    return bits(now) < bits(author)


def _bind_narrow(rewriter: _Rewriter, eqn: Eqn, operands: list[Any]):
    """Binds an equation with its programs rewritten for narrower operands."""
    pairs = zip(operands, eqn.invars, strict=True)
    dtypes = [x.dtype if _is_narrower(x, v) else None for x, v in pairs]
    programs = [(b.jaxpr, tuple(dtypes[i] for i in b.ins)) for b in bodies(eqn)]
    new = [rewriter.close(*program) for program in programs]
    if eqn.primitive.name == "cond":
        # One branch may hand on a stored input where another one computes a result. All
        # must return one dtype: the narrower one, in which the result is read.
        results = zip(*(raw(branch).outvars for branch in new), strict=True)
        agreed = tuple(_narrowest([v.aval for v in vs]) for vs in results)
        if any(dtype is not None for dtype in agreed):
            new = [rewriter.close(*program, agreed) for program in programs]
    values: Sequence[Any] = ()
    if eqn.primitive.name in REMAT:
        body, values = open_jaxpr(*new)
        new = [body]
    old = (id(jaxpr) for jaxpr, _ in programs)
    again = replace_subjaxprs(eqn, dict(zip(old, new, strict=True)))
    return bind(eqn.primitive, [*values, *operands], again.params)


def _narrowest(avals: Sequence[Any]) -> DType | None:
    dtypes = [a.dtype for a in avals if is_float(getattr(a, "dtype", None))]
    return min(dtypes, key=bits) if len(set(dtypes)) > 1 else None


def _bind_without_rule(rewriter: _Rewriter, eqn: Eqn, operands: list[Any]):
    """Binds the function that an author gave a derivative rule, without the rule.

    The rule was written for the dtypes of the author, so it can't be kept. No other
    derivative may take its place, so to differentiate is an error."""
    (body,) = bodies(eqn)
    if not raw(body.jaxpr).eqns:  # it only hands its operands on
        return rewriter.run(eqn, operands)

    @jax.custom_jvp
    def forward(*operands):
        return rewriter.run(eqn, operands)

    @forward.defjvp
    def _(primals, tangents):
        raise AmpError(
            "A converted function can't be differentiated here: the derivative rule of "
            f"`{eqn.primitive}` belongs to parameters as they were. Differentiate "
            "`amp(fn)` with the parameters in full, and convert what you have trained."
        )

    return forward(*operands)


def _bind_shard_map(rewriter: _Rewriter, eqn: Eqn, operands: list[Any]):
    def body(*args):
        return rewriter.run(eqn, args)

    return jax.shard_map(body, **shard_map_options(eqn.params))(*operands)


_STRUCTURAL = {
    **dict.fromkeys(("jit", "pjit", "scan", "while", "cond", *REMAT), _bind_narrow),
    **dict.fromkeys(("closed_call", "core_call", "call", "eval_jaxpr"), _Rewriter.run),
    "custom_jvp_call": _bind_without_rule,
    "custom_vjp_call": _bind_without_rule,
    "shard_map": _bind_shard_map,
}

BOUND_CALLS = CALLS & _STRUCTURAL.keys()
"""The calls that are bound again here."""
