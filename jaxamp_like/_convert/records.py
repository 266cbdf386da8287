"""What a summary tells besides parameters: casts that are left, and contractions."""

from collections.abc import Iterable
from typing import Annotated, NamedTuple

from .._jax import Jaxpr, without_folders
from .._primitives import CONTRACTIONS, is_contraction
from .._reports import walk
from .._reports.data.columns import Column
from .uses import Use


class Cast(NamedTuple):
    """A cast of a parameter that the converted function still makes.

    Args:
        name: the path of the parameter.
        dtype: what it is cast to.
        scope: the named scopes around the operation that reads it, joined by "/".
        line: where the author wrote that operation."""

    name: Annotated[str, Column("parameter")]
    dtype: Annotated[str, Column("to")]
    scope: Annotated[str, Column("scope")]
    line: Annotated[str, Column("source", "line")]


class ContractionRecord(NamedTuple):
    """A contraction of a program, and in what precision it runs.

    Args:
        primitive: the name of its primitive.
        scope: the named scopes around it, joined by "/".
        line: where its author wrote it.
        reads: the dtypes of its operands.
        makes: the dtype of its result.
        shape: the shape of its result.
        times: how often it runs, if loops around it have a fixed length."""

    primitive: Annotated[str, Column("contraction", at=2, terminal=True)]
    scope: Annotated[str, Column("scope", at=1, terminal=True)]
    line: Annotated[str, Column("source", "line", at=6, terminal=True)]
    reads: tuple[str, ...]
    makes: str
    shape: tuple[str, ...]
    times: Annotated[int, Column("times", "number", at=5)]

    @property
    def operands(self) -> Annotated[str, Column("reads", at=3, terminal=True)]:
        return " x ".join(self.reads)

    @property
    def result(self) -> Annotated[str, Column("makes", at=4, terminal=True)]:
        return f"{self.makes}[{', '.join(self.shape)}]"


def casts_of(name: str, uses: Iterable[Use]) -> list[Cast]:
    """The casts among the readers of a parameter."""
    casts = (Cast(name, u.dtype, u.scope, u.line) for u in uses if u.dtype is not None)
    return sorted(casts)


def contractions_of(jaxpr: Jaxpr) -> tuple[ContractionRecord, ...]:
    """The contractions of a program, at any depth."""
    found = []
    for eqn, at, is_structural in walk.walk(jaxpr, ()):
        if is_structural or eqn.primitive.name not in CONTRACTIONS:
            continue
        if not is_contraction(eqn.params, [v.aval for v in eqn.invars]):
            continue
        place, out = at.place(eqn), eqn.outvars[0].aval
        found.append(
            ContractionRecord(
                primitive=eqn.primitive.name,
                scope=place.scope,
                line=without_folders(place.source),
                reads=tuple(v.aval.dtype.name for v in eqn.invars[:2]),
                makes=out.dtype.name,
                shape=tuple(map(str, out.shape)),
                times=place.times,
            )
        )
    return tuple(found)
