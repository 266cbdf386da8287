"""Jaxprs made ready to be run many times, in Python."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np

from . import in_numpy

CONTRACTIONS = frozenset(
    "dot_general conv_general_dilated ragged_dot_general ragged_dot".split()
)


def is_contraction(eqn: Any) -> bool:
    """Whether an equation sums products, of numbers that it reads more than once.

    A product without a sum, and an inner product, are arithmetic."""
    if eqn.primitive.name not in CONTRACTIONS:
        return False
    if eqn.primitive.name != "dot_general":
        return True
    (axes, _), _ = eqn.params["dimension_numbers"]
    shapes = [v.aval.shape for v in eqn.invars]
    summed = int(np.prod([shapes[0][i] for i in axes]))
    (out,) = eqn.outvars
    # How often all that is read is read in sum: once for each result it is a part of.
    reads = out.aval.size * summed
    return summed > 1 and any(reads > np.prod(shape) for shape in shapes)


@dataclass(eq=False)
class Step:
    """An equation, with what need not be found out each time that it is run."""

    eqn: Any
    ins: list[int]  # places of its operands among the values of its program
    outs: list[int]
    name: str  # of its primitive
    in_numpy: Callable[..., Any] | None
    holds_program: bool
    is_contraction: bool


@dataclass(eq=False)
class Code:
    """A jaxpr whose variables and literals are numbered, to be run many times."""

    steps: list[Step]
    constvars: list[int]
    invars: list[int]
    outvars: list[int]
    values: list[Any]  # the literals, in their places
    read: dict[Any, list[Any]] = field(default_factory=dict)

    def start(self, read: Callable[[Any], Any], kind: Any) -> list[Any]:
        """A list with a place for each value; the literals are there already.

        They are read as a `kind` of evaluator does."""
        known = self.read.get(kind)
        if known is None:
            known = [None if x is None else read(x) for x in self.values]
            self.read[kind] = known
        return known.copy()


_codes: WeakKeyDictionary[Any, Code] = WeakKeyDictionary()


def code_of(jaxpr: Any) -> Code:
    """The code of an open jaxpr, made once."""
    code = _codes.get(jaxpr)
    if code is None:
        code = _codes[jaxpr] = _code(jaxpr)
    return code


def _code(jaxpr: Any) -> Code:
    numbers: dict[Any, int] = {}
    values: list[Any] = []

    def place(atom: Any) -> int:
        is_literal = hasattr(atom, "val")
        if not is_literal and atom in numbers:
            return numbers[atom]
        values.append(_value(atom) if is_literal else None)
        if not is_literal:
            numbers[atom] = len(values) - 1
        return len(values) - 1

    def places(atoms: Any) -> list[int]:
        return [place(atom) for atom in atoms]

    constvars, invars = places(jaxpr.constvars), places(jaxpr.invars)
    steps = [_step(eqn, places(eqn.invars), places(eqn.outvars)) for eqn in jaxpr.eqns]
    return Code(steps, constvars, invars, places(jaxpr.outvars), values)


def _value(literal: Any) -> Any:
    """Of a literal; a Python number has the dtype that JAX gives it."""
    val = literal.val
    is_number = isinstance(val, bool | int | float | complex)
    return np.asarray(val, literal.aval.dtype) if is_number else val


def _step(eqn: Any, ins: list[int], outs: list[int]) -> Step:
    return Step(
        eqn,
        ins,
        outs,
        eqn.primitive.name,
        in_numpy.version(eqn),
        any(hasattr(v, "eqns") or hasattr(v, "jaxpr") for v in eqn.params.values()),
        is_contraction(eqn),
    )
