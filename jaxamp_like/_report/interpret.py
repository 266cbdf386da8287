"""The interpreter behind `trace_numerics`.

Outside of long loops, every equation is compiled by itself and run at once; equal ones
share their code, so that unrolled layers cost no more to compile than one."""

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax

from .._jax import Eqn, Jaxpr, Literal, consts, is_array_aval, raw, subjaxprs
from .._plan import Step
from . import pairs as p, walk
from .blocks import OPTIONS, Block, Found, Loop, Path, Seen, Where
from .loops import CALLS, HANDLERS, ONE_BY_ONE
from .pairs import Pair, Role


@dataclass(eq=False)
class Interpreter:
    """Runs programs of pairs and collects tables of statistics.

    `tick` is called with every equation that is about to run outside of loops."""

    steps: Sequence[Step]
    tick: Callable[[Eqn, walk.Around], None]
    seen: dict[Path, list[Seen]] = field(default_factory=dict)
    axes: tuple[Any, ...] = ()  # manual mesh axes around what is being run

    def run(self, jaxpr: Jaxpr, args: Sequence[Pair]) -> tuple[list[Pair], Found]:
        """Runs a whole program."""
        block = Block((), (), compiled=False)
        outs, found = self._run(jaxpr, args, walk.Around(), (), block)
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
        block = Block(path, loops, compiled)
        outs, found = self._run(jaxpr, args, where.at.within(eqn), path, block)
        return [pair.bare() for pair in outs], found | self._close(block)

    def _close(self, block: Block) -> Found:
        self.seen[block.path] = block.seen
        return block.tables()

    def _run(
        self,
        jaxpr: Jaxpr,
        args: Sequence[Pair],
        around: walk.Around,
        path: Path,
        block: Block,
    ) -> tuple[list[Pair], Found]:
        inner = raw(jaxpr)
        env: dict[Any, Pair] = dict(zip(inner.invars, args, strict=True))
        env |= zip(inner.constvars, map(Pair, consts(jaxpr)), strict=True)
        last = {a: i for i, e in enumerate(inner.eqns) for a in _variables(e.invars)}
        last |= dict.fromkeys(_variables(inner.outvars), len(inner.eqns))
        found: Found = {}
        for i, eqn in enumerate(inner.eqns):
            where = Where(around.at(eqn, self.steps), (*path, i), block)
            outs, new = self._equation(eqn, env, where)
            found |= new
            env |= zip(eqn.outvars, outs, strict=True)
            for v in {*_variables(eqn.invars), *eqn.outvars}:
                if last.get(v, -1) <= i:
                    del env[v]
        return [
            p.literal_pair(atom, None) if isinstance(atom, Literal) else env[atom]
            for atom in inner.outvars
        ], found

    def _equation(
        self, eqn: Eqn, env: dict[Any, Pair], where: "Where"
    ) -> tuple[list[Pair], Found]:
        _check(eqn)
        name, block = eqn.primitive.name, where.block
        role = p.role_of(eqn, where.at)
        is_leaf = name not in CALLS and name not in HANDLERS
        operands = []
        for atom, written in zip(eqn.invars, role.literals, strict=True):
            if isinstance(atom, Literal):
                pair = p.literal_pair(atom, written)
            else:
                pair = env[atom]
            if is_leaf and not p.is_move(eqn) and pair.is_float and pair.row is None:
                pair = pair._replace(row=block.measure(pair)[0])
                if not isinstance(atom, Literal):
                    env[atom] = pair  # known to whatever reads it next
            operands.append(pair)
        if name in CALLS:
            (body,) = subjaxprs(eqn.params)
            path = (*where.path, 0)
            return self._run(body, operands, where.at.within(eqn), path, block)
        if not block.compiled:
            self.tick(eqn, where.at)
        bare = [pair.bare() for pair in operands]
        if not block.compiled and name in ONE_BY_ONE:
            result = ONE_BY_ONE[name](self, eqn, where, bare)
            if result is not None:
                return result
        if name in HANDLERS:
            handle = functools.partial(HANDLERS[name], self, eqn, where)
            if block.compiled:
                return handle(bare)
            return jax.jit(handle, compiler_options=OPTIONS)(bare)
        evaluate = (
            _compiled(eqn, role)
            if not block.compiled
            else functools.partial(p.evaluate, eqn, role)
        )
        return self._measured(eqn, operands, evaluate(bare), where), {}

    def _measured(
        self, eqn: Eqn, operands: list[Pair], outs: list[Pair], where: "Where"
    ) -> list[Pair]:
        if p.is_move(eqn):
            return p.with_rows(operands, outs)
        floats = [i for i, out in enumerate(outs) if out.is_float]
        if not floats:
            return outs
        block = where.block
        measured = [block.measure(outs[i]) for i in floats]
        for i, (row, _) in zip(floats, measured, strict=True):
            outs[i] = outs[i]._replace(row=row)
        sizes = tuple(int(outs[i].run.size) for i in floats)
        written = walk.dtype_names_of(outs[i].exact for i in floats)
        seen = Seen(eqn, where.at, where.path, block.loops, written, sizes)
        block.add(seen, measured, [pair.row for pair in operands if pair.is_float])
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


# Equal equations share their code.


def _compiled(eqn: Eqn, role: Role) -> Callable[..., Any]:
    literals = tuple(
        (i, str(atom.val), str(atom.aval))
        for i, atom in enumerate(eqn.invars)
        if isinstance(atom, Literal)
    )
    # `mul a a` is another equation than `mul a b`.
    atoms = [id(atom) for atom in eqn.invars]
    same = tuple(map(atoms.index, atoms))
    params = tuple(sorted(eqn.params.items(), key=lambda item: item[0]))
    try:
        return _shared(_Key((eqn.primitive, params, role, literals, same), eqn))
    except TypeError:  # a parameter that has no hash
        return _compile(eqn, role)


class _Key:
    """Equal for equations that do the same; carries one of them."""

    def __init__(self, key: Any, eqn: Eqn):
        self.key, self.eqn, self.role = key, eqn, key[2]
        self.hash = hash(key)

    def __hash__(self) -> int:
        return self.hash

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Key) and self.key == other.key


@functools.lru_cache(maxsize=1024)
def _shared(key: _Key) -> Callable[..., Any]:
    return _compile(key.eqn, key.role)


def _compile(eqn: Eqn, role: Role) -> Callable[..., Any]:
    fn = functools.partial(p.evaluate, eqn, role)
    return jax.jit(fn, compiler_options=OPTIONS)
