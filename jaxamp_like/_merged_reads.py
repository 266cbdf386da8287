"""Equal reads of a value, merged in the program that JAX lowers.

XLA merges equal operations only after it has decided what devices send each other, and
never merges what they send. So what is to be sent once has to be read once before."""

from collections.abc import Iterator
from typing import Any

from jaxlib.mlir import ir

# What moves a value about or rounds it, and so is as good as the value.
_READS = frozenset(
    f"stablehlo.{name}"
    for name in "broadcast_in_dim convert gather reshape slice transpose".split()
)
# What indices of a lookup are made by.
_INDICES = _READS | frozenset(
    f"stablehlo.{name}"
    for name in "add clamp compare concatenate constant iota select subtract".split()
)
_BARRIER = "stablehlo.optimization_barrier"


def merge_reads(value: Any) -> None:
    """Lets equal reads of a value, also behind barriers, share the first one's result.

    Args:
        value: a value of MLIR."""
    firsts: list[Any] = []
    for op in _readers(value):
        i = next((i for i, first in enumerate(firsts) if _are_equal(op, first)), None)
        if i is None:
            firsts.append(op)
            continue
        first, later = (op, firsts[i]) if _is_before(op, firsts[i]) else (firsts[i], op)
        later.results[0].replace_all_uses_with(first.results[0])
        firsts[i] = first
    for op in firsts:
        if op.name != "stablehlo.gather":
            merge_reads(op.results[0])


def _readers(value: Any) -> Iterator[Any]:
    for use in list(value.uses):
        op = use.owner.operation
        if _is_barrier(op):
            yield from _readers(op.results[0])
        elif op.name in _READS and use.operand_number == 0:
            yield op


def _is_barrier(op: Any) -> bool:
    return op.name == _BARRIER and len(op.operands) == 1


def _is_before(a: Any, b: Any) -> bool:
    """Whether `a` stands before `b` in the block of both."""
    if hasattr(a, "is_before_in_block"):
        return a.is_before_in_block(b)
    first = next(op for op in _block(a).operations if op.operation in (a, b))  # JAX 0.6
    return first.operation == a


def _block(op: Any) -> Any:
    return ir.InsertionPoint(op).block


def _are_equal(a: Any, b: Any, depth: int = 8) -> bool:
    """Whether two operations of one block compute the same."""
    if a == b:
        return True
    if a.name != b.name or a.name not in _INDICES or not depth:
        return False
    if _block(a) != _block(b) or _description(a) != _description(b):
        return False
    pairs = zip(map(_origin, a.operands), map(_origin, b.operands), strict=True)
    return all(x == y or _are_made_equal(x, y, depth - 1) for x, y in pairs)


def _are_made_equal(x: Any, y: Any, depth: int) -> bool:
    a, b = _maker(x), _maker(y)
    return a is not None and b is not None and _are_equal(a, b, depth)


def _maker(value: Any) -> Any:
    """The operation that makes a value; `None` for an argument of a block."""
    return getattr(value.owner, "operation", None)


def _origin(value: Any) -> Any:
    """A value as it is in front of barriers."""
    while (op := _maker(value)) is not None and _is_barrier(op):
        value = op.operands[0]
    return value


def _description(op: Any) -> tuple[Any, ...]:
    """The types that an operation reads and makes, and its other parameters."""
    types = (str(value.type) for value in (*op.operands, *op.results))
    # By index: what iteration gives depends on the version of MLIR.
    named = [op.attributes[i] for i in range(len(op.attributes))]
    return *types, *((str(x.name), str(x.attr)) for x in named)
