"""Which inputs lie on several devices, and so are expensive to read twice.

A cast of a parameter is made again in the backward pass, since the parameter is live
anyway. Where it lies on several devices, XLA gathers for each reader what the reader
does not have, and it never sees that two gathers bring the same: a cast that is made
again is gathered again. So such a parameter is cast once, and its cast is kept.

The type of an array names its mesh (also where XLA chooses how to split it); so does a
`jit` with `in_shardings`, for the code inside of it. What neither tells is found when
the program is lowered (see `_rules.read_once`)."""

from collections.abc import Iterator, Sequence
from typing import Any

from .._jax import is_on_mesh, is_split
from .._rules import INPUT_SOURCES, Fact, RematSource


def remat_source_of(aval: Any, gather_once: bool | None) -> RematSource:
    """The remat source of an input; `gather_once` is what the user asked for."""
    sharded = is_on_mesh(aval) if gather_once is None else gather_once and aval.ndim > 0
    return RematSource.SHARDED if sharded else RematSource.INPUT


def of_operands(
    facts: Sequence[Fact | None], params: dict[str, Any], gather_once: bool | None
) -> Iterator[Fact | None]:
    """The facts of a call's operands, knowing the `in_shardings` that it may have."""
    given = params.get("in_shardings", ())
    for i, fact in enumerate(facts):
        split = i < len(given) and is_split(given[i]) and gather_once is not False
        is_input = fact is not None and fact.remat_source in INPUT_SOURCES
        yield (
            fact._replace(remat_source=RematSource.SHARDED)
            if fact and split and is_input
            else fact
        )


def as_asked(
    facts: Sequence[Fact | None], gather_once: bool | None
) -> tuple[Fact | None, ...]:
    """Facts of results; none stays `SHARDED` if `gather_once` is `False`."""
    if gather_once is not False:
        return tuple(facts)
    return tuple(
        fact._replace(remat_source=RematSource.NONE)
        if fact and fact.remat_source == RematSource.SHARDED
        else fact
        for fact in facts
    )
