"""Marks on values that the backward pass keeps, and the policies that read them."""

from typing import Any

from jax import lax

from .._dtypes import is_float
from .._primitives import CHEAP


def keep(x: Any) -> Any:
    """Marks a value that policies keep although it could be made again.

    By a copy, which is none once it is compiled: a `checkpoint_name` has no transpose,
    so that linear code would be no longer linear."""
    return lax.copy_p.bind(x) if is_float(x.dtype) else x


def is_kept(primitive: Any) -> bool:
    """Whether `primitive` is what `keep` marks values with."""
    return primitive is lax.copy_p


def save_marked(primitive: Any, *avals: Any, **params: Any) -> bool:
    """A policy for a `jax.checkpoint` around islands: keeps what leaves them.

    A policy overrules the checkpoints inside, so what it keeps of an island is not made
    again there; and what it doesn't keep outside of islands is made again first, for
    all iterations of a loop."""
    del avals, params
    return is_kept(primitive) or primitive.name not in (*CHEAP, "name")
