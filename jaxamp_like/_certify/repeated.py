"""Finds operations that compute what another one has computed already."""

import re
from collections.abc import Hashable, Iterable

from .._hlo.graph import CalledComputation, Node, Value, handed_on, traced_back
from .._hlo.numbers import combines_by
from .operations import Operation


def repeated(operations: Iterable[Operation]) -> dict[Operation, Operation]:
    """Contractions and quantisations that run again, each with the first run.

    XLA may compute their operands again, too: two values are the same if the same
    instructions make them of the same values (value numbering)."""
    operations = list(operations)
    if not operations:
        return {}
    numbers = _numbered(_program(operations[0].node))
    firsts: dict[Hashable, Operation] = {}
    found: dict[Operation, Operation] = {}
    # What has a name of its equation comes before what XLA left nameless.
    for one in sorted(operations, key=lambda one: not one.op_name):
        if can_repeat(one):
            first = firsts.setdefault((numbers.get(one.node, one.node), one.times), one)
            if first is not one:
                found[one] = first
    return found


def can_repeat(one: Operation) -> bool:
    """Whether it is a kind of operation that `repeated` finds."""
    return one.kind in ("contraction", "quantisation")


def _program(node: Node) -> CalledComputation:
    body = node.body
    while body.caller is not None:
        body = body.caller.body
    return body


def _numbered(body: CalledComputation) -> dict[Node, Hashable]:
    """Numbers for instructions, which are the same if their results are."""
    found: dict[Node, Hashable] = {}
    known: dict[Hashable, int] = {}
    for node in body.innermost:
        one = node.one
        if not one.operands and one.opcode not in ("constant", "iota"):
            continue  # it is the same as itself alone
        if handed_on(Value(node)) is not None:
            continue  # it is what it hands on
        reads = []
        for operand in node.operands:
            path = ()
            if operand not in found:
                operand, path = traced_back(Value(operand))
            reads.append((found.get(operand, operand), path))
        key = one.opcode, one.shapes, one.literal, _settings(node), *reads
        found[node] = known.setdefault(key, len(known))
    return found


_REGION = re.compile(r", to_apply=%?[\w.-]+")


def _settings(node: Node) -> Hashable:
    """What an instruction computes; of a reduction, XLA may have copied how it adds."""
    settings = node.one.settings
    if "to_apply=" not in settings:
        return settings
    return _REGION.sub("", settings), frozenset(combines_by(node))
