"""Equal reads of a value, merged in the program that JAX lowers.

XLA merges equal operations only after it has decided what devices send each other, and
never merges what they send. So what is to be sent once has to be read once before.

The Python interface to MLIR is not documented; what is used of it was checked on JAX
0.8.3, 0.10.2 and 0.12.0. Before JAX 0.7.2 it does not tell which of two operations
comes first, and nothing is merged."""

from collections import defaultdict
from collections.abc import Hashable, Iterator
from typing import Any

from jaxlib.mlir import ir

# What moves a value about or rounds it, and so is as good as the value.
_READS = frozenset(
    f"stablehlo.{name}"
    for name in "broadcast_in_dim convert gather reshape slice transpose".split()
)
# What the indices of a lookup are made by.
_INDICES = _READS | frozenset(
    f"stablehlo.{name}"
    for name in "add clamp compare concatenate constant iota select subtract".split()
)
_BARRIER = "stablehlo.optimization_barrier"
_DEPTH = 8  # operations between two indices and what both are made of

# Whether MLIR tells which of two operations comes first.
CAN_MERGE = hasattr(ir.Operation, "is_before_in_block")


class Reads:
    """The reads of some values in a program that is being lowered.

    Each read is looked at once, in however many steps the program is lowered."""

    def __init__(self) -> None:
        self._values: defaultdict[Hashable, dict[Any, None]] = defaultdict(dict)
        self._users: defaultdict[Any, set[Any]] = defaultdict(set)  # that were seen
        self._same: dict[Any, list[Any]] = {}  # a value, and what barriers make of it
        self._different: defaultdict[Any, dict[Any, None]] = defaultdict(dict)
        self._firsts: dict[Hashable, Any] = {}  # of equal reads in one block
        self._keys: dict[Any, Hashable] = {}

    def note(self, tag: Hashable, value: Any) -> None:
        """Notes a value of MLIR, whose reads are to be merged, by a tag."""
        self._values[tag][value] = None  # once, however often its function is inlined

    def merge(self, tag: Hashable) -> None:
        """Lets equal reads, also behind barriers, share the first one's result."""
        todo = list(self._values[tag])
        while todo:
            value = todo.pop()
            different = self._different[value]
            for op in self._new_reads(value):
                key = _block(op), _key(op, self._keys)
                first, later = self._firsts.setdefault(key, op), op
                if later.is_before_in_block(first):
                    first, later = later, first
                different[first] = None
                if first != later:
                    later.results[0].replace_all_uses_with(first.results[0])
                    self._firsts[key] = first
                    different.pop(later, None)
            # What is looked up in a table is no view of it.
            todo += [op.results[0] for op in different if op.name != "stablehlo.gather"]

    def _new_reads(self, value: Any) -> Iterator[Any]:
        """The reads of a value that came after those that this has given before."""
        same = self._same.setdefault(value, [value])
        for one in same:  # grows while it is gone through
            seen, uses = self._users[one], []
            for use in one.uses:
                if use.owner.operation in seen:
                    break  # MLIR tells the newest use first
                uses.append((use.owner.operation, use.operand_number))
            for op, operand in reversed(uses):  # the first read stays where it is
                seen.add(op)
                if _is_barrier(op):
                    same.append(op.results[0])
                elif op.name in _READS and operand == 0:
                    yield op


def _is_barrier(op: Any) -> bool:
    return op.name == _BARRIER and len(op.operands) == 1


def _block(op: Any) -> Any:
    return ir.InsertionPoint(op).block


def _key(op: Any, known: dict[Any, Hashable], depth: int = _DEPTH) -> Hashable:
    """What an operation computes: equal for two that compute the same.

    Types and attributes are objects that MLIR makes once for all that are equal."""
    if (op, depth) not in known:
        # By index: what iteration gives depends on the version of MLIR.
        named = (op.attributes[i] for i in range(len(op.attributes)))
        known[op, depth] = (
            op.name,
            tuple(value.type for value in op.results),
            tuple((str(x.name), x.attr) for x in named),
            tuple(_key_of_value(value, known, depth - 1) for value in op.operands),
        )
    return known[op, depth]


def _key_of_value(value: Any, known: dict[Any, Hashable], depth: int) -> Hashable:
    value = _origin(value)
    op = _maker(value)
    is_index = depth and op is not None and op.name in _INDICES
    return _key(op, known, depth) if is_index else value


def _maker(value: Any) -> Any:
    """The operation that makes a value; `None` for an argument of a block."""
    return getattr(value.owner, "operation", None)


def _origin(value: Any) -> Any:
    """A value as it is in front of barriers."""
    while (op := _maker(value)) is not None and _is_barrier(op):
        value = op.operands[0]
    return value
