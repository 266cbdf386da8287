"""Marks on values that the backward pass keeps, and the policies that read them."""

import functools
from collections.abc import Callable
from dataclasses import dataclass
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


@dataclass(unsafe_hash=True)
class KeepingToo:
    """A policy that keeps values of some names beside what another keeps.

    Args:
        names: as `checkpoint_name` gave them.
        policy: the other; `None` keeps nothing."""

    names: frozenset[str]
    policy: Callable[..., Any] | None

    def __post_init__(self) -> None:
        if self.policy is not None:
            functools.update_wrapper(self, self.policy)

    def __call__(self, primitive: Any, *avals: Any, **params: Any) -> Any:
        if primitive.name == "name" and params["name"] in self.names:
            return True
        return self.policy is not None and self.policy(primitive, *avals, **params)
