"""Marks on values that the backward pass keeps, and the policies that read them."""

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp
from jax import lax

from .._dtypes import is_float
from .._primitives import CHEAP, CONTRACTIONS

_E4M3FN = jnp.dtype("float8_e4m3fn")


def mark_saved(x: Any) -> Any:
    """Marks a value that policies keep although it could be made again.

    The mark is a `copy`, which XLA leaves out. A `checkpoint_name` would not do: it has
    no transpose, so that linear code could not be transposed any more."""
    return lax.copy_p.bind(x) if is_float(getattr(x, "dtype", None)) else x


def is_marked_saved(primitive: Any) -> bool:
    """Whether `primitive` is what `mark_saved` marks values with."""
    return primitive is lax.copy_p


def save_marked(primitive: Any, *avals: Any, **params: Any) -> bool:
    """A policy for a `jax.checkpoint` around remat regions: keeps what leaves them.

    JAX applies the policy inside of the regions, too: what it keeps there is not made
    again. What it drops elsewhere is made again for all iterations of a loop first."""
    del avals, params
    return is_marked_saved(primitive) or primitive.name not in (*CHEAP, "name")


@dataclass(unsafe_hash=True)
class SaveNamesToo:
    """A policy that keeps values of some names beside what another keeps.

    No `float8_e4m3fn` is kept by the other: it is made again from what is kept. JAX
    passes what a policy keeps through `reduce_precision`, which assumes that a format
    has infinities. This one has none, and its values from 256 to 448 would become NaN.

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
        if self.policy is None or _makes_e4m3fn(primitive, avals, params):
            return False
        return self.policy(primitive, *avals, **params)


def _makes_e4m3fn(primitive: Any, avals: Sequence[Any], params: dict[str, Any]) -> bool:
    if "new_dtype" in params:
        return params["new_dtype"] == _E4M3FN
    if primitive.name in CONTRACTIONS:
        return False
    return any(getattr(aval, "dtype", None) == _E4M3FN for aval in avals)
