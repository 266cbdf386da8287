"""Random programs as data: statements of Python, typed enough to fit together.

A program prints as the source of a function, and that source is what is run: what is
seen to fail can be printed as it ran. A seed makes the same program every time."""

import dataclasses
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

Shape = tuple[int, ...]

DTYPES = {
    "f": "jnp.float32",
    "i": "jnp.int32",
    "b": "jnp.bool_",
    "h": "jnp.bfloat16",  # low by the author's hand
    "e": "jnp.float16",
    "c": "jnp.complex64",
}


@dataclass(frozen=True)
class Type:
    kind: str  # a key of `DTYPES`
    shape: Shape = ()

    @property
    def size(self) -> int:
        return int(np.prod(self.shape))


@dataclass(frozen=True)
class Var:
    name: str
    type: Type


@dataclass(frozen=True)
class Body:
    """A function inside of a program. It may read what is around it."""

    name: str
    params: tuple[Var, ...]
    stmts: tuple["Stmt", ...]
    results: tuple[Var, ...]

    def lines(self) -> Iterator[str]:
        yield f"def {self.name}({', '.join(p.name for p in self.params)}):"
        for stmt in self.stmts:
            yield from indented(stmt.lines())
        yield f"    return {_tuple(self.results)}"


@dataclass(frozen=True)
class Stmt:
    """`outs = code`, where `{0}`, `{1}`, ... in the code stand for what is read, and
    `{f0}`, `{f1}`, ... for the names of its bodies."""

    outs: tuple[Var, ...]
    code: str
    ins: tuple[Var, ...] = ()
    bodies: tuple[Body, ...] = ()
    scope: str | None = None
    many: bool = False  # the code is a pytree whose leaves are the results

    def lines(self) -> Iterator[str]:
        for body in self.bodies:
            yield from body.lines()
        names = {f"f{i}": body.name for i, body in enumerate(self.bodies)}
        code = self.code.format(*(v.name for v in self.ins), **names)
        line = f"{self.outs[0].name} = {code}"
        if self.many:
            line = f"{_tuple(self.outs)} = jax.tree.leaves({code})"
        if self.scope is None:
            yield line
        else:
            yield f"with jax.named_scope({self.scope!r}):"
            yield f"    {line}"

    def reads(self) -> set[str]:
        """The names that are read, also by its bodies."""
        found = {v.name for v in self.ins}
        for body in self.bodies:
            inner = {v.name for v in body.results}
            for stmt in body.stmts:
                inner |= stmt.reads()
            found |= inner
        return found


@dataclass(frozen=True)
class Program:
    args: tuple[Var, ...]
    values: tuple[Any, ...]  # of the arguments
    consts: tuple[tuple[Var, str], ...]  # closed over, with the code that makes them
    stmts: tuple[Stmt, ...]
    results: tuple[Var, ...]
    tree: str  # the code of the result, of the names in `results`

    def lines(self) -> Iterator[str]:
        for var, code in self.consts:
            yield f"{var.name} = {code}"
        yield ""
        yield ""
        yield from self.function_lines()
        yield ""
        yield ""
        yield "args = ("
        for x in self.values:
            yield f"    {value_code(x)},"
        yield ")"

    def function_lines(self) -> Iterator[str]:
        yield f"def program({', '.join(v.name for v in self.args)}):"
        for stmt in self.stmts:
            yield from indented(stmt.lines())
        yield f"    return {self.result_code()}"

    def function_code(self) -> str:
        return "\n".join(self.function_lines())

    def result_code(self) -> str:
        names = [v.name for v in self.results]
        return self.tree.format(*names, all=_names(names))

    def without_dead_code(self) -> "Program":
        needed = {v.name for v in self.results}
        stmts = _live(self.stmts, needed)
        return dataclasses.replace(self, stmts=stmts)


def _live(stmts: Sequence[Stmt], needed: set[str]) -> tuple[Stmt, ...]:
    kept: list[Stmt] = []
    for stmt in reversed(stmts):
        if any(v.name in needed for v in stmt.outs):
            bodies = tuple(
                dataclasses.replace(
                    body, stmts=_live(body.stmts, {v.name for v in body.results})
                )
                for body in stmt.bodies
            )
            stmt = dataclasses.replace(stmt, bodies=bodies)
            needed = needed | stmt.reads()
            kept.append(stmt)
    return tuple(reversed(kept))


def value_code(x: Any) -> str:
    if not isinstance(x, np.ndarray):
        return repr(x)
    name = "bool_" if x.dtype == bool else x.dtype.name
    module = "jnp" if name == "bfloat16" else "np"
    return f"np.array({x.tolist()}, {module}.{name})".replace("inf", "np.inf")


def indented(lines: Iterator[str]) -> Iterator[str]:
    return (f"    {line}" for line in lines)


def _names(names: Sequence[str]) -> str:
    return ", ".join(names) + ("," if len(names) == 1 else "")


def _tuple(variables: Sequence[Var]) -> str:
    return f"({_names([v.name for v in variables])})"
