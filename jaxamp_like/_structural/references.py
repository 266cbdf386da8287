"""References (`jax.Ref`) that derivative rules are given."""

from collections.abc import Callable, Sequence
from typing import Any

import jax

from .._jax import Eqn, is_array_aval, new_reference, typeof

_WRITES = ("WriteEffect", "AccumEffect")


def writes(eqn: Eqn) -> bool:
    """Whether an equation writes to a reference."""
    return any(type(effect).__name__ in _WRITES for effect in eqn.effects)


def making_references(fn: Callable[..., Any], places: Sequence[int]) -> Any:
    """`fn`, given the values of the references at `places`.

    JAX finds the cotangents of references that are made inside of what it
    differentiates. Also returns what is left in them."""

    def making(*args: Any) -> tuple[list[Any], list[Any]]:
        given = [new_reference(x) if k in places else x for k, x in enumerate(args)]
        outs = fn(*given)
        return outs, [jax.lax.stop_gradient(given[k][...]) for k in places]

    return making


def references_among(values: Sequence[Any], args: Sequence[Any]) -> dict[int, int]:
    """Which of `values` are references that came in, and as which of `args`.

    A backward rule may write to them, and no traced function returns one."""
    places = {id(x): i for i, x in enumerate(args) if not is_array_aval(typeof(x))}
    return {k: places[id(x)] for k, x in enumerate(values) if id(x) in places}
