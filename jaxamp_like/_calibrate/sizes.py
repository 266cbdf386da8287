"""Which sizes of the operands of contractions are free, and which the parameters fix.

A policy that tells contractions apart by shapes has to hold for other batches too.
Shapes don't tell which sizes come from the batch. So the function is traced again (and
not run) with batches of other sizes, and the sizes that change are free."""

import warnings
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import jax

from .._jax import Jaxpr, equations
from .._rules.by_shapes import Dims, as_dims, as_text, overlap, widened
from .candidates import Candidate
from .marks import MARK, Contraction, traced
from .measured_function import MeasuredFunction, Point

BatchAxis = tuple[int, int]  # an array among the arguments, and one of its axes


def patterns(
    subject: MeasuredFunction,
    jaxpr: Jaxpr,
    point: Point,
    candidates: tuple[Candidate, ...],
) -> dict[Contraction, str]:
    """The shapes of each contraction of a program with marks, free sizes as "*".

    Contractions of one scope and primitive whose patterns overlap share one pattern.

    Args:
        subject: what is measured.
        jaxpr: its program.
        point: the point whose arrays it was traced for.
        candidates: the low precisions that the marks are for."""
    before = [*_marked(jaxpr)]
    dims = {of: as_dims(of.shapes) for of in before}
    done: set[BatchAxis] = set()
    for places in _tied_sizes(subject, point):
        if not places <= done:
            after = _traced_otherwise(subject, point, candidates, places, before)
            done |= places if after else set()
            for of, other in zip(before, after, strict=False):
                dims[of] = _free(dims[of], as_dims(of.shapes), as_dims(other.shapes))
    return {of: as_text(one) for of, one in _merged(dims).items()}


def _marked(jaxpr: Jaxpr) -> Iterator[Contraction]:
    return (e.params["of"] for e in equations(jaxpr) if e.primitive is MARK)


def _tied_sizes(subject: MeasuredFunction, point: Point) -> Iterator[set[BatchAxis]]:
    """Sets of places in the batch whose sizes may have to change together.

    First come places of one size at the same axis, such as that of examples; then all
    places of one size."""
    held = set(subject.call.active)
    sizes = {
        (i, axis): size
        for i, x in enumerate(point.arrays)
        for axis, size in enumerate(x.shape)
        if i not in held and size
    }
    alike: dict[Any, set[BatchAxis]] = {}
    for place, size in sizes.items():
        alike.setdefault((place[1], size), set()).add(place)
    for place, size in sizes.items():
        alike.setdefault(size, set()).add(place)
    yield from alike.values()


def _traced_otherwise(
    subject: MeasuredFunction,
    point: Point,
    candidates: tuple[Candidate, ...],
    places: set[BatchAxis],
    before: Sequence[Contraction],
) -> list[Contraction]:
    """The contractions if these places have another size; none if no other works."""
    i, axis = min(places)
    size = point.arrays[i].shape[axis]
    for other in dict.fromkeys((2 * size, size + 1, max(size // 2, 1))):
        arrays = [
            _resized(x, {a for j, a in places if j == i}, other)
            for i, x in enumerate(point.arrays)
        ]
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                moved = point._replace(arrays=tuple(arrays))
                jaxpr, _ = traced(subject, moved, candidates)
        except Exception:  # a function may raise anything for sizes that don't fit
            continue
        after = [*_marked(jaxpr)]
        if list(map(_kind, after)) == list(map(_kind, before)):
            return after
    return []


def _resized(x: Any, axes: set[int], size: int) -> Any:
    shape = [size if axis in axes else n for axis, n in enumerate(x.shape)]
    return jax.ShapeDtypeStruct(shape, x.dtype) if axes else x


def _kind(of: Contraction) -> Any:
    axes = [list(map(widened, one)) for one in as_dims(of.shapes)]
    return of.scope, of.primitive, axes


def _free(dims: Dims, before: Dims, after: Dims) -> Dims:
    """`dims`, with those sizes free that differ between `before` and `after`."""
    triples = zip(dims, before, after, strict=True)
    return tuple(
        tuple(n if x == y else widened(n) for n, x, y in zip(*three, strict=True))
        for three in triples
    )


def _merged(dims: Mapping[Contraction, Dims]) -> dict[Contraction, Dims]:
    """`dims`, with one pattern for contractions that theirs could not tell apart."""
    known: dict[Any, set[Dims]] = {}
    for of, one in dims.items():
        some = known.setdefault((of.scope, of.primitive), set())
        while clash := next((other for other in some if overlap(one, other)), None):
            some.remove(clash)
            one = _free(one, one, clash)
        some.add(one)
    return {
        of: next(p for p in known[of.scope, of.primitive] if overlap(p, one))
        for of, one in dims.items()
    }
