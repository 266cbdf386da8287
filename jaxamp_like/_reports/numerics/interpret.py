"""The interpreter behind `trace_numerics`.

Outside of long loops, every equation is compiled by itself and run at once; equal ones
share their code, so that unrolled layers cost no more to compile than one."""

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax

from ..._jax import (
    Eqn,
    Jaxpr,
    Literal,
    consts,
    describe,
    is_array_aval,
    is_hi_type,
    raw,
    subjaxprs,
)
from ..._structural import CALLS, Step
from .. import walk
from . import pairs as p, rounding
from .blocks import Block, Found, Loop, Path, Seen, Where
from .compiled import OPTIONS, Memory, evaluated, joined
from .loops import HANDLERS, ONE_BY_ONE
from .pairs import Pair, Value


@dataclass(eq=False)
class Interpreter:
    """Runs programs of pairs and collects tables of statistics.

    `tick` is called with every equation that is about to run outside of loops."""

    steps: Sequence[Step]
    tick: Callable[[Eqn, walk.Around], None]
    seen: dict[Path, list[Seen]] = field(default_factory=dict)
    axes: tuple[Any, ...] = ()  # manual mesh axes around what is being run
    memory: Memory = field(default_factory=Memory)

    def run(self, jaxpr: Jaxpr, args: Sequence[Pair]) -> tuple[list[Pair], Found]:
        """Runs a whole program. Its own arrays are written over where nothing reads
        them any more, those of `args` are not."""
        block = Block((), (), self.memory)
        outs, found = self._run(jaxpr, args, walk.Around(), (), block)
        outs = [self.joined(value) for value in outs]
        self.memory = Memory()  # gives back what was kept for results to come
        return outs, found | self._close(block)

    def body(
        self,
        jaxpr: Jaxpr,
        args: Sequence[Pair],
        eqn: Eqn,
        where: "Where",
        index: int,
        loop: Loop | None = None,
        compiled: bool = True,
    ) -> tuple[list[Pair], Found]:
        """Runs a program that an equation holds, as a block of its own."""
        path, loops = (*where.path, index), where.block.loops
        loops = loops if loop is None else (*loops, loop)
        block = Block(path, loops, None if compiled else self.memory)
        outs, found = self._run(jaxpr, args, where.at.within(eqn), path, block)
        whole = [self.joined(value).bare() for value in outs]
        self.memory.hold(p.arrays_of(outs))
        self.memory.hand_on(p.arrays_of(whole), instead_of=p.arrays_of(outs))
        return whole, found | self._close(block)

    def _close(self, block: Block) -> Found:
        self.seen[block.path] = block.seen
        return block.tables()

    def _run(
        self,
        jaxpr: Jaxpr,
        args: Sequence[Value],
        around: walk.Around,
        path: Path,
        block: Block,
        handed_over: Sequence[Any] = (),
    ) -> tuple[list[Value], Found]:
        """Runs a program; its caller holds no more what it has `handed_over`."""
        inner, memory = raw(jaxpr), self.memory
        env: dict[Any, Value] = {}

        def bind(atoms: Sequence[Any], values: Sequence[Value]) -> None:
            for atom, value in zip(atoms, values, strict=True):
                memory.hold(value.arrays)
                env[atom] = value

        bind(inner.invars, args)
        bind(inner.constvars, [Pair(x) for x in consts(jaxpr)])
        memory.release(handed_over, reuse=False)
        last = {a: i for i, e in enumerate(inner.eqns) for a in _variables(e.invars)}
        last |= dict.fromkeys(_variables(inner.outvars), len(inner.eqns))
        found: Found = {}
        for i, eqn in enumerate(inner.eqns):
            where = Where(around.at(eqn, self.steps), (*path, i), block)
            read = set(_variables(eqn.invars))
            dying = [v for v in read if last[v] == i]
            outs, new = self._equation(eqn, env, where, dying)
            found |= new
            bind(eqn.outvars, outs)
            for v in (*dying, *(v for v in eqn.outvars if v not in last)):
                if v in env:
                    memory.release(env.pop(v).arrays)
        outs = [
            p.literal_pair(atom, None) if isinstance(atom, Literal) else env[atom]
            for atom in inner.outvars
        ]
        memory.hand_on(p.arrays_of(outs), instead_of=p.arrays_of(env.values()))
        return outs, found

    def _equation(
        self, eqn: Eqn, env: dict[Any, Value], where: "Where", dying: Sequence[Any]
    ) -> tuple[Sequence[Value], Found]:
        _check(eqn)
        name, block = eqn.primitive.name, where.block
        role = p.role_of(eqn, where.at)
        is_leaf = name not in CALLS and name not in HANDLERS
        operands = []
        for atom, written in zip(eqn.invars, role.literals, strict=True):
            if isinstance(atom, Literal):
                pair = p.literal_pair(atom, written)
            else:
                pair = env[atom] = self._held(env[atom], name)
            if is_leaf and not p.is_move(eqn):
                pair = block.measure(pair)
                if not isinstance(atom, Literal):
                    env[atom] = pair  # known to whatever reads it next
            operands.append(pair)
        if name in CALLS:
            (body,) = subjaxprs(eqn.params)
            path = (*where.path, 0)
            last_read = p.arrays_of([env.pop(v) for v in dying])
            at = where.at.within(eqn)
            return self._run(body, operands, at, path, block, last_read)
        if not block.compiled:
            self.tick(eqn, where.at)
        bare = [pair.bare() for pair in operands]
        if not block.compiled and name in ONE_BY_ONE:
            result = ONE_BY_ONE[name](self, eqn, where, bare)
            if result is not None:
                return result
        bare = [self.joined(pair) for pair in bare]
        shares = rounding.shares(eqn, where.at, bare)
        if name in HANDLERS:
            handle = functools.partial(HANDLERS[name], self, eqn, where)
            if block.compiled:
                return handle(bare)
            return jax.jit(handle, compiler_options=OPTIONS)(bare)
        if block.memory is None:
            outs = p.evaluate(eqn, role, bare)
        else:
            last_read = p.arrays_of([env[v] for v in dying])
            outs = evaluated(block.memory, eqn, role, bare, last_read)
        if p.keeps_magnitudes(eqn, role):
            outs = p.with_measures(operands, outs)
        if not p.is_move(eqn):
            outs = self._measured(eqn, operands, outs, where, shares)
        return outs, {}

    def joined(self, value: Value) -> Pair:
        """A value as one array."""
        return value if isinstance(value, Pair) else joined(self.memory, value.pairs)

    def _held(self, value: Value, name: str) -> Any:
        """A value as the primitive of this name can take it."""
        if isinstance(value, Pair) or name in CALLS or name in ONE_BY_ONE:
            return value
        whole = self.joined(value)
        self.memory.hold(whole.arrays)
        self.memory.release(value.arrays)
        return whole

    def _measured(
        self,
        eqn: Eqn,
        operands: list[Pair],
        outs: list[Pair],
        where: "Where",
        shares: rounding.Shares | None,
    ) -> list[Pair]:
        block = where.block
        outs = [block.measure(out) for out in outs]
        floats = [out for out in outs if out.is_float]
        if shares is not None:
            floats = [rounding.told(out, shares) for out in floats]
        if floats:
            written = walk.dtype_names_of(out.exact for out in floats)
            made = tuple(
                v for v, out in zip(eqn.outvars, outs, strict=True) if out.is_float
            )
            reads = tuple(
                a for a, x in zip(eqn.invars, operands, strict=True) if x.is_float
            )
            seen = Seen(eqn, where.at, where.path, block.loops, written, made, reads)
            block.add(seen, floats, [pair for pair in operands if pair.is_float])
        return outs


def _variables(atoms: Sequence[Any]) -> list[Any]:
    return [atom for atom in atoms if not isinstance(atom, Literal)]


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
