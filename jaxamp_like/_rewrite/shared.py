"""Which variables are read more than once, and not by disjoint slices.

The cotangents of their readers are added."""

from collections.abc import Iterable, Mapping
from itertools import combinations
from typing import Any

from .._jax import Eqn

_FEW = 16  # parts that are compared with each other


def shared(readers: Mapping[Any, list[Eqn | None]]) -> frozenset[Any]:
    """The variables of which several cotangents overlap.

    Args:
        readers: of each variable, the equations that read it, once for each operand;
            `None` stands for any other reader."""
    several = (v for v, eqns in readers.items() if len(eqns) > 1)
    return frozenset(v for v in several if not _are_parts(readers[v]))


def _are_parts(eqns: Iterable[Eqn | None]) -> bool:
    """Whether all of them are slices that have no element in common, as of QKV."""
    boxes = []
    for eqn in eqns:
        if eqn is None or eqn.primitive.name != "slice" or len(boxes) == _FEW:
            return False
        params = eqn.params
        boxes.append(
            list(zip(params["start_indices"], params["limit_indices"], strict=True))
        )
    return all(_are_apart(a, b) for a, b in combinations(boxes, 2))


def _are_apart(a: list[tuple[Any, Any]], b: list[tuple[Any, Any]]) -> bool:
    """Whether two boxes, given by `(start, limit)` along each axis, don't overlap."""
    return any(
        n <= start or limit <= m
        for (m, n), (start, limit) in zip(a, b, strict=True)
        if all(isinstance(x, int) for x in (m, n, start, limit))
    )
