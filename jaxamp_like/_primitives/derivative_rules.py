"""Derivative rules that an author gave: which equations hold one."""

from typing import Any
from weakref import WeakKeyDictionary

from .._jax import Eqn, Jaxpr, raw, subjaxprs

RULED = ("custom_jvp_call", "custom_vjp_call")


def holds_rule(eqn: Eqn) -> bool:
    """Whether an equation is one with an author's rule, or holds one at any depth."""
    return eqn.primitive.name in RULED or any(map(_holds_rule, subjaxprs(eqn.params)))


def _holds_rule(jaxpr: Jaxpr) -> bool:
    if jaxpr not in _ruled:
        _ruled[jaxpr] = any(map(holds_rule, raw(jaxpr).eqns))
    return _ruled[jaxpr]


_ruled: Any = WeakKeyDictionary()
