"""Making a failing case small: take away what it fails without."""

import dataclasses
import time
from collections.abc import Callable, Iterator, Sequence

from .cases import Case
from .programs import Body, Program, Stmt, Type, Var

Test = Callable[[Case], bool]

_FLAGS = ("lean", "x64", "leaks", "checks", "jitted", "again")


def shrink(case: Case, fails: Test, seconds: float = 120.0) -> Case:
    """The smallest case found, within a time, that still `fails`."""
    end = time.monotonic() + seconds
    changed = True
    while changed:
        changed = False
        for smaller in _candidates(case):
            if time.monotonic() > end:
                return case
            if size(smaller) < size(case) and fails(smaller):
                case, changed = smaller, True
                break
    return case


def size(case: Case) -> tuple[int, int]:
    """What is to be small: statements and settings first, then the text."""
    flags = [getattr(case, name) for name in _FLAGS]
    count = _count(case.program.stmts) + len(case.transforms) + sum(flags)
    return count, len(case.source())


def _count(stmts: Sequence[Stmt]) -> int:
    return sum(
        1
        + (stmt.scope is not None)
        + sum(1 + _count(body.stmts) for body in stmt.bodies)
        for stmt in stmts
    )


def _candidates(case: Case) -> Iterator[Case]:
    for name in ("inner", "outer"):
        transforms = getattr(case, name)
        for i in range(len(transforms)):
            rest = transforms[:i] + transforms[i + 1 :]
            yield dataclasses.replace(case, **{name: rest})
    for name in _FLAGS:
        if getattr(case, name):
            yield dataclasses.replace(case, **{name: False})
    if " | {" in case.policy:
        base = case.policy.rsplit(" | {", 1)[0]
        yield dataclasses.replace(case, policy=base)
    for program in _programs(case.program):
        yield dataclasses.replace(case, program=program)


def _programs(program: Program) -> Iterator[Program]:
    results = program.results
    for var in results:
        if len(results) > 1:
            rest = tuple(v for v in results if v != var)
            smaller = dataclasses.replace(program, results=rest, tree="({all})")
            yield smaller.without_dead_code()
    if program.tree != "({all})":
        yield dataclasses.replace(program, tree="({all})")
    for stmts in _smaller(program.stmts, [*program.args, *_consts(program)]):
        yield dataclasses.replace(program, stmts=stmts).without_dead_code()
    # A result that one statement less makes.
    for stmt in program.stmts:
        for var in stmt.ins:
            if var not in results and len(results) == 1:
                yield dataclasses.replace(program, results=(var,)).without_dead_code()
    used = {name for stmt in program.stmts for name in stmt.reads()}
    used |= {v.name for v in results}
    for i, var in enumerate(program.args):
        if var.name not in used and len(program.args) > 1:
            yield dataclasses.replace(
                program,
                args=program.args[:i] + program.args[i + 1 :],
                values=program.values[:i] + program.values[i + 1 :],
            )
    for i, (var, _) in enumerate(program.consts):
        if var.name not in used:
            consts = program.consts[:i] + program.consts[i + 1 :]
            yield dataclasses.replace(program, consts=consts)


def _consts(program: Program) -> list[Var]:
    return [var for var, _ in program.consts]


def _smaller(
    stmts: tuple[Stmt, ...], visible: Sequence[Var]
) -> Iterator[tuple[Stmt, ...]]:
    """Lists of statements with something less."""
    for i, stmt in enumerate(stmts):
        before, after = stmts[:i], stmts[i + 1 :]
        seen = [*visible, *(v for s in before for v in s.outs)]
        for instead in _instead(stmt, seen):
            yield before + instead + after
        if stmt.scope is not None:
            yield (*before, dataclasses.replace(stmt, scope=None), *after)
        for k, body in enumerate(stmt.bodies):
            inner = [*seen, *body.params]
            for smaller in _smaller(body.stmts, inner):
                new = dataclasses.replace(body, stmts=smaller)
                bodies = (*stmt.bodies[:k], new, *stmt.bodies[k + 1 :])
                yield (*before, dataclasses.replace(stmt, bodies=bodies), *after)
            for new in _other_results(body):
                bodies = (*stmt.bodies[:k], new, *stmt.bodies[k + 1 :])
                yield (*before, dataclasses.replace(stmt, bodies=bodies), *after)


def _instead(stmt: Stmt, seen: Sequence[Var]) -> Iterator[tuple[Stmt, ...]]:
    """Simpler statements that make the same variables."""
    yield tuple(_alias(out, seen) for out in stmt.outs)
    if not stmt.code.startswith(_PLAIN):
        yield tuple(_constant(out) for out in stmt.outs)
    if len(stmt.bodies) == 1 and len(stmt.ins) == len(stmt.bodies[0].params):
        # The body as it stands, without what is around it.
        body = stmt.bodies[0]
        types = [v.type for v in body.results]
        same_ins = [v.type for v in stmt.ins] == [v.type for v in body.params]
        if same_ins and types == [v.type for v in stmt.outs]:
            names = [*(_copy(p, v) for p, v in zip(body.params, stmt.ins, strict=True))]
            ends = [_copy(o, r) for o, r in zip(stmt.outs, body.results, strict=True)]
            yield (*names, *body.stmts, *ends)


_PLAIN = ("jnp.full(", "{0}")


def _copy(out: Var, source: Var) -> Stmt:
    return Stmt((out,), "{0}", (source,))


def _alias(out: Var, seen: Sequence[Var]) -> Stmt:
    same = [v for v in seen if v.type == out.type]
    return _copy(out, same[0]) if same else _constant(out)


def _constant(out: Var) -> Stmt:
    shape, kind = out.type.shape, out.type.kind
    dtypes = {
        "f": "jnp.float32",
        "i": "jnp.int32",
        "b": "jnp.bool_",
        "h": "jnp.bfloat16",
        "e": "jnp.float16",
        "c": "jnp.complex64",
    }
    value = "0.5" if kind in "fhec" else "1"
    return Stmt((out,), f"jnp.full({shape}, {value}, {dtypes[kind]})")


def _other_results(body: Body) -> Iterator[Body]:
    """The body with a result that comes earlier, a parameter rather."""
    for i, result in enumerate(body.results):
        for var in body.params:
            if var.type == result.type and var != result:
                results = (*body.results[:i], var, *body.results[i + 1 :])
                yield dataclasses.replace(body, results=results)


__all__ = ["Type", "shrink", "size"]
