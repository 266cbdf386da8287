"""Gradients that say of themselves that they come from a scaled loss.

A factor leaves no trace in an array: an optimizer that must not be given gradients of
an unscaled loss can't tell them by their values. So each gradient is marked, in the
structure of its tree, where `jax.jit`, `jax.lax.scan`, `jax.tree.map` and the states of
frameworks keep it, and where it can be looked for while a step is traced."""

from typing import Any

import equinox as eqx
import jax
from jax import Array


@jax.tree_util.register_pytree_with_keys_class
class Unscaled:
    """Marks a true gradient of a loss that was scaled to compute it.

    `value_and_grad` of a `loss_scale_optimizer` returns a tree of these in the place of
    the arrays, and its `update` takes no others. To mark gradients that you have made
    or put together yourself is to say that none of them has underflown:
    `jax.tree.map(Unscaled, grads)`.

    A pytree of one leaf, which functions of `jax.numpy` read as an array.

    Args:
        value: the gradient.

    >>> import jax.numpy as jnp
    >>> grads = {"w": Unscaled(jnp.ones(2))}
    >>> jax.tree.map(lambda g: 0.5 * g, grads)
    {'w': Unscaled([0.5 0.5])}
    >>> float(jnp.sum(grads["w"]))
    2.0
    """

    __slots__ = ("value",)

    def __init__(self, value: Any):
        self.value = value

    def __jax_array__(self) -> Array:
        return self.value

    def __repr__(self) -> str:
        return f"Unscaled({self.value})"

    def tree_flatten_with_keys(self) -> Any:
        return [(jax.tree_util.GetAttrKey("value"), self.value)], None

    def tree_flatten(self) -> Any:
        return [self.value], None

    @classmethod
    def tree_unflatten(cls, _: None, leaves: Any) -> "Unscaled":
        return cls(*leaves)


def _refuse(self: Unscaled, *_: Any) -> Any:
    raise TypeError(
        "A gradient of a `loss_scale_optimizer` is marked as one, and is no array to "
        "compute with.\nWrite `jax.tree.map(lambda g: ..., grads)`, which keeps the "
        "mark for `update`, or read the array: `grads.value`."
    )


for _name in "add sub mul truediv pow matmul".split():
    setattr(Unscaled, f"__{_name}__", _refuse)
    setattr(Unscaled, f"__r{_name}__", _refuse)
for _name in "neg abs getitem".split():
    setattr(Unscaled, f"__{_name}__", _refuse)


def _is_marked(x: Any) -> bool:
    return isinstance(x, Unscaled)


def marked(grads: Any) -> Any:
    """A tree of gradients with each of its numbers marked."""
    return jax.tree.map(lambda g: Unscaled(g) if eqx.is_inexact_array(g) else g, grads)


def unmarked(grads: Any) -> Any:
    """The arrays themselves."""
    return jax.tree.map(
        lambda g: g.value if _is_marked(g) else g, grads, is_leaf=_is_marked
    )


def without_mark(grads: Any) -> list[str]:
    """The paths of gradients that are not marked."""
    leaves = jax.tree_util.tree_leaves_with_path(grads, is_leaf=_is_marked)
    return [jax.tree_util.keystr(path) for path, g in leaves if eqx.is_inexact_array(g)]
