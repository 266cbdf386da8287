"""Scales by group of parameters: a tree of states that is a prefix of the gradients'.

Each group gets its gradients from a backward pass of its own, which begins with the
group's scale. A factor on the finished gradients would come too late: numbers that have
underflown in 16 bits are zero."""

from collections.abc import Sequence
from typing import Any

import jax
from jax import Array

from .arithmetic import all_finite
from .state import Scaler, is_scaler


def split_groups(state: Any) -> tuple[list[Scaler], Any]:
    """The states, and the structure of the tree that holds them."""
    return jax.tree.flatten(state, is_leaf=is_scaler)


def merge_groups(structure: Any, grads_of: Sequence[Any]) -> tuple[Any, list[Array]]:
    """Takes each group's gradients from its own backward pass.

    Args:
        structure: of the tree of states.
        grads_of: for each group all gradients, made with the group's scale.
    Returns:
        The gradients, and for each group whether its own are finite."""
    if jax.tree_util.treedef_is_leaf(structure):
        return grads_of[0], [all_finite(grads_of[0])]
    groups = jax.tree.unflatten(structure, range(len(grads_of)))
    first = grads_of[0]
    try:
        owners = jax.tree.leaves(
            jax.tree.map(lambda i, sub: jax.tree.map(lambda _: i, sub), groups, first)
        )
    except ValueError as error:
        raise ValueError(
            "`dynamic_scaler_state` is a tree of states, and must be a prefix of the "
            f"tree of gradients.\nIt has the structure {structure}, they have "
            f"{jax.tree.structure(first)}."
        ) from error
    leaves_of = [jax.tree.leaves(grads) for grads in grads_of]
    leaves = [leaves_of[owner][i] for i, owner in enumerate(owners)]
    finite = [
        all_finite([x for x, owner in zip(leaves, owners, strict=True) if owner == i])
        for i in range(len(grads_of))
    ]
    return jax.tree.unflatten(jax.tree.structure(first), leaves), finite
