"""Which values the backward pass may read as copies in 8 bits.

What the backward pass runs again from a rounded value errs by that rounding, which is
large where the value is small beside what it is the sum of. So, unless a user's rule
asks for more, a value is kept in 8 bits only if a contraction reads it, which is linear
in it, or if a contraction made it, which rounds what it makes anyway. (Where only gates
read it, it may be the sum of two contractions' results; see `Grouping.saved_dtype`.)

In 8 bits a number may be off by a part of the largest one of its block. A logarithm, a
quotient and whatever else has a pole or jumps would magnify that without bound: what
they read stays in 16 bits. See `reading_of`."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from ..._jax import Literal, is_inexact, variables
from ..._primitives import (
    ADDING,
    ASKING_SIGNS,
    CONTRACTIONS,
    EXTREMES,
    LINEAR,
    LOOKUPS,
    MOVES,
    REDUCTIONS,
    VIEWS,
    jumps,
    steep_operands,
)
from ..._rules import Fact, RematSource
from ..._rules.low_bits import LowBits
from ..._structural import Plan, Step, steps_in
from .schedule import Region

_SUMS = frozenset({"reduce_sum", "psum", "psum2", "psum_invariant"})
_MOVING = VIEWS | {"convert_element_type", "copy", "reduce_precision", "neg"}


def is_kept_anyway(fact: Fact | None) -> bool:
    """Whether a value is live in the backward pass, or is no float at all.

    What lies on several devices is kept as it was gathered."""
    return fact is None or fact.remat_source != RematSource.NONE


def is_contraction_result(atom: Any, maker: Mapping[Any, Step]) -> bool:
    """Whether a value is a contraction's result, perhaps moved since.

    `maker` has the step of this program that makes each variable."""
    if isinstance(atom, Literal) or atom not in maker:
        return False
    step = maker[atom]
    name, operands = step.eqn.primitive.name, step.eqn.invars
    if step.handler is not None:
        return step.handler.is_call and _is_result_inside(atom, step, maker)
    if name in CONTRACTIONS:
        return step.is_compute
    return name in _MOVING and all(is_contraction_result(v, maker) for v in operands)


def _is_result_inside(atom: Any, step: Step, maker: Mapping[Any, Step]) -> bool:
    """The same of a result of a call; one that is handed through is what came in."""
    (plan,) = step.inner
    inside = plan.outvars[step.eqn.outvars.index(atom)]
    if inside in plan.invars:
        operand = step.eqn.invars[list(plan.invars).index(inside)]
        return is_contraction_result(operand, maker)
    return is_contraction_result(inside, plan.makers)


def reduces_rows(step: Step) -> bool:
    """Whether a step reduces an array along its last axis, alone or in a program."""
    eqns = [s.eqn for s in steps_in(step) if s.eqn.primitive.name in REDUCTIONS]
    return any(e.invars[0].aval.ndim - 1 in e.params["axes"] for e in eqns)


@dataclass
class Reading:
    """What a program makes of a value that it is run again from.

    Args:
        is_steep: something with a pole or a jump reads it, or what scales with it.
        asks_signs: something asks for the signs of its numbers, as a ReLU does.
        sums_made: it sums what does not follow its numbers in size, as exponentials.
        rows: the lengths of the rows that are reduced to one number each."""

    is_steep: bool = False
    asks_signs: bool = False
    sums_made: bool = False
    rows: set[Any] = field(default_factory=set[Any])

    def fitting(self, how: LowBits, length: int) -> LowBits:
        """`how`, with blocks that are no longer than rows, and signs if they count.

        Beside a row with large numbers a block would lose a row with small ones."""
        rows = (n for n in self.rows if isinstance(n, int) and n > 1)
        block = min((how.block, *(n for n in rows if length % n == 0)))
        return how._replace(block=block, keeps_signs=self.asks_signs)


def reading_of(variables: Iterable[Any], steps: Iterable[Step]) -> Reading:
    """What some steps, in the order in which they run, make of values."""
    reading = Reading()
    _read(dict.fromkeys(variables, _IN_ROWS), [*steps], reading)
    return reading


_SCALING = MOVES | LINEAR | ADDING | ASKING_SIGNS
_SCALING |= {"abs", "clamp", "mul", "div", "square", "integer_pow", "cumsum"}


def _stopped(steps: Sequence[Step]) -> set[Any]:
    """The variables that only lead to `stop_gradient`, as the maximum in a softmax."""
    read: set[Any] = set()
    read_on: set[Any] = set()  # by what a derivative may go through
    for step in reversed(steps):
        is_stopped = all(v in read and v not in read_on for v in step.eqn.outvars)
        read.update(step.variables_read)
        if step.eqn.primitive.name != "stop_gradient" and not is_stopped:
            read_on.update(step.variables_read)
    return read - read_on


def _needed(plan: Plan) -> list[Step]:
    """The steps of a plan that its results are made of."""
    read = {*variables(plan.outvars)}
    found: list[Step] = []
    for step in reversed(plan.steps):
        if not read.isdisjoint(step.eqn.outvars):
            read.update(step.variables_read)
            found.append(step)
    return found[::-1]


_MADE, _SCALED, _IN_ROWS = range(3)


def _read(like: dict[Any, int], steps: Sequence[Step], reading: Reading) -> None:
    """Adds what `steps` make of values whose size follows that of a row's numbers.

    `like` has these values, as `_IN_ROWS` if their last axis is still that of the rows,
    else as `_SCALED`; and as `_MADE` what is made of them in another way. The size of
    an exponential or of a `tanh` does not follow, nor does that of a row's sum: what is
    small in a row counts little in it. `like` gains such values of `steps`.

    A pole counts in what follows in size, and a jump in all that is made of a value."""
    stopped = _stopped(steps)
    for step in steps:
        eqn, name = step.eqn, step.eqn.primitive.name
        places = {i: a for i, a in enumerate(eqn.invars) if not isinstance(a, Literal)}
        found = {i: like[a] for i, a in places.items() if a in like}
        if not found:
            continue
        if step.handler is not None:
            plan = step.inner[0] if len(step.inner) == 1 else None
            if plan is None or len(plan.invars) != len(eqn.invars):
                reading.is_steep = True  # it is not known what is made of it
                continue
            inside = {plan.invars[i]: how for i, how in found.items()}
            _read(inside, _needed(plan), reading)
            pairs = zip(eqn.outvars, plan.outvars, strict=True)
            like |= {
                out: inside[u]
                for out, u in pairs
                if not isinstance(u, Literal) and u in inside
            }
            continue
        scaled = {i: how for i, how in found.items() if how != _MADE}
        if name not in EXTREMES or not stopped.issuperset(eqn.outvars):
            of = found if jumps(eqn) else scaled
            reading.is_steep |= any(i in of for i in steep_operands(eqn))
        reading.sums_made |= name in REDUCTIONS - EXTREMES and not scaled
        how = _made_of(scaled, step, reading) if scaled else _MADE
        like |= {v: how for v in eqn.outvars if is_inexact(v.aval)}


def _made_of(found: dict[int, int], step: Step, reading: Reading) -> int:
    """How a step's results follow those of its operands that a row's numbers scale."""
    eqn, name = step.eqn, step.eqn.primitive.name
    reading.asks_signs |= name in ASKING_SIGNS or name == "abs"
    shape = eqn.invars[min(found)].aval.shape
    how = min(found.values())
    if name in REDUCTIONS:
        axes = eqn.params["axes"]
        if len(axes) == len(shape):
            return _MADE
        if how == _IN_ROWS and len(shape) - 1 in axes:
            reading.rows.add(shape[-1])
            return _MADE
        return _SCALED
    if name == "transpose":
        return how if eqn.params["permutation"][-1] == len(shape) - 1 else _SCALED
    if name in LOOKUPS:
        return _SCALED
    return how if name in _SCALING else _MADE


def is_centred(
    v: Any, readers: Mapping[Any, list[Step]], number: Mapping[Step, int]
) -> bool:
    """Whether a mean of `v` is subtracted from it, as a norm does.

    What is left may be small beside the mean. `readers` has the steps of a program that
    read each variable, and `number` their places."""
    found: set[Step] = set()
    pending = [v]
    while pending:
        new = [step for step in readers.get(pending.pop(), ()) if step not in found]
        found |= {*new}
        pending += [out for s in new if _may_be_linear(s) for out in s.eqn.outvars]
    return _subtracts_mean({v: _VALUE}, sorted(found, key=number.__getitem__))


def _may_be_linear(step: Step) -> bool:
    name = step.eqn.primitive.name
    return step.handler is not None or name in LINEAR | _SUMS | {"mul", "div"}


_VALUE, _MEAN = "value", "mean"


def _subtracts_mean(kinds: dict[Any, str], steps: Iterable[Step]) -> bool:
    """Whether a mean is subtracted, given kinds of values; adds the kinds of others."""
    for step in steps:
        name, operands = step.eqn.primitive.name, step.eqn.invars
        read = [None if isinstance(a, Literal) else kinds.get(a) for a in operands]
        found = {*read} - {None}
        if not found:
            continue
        if step.handler is not None:
            if not step.handler.is_call:
                continue
            (plan,) = step.inner
            pairs = zip(plan.invars, read, strict=True)
            inside = {v: kind for v, kind in pairs if kind is not None}
            if _subtracts_mean(inside, plan.steps):
                return True
            for out, u in zip(step.eqn.outvars, plan.outvars, strict=True):
                if not isinstance(u, Literal) and u in inside:
                    kinds[out] = inside[u]
        elif len(found) == 2:
            if name in ("add", "sub"):
                return True
        elif name in _SUMS:
            kinds |= dict.fromkeys(step.eqn.outvars, _MEAN)
        elif name in LINEAR or (name in ("mul", "div") and read[1:] == [None]):
            kinds |= dict.fromkeys(step.eqn.outvars, *found)
    return False


def kept_whole(
    units: Iterable[Step | Region], facts: Mapping[Any, Fact | None]
) -> frozenset[Any]:
    """The variables that a region keeps, and not in 8 bits."""
    return frozenset(
        v
        for unit in units
        if isinstance(unit, Region)
        for v in unit.ins.keys() - unit.in_8_bits.keys()
        if not is_kept_anyway(facts[v])
    )
