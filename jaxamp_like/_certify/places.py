"""Reads where an equation stands from its name in HLO.

JAX joins the name stack of an equation, and its primitive, by slashes: transforms are
written as calls around what they transform, as in
`jit(step)/transpose(jvp(encoder))/dot_general`."""

import os
import re
from dataclasses import dataclass
from pathlib import Path

from .._hlo.graph import Node
from .._name_stacks import RECOMPUTED
from .._policies.dictionary import REWRITTEN
from .._reports.data.records import Phase
from .._rewrite.record import number_in
from .._structural import STRUCTURAL

_PACKAGE = f"{Path(__file__).parent.parent}{os.sep}"
_TRANSFORM = re.compile(
    r"(jvp|transpose|vmap|jit|pjit|pmap|shard_map|remat|checkpoint)\((.*)\)$"
)
# What JAX calls structural primitives and their parts in names.
_STRUCTURE = frozenset(STRUCTURAL) | {"body", "body_pred", "checkpoint", "remat"}
# Separates the names of operations that became one. A colon before a digit is part of
# a name, as in `amp_equation:7`.
_BETWEEN = re.compile(r":(?!\d)")
_BRANCH = re.compile(r"branch_\d+_fun$")


@dataclass(frozen=True)
class Named:
    """What the name of an operation tells.

    Args:
        outer: names of the `jax.named_scope`s around `amp`, outermost first.
        inner: those within, or all of them where there is no `amp`.
        phase: as in a report.
        is_transposed: whether a transposition is in the name.
        primitive: that of the equation, the last part of the name; of several
            operations that became one, that of the first.
        step: the number of the decision that it was made for; None outside of `amp`."""

    outer: tuple[str, ...]
    inner: tuple[str, ...]
    phase: Phase
    is_transposed: bool
    primitive: str
    step: int | None


def named(op_name: str) -> Named:
    """Reads the name of an operation."""
    *stack, primitive = _parts(op_name)
    if primitive.startswith("(") and primitive.endswith(")"):
        # Several operations became one: `jit(f)/(a/psum:b/psum)`. The first stands for
        # all of them.
        first = _BETWEEN.split(primitive[1:-1])[0]
        *inner, primitive = _parts(first)
        stack += inner
    phase: Phase = "forward"
    step = None
    outer: list[str] | None = None
    scopes: list[str] = []
    derivatives, is_transposed = 0, False
    for part in stack:
        transforms, name = _unwrapped(part)
        derivatives += "jvp" in transforms
        is_transposed |= "transpose" in transforms
        if is_transposed and phase == "forward":
            phase = "backward"
        if name == RECOMPUTED:
            phase = "recomputed"
        elif name == REWRITTEN:
            # Differentiation repeats the scopes around `amp`, and those in it.
            outer, scopes = scopes if outer is None else outer, []
        elif (number := number_in(name)) is not None:
            step = number
        elif name and name not in _STRUCTURE and not _BRANCH.match(name):
            scopes.append(name)
    if derivatives > 1:  # a checkpoint's own derivative repeats what is around it
        scopes = _without_repetition(scopes)
    inner = tuple(scopes)
    return Named(tuple(outer or ()), inner, phase, is_transposed, primitive, step)


def _parts(op_name: str) -> list[str]:
    """The name, split at the slashes outside of parentheses."""
    plain = op_name.split("/")
    if all(part.count("(") == part.count(")") for part in plain):
        return plain
    parts, depth, start = [], 0, 0
    for i, letter in enumerate(op_name):
        depth += (letter == "(") - (letter == ")")
        if letter == "/" and depth == 0:
            parts.append(op_name[start:i])
            start = i + 1
    # A scope whose own parentheses do not match hides where names end.
    return [*parts, op_name[start:]] if depth == 0 else plain


def _unwrapped(part: str) -> tuple[list[str], str]:
    """The transforms around a name, and the name; that of `jit` is no scope."""
    transforms: list[str] = []
    while found := _TRANSFORM.match(part):
        transforms.append(found[1])
        part = found[2]
        if found[1] in ("jit", "pjit", "pmap"):
            return transforms, ""
    return transforms, part


def _without_repetition(scopes: list[str]) -> list[str]:
    """Scopes that are written twice, one after the other, once."""
    half = len(scopes) // 2
    return scopes[half:] if half and scopes[:half] == scopes[half:] else scopes


def source_of(node: Node) -> str:
    """The line of the author's that an instruction comes from, or that of a call."""
    here: Node | None = node
    while here is not None:
        for file, line in here.body.module.frames(here.one):
            if file and not file.startswith(_PACKAGE):
                return f"{file}:{line}"
        here = here.body.caller
    return ""
