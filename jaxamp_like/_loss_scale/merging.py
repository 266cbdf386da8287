"""Merges the states that follow from several losses or microbatches of one step."""

from typing import Any

import jax
import jax.numpy as jnp

from .state import DynamicScalerState, Scaler, is_scaler


def merge_scalers(*states: Any) -> Any:
    """The state after one step that was made of several parts.

    Parts may be several losses, or microbatches whose gradients are added up. Begin
    each with the same state, and merge what they return: the scale changes once.

    Args:
        states: the next states of the parts, or one whose fields are stacked along a
            leading axis, as `jax.lax.scan` returns them. Trees of states (scales by
            group) will do.
    Returns:
        The state that follows. If any part overflowed, the step did.
    Raises:
        TypeError: no state was given, or something else.

    >>> state = DynamicScalerState(scaler=1024)
    >>> float(merge_scalers(state.update(True), state.update(False)).scaler)
    512.0
    """
    leaves = jax.tree.leaves(states, is_leaf=is_scaler)
    if len(states) == 1 and isinstance(states[0], list | tuple) and len(leaves) > 1:
        if all(
            isinstance(x, DynamicScalerState) and x.scaler.ndim == 0 for x in leaves
        ):
            raise TypeError(
                "`merge_scalers` was given one sequence of states, and would merge "
                "nothing.\nPass them as arguments: `merge_scalers(*states)`."
            )
    if not states or not all(map(is_scaler, leaves)):
        raise TypeError(
            "`merge_scalers` takes the next states of the parts of a step, but was "
            f"given {', '.join(type(x).__name__ for x in states) or 'nothing'}.\n"
            "A step returns `(next_state, results)`: pass its first part."
        )
    return jax.tree.map(_merged, *states, is_leaf=is_scaler)


def _merged(*states: Scaler) -> Scaler:
    first = states[0]
    if not isinstance(first, DynamicScalerState):
        return first
    lowest = {"scaler", "count"}  # these are smaller after a part that overflowed
    return first._with(
        **{
            name: (jnp.min if name in lowest else jnp.max)(jnp.stack(values))
            for name, values in zip(
                first._fields, zip(*states, strict=True), strict=True
            )
        }
    )
