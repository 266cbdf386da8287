"""Carrying anything at all through transforms that take arrays only."""

from typing import Any, NamedTuple

import equinox as eqx
import jax
from jax import Array


@jax.tree_util.register_static
class Static:
    """Keeps what is no array in the tree's structure, out of sight of transforms."""

    def __init__(self, tree: Any):
        self.tree = tree


def pack(tree: Any) -> tuple[Any, Static]:
    arrays, static = eqx.partition(tree, lambda x: isinstance(x, Array))
    return arrays, Static(static)


def unpack(arrays: Any, static: Static) -> Any:
    return eqx.combine(arrays, static.tree)


class Carried(NamedTuple):
    """What travels beside the scaled loss, and marks where a transform puts its aux."""

    value: Array
    aux: tuple[Any, Static]
