"""Jaxprs, and the jaxprs that their equations hold, with other parts."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import jax.extend.core as jex
import numpy as np

Jaxpr = Any  # open, closed, or since JAX 0.12 the one class that is both
Eqn = Any


def raw(jaxpr: Jaxpr) -> Jaxpr:
    """The open jaxpr of an open or closed one."""
    return getattr(jaxpr, "jaxpr", jaxpr)


def closed(jaxpr: Jaxpr, values: Sequence[Any]) -> Jaxpr:
    """An open jaxpr with its constants."""
    # Since JAX 0.12 it is another name of `Jaxpr`, which types don't see as public.
    return jex.ClosedJaxpr(jaxpr, values)  # pyright: ignore[reportPrivateImportUsage]


# Most parameters of equations are one of these. They are told apart first, since a
# program has many equations, and each of its parameters is asked about several times.
SIMPLE = (type(None), bool, int, float, str, np.dtype)


def is_jaxpr(value: Any) -> bool:
    return not isinstance(value, SIMPLE) and hasattr(raw(value), "eqns")


def jaxprs_in(values: Iterable[Any]) -> Iterator[Jaxpr]:
    """The jaxprs among some values, such as the parameters of an equation."""
    for value in values:
        if isinstance(value, tuple | list):
            yield from filter(is_jaxpr, value)
        elif is_jaxpr(value):
            yield value


def with_eqns(jaxpr: Jaxpr, eqns: Sequence[Eqn]) -> Jaxpr:
    """`jaxpr` with other equations, which make the same variables.

    If none of them is new, `jaxpr` itself is returned."""
    if all(new is old for new, old in zip(eqns, raw(jaxpr).eqns, strict=True)):
        return jaxpr
    inner = raw(jaxpr).replace(eqns=list(eqns))
    return inner if raw(jaxpr) is jaxpr else jaxpr.replace(jaxpr=inner)


def with_jaxprs(
    params: dict[str, Any], other: Callable[[Jaxpr], Jaxpr]
) -> dict[str, Any]:
    """An equation's parameters, with what `other` makes of each jaxpr among them.

    If no jaxpr is new, `params` itself is returned."""

    def of(value: Any) -> Any:
        if is_jaxpr(value):
            return other(value)
        if not isinstance(value, tuple | list):
            return value
        items = [of(item) for item in value]
        if all(new is old for new, old in zip(items, value, strict=True)):
            return value
        is_named = hasattr(value, "_fields")  # of a linear solve
        return type(value)(*items) if is_named else type(value)(items)

    changed = {}
    for name, value in params.items():
        if (new := of(value)) is not value:
            changed[name] = new
    return params | changed if changed else params
