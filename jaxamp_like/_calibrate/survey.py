"""The contractions of a program, and what each does.

Read off a program with marks: every contraction that may be rounded reads one, in the
forward as in the backward pass."""

from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

from .._jax import Eqn, Jaxpr, Literal, names, raw, subjaxprs
from .._primitives import CONTRACTIONS, MOVING_VIEWS
from .._reports.walk import flops, size_of
from .costs import Run, Work
from .marks import MARK, Contraction, is_read_by_its_contraction


class Found(NamedTuple):
    """The contractions of a program, in order, and what each does."""

    work: dict[Contraction, Work]
    fixed_flops: float  # of contractions that `amp` leaves as written


def survey(jaxpr: Jaxpr) -> Found:
    """The contractions of a program with marks."""
    work: dict[Contraction, Work] = {}
    fixed = 0.0
    given = frozenset([*raw(jaxpr).invars, *raw(jaxpr).constvars])
    for eqn, times, marks, kept in _contractions(jaxpr, 1, given):
        if not marks:
            fixed += times * flops(eqn)
            continue
        read, made = (
            sum(times * size_of(v.aval) for v in some)
            for some in (eqn.invars[:2], eqn.outvars)
        )
        run = Run(
            times * flops(eqn),
            read,
            made,
            times * kept[0],
            times * kept[1],
            _in_eight_bits(marks),
        )
        work.setdefault(marks[0].params["of"], Work()).runs.append(run)
    return Found(work, fixed)


def _in_eight_bits(marks: Sequence[Eqn]) -> frozenset[str]:
    """The candidates that make 8 bits of all that has a mark."""
    some = [{how.eight_bits for how in mark.params["to"]} for mark in marks]
    return frozenset(set.intersection(*some) - {None})


def _contractions(
    jaxpr: Jaxpr, times: int, given: frozenset[Any]
) -> Iterator[tuple[Eqn, int, list[Eqn], tuple[int, int]]]:
    """Contractions, how often they run, the marks that they read, and what they keep.

    That is in elements, of operands and of results.
    `given` are parameters and batches, which are live anyway."""
    eqns = raw(jaxpr).eqns
    marked = {e.outvars[0]: e for e in eqns if e.primitive is MARK}
    known, seen = set(given), set()
    for eqn in eqns:
        operands = [v for v in eqn.invars if not _is_literal(v)]
        if eqn.primitive.name in MOVING_VIEWS and operands and operands[0] in known:
            known.update(eqn.outvars)
        if eqn.primitive.name in CONTRACTIONS:
            made = (marked[v] for v in operands if v in marked)
            before = [e for e in made if is_read_by_its_contraction(e)]
            kept = (0, 0)
            if not _is_backward(eqn):
                read = {e.invars[0] for e in before} - known - seen
                made = {*eqn.outvars} if before else set()
                seen |= read | made
                kept = _size(read), _size(made)
            yield eqn, times, before, kept
        length = eqn.params["length"] if eqn.primitive.name == "scan" else 1
        for sub in subjaxprs(eqn.params):
            # Conditions and indices come first in an equation, and are no operands.
            outer = zip(reversed(raw(sub).invars), reversed(eqn.invars), strict=False)
            inner = frozenset(v for v, x in outer if not _is_literal(x) and x in known)
            yield from _contractions(sub, times * length, inner)


def _size(some: Iterable[Any]) -> int:
    return sum(size_of(v.aval) for v in some)


def _is_literal(atom: Any) -> bool:
    return isinstance(atom, Literal)


def _is_backward(eqn: Eqn) -> bool:
    told = names(eqn)
    return told.backward or told.recomputed
