"""Splits a program in two: what is made of parameters alone, and the rest.

Equations that only widen or move numbers (such as a cast of int8 to the dtype that is
multiplied in) are left to the rest, since the narrow numbers are to be stored. Programs
that equations hold are split too. Calls are gone through as if their code stood there.
What the body of a scan makes of a slice is made of all slices, unless the scan stands
in another one and reads slices of that. What the body of a `while` or a branch makes of
a parameter is made before it."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from .._jax import Eqn, Jaxpr, Literal, jaxprs_in, raw, scan_arity
from .._primitives import VIEWS
from .._quantised.stored import STORED
from .rewriting import BOUND_CALLS
from .uses import bodies

Owners = frozenset[int]
INPUT: Owners = frozenset({-1})  # depends on an input, or on what is not to be folded
CONSTANT: Owners = frozenset()


class Part(NamedTuple):
    """A value that is made of a parameter, and that the rest needs.

    Args:
        owners: the position of the parameter that it is made of.
        size: its size in bytes.
        is_sliced: whether each iteration of the scan around has a value of its own.
        is_8_bit: whether its numbers have 8 bits."""

    owners: Owners
    size: int
    is_sliced: bool
    is_8_bit: bool


@dataclass
class Split:
    """A program, and for each variable the parameters that it is made of alone.

    Args:
        jaxpr: the program.
        owners: for each variable the position of the parameter that it is made of,
            nothing if it depends on no input at all, or `INPUT`.
        sliced: variables that have another value in each iteration of the scan around.
        length: how often the program runs, if it is the body of a scan.
        needed: variables that are made of a parameter and read by the rest, in order.
        inner: by the `id` of an equation, the splits of the programs that it holds.
        again: the `id`s of equations that the rest computes, although what they make
            is made of a parameter alone."""

    jaxpr: Jaxpr
    owners: dict[Any, Owners]
    sliced: set[Any]
    length: Any = None
    needed: dict[Any, None] = field(default_factory=dict)
    inner: dict[int, list["Split"]] = field(default_factory=dict)
    recomputed: set[int] = field(default_factory=set)

    def of(self, atom: Any) -> Owners:
        return CONSTANT if isinstance(atom, Literal) else self.owners[atom]

    def is_prepared(self, atom: Any) -> bool:
        """Whether `atom` is made of a parameter, and so is not computed at a call."""
        owners = self.of(atom)
        return owners != CONSTANT and not owners & INPUT

    def is_slice(self, atom: Any) -> bool:
        return not isinstance(atom, Literal) and atom in self.sliced

    def parts(self) -> Iterator["Part"]:
        """All that the rest needs, in order, from the programs in equations too."""
        for v in self.needed:
            is_8_bit = v.aval.dtype.itemsize == 1 and v.aval.dtype != bool
            yield Part(self.owners[v], _bytes(v), v in self.sliced, is_8_bit)
        for one in (one for inner in self.inner.values() for one in inner):
            for piece in one.parts():
                if one.length is not None:
                    times = one.length if piece.is_sliced else 1
                    piece = piece._replace(size=piece.size * times, is_sliced=False)
                yield piece

    def slices(self) -> list[bool]:
        return [piece.is_sliced for piece in self.parts()]


def is_call(eqn: Eqn) -> bool:
    return eqn.primitive.name in BOUND_CALLS


def split(
    jaxpr: Jaxpr,
    owners: Sequence[Owners],
    sliced: Sequence[bool] = (),
    length: Any = None,
    is_called: bool = False,
) -> Split:
    """Splits a program, given what its inputs are made of.

    A result that is made of a parameter is needed, unless the program `is_called` by
    another one, which then decides whether it needs that result."""
    inner = raw(jaxpr)
    known = dict(zip(inner.invars, owners, strict=True))
    known |= dict.fromkeys(inner.constvars, CONSTANT)
    slices = {v for v, is_one in zip(inner.invars, sliced, strict=False) if is_one}
    made = Split(jaxpr, known, slices, length)
    for eqn in inner.eqns:
        _split_eqn(made, eqn)
    if not is_called:
        _need(made, inner.outvars)
    _leave_widening(made)
    return made


def _need(made: Split, atoms: Iterable[Any]) -> None:
    made.needed |= {v: None for v in atoms if made.is_prepared(v)}


def _leave_widening(made: Split) -> None:
    """Replaces each needed value by the narrowest that casts and moves make it of.

    Axes of length 1 are left to the rest, too: how many there are depends on the rank
    of an input, which may be another one at the next call."""
    makers = {v: eqn for eqn in raw(made.jaxpr).eqns for v in eqn.outvars}
    for needed in list(made.needed):
        chain, v = [needed], needed
        while (eqn := makers.get(v)) is not None and _is_view(eqn):
            v = eqn.invars[0]
            chain.append(v)
        best = min(chain, key=_bytes)
        for v in chain[chain.index(best) :]:
            if _without_ones(v) != _without_ones(best):
                break
            best = v
        if best is not needed:
            made.recomputed |= {id(makers[v]) for v in chain[: chain.index(best)]}
            del made.needed[needed]
            made.needed[best] = None


def _is_view(eqn: Eqn) -> bool:
    return eqn.primitive.name in VIEWS and len(eqn.invars) == 1


def _bytes(var: Any) -> int:
    return var.aval.size * var.aval.dtype.itemsize


def _without_ones(var: Any) -> Any:
    return var.aval.dtype, [n for n in var.aval.shape if n != 1]


def _split_eqn(made: Split, eqn: Eqn) -> None:
    if eqn.primitive is STORED:
        # What is made of this value is larger, and left to the rest.
        made.owners[eqn.outvars[0]] = INPUT
        _need(made, eqn.invars)
        return
    together = frozenset().union(*map(made.of, eqn.invars))
    is_sliced = any(map(made.is_slice, eqn.invars))
    # What depends on two parameters is left to the rest, which makes it at each call.
    is_whole = -1 not in together and len(together) <= 1 and not eqn.effects
    if is_whole and not (_can_be_split(eqn, is_sliced) and _says_what_to_store(eqn)):
        made.owners |= dict.fromkeys(eqn.outvars, together)
        made.sliced |= set(eqn.outvars) if is_sliced else set()
        return
    made.owners |= dict.fromkeys(eqn.outvars, INPUT)
    if any(map(made.is_prepared, eqn.invars)) and _can_be_split(eqn, is_sliced):
        _split_programs(made, eqn)
    else:
        _need(made, eqn.invars)


def _says_what_to_store(eqn: Eqn) -> bool:
    return any(
        one.primitive is STORED or _says_what_to_store(one)
        for program in jaxprs_in(eqn.params.values())
        for one in raw(program).eqns
    )


def _can_be_split(eqn: Eqn, is_sliced: bool) -> bool:
    """Whether the programs of an equation are split; `is_sliced` if it reads slices."""
    if is_call(eqn):
        return True
    name = eqn.primitive.name
    is_nested = name == "scan" and is_sliced
    return name in ("scan", "while", "cond") and not eqn.effects and not is_nested


def _split_programs(made: Split, eqn: Eqn) -> None:
    all_bodies = bodies(eqn)
    # `carried` are operands that a loop begins with; from `first` on, a scan slices.
    carried = {body.ins[i] for body in all_bodies for _, i in body.carries}
    is_scan = eqn.primitive.name == "scan"
    first = sum(scan_arity(eqn)) if is_scan else len(eqn.invars)
    length = eqn.params["length"] if is_scan else None
    made.inner[id(eqn)] = []
    for body in all_bodies:
        operands = [eqn.invars[j] for j in body.ins]
        owners = [INPUT if j in carried else made.of(eqn.invars[j]) for j in body.ins]
        # Where a scan is split, nothing that it reads is a slice of a loop around.
        slices = [j >= first or made.is_slice(eqn.invars[j]) for j in body.ins]
        inner = split(body.jaxpr, owners, slices, length, is_called=is_call(eqn))
        made.inner[id(eqn)].append(inner)
        # An input that the body needs as it is stays an operand of the equation.
        for v, operand in zip(raw(body.jaxpr).invars, operands, strict=True):
            if v in inner.needed:
                del inner.needed[v]
                made.needed[operand] = None
        if is_call(eqn):
            for v, out in zip(eqn.outvars, raw(body.jaxpr).outvars, strict=True):
                made.owners[v] = inner.of(out)
                made.sliced |= {v} if inner.is_slice(out) else set()
    # The rest also needs what a loop begins with, and what picks a branch.
    handed = {j for body in all_bodies for j in body.ins} - carried
    _need(made, [v for j, v in enumerate(eqn.invars) if j not in handed])
