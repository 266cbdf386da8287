"""Faults that leave values right, or almost, and gradients wrong: see `planted`.

Each is found within `MOST` cases of the kind that it is of."""

import collections
import contextlib
import functools
import sys
from collections.abc import Callable
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxamp_like import _amp, _jax
from jaxamp_like._dtypes import bits
from jaxamp_like._rewrite import bind as _bind
from jaxamp_like._rewrite.casts import cast_of
from jaxamp_like._structural import STRUCTURAL, loops

from .planted import KINDS, fault, float8_module as _float8, handler

MOST = 400

OF_GRADIENTS = dict(
    copy_kept_low="wide",
    two_roundings="tailed",
    swapped_formats="ruled",
    scope_lost_backward="scoped",
    cotangents_added_low="read_often",
    container_decides="contained",
    mean_of_rounded="wide",
    carry_stored_low="wide",
    logit_rounded_for_one="tailed",
    cotangent_rounded_per_reader="wide",
)
"""The faults, and the kind of programs that each is looked for in."""
KINDS.update(OF_GRADIENTS)

Binder, Step = _bind.Binder, Any
Patch = contextlib.AbstractContextManager[Any]


def _rounded(x: Any, low: Any) -> Any:
    """The value of `x` in 16 bits; its gradient is that of `x`."""
    return x + lax.stop_gradient(x.astype(low).astype(x.dtype) - x)


def _is_full(x: Any) -> bool:
    return getattr(x, "dtype", None) == np.float32


def _of_operands(change: Callable[[Any, Step, int, Any], Any]) -> Patch:
    """What an equation reads is changed."""
    original = Binder.operand

    def operand(self, step, i):
        return change(self, step, i, original(self, step, i))

    return mock.patch.object(Binder, "operand", operand)


def _of_second_readers(
    change: Callable[[Any, Any], Any], is_meant: Callable[[Any], bool]
) -> Patch:
    """What every second equation that reads a computed value finds there."""
    seen: collections.Counter[Any] = collections.Counter()

    def changed(binder, step, i, x):
        atom = step.eqn.invars[i]
        if hasattr(atom, "val") or i in step.input_casts or not is_meant(x):
            return x
        seen[atom] += 1
        return change(binder, x) if seen[atom] % 2 == 0 else x

    return _of_operands(changed)


@fault
def copy_kept_low():
    """The backward pass reads a low copy of what a function was computed of in full."""
    original = Binder.apply
    names = frozenset("sin cos exp tanh logistic floor log rsqrt sqrt".split())

    def apply(self, step, given=None):
        if step.eqn.primitive.name not in names:
            return original(self, step, given)
        x = (given or {}).get(0, self.operand(step, 0))
        if not _is_full(x):
            return original(self, step, given)
        low = self.planner.compute_dtype

        @jax.custom_jvp
        def run(x):
            (out,) = original(self, step, {0: x})
            return out

        @run.defjvp
        def _(primals, tangents):
            (x,), (t,) = primals, tangents
            kept = x.astype(low).astype(x.dtype)
            fn = functools.partial(step.eqn.primitive.bind, **step.eqn.params)
            return run(x), jax.jvp(fn, (kept,), (t,))[1]

        return [run(x)]

    return mock.patch.object(Binder, "apply", apply)


@fault
def two_roundings():
    """Every second reader of a low number finds its neighbour."""

    def next_to(binder, x):
        del binder
        eps = jnp.finfo(x.dtype).eps
        return x + lax.stop_gradient(x * x.dtype.type(eps))

    return _of_second_readers(next_to, lambda x: bits(x.dtype) == 16)


@fault
def logit_rounded_for_one():
    """Every second reader of what is held in full finds it rounded."""
    return _of_second_readers(
        lambda binder, x: _rounded(x, binder.planner.compute_dtype), _is_full
    )


@fault
def mean_of_rounded():
    """Sums, and with them means, are those of rounded numbers."""

    def changed(binder, step, i, x):
        is_sum = step.eqn.primitive.name == "reduce_sum" and _is_full(x)
        return _rounded(x, binder.planner.compute_dtype) if is_sum else x

    return _of_operands(changed)


@fault
def carry_stored_low():
    """What an iteration hands on to the next is rounded in between."""
    run, original = Binder.run, STRUCTURAL["scan"].bind
    carries: dict[int, int] = {}  # of the body that is bound

    def bind(binder, step, operands):
        carries[id(step.inner[0])] = loops.scan_arity(step.eqn)[1]
        return original(binder, step, operands)

    def rounding(self, plan, *args, **kwargs):
        outs = run(self, plan, *args, **kwargs)
        low = self.planner.compute_dtype
        for i in range(carries.get(id(plan), 0)):
            if _is_full(outs[i]):
                outs[i] = _rounded(outs[i], low)
        return outs

    with contextlib.ExitStack() as stack:
        stack.enter_context(handler("scan", bind=bind))
        stack.enter_context(mock.patch.object(Binder, "run", rounding))
        return stack.pop_all()


@fault
def cotangents_added_low():
    """The cotangents of a low value add up in its own dtype."""

    def _in_dtype(self, var, dtype):
        return cast_of(var, self.env[var], dtype)  # afresh for each reader

    with contextlib.ExitStack() as stack:
        stack.enter_context(mock.patch.object(Binder, "_in_dtype", _in_dtype))
        stack.enter_context(
            mock.patch.object(_bind, "with_full_gradient", lambda full, low: low)
        )
        return stack.pop_all()


@fault
def cotangent_rounded_per_reader():
    """What each reader hands back is rounded, before it is added to the others."""

    def changed(binder, step, i, x):
        atom = step.eqn.invars[i]
        is_meant = (
            not hasattr(atom, "val") and i not in step.input_casts and _is_full(x)
        )
        return _bind.round_cotangent(x, binder.planner.compute_dtype) if is_meant else x

    return _of_operands(changed)


@fault
def swapped_formats():
    """Cotangents have the format of all else in 8 bits, and that has theirs."""
    formats = {_float8.E4M3: _float8.E5M2, _float8.E5M2: _float8.E4M3}
    original = _float8.Float8._format

    def swapped(self, dtype):
        return original(self, formats[dtype])

    return mock.patch.object(_float8.Float8, "_format", swapped)


@fault
def scope_lost_backward():
    """The innermost scope is not seen around equations of a backward pass."""
    original = _jax.scopes

    def scopes(eqn):
        frames = eqn.source_info.name_stack.stack
        is_backward = any(frame.name == "transpose" for frame in frames)
        return original(eqn)[:-1] if is_backward else original(eqn)

    with contextlib.ExitStack() as stack:
        for name, module in list(sys.modules.items()):
            is_ours = name.startswith(_jax.__package__ or "")
            if is_ours and getattr(module, "scopes", None) is original:
                stack.enter_context(mock.patch.object(module, "scopes", scopes))
        return stack.pop_all()


@fault
def container_decides():
    """Arguments that hold many arrays are taken for parameters."""
    original = _amp.origins_of

    def origins_of(fn, args, kwargs, argnums):
        many = [i for i, x in enumerate(args) if len(jax.tree.leaves(x)) > 1]
        return original(fn, args, kwargs, tuple(many) or argnums)

    return mock.patch.object(_amp, "origins_of", origins_of)
