"""A program for inputs that are stored in narrower dtypes than it was traced with.

The casts of these inputs vanish, and what only moves them moves what is stored. All
other equations stay the very same. What is asked of the inputs (`uses`) says beforehand
that this can be done: such an input is read in its narrower dtype only."""

from collections.abc import Sequence
from typing import Any

import jax

from .._dtypes import DType, bits, cast, is_float
from .._errors import AmpError
from .._jax import (
    Eqn,
    Jaxpr,
    bind,
    bind_flat,
    consts,
    eqn_context,
    evaluate,
    open_jaxpr,
    raw,
    reemit,
    shard_map_options,
    subjaxprs,
    trace,
)
from .._primitives import EACH_ALONE
from .._structural import CALLS, REMAT
from .uses import bodies, is_narrowing

_Dtypes = tuple[DType | None, ...]


def run_stored(jaxpr: Jaxpr, values: Sequence[Any], args: Sequence[Any]) -> list[Any]:
    """Computes `jaxpr` on constants and inputs that may be narrower than it expects."""
    return _Rewriter().run(raw(jaxpr), values, args)


class _Rewriter:
    """Binds programs again, and remembers the inner ones.

    JAX compiles an inner program once if it is the same object each time."""

    def __init__(self) -> None:
        self._closed: dict[Any, tuple[Jaxpr, Jaxpr]] = {}

    def run(self, jaxpr: Jaxpr, values: Sequence[Any], args: Sequence[Any]):
        return evaluate(jaxpr, args, self.bind, values)

    def bind(self, eqn: Eqn, operands: list[Any]) -> Sequence[Any]:
        pairs = list(zip(operands, eqn.invars, strict=True))
        narrow = [x.dtype for x, v in pairs if _is_narrower(x, v)]
        if not narrow:
            return reemit(eqn, operands)
        if is_narrowing(eqn):
            return operands  # as it is stored
        if bind := _STRUCTURAL.get(eqn.primitive.name):
            return bind(self, eqn, operands)
        if eqn.primitive.name not in EACH_ALONE:
            # Who reads the result reads it so.
            floats = (x is not None and is_float(v.aval.dtype) for x, v in pairs)
            operands = [
                cast(jax.numpy.asarray(x), narrow[0]) if is_one else x
                for x, is_one in zip(operands, floats, strict=True)
            ]
        with eqn_context(eqn):
            params = eqn.params
            if eqn.primitive.name == "convert_element_type":  # of a weak type
                return operands
            return bind_flat(eqn.primitive, operands, params)

    def close(self, jaxpr: Jaxpr, dtypes: _Dtypes, outs: _Dtypes | None = None):
        """The program for inputs of other dtypes, closed; results cast to `outs`."""
        key = (id(jaxpr), dtypes, outs)
        if key not in self._closed:

            def rewritten(*args: Any) -> list[Any]:
                results = self.run(raw(jaxpr), consts(jaxpr), args)
                if outs is None:
                    return results
                pairs = zip(results, outs, strict=True)
                return [x if d is None else cast(x, d) for x, d in pairs]

            avals = [
                v.aval if d is None else v.aval.update(dtype=d, weak_type=False)
                for v, d in zip(raw(jaxpr).invars, dtypes, strict=True)
            ]
            # With the program, whose `id` must not be another's.
            self._closed[key] = (trace(rewritten, avals), jaxpr)
        return self._closed[key][0]


def _is_narrower(x: Any, var: Any) -> bool:
    author, now = getattr(var.aval, "dtype", None), getattr(x, "dtype", None)
    if author is None or now is None or not is_float(author) or not is_float(now):
        return False
    return bits(now) < bits(author)


def _held(operands: Sequence[Any], eqn: Eqn) -> _Dtypes:
    """The dtypes of those operands that are narrower than expected."""
    pairs = zip(operands, eqn.invars, strict=True)
    return tuple(x.dtype if _is_narrower(x, v) else None for x, v in pairs)


def _pick(dtypes: _Dtypes, ins: Sequence[int]) -> _Dtypes:
    return tuple(dtypes[i] for i in ins)


def _bind_jit(rewriter: _Rewriter, eqn: Eqn, operands: list[Any]):
    closed = rewriter.close(eqn.params["jaxpr"], _held(operands, eqn))
    with eqn_context(eqn):
        return eqn.primitive.bind(*operands, **eqn.params | {"jaxpr": closed})


def _bind_remat(rewriter: _Rewriter, eqn: Eqn, operands: list[Any]):
    closed = rewriter.close(eqn.params["jaxpr"], _held(operands, eqn))
    body, values = open_jaxpr(closed)
    with eqn_context(eqn):
        params = eqn.params | {"jaxpr": body}
        return bind(eqn.primitive, [*values, *operands], params)


def _bind_while(rewriter: _Rewriter, eqn: Eqn, operands: list[Any]):
    held = _held(operands, eqn)
    cond, body = bodies(eqn)
    new = {
        "cond_jaxpr": rewriter.close(cond.jaxpr, _pick(held, cond.ins)),
        "body_jaxpr": rewriter.close(body.jaxpr, _pick(held, body.ins)),
    }
    with eqn_context(eqn):
        return eqn.primitive.bind(*operands, **eqn.params | new)


def _bind_cond(rewriter: _Rewriter, eqn: Eqn, operands: list[Any]):
    held = _held(operands, eqn)[1:]
    branches = [rewriter.close(b, held) for b in eqn.params["branches"]]
    results = zip(*(raw(b).outvars for b in branches), strict=True)
    # One branch may hand on what is stored, where another computes: all agree on the
    # narrower dtype, which is what the result is read in.
    agreed = tuple(_narrowest([v.aval for v in vs]) for vs in results)
    new = tuple(rewriter.close(b, held, agreed) for b in eqn.params["branches"])
    with eqn_context(eqn):
        return eqn.primitive.bind(*operands, **eqn.params | {"branches": new})


def _narrowest(avals: Sequence[Any]) -> DType | None:
    dtypes = [a.dtype for a in avals if is_float(getattr(a, "dtype", None))]
    return min(dtypes, key=bits) if len(set(dtypes)) > 1 else None


def _bind_inline(rewriter: _Rewriter, eqn: Eqn, operands: list[Any]):
    (jaxpr,) = subjaxprs(eqn.params)
    with eqn_context(eqn):
        return rewriter.run(raw(jaxpr), consts(jaxpr), operands)


def _bind_without_rule(rewriter: _Rewriter, eqn: Eqn, operands: list[Any]):
    """Binds what an author's derivative rule stands for, without the rule.

    The rule was written for the dtypes of the author, so it can't be kept; and another
    derivative must not come in its place."""
    (jaxpr,) = subjaxprs(eqn.params)
    if not raw(jaxpr).eqns:  # hands its operands on
        return rewriter.run(raw(jaxpr), consts(jaxpr), operands)

    @jax.custom_jvp
    def forward(*operands):
        return rewriter.run(raw(jaxpr), consts(jaxpr), operands)

    @forward.defjvp
    def _(primals, tangents):
        raise AmpError(
            "A converted function can't be differentiated here: the derivative rule of "
            f"`{eqn.primitive}` belongs to parameters as they were. Differentiate "
            "`amp(fn)` with the parameters in full, and convert what you have trained."
        )

    with eqn_context(eqn):
        return forward(*operands)


def _bind_shard_map(rewriter: _Rewriter, eqn: Eqn, operands: list[Any]):
    (jaxpr,) = subjaxprs(eqn.params)

    def body(*args):
        return rewriter.run(raw(jaxpr), consts(jaxpr), args)

    with eqn_context(eqn):
        return jax.shard_map(body, **shard_map_options(eqn.params))(*operands)


_STRUCTURAL = {
    "jit": _bind_jit,
    "pjit": _bind_jit,
    "scan": _bind_jit,
    **dict.fromkeys(REMAT, _bind_remat),
    **dict.fromkeys(("closed_call", "core_call", "call", "eval_jaxpr"), _bind_inline),
    "cond": _bind_cond,
    "while": _bind_while,
    "custom_jvp_call": _bind_without_rule,
    "custom_vjp_call": _bind_without_rule,
    "shard_map": _bind_shard_map,
}

BOUND_CALLS = CALLS & _STRUCTURAL.keys()
"""The calls that are bound again here."""
