"""A program split in two: what is made of parameters alone, and the rest.

What only widens or moves numbers (int8 cast to the dtype that is multiplied in) is left
to the rest, since it is the narrow numbers that are to be stored. Programs that
equations hold are split too, wherever they stand: calls are gone through as if their
code stood there; what the body of a scan makes of a slice is made of all slices; and
what the body of a `while` or a branch makes of a parameter is made before it."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from .._jax import (
    Eqn,
    Jaxpr,
    Literal,
    consts,
    raw,
    scan_arity,
    subjaxprs,
)
from .._primitives import VIEWS
from .._structural import Body
from .rewriting import BOUND_CALLS
from .uses import bodies

Owners = frozenset[int]
INPUT: Owners = frozenset({-1})  # depends on an input, or on what is not to be folded
CONSTANT: Owners = frozenset()


class Piece(NamedTuple):
    """Something that is made of a parameter, and needed by the rest.

    Args:
        owners: the position of the parameter that it is made of.
        size: in bytes.
        is_sliced: whether it is another one in each iteration of the loop around.
        is_8_bit: whether its numbers have 8 bits."""

    owners: Owners
    size: int
    is_sliced: bool
    is_8_bit: bool


@dataclass
class Split:
    """A program, and for each variable the parameters that it is made of alone.

    Args:
        jaxpr: the program, open.
        values: its constants.
        owners: of each variable: positions of parameters, nothing for what depends on
            no input at all, or `INPUT`.
        sliced: variables that are another one in each iteration of the loop around.
        needed: what is made of parameters and read by the rest, in order.
        inner: the same for the programs that equations hold, by their position.
        again: positions of equations that the rest computes, although it need not."""

    jaxpr: Jaxpr
    values: Sequence[Any]
    owners: dict[Any, Owners]
    sliced: set[Any]
    needed: dict[Any, None] = field(default_factory=dict)
    inner: dict[int, list["Split"]] = field(default_factory=dict)
    again: set[int] = field(default_factory=set)

    def of(self, atom: Any) -> Owners:
        return CONSTANT if isinstance(atom, Literal) else self.owners[atom]

    def is_prepared(self, atom: Any) -> bool:
        """Whether it is made of parameters, and so not there at a call."""
        owners = self.of(atom)
        return owners != CONSTANT and not owners & INPUT

    def is_slice(self, atom: Any) -> bool:
        return not isinstance(atom, Literal) and atom in self.sliced

    def pieces(self) -> Iterator["Piece"]:
        """What is needed, in order."""
        for v in self.needed:
            is_8_bit = v.aval.dtype.itemsize == 1 and v.aval.dtype != bool
            yield Piece(self.owners[v], _bytes(v), v in self.sliced, is_8_bit)
        for i, inner in self.inner.items():
            eqn = self.jaxpr.eqns[i]
            for piece in (piece for one in inner for piece in one.pieces()):
                if is_scan(eqn):
                    times = eqn.params["length"] if piece.is_sliced else 1
                    piece = piece._replace(size=piece.size * times, is_sliced=False)
                yield piece

    def slices(self) -> list[bool]:
        return [piece.is_sliced for piece in self.pieces()]


def is_scan(eqn: Eqn) -> bool:
    return eqn.primitive.name == "scan"


def is_call(eqn: Eqn) -> bool:
    return eqn.primitive.name in BOUND_CALLS


def split(
    jaxpr: Jaxpr,
    owners: Sequence[Owners],
    sliced: Sequence[bool] = (),
    is_outermost: bool = True,
) -> Split:
    """Splits a program, given what its inputs are made of."""
    inner = raw(jaxpr)
    known = dict(zip(inner.invars, owners, strict=True))
    known |= dict.fromkeys(inner.constvars, CONSTANT)
    slices = {v for v, is_one in zip(inner.invars, sliced, strict=False) if is_one}
    made = Split(inner, consts(jaxpr), known, slices)
    for i, eqn in enumerate(inner.eqns):
        _split_eqn(made, i, eqn)
    if is_outermost:
        made.needed |= {v: None for v in inner.outvars if made.is_prepared(v)}
    _leave_widening(made)
    return made


def _hand_over(made: Split, operands: Sequence[Any], inner: Split) -> None:
    """What a body needs of its inputs as they are is handed to it, as ever."""
    for v, operand in zip(inner.jaxpr.invars, operands, strict=True):
        if v in inner.needed:
            del inner.needed[v]
            made.needed[operand] = None


def _leave_widening(made: Split) -> None:
    """Takes the narrowest of what is only cast and moved until it is needed."""
    makers = {v: i for i, eqn in enumerate(made.jaxpr.eqns) for v in eqn.outvars}
    for needed in list(made.needed):
        chain, v = [needed], needed
        while (i := makers.get(v)) is not None and _only_shows(made.jaxpr.eqns[i]):
            v = made.jaxpr.eqns[i].invars[0]
            chain.append(v)
        best = min(chain, key=_bytes)
        if _bytes(best) < _bytes(needed):
            made.again |= {makers[v] for v in chain[: chain.index(best)]}
            del made.needed[needed]
            made.needed[best] = None


def _only_shows(eqn: Eqn) -> bool:
    return eqn.primitive.name in VIEWS and len(eqn.invars) == 1


def _bytes(var: Any) -> int:
    return var.aval.size * var.aval.dtype.itemsize


def _split_eqn(made: Split, i: int, eqn: Eqn) -> None:
    owners = [made.of(v) for v in eqn.invars]
    together = frozenset().union(*owners)
    is_sliced = any(map(made.is_slice, eqn.invars))
    # What is made of two parameters is made at each call, by the rest.
    if -1 not in together and len(together) <= 1 and not eqn.effects:
        made.owners |= dict.fromkeys(eqn.outvars, together)
        made.sliced |= set(eqn.outvars) if is_sliced else set()
        return
    made.owners |= dict.fromkeys(eqn.outvars, INPUT)
    prepared = {v: None for v in eqn.invars if made.is_prepared(v)}
    if prepared and is_call(eqn):
        _split_call(made, i, eqn)
    elif prepared and _has_bodies(eqn) and not (is_scan(eqn) and is_sliced):
        _split_bodies(made, i, eqn)
    else:
        made.needed |= prepared


def _has_bodies(eqn: Eqn) -> bool:
    return eqn.primitive.name in ("scan", "while", "cond") and not eqn.effects


def _split_call(made: Split, i: int, eqn: Eqn) -> None:
    (body,) = subjaxprs(eqn.params)
    owners, slices = map(made.of, eqn.invars), map(made.is_slice, eqn.invars)
    inner = split(body, list(owners), list(slices), is_outermost=False)
    made.inner[i] = [inner]
    _hand_over(made, eqn.invars, inner)
    for v, out in zip(eqn.outvars, inner.jaxpr.outvars, strict=True):
        made.owners[v] = inner.of(out)
        made.sliced |= {v} if inner.is_slice(out) else set()


def _split_bodies(made: Split, i: int, eqn: Eqn) -> None:
    all_bodies = bodies(eqn)
    carried = carried_operands(all_bodies)
    handed = {j for body in all_bodies for j in body.ins} - carried
    first = sum(scan_arity(eqn)) if is_scan(eqn) else None
    made.inner[i] = []
    for body in all_bodies:
        operands = [eqn.invars[j] for j in body.ins]
        owners = [INPUT if j in carried else made.of(eqn.invars[j]) for j in body.ins]
        slices = [
            made.is_slice(v) if first is None else j >= first
            for j, v in zip(body.ins, operands, strict=True)
        ]
        inner = split(body.jaxpr, owners, slices)
        made.inner[i].append(inner)
        _hand_over(made, operands, inner)
    # What a loop begins with, and what picks a branch.
    rest = [v for j, v in enumerate(eqn.invars) if j not in handed]
    made.needed |= {v: None for v in rest if made.is_prepared(v)}


def carried_operands(all_bodies: Sequence[Body]) -> set[int]:
    """The operands that are what a loop begins with."""
    return {body.ins[i] for body in all_bodies for _, i in body.loop}
