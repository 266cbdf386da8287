"""Large arrays that a program writes to memory, and those kept for the backward pass.

XLA fuses many equations into one kernel, which writes few arrays. What the forward pass
writes and the backward pass reads is kept in between: most of what training holds in
memory beside its parameters."""

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

from .._hlo.graph import (
    FUSIONS,
    VIEWS,
    CalledComputation,
    Node,
    Value,
    first_result,
    handed_on,
    kernels,
    written_by,
)
from .._hlo.numbers import ROUNDS
from .._hlo.text import Shape

LARGE = 2**20
"""Bytes of an array that is worth a row."""

# Beside views, these hand on what is there, or fill an array.
_WRITES_NOTHING = VIEWS | {
    "constant",
    "get-tuple-element",
    "iota",
    "opt-barrier",
    "parameter",
    "tuple",
}
MOVES = VIEWS | {"pad", "slice", "transpose"}
"""Instructions that make the data of their operand again, elsewhere."""
_PASSES = MOVES | ROUNDS


@dataclass(frozen=True, eq=False)
class Array:
    """An array of floats that a kernel writes.

    Args:
        value: the result of the kernel.
        readers: the kernels that read it, and as which operand.
        is_kept: whether the forward pass writes it and the backward pass reads it."""

    value: Value
    readers: tuple[tuple[Node, int], ...] = ()
    is_kept: bool = False

    @property
    def kernel(self) -> Node:
        return self.value.node

    @property
    def shape(self) -> Shape:
        return _results(self.kernel)[self.value.path]

    @cached_property
    def origins(self) -> list[Node]:
        """The instructions that its data went through; it was computed by the last."""
        found, value = [], self.value
        while True:
            node = value.node
            if node.one.opcode not in FUSIONS:
                found.append(node)
            before = handed_on(value)
            if before is None and node.one.opcode in _PASSES:
                before = [Value(node.operand(0))]
            elif before is None and node.one.opcode == "dynamic-update-slice":
                before = [Value(node.operand(1))]
            # Parts of one array may come one by one, and it is followed by the first.
            is_parted = node.one.target == "ConcatBitcast"
            if before is None or (len(before) != 1 and not is_parted):
                return found
            value = before[0]

    @property
    def is_data(self) -> bool:
        """Whether it holds more than one number many times, a count, or nothing yet."""
        first = self.origins[-1]
        if first.one.opcode == "broadcast":
            return bool(first.operand(0).one.shape.dims)
        is_empty = first.one.target == "AllocateBuffer"
        return first.one.opcode not in ("constant", "iota") and not is_empty


def arrays(body: CalledComputation, large: int = LARGE) -> Iterator[Array]:
    """The arrays of floats that a program writes, if they have so many bytes."""
    readers: dict[Value, list[tuple[Node, int]]] = defaultdict(list)
    results: list[Value] = []
    late: set[Node] = set()  # kernels of the backward pass

    for kernel in kernels(body):
        one, scope = kernel.one, kernel.body.computation
        large_operands = [
            i for i, name in enumerate(one.operands) if scope[name].largest >= large
        ]
        if not large_operands and one.largest < large:
            continue
        reads: list[Value] = []
        for i in large_operands:
            written = written_by(Value(kernel.operand(i)))
            reads += written
            for value in written:
                readers[value].append((kernel, i))
        opcode = kernel.one.opcode
        if opcode in _WRITES_NOTHING or opcode.endswith("-done"):
            continue
        is_late = _is_of_backward_pass(kernel)
        if is_late or (is_late is None and any(value.node in late for value in reads)):
            late.add(kernel)
        if opcode == "custom-call" and handed_on(Value(kernel)) is not None:
            continue
        for path, shape in _results(kernel).items():
            if shape.is_float and shape.size_in_bytes >= large:
                results.append(Value(kernel, path))
    for value in results:
        ours = readers[value]
        is_kept = value.node not in late and any(one in late for one, _ in ours)
        if is_kept:
            ours = [each for each in ours if each[0] in late]
        yield Array(value, tuple(ours), is_kept)


def _results(kernel: Node) -> dict[tuple[int, ...], Shape]:
    """The shapes of a kernel's results, by where they are in what it gives.

    An instruction that starts a fusion or a collective has its operands before them."""
    one = kernel.one
    if first := first_result(one):
        return {(i,): shape for i, shape in enumerate(one.shapes) if i >= first}
    if one.opcode == "fusion-start":
        one = kernel.bodies[0].root.one
    return dict(zip(one.paths, one.shapes, strict=False))


def _is_of_backward_pass(kernel: Node) -> bool | None:
    """Whether a kernel runs in the backward pass, by the names of its instructions.

    None if they have no names."""
    names = (kernel.op_name,)
    if kernel.one.opcode in FUSIONS:
        names = (node.op_name for node in inside(kernel))
    found = None
    for name in names:
        if "transpose(" in name:
            return True
        if name:
            found = False
    return found


def inside(kernel: Node) -> Iterator[Node]:
    """The instructions that a kernel runs, itself included."""
    yield kernel
    if kernel.one.opcode in FUSIONS:
        for body in kernel.bodies:
            for node in body:
                yield from inside(node)
