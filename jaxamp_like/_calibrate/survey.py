"""The contractions of a program, and what each does.

They are found in a program with marks: every contraction that may be rounded reads a
mark, in the forward pass and in the backward pass."""

from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

from .._jax import Eqn, Jaxpr, Literal, Primitive, names, raw, subjaxprs, variables
from .._primitives import CONTRACTIONS, MOVING_VIEWS
from .._reports.walk import flops, size_of
from .costs import ContractionCost
from .marks import MARK, Contraction, is_read_by_its_contraction


class Survey(NamedTuple):
    """The contractions of a program, in order, and what each does.

    Args:
        work: for each contraction that may be rounded, what it does, in the backward
            pass too.
        fixed_flops: the FLOPs of contractions that `amp` leaves as written.
        primitives: the primitives of all contractions, by name."""

    work: dict[Contraction, list[ContractionCost]]
    fixed_flops: float
    primitives: dict[str, Primitive]


def survey(jaxpr: Jaxpr) -> Survey:
    """The contractions of a program with marks."""
    found = Survey({}, 0.0, {})
    given = frozenset([*raw(jaxpr).invars, *raw(jaxpr).constvars])
    for eqn, marks, run in _contractions(jaxpr, 1, given):
        found.primitives[eqn.primitive.name] = eqn.primitive
        if marks:
            found.work.setdefault(marks[0].params["of"], []).append(run)
        else:
            found = found._replace(fixed_flops=found.fixed_flops + run.flops)
    return found


def _contractions(
    jaxpr: Jaxpr, times: int, given: frozenset[Any]
) -> Iterator[tuple[Eqn, list[Eqn], ContractionCost]]:
    """Contractions, the marks that they read, and what they do.

    `times` is how often the program runs. `given` are its variables that hold
    parameters and batches, which are in memory anyway."""
    eqns = raw(jaxpr).eqns
    marked = {e.outvars[0]: e for e in eqns if e.primitive is MARK}
    known, seen = set(given), set()
    for eqn in eqns:
        operands = variables(eqn.invars)
        if eqn.primitive.name in MOVING_VIEWS and operands and operands[0] in known:
            known.update(eqn.outvars)
        if eqn.primitive.name in CONTRACTIONS:
            own = (marked[v] for v in operands if v in marked)
            before = [e for e in own if is_read_by_its_contraction(e)]
            saved_read, saved_made = set(), set()
            if before and not _is_backward(eqn):
                saved_read = {e.invars[0] for e in before} - known - seen
                saved_made = {*eqn.outvars}
                seen |= saved_read | saved_made
            run = ContractionCost(
                flops=times * flops(eqn),
                read=times * _size(eqn.invars[:2]),
                made=times * _size(eqn.outvars),
                saved_read=times * _size(saved_read),
                saved_made=times * _size(saved_made),
                quantised_by=_in_eight_bits(before),
            )
            yield eqn, before, run
        length = eqn.params["length"] if eqn.primitive.name == "scan" else 1
        for sub in subjaxprs(eqn.params):
            # Conditions and indices come first, and are not given to the program.
            outer = zip(reversed(raw(sub).invars), reversed(eqn.invars), strict=False)
            pairs = ((v, x) for v, x in outer if not isinstance(x, Literal))
            inner = frozenset(v for v, x in pairs if x in known)
            yield from _contractions(sub, times * length, inner)


def _size(some: Iterable[Any]) -> int:
    return sum(size_of(v.aval) for v in some)


def _is_backward(eqn: Eqn) -> bool:
    told = names(eqn)
    return told.backward or told.recomputed


def _in_eight_bits(marks: Sequence[Eqn]) -> frozenset[str]:
    """The candidates that round the values of all `marks` to 8 bits."""
    some = [{how.eight_bits for how in mark.params["to"]} for mark in marks]
    return frozenset(set.intersection(*some) - {None}) if some else frozenset()
