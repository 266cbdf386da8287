"""Carries values of any type through transforms that only take arrays."""

from typing import Any, NamedTuple

import equinox as eqx
import jax
from jax import Array


@jax.tree_util.register_static
class Static:
    """Holds values other than arrays in a tree's structure, unseen by transforms."""

    def __init__(self, tree: Any):
        self.tree = tree


def pack(tree: Any) -> tuple[Any, Static]:
    arrays, static = eqx.partition(tree, lambda x: isinstance(x, Array))
    return arrays, Static(static)


def unpack(arrays: Any, static: Static) -> Any:
    return eqx.combine(arrays, static.tree)


class ScaledAux(NamedTuple):
    """The aux of the scaled loss; its type shows where a transform has put it."""

    value: Array
    aux: tuple[Any, Static]
