"""The interpreter behind `trace_numerics`.

`evaluate` walks through a program, and calls a handler that runs each equation. The
handler finds out where values are read for the last time, so that their arrays can be
written over.

Outside of long loops, every equation is compiled by itself and run at once; equal ones
share their code, so that unrolled layers cost no more to compile than one."""

import functools
import itertools
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp

from ..._jax import (
    Eqn,
    Jaxpr,
    Literal,
    consts,
    describe,
    evaluate,
    is_array_aval,
    is_hi_type,
    raw,
    subjaxprs,
    variables,
)
from ..._structural import CALLS, Step
from .. import walk
from . import pairs as p, rounding
from .blocks import EquationBlock, Location, Loop, MeasuredEqn, Path, Tables
from .compiled import OPTIONS, Memory, evaluated, joined
from .loops import HANDLERS, ONE_BY_ONE
from .pairs import Pair, Value


@dataclass(eq=False)
class Cell:
    """Holds a value of a program until that is read for the last time."""

    value: Any


@dataclass(eq=False)
class Interpreter:
    """Runs programs of pairs and collects tables of statistics.

    `tick` is called with every equation that is about to run outside of loops."""

    steps: Sequence[Step]
    tick: Callable[[Eqn, walk.ReportContext], None]
    seen: dict[Path, list[MeasuredEqn]] = field(default_factory=dict)

    def run(self, jaxpr: Jaxpr, args: Sequence[Pair]) -> tuple[list[Pair], Tables]:
        """Runs a whole program. Arrays that it makes are written over once nothing
        reads them any more; those of `args` never are."""
        block = EquationBlock((), (), Memory())
        outs, found = self._run(jaxpr, args, Location(walk.ReportContext(), (), block))
        outs = [joined(block.memory, value) for value in outs]
        return outs, found | self._close(block)

    def body(
        self,
        jaxpr: Jaxpr,
        args: Sequence[Pair],
        eqn: Eqn,
        where: Location,
        index: int,
        loop: Loop | None = None,
        compiled: bool = True,
        axes: tuple[Any, ...] = (),
    ) -> tuple[list[Pair], Tables]:
        """Runs a program that an equation holds, as a block of its own.

        Args:
            jaxpr: the program.
            args: the values that it is run on.
            eqn: the equation that holds it.
            where: where that stands.
            index: the number of the program among those of the equation.
            loop: the loop that it is the body of, if it is.
            compiled: whether it is traced as a whole; else equations run one by one.
            axes: the mesh axes that the equation makes manual."""
        around, inner = where.block, where.within(eqn, index)
        loops = around.loops if loop is None else (*around.loops, loop)
        memory = Memory() if compiled else around.memory
        block = EquationBlock(
            inner.path, loops, memory, compiled, (*around.axes, *axes)
        )
        outs, found = self._run(jaxpr, args, inner._replace(block=block))
        whole = [joined(memory, value).bare() for value in outs]
        memory.hold(p.arrays_of(outs))
        memory.transfer(p.arrays_of(whole), instead_of=p.arrays_of(outs))
        return whole, found | self._close(block)

    def _close(self, block: EquationBlock) -> Tables:
        self.seen[block.path] = block.seen
        return block.tables()

    def _run(
        self,
        jaxpr: Jaxpr,
        args: Sequence[Value],
        where: Location,
        handed_over: Sequence[Any] = (),
    ) -> tuple[list[Value], Tables]:
        """Runs a program; its caller no longer holds the arrays `handed_over`."""
        inner, block = raw(jaxpr), where.block
        memory = block.memory
        last = {a: eqn for eqn in inner.eqns for a in variables(eqn.invars)}
        last |= dict.fromkeys(variables(inner.outvars))
        cells: list[Cell] = []
        numbers = itertools.count()
        found: Tables = {}

        def hold(values: Iterable[Value]) -> list[Cell]:
            new = [Cell(value) for value in values]
            cells.extend(new)
            memory.hold(p.arrays_of(cell.value for cell in new))
            return new

        def release(unread: Iterable[Cell]) -> None:
            for cell in unread:
                if cell.value is not None:
                    memory.release(cell.value.arrays)
                    cell.value = None

        def bind(eqn: Eqn, operands: list[Cell]) -> list[Cell]:
            at, path = where.at.at(eqn, self.steps), (*where.path, next(numbers))
            pairs = zip(eqn.invars, operands, strict=True)
            read = {v: x for v, x in pairs if not isinstance(v, Literal)}
            dying = [x for v, x in read.items() if last[v] is eqn]
            outs, new = self._equation(eqn, operands, Location(at, path, block), dying)
            found.update(new)
            made = hold(outs)
            release(dying)
            release(x for v, x in zip(eqn.outvars, made, strict=True) if v not in last)
            return made

        def literal(atom: Literal) -> Cell:
            return Cell(p.literal_pair(atom))

        operands, constants = hold(args), hold(map(Pair, consts(jaxpr)))
        memory.release(handed_over, reuse=False)
        results = evaluate(jaxpr, operands, bind, constants, literal)
        outs = [cell.value for cell in results]
        left = [cell.value for cell in cells if cell.value is not None]
        memory.transfer(p.arrays_of(outs), instead_of=p.arrays_of(left))
        return outs, found

    def _equation(
        self, eqn: Eqn, cells: list[Cell], where: Location, dying: Sequence[Cell]
    ) -> tuple[Sequence[Value], Tables]:
        _check(eqn)
        name, block = eqn.primitive.name, where.block
        role = p.role_of(eqn, where.at)
        is_measured = name not in (*CALLS, *HANDLERS) and not p.is_move(eqn)
        for atom, cell in zip(eqn.invars, cells, strict=True):
            cell.value = _held(block.memory, cell.value, name)
            if (written := p.as_written(atom, where.at)) is not None:
                cell.value = cell.value._replace(true=jnp.float32(written))
            if is_measured:  # the next reader of the cell finds this, too
                cell.value = block.measure(cell.value)
        operands = [cell.value for cell in cells]
        last_read = p.arrays_of(cell.value for cell in dying)
        if name in CALLS:
            (body,) = subjaxprs(eqn.params)
            for cell in dying:
                cell.value = None
            return self._run(body, operands, where.within(eqn, 0), last_read)
        if not block.compiled:
            self.tick(eqn, where.at)
        bare = [pair.bare() for pair in operands]
        if not block.compiled and name in ONE_BY_ONE:
            result = ONE_BY_ONE[name](self.body, eqn, where, bare)
            if result is not None:
                return result
        bare = [joined(block.memory, pair) for pair in bare]
        shares = rounding.shares(eqn, where.at, bare)
        if name in HANDLERS:
            handle = functools.partial(HANDLERS[name], self.body, eqn, where)
            if block.compiled:
                return handle(bare)
            return jax.jit(handle, compiler_options=OPTIONS)(bare)
        if block.compiled:
            outs = p.rebind_pairs(eqn, role, bare)
        else:
            outs = evaluated(block.memory, eqn, role, bare, last_read)
        if p.keeps_magnitudes(eqn, role):
            outs = p.with_measures(operands, outs)
        if not p.is_move(eqn):
            outs = self._measured(eqn, operands, outs, where, shares)
        return outs, {}

    def _measured(
        self,
        eqn: Eqn,
        operands: list[Pair],
        outs: list[Pair],
        where: Location,
        shares: rounding.Shares | None,
    ) -> list[Pair]:
        block = where.block
        outs = [block.measure(out) for out in outs]
        floats = [out for out in outs if out.is_float]
        if shares is not None:
            floats = [rounding.with_shares(out, shares) for out in floats]
        if floats:
            written = walk.dtype_names_of(out.exact for out in floats)
            made = tuple(
                v for v, out in zip(eqn.outvars, outs, strict=True) if out.is_float
            )
            reads = tuple(
                a for a, x in zip(eqn.invars, operands, strict=True) if x.is_float
            )
            seen = MeasuredEqn(
                eqn, where.at, where.path, block.loops, written, made, reads
            )
            block.add(seen, floats, [pair for pair in operands if pair.is_float])
        return outs


def _held(memory: Memory, value: Value, name: str) -> Value:
    """A value as the primitive of this name can take it."""
    if isinstance(value, Pair) or name in CALLS or name in ONE_BY_ONE:
        return value
    whole = joined(memory, value)
    memory.hold(whole.arrays)
    memory.release(value.arrays)
    return whole


def _check(eqn: Eqn) -> None:
    for atom in (*eqn.invars, *eqn.outvars):
        if "Ref" in type(atom.aval).__name__ and not is_array_aval(atom.aval):
            raise NotImplementedError(
                f"`trace_numerics` can't follow mutable arrays, but {eqn.primitive} "
                f"({walk.source_of(eqn)}) works on one. Trace the part of the function "
                "that has none, or pass the arrays' values instead."
            )
        if is_hi_type(atom.aval):
            raise NotImplementedError(
                f"`trace_numerics` can't follow values of hi-types, but "
                f"{describe(eqn)} ({walk.source_of(eqn)}) takes or makes one, of type "
                f"{atom.aval}. Trace the parts of the function before and after it."
            )
