"""Where rounded numbers lie on a mesh with Explicit axes: XLA is to say."""

from typing import Any

from .._jax import explicit_axes, has_auto_axes, in_auto_axes, is_explicitly_sharded
from .._rules import Decision, Site


def why_not_along_axes(operands: Any, what: str) -> str | None:
    """Why operands can't be rounded where they lie, if they can't.

    Args:
        operands: types of arrays that are rounded.
        what: the parts that share a scale, such as "blocks"."""
    if _split_axes(operands) and not has_auto_axes():
        return (
            f"before JAX 0.7, {what} are not laid over axes of a mesh that are "
            "Explicit; Auto ones and `shard_map` are no obstacle"
        )
    return None


def along_axes(operands: Any, site: Site, decision: Decision) -> Decision:
    """The decision where Explicit axes, along which operands are split, become Auto.

    A sum may be cut within a block, and numbers of a weight that is rounded before a
    loop would be of a type of their own: XLA is to say where they go."""
    if not (axes := _split_axes(operands)):
        return decision
    assert decision.bind is not None
    bind = in_auto_axes(decision.bind, axes, site.out_avals[0])
    return decision._replace(bind=bind, quantisers=())


def _split_axes(operands: Any) -> frozenset[str]:
    """The `Explicit` axes of a mesh, if an operand is split along one."""
    if not any(map(is_explicitly_sharded, operands)):
        return frozenset()
    return frozenset().union(*map(explicit_axes, operands))
