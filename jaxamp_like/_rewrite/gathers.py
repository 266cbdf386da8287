"""Values that are gathered from several devices as numbers of 8 bits.

Where contractions that quantise are the only readers of a value that is gathered, each
device rounds its own part before, by scales that all of them agree on. What is sent are
the rounded numbers, which take half the bytes of 16 bits. Where a contraction's
derivative reads the value itself, that would have to be sent as well: then the numbers
are for a forward pass of which no derivative is taken."""

from collections import defaultdict
from collections.abc import Iterator, Mapping, Set
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

from .._jax import Literal, scan_arity, variables
from .._primitives import PLACING
from .._quantised.gathered import (
    GatheredNumbers,
    is_gather,
    is_whole_view,
    numbers_read,
)
from .._rules.weights import is_parameter
from .._structural import Plan, Step
from .hoisting import Path, passes_hoisted_weights
from .memo import Memo

Read = tuple[Path, Any, tuple[GatheredNumbers, ...]]
"""A contraction that reads numbers: the way to it, the variable, which numbers of it.

The second of the numbers, if there are two, are for a gradient."""


@dataclass(frozen=True)
class Gathers:
    """What is gathered as rounded numbers in a program.

    Args:
        movers: gathers, and views of what they make, by the variables that they make.
        made: by these variables, the numbers that are read of them.
        read: what contractions in a step read: for each the way to it, the variable,
            and which numbers of it.
        only_rounded: the variables that nothing reads but as such numbers, in a
            derivative neither.
        of_parameters: those that are gathered of parameters.
        gathered_by_gradient: by step and operand, what is read by that contraction
            alone, and may be gathered in the passes that make its gradient.
        told: gathers, each as a step whose decision tells a report what it sends."""

    movers: Mapping[Any, Step] = field(default_factory=dict)
    made: Mapping[Any, tuple[GatheredNumbers, ...]] = field(default_factory=dict)
    read: Mapping[Step, list[Read]] = field(default_factory=dict)
    only_rounded: frozenset[Any] = frozenset()
    of_parameters: frozenset[Any] = frozenset()
    gathered_by_gradient: Mapping[tuple[Step, int], Step] = field(default_factory=dict)
    told: Mapping[Step, Step] = field(default_factory=dict)


@dataclass
class _Reads:
    """How the result of a mover is read: as which numbers, and whether as it is."""

    numbers: dict[GatheredNumbers, None] = field(default_factory=dict)
    whole: bool = False
    by_derivative: bool = False


_gathers = Memo()


def gathers_of(plan: Plan) -> Gathers:
    """What is gathered as rounded numbers in the program of a plan."""
    return _gathers(plan, None, lambda: _found(plan))


def _found(plan: Plan) -> Gathers:
    movers = _movers(plan)
    if not movers:
        return Gathers()
    reads, moving = _how_read(plan, movers), set(movers.values())
    made: dict[Any, tuple[GatheredNumbers, ...]] = {}
    only_rounded: set[Any] = set()
    for var, step in movers.items():
        operand = step.eqn.invars[0]
        if reads[var].whole or not (is_gather(step.eqn) or operand in made):
            continue
        made[var] = tuple(reads[var].numbers)
        is_kept = operand in made and operand not in only_rounded
        if not is_kept and not reads[var].by_derivative:
            only_rounded.add(var)
    read: dict[Step, list[Read]] = defaultdict(list)
    for step in plan.steps:
        for i, atom in enumerate(step.eqn.invars):
            if isinstance(atom, Literal) or atom not in made or step in moving:
                continue
            read[step] += [(x.path, atom, x.numbers) for x in _readers(step, i) if x]
    facts = ((v, plan.facts[step.eqn.invars[0]]) for v, step in movers.items())
    parameters = {
        v for v, fact in facts if fact and is_parameter(fact) and fact.remat_source
    }
    told = {
        step: _told(step, made[v], not reads[v].by_derivative)
        for v, step in movers.items()
        if v in made and is_gather(step.eqn)
    }
    return Gathers(
        movers,
        made,
        read,
        frozenset(only_rounded),
        frozenset(parameters),
        _gathered_by_gradient(plan, movers, moving, only_rounded),
        told,
    )


def _gathered_by_gradient(
    plan: Plan, movers: Mapping[Any, Step], moving: Set[Step], only_rounded: Set[Any]
) -> Mapping[tuple[Step, int], Step]:
    """Operands whose only reader is a contraction, and which XLA gathers.

    Else a scale would stand between the sum of their gradients over devices and the
    slice of that sum, and XLA would not merge the two."""
    readers: dict[Any, list[tuple[Step, int]]] = defaultdict(list)
    for step in plan.steps:
        for i, atom in enumerate(step.eqn.invars):
            if not isinstance(atom, Literal) and atom in only_rounded:
                readers[atom].append((step, i))
    return {
        some[0]: movers[var]
        for var, some in readers.items()
        if len(some) == 1
        and some[0][0].handler is None
        and some[0][0] not in moving
        and movers[var].eqn.primitive.name in PLACING
        and movers[var].eqn.invars[0] not in only_rounded
    }


def _told(
    step: Step, numbers: tuple[GatheredNumbers, ...], is_for_gradients: bool
) -> Step:
    names = " and ".join(dict.fromkeys(one.dtype.name for one in numbers))
    why = f"sends {names}, which each device rounds by the scales of all"
    if not is_for_gradients:
        why = f"{why}; where a derivative is taken, {step.decision.why}"
    return replace(step, decision=step.decision._replace(why=why))


def _movers(plan: Plan) -> dict[Any, Step]:
    """Gathers, and whole views of what these make, by their results."""
    movers: dict[Any, Step] = {}
    for step in plan.steps:
        eqn = step.eqn
        if (
            step.handler is not None
            or step.opaque
            or isinstance(eqn.invars[0], Literal)
        ):
            continue
        if is_gather(eqn) or (is_whole_view(eqn) and eqn.invars[0] in movers):
            movers[eqn.outvars[0]] = step
    return movers


def _how_read(plan: Plan, movers: Mapping[Any, Step]) -> Mapping[Any, _Reads]:
    """How the results of movers are read, known from the end backwards."""
    reads: dict[Any, _Reads] = defaultdict(_Reads)
    for v in variables(plan.outvars):
        reads[v].whole = True
    for step in reversed(plan.steps):
        atoms, outs = step.eqn.invars, step.eqn.outvars
        if outs and movers.get(outs[0]) is step:
            of_result, of_operand = reads[outs[0]], reads[atoms[0]]
            before = [one.before(step.eqn) for one in of_result.numbers]
            if None in before or not before:
                of_result.whole = True
            of_operand.whole |= of_result.whole
            of_operand.by_derivative |= of_result.by_derivative
            of_operand.numbers |= dict.fromkeys(one for one in before if one)
            continue
        for i, atom in enumerate(atoms):
            if isinstance(atom, Literal) or atom not in movers:
                continue
            for one in _readers(step, i):
                if one is None:
                    reads[atom].whole = True
                else:
                    reads[atom].numbers |= dict.fromkeys(one.numbers)
                    reads[atom].by_derivative |= not one.is_only_rounded
    return reads


class _Reader(NamedTuple):
    """A contraction that reads a value as rounded numbers.

    Args:
        path: the way to it, as that to a weight that was rounded before a loop.
        numbers: what it reads; the second, if there are two, for a gradient.
        is_only_rounded: whether its derivative reads nothing else."""

    path: Path
    numbers: tuple[GatheredNumbers, ...]
    is_only_rounded: bool


def _readers(step: Step, i: int) -> Iterator[_Reader | None]:
    """What reads operand `i` of a step, in a program that it holds too.

    A reader that is `None` reads it as it is."""
    if step.handler is None:
        numbers = numbers_read(step.decision, i)
        only = step.decision.is_only_rounded
        is_only_rounded = bool(only and only[i])
        yield _Reader((step, i), tuple(numbers), is_only_rounded) if numbers else None
        return
    if not passes_hoisted_weights(step):
        yield None
        return
    *others, body = step.handler.bodies(step.eqn)
    plan, is_loop = step.inner[-1], not step.handler.is_call
    is_slice = step.eqn.primitive.name == "scan" and i >= sum(scan_arity(step.eqn))
    carried = {place for _, place in body.carries}
    for place, operand in enumerate(body.ins):
        if operand != i:
            continue
        if is_slice or place in carried or any(i in other.ins for other in others):
            yield None
            continue
        for one in _readers_of(plan, plan.invars[place]):
            way = (step, False) if is_loop else (step,)
            yield one and one._replace(path=(*way, *one.path))


def _readers_of(plan: Plan, var: Any) -> Iterator[_Reader | None]:
    """What reads an input of a program."""
    if any(atom is var for atom in plan.outvars):
        yield None
    for step in plan.steps:
        for i, atom in enumerate(step.eqn.invars):
            if atom is var:
                yield from _readers(step, i)
