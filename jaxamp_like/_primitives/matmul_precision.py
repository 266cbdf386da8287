"""`jax_default_matmul_precision`: a setting of the process, not the author's voice.

JAX writes it into every contraction whose author gave no `precision=`, when a function
is traced and again when it is differentiated: then it can't be told from what the
author asked for. So `amp` traces the author's code without it, and says what holds
where a contraction is bound: the setting, if the contraction runs as written; if it is
lowered, none, whatever is set when it is differentiated. A `with
jax.default_matmul_precision(...)` that the author wrote stands in the trace and stays.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any
from weakref import WeakKeyDictionary

import jax
from jax import lax

from .._errors import warn_or_raise
from .._jax import (
    Eqn,
    Jaxpr,
    Primitive,
    bind,
    describe,
    is_opaque_hi,
    raw,
    source_line,
    with_eqns,
    with_jaxprs,
)
from .fences import fenced
from .kinds import CONTRACTIONS

_DEFAULT = (lax.Precision.DEFAULT, lax.Precision.DEFAULT)


def without_setting() -> AbstractContextManager[object]:
    """The context in which the author's code is traced, without the setting."""
    return jax.default_matmul_precision(None)  # type: ignore[arg-type]


def setting() -> str | None:
    """What `jax_default_matmul_precision` is, here and now."""
    return jax.config.jax_default_matmul_precision  # type: ignore[attr-defined]


def settled(
    primitive: Primitive, params: dict[str, Any], is_low: bool
) -> dict[str, Any]:
    """The parameters to bind with: `precision` filled in where its author gave none.

    A dot algorithm that the author gave names dtypes, so it is dropped if `is_low`."""
    if primitive.name not in CONTRACTIONS:  # which have a parameter `precision`
        return params
    given, value = params["precision"], setting()
    names_dtypes = isinstance(given, lax.DotAlgorithm | lax.DotAlgorithmPreset)
    if is_low and (given is None or names_dtypes):
        return params | {"precision": _DEFAULT}
    if given is None and value is not None:
        return params | {"precision": _canonical(value)}
    return params


def settled_bind(
    primitive: Primitive, params: dict[str, Any], is_low: bool
) -> Callable[..., Any]:
    """Binds `primitive`, with what `settled` says at the time of binding."""

    def run(*operands: Any) -> Any:
        return bind(primitive, operands, settled(primitive, params, is_low))

    return fenced(primitive.name, run) if is_low else run


def _canonical(value: str) -> Any:
    if value in lax.DotAlgorithmPreset.__members__:
        return lax.DotAlgorithmPreset[value]
    return lax.Precision(value), lax.Precision(value)


_filled: Any = WeakKeyDictionary()  # JAX finds compiled code by the identity of jaxprs


def with_setting(eqn: Eqn, strict: bool) -> Eqn:
    """`eqn`, with the setting in the programs that it holds, which run as written."""
    value = setting()
    if value is None:
        return eqn
    if is_opaque_hi(eqn):
        warn_or_raise(
            f"`{describe(eqn)}` ({source_line(eqn)}) hides its program, so amp can't "
            f"give it your `jax_default_matmul_precision`, {value!r}: contractions in "
            "it run in JAX's default precision. Write `precision=` there, or `with "
            "jax.default_matmul_precision(...)` around the call in your function.",
            strict,
        )
    params = _filled_params(eqn, value)
    return eqn if params is eqn.params else eqn.replace(params=params)


def _filled_jaxpr(jaxpr: Jaxpr, value: str) -> Jaxpr:
    """A program with the setting in its contractions and in the programs it holds."""
    entries = _filled.setdefault(jaxpr, {})
    if value not in entries:
        eqns = [_filled_eqn(eqn, value) for eqn in raw(jaxpr).eqns]
        entries[value] = with_eqns(jaxpr, eqns)
    return entries[value]


def _filled_eqn(eqn: Eqn, value: str) -> Eqn:
    params = _filled_params(eqn, value)
    params = settled(eqn.primitive, params, is_low=False)
    return eqn if params is eqn.params else eqn.replace(params=params)


def _filled_params(eqn: Eqn, value: str) -> dict[str, Any]:
    return with_jaxprs(eqn.params, lambda jaxpr: _filled_jaxpr(jaxpr, value))
