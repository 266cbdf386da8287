"""What a program is made of: the structures that the rewrite must leave in place."""

import collections
from collections.abc import Iterator
from typing import Any

import jax
import numpy as np
from jax import lax

from .oracle import CONTRACTIONS, is_contraction


def equations(jaxpr: Any, inside: tuple[str, ...] = ()) -> Iterator[tuple[Any, Any]]:
    """Every equation at any depth, with the primitives that it stands in."""
    for eqn in getattr(jaxpr, "jaxpr", jaxpr).eqns:
        yield eqn, inside
        for value in jax.tree.leaves(list(eqn.params.values()), is_leaf=_is_jaxpr):
            if _is_jaxpr(value):
                yield from equations(value, (*inside, eqn.primitive.name))


def _is_jaxpr(value: Any) -> bool:
    return hasattr(getattr(value, "jaxpr", value), "eqns")


def parts(jaxpr: Any) -> collections.Counter[Any]:
    """How often each structure occurs, with the parameters that its author chose."""
    return collections.Counter(
        key for eqn, _ in equations(jaxpr) if (key := _key(eqn)) is not None
    )


def _key(eqn: Any) -> Any:
    name, params = eqn.primitive.name, eqn.params
    if name in ("checkpoint", "remat2"):
        policy = params["policy"]
        return "checkpoint", getattr(policy, "__qualname__", None)
    if name == "scan":
        return name, params["length"], params["reverse"], params["unroll"]
    if name == "cond":
        return name, len(params["branches"])
    if name in ("while", "debug_callback", "pure_callback", "custom_linear_solve"):
        return name
    return None


def lost(plain: Any, mixed: Any) -> str | None:
    """A structure that a rewritten program has less of than the program as written."""
    missing = parts(plain) - parts(mixed)
    return ", ".join(map(str, missing)) or None


# Their bodies are another's contract, or stay as written for the sake of their end.
_AS_WRITTEN = frozenset(
    """while custom_linear_solve linear_call custom_vmap_call pure_callback
    custom_vjp_call reduce reduce_window""".split()
)


def left_in_full(jaxpr: Any) -> str | None:
    """A contraction that reads two float32 operands, though nobody asked for that."""
    for eqn, inside in equations(jaxpr):
        name = eqn.primitive.name
        if name not in CONTRACTIONS or "ragged" in name:
            continue  # those of ragged arrays are in few policies
        if _AS_WRITTEN.intersection(inside):
            continue
        if eqn.params.get("precision") not in (None, lax.Precision.DEFAULT):
            if eqn.params["precision"] != (lax.Precision.DEFAULT,) * 2:
                continue
        if "amp_stop" in str(eqn.source_info.name_stack):
            continue
        is_full = all(v.aval.dtype == np.float32 for v in eqn.invars[:2])
        if is_full and is_contraction(eqn):
            return str(eqn.primitive)
    return None


def has_products(jaxpr: Any) -> bool:
    """Whether a `dot_general` is there that is no contraction."""
    found = (eqn for eqn, _ in equations(jaxpr) if eqn.primitive.name in CONTRACTIONS)
    return not all(map(is_contraction, found))
