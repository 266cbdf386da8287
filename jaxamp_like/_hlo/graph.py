"""Where the values of an HLO program come from: across fusions, calls and loops."""

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import NamedTuple

from .text import Computation, Instruction, Module, trip_count

FUSIONS = frozenset({"fusion", "fusion-start"})
"""Instructions that run all that is in them at once, and write only its results."""

_CALLS = FUSIONS | {"call", "async-start"}
_CALLING = _CALLS | {"while", "conditional"}
_BRANCHES = ("branch_computations", "true_computation", "false_computation")
_MARKERS = frozenset(
    "Sharding SPMDFullToShardShape SPMDShardToFullShape annotate_device_placement "
    "MoveToHost MoveToDevice".split()
)
_HANDED_ON = frozenset({"opt-barrier", "add-dependency", "domain"})
_MAY_HAND_ON = _CALLING | _HANDED_ON
_MAY_HAND_ON |= {"parameter", "get-tuple-element", "tuple", "custom-call"}
COLLECTIVES = frozenset(
    "all-gather all-reduce reduce-scatter all-to-all ragged-all-to-all "
    "collective-permute collective-broadcast".split()
)
_STARTS = frozenset(f"{opcode}-start" for opcode in COLLECTIVES)
VIEWS = frozenset({"bitcast", "copy", "copy-start", "reshape", "slice-start"})
"""Instructions that give their operand another shape or place, or a part of it."""


@dataclass(frozen=True, eq=False)
class CalledComputation:
    """A computation, where one instruction calls it.

    Args:
        computation: what is in it.
        module: the program.
        caller: the instruction that calls it; None of the entry.
        times: how often it runs when the program runs once; a loop of which XLA does
            not know the length counts once.
        is_counted: whether the lengths of all loops around it are known.
        prefix: the name stack of the call around it, which the names in here lack."""

    computation: Computation
    module: Module
    caller: "Node | None" = None
    times: int = 1
    is_counted: bool = True
    prefix: str = ""
    _nodes: "dict[str, Node]" = field(default_factory=dict)

    def node(self, name: str) -> "Node":
        if name not in self._nodes:
            self._nodes[name] = Node(self.computation[name], self)
        return self._nodes[name]

    def __iter__(self) -> "Iterator[Node]":
        return iter(self._all)

    @cached_property
    def _all(self) -> "list[Node]":
        return [self.node(name) for name in self.computation]

    @cached_property
    def innermost(self) -> "list[Node]":
        """Every instruction that calls no others, here and in what is called."""
        found: list[Node] = []
        for node in self:
            if bodies := node.bodies:
                for inner in bodies:
                    found += inner.innermost
            else:
                found.append(node)
        return found

    @cached_property
    def root(self) -> "Node":
        return next(node for node in self if node.one.is_root)

    @cached_property
    def readers(self) -> "dict[str, list[tuple[Node, int]]]":
        """By name, the instructions that read a value, and as which operand."""
        found: dict[str, list[tuple[Node, int]]] = {
            name: [] for name in self.computation
        }
        for node in self:
            for i, name in enumerate(node.one.operands):
                found[name].append((node, i))
        return found


def _is_whole(name: str, prefix: str) -> bool:
    """Whether a name begins at the program's own function, as `prefix` does.

    A name that begins at another function, `jit(inner)/dot_general`, is that of a call
    within a call, and lacks the prefix as all names do that JAX gives in a call."""
    function = name.partition("/")[0]
    return function.startswith(("jit(", "pjit(")) and (
        function == prefix.partition("/")[0]
    )


@dataclass(eq=False)
class Node:
    """An instruction, in one call of the computation that holds it."""

    one: Instruction
    body: CalledComputation

    def operand(self, i: int) -> "Node":
        return self.body.node(self.one.operands[i])

    @property
    def operands(self) -> "list[Node]":
        return list(map(self.body.node, self.one.operands))

    @cached_property
    def op_name(self) -> str:
        """JAX's name stack and primitive, with those of the calls around it."""
        own, prefix = self.one.op_name, self.body.prefix
        if not prefix or not own or _is_whole(own, prefix):
            return own
        return f"{prefix}/{own}"

    @property
    def bodies(self) -> list[CalledComputation]:
        """What it calls: of a loop, its body and not its condition."""
        return self._bodies if self.one.opcode in _CALLING else []

    @cached_property
    def _bodies(self) -> list[CalledComputation]:
        one, here = self.one, self.body
        times, is_counted = here.times, here.is_counted
        if one.opcode == "while":
            names = one.called("body")
            trips = trip_count(here.module, one, here.computation)
            times, is_counted = times * (trips or 1), is_counted and trips is not None
        elif one.opcode == "conditional":
            names = [name for key in _BRANCHES for name in one.called(key)]
        else:
            names = one.called("calls", "to_apply")
        computations = here.module.computations
        # What a loop or a branch holds is named as what stands around it.
        is_inline = one.opcode in ("while", "conditional")
        prefix = here.prefix if is_inline else self.op_name or here.prefix
        return [
            CalledComputation(
                computations[name], here.module, self, times, is_counted, prefix
            )
            for name in names
        ]


def program(module: Module) -> CalledComputation:
    """The computation that a program begins with."""
    return CalledComputation(module.computations[module.entry], module)


def kernels(body: CalledComputation) -> list[Node]:
    """Every instruction that runs by itself, in every call of its computation."""
    found: list[Node] = []
    for node in body:
        bodies = [] if node.one.opcode in FUSIONS else node.bodies
        if bodies:
            for inner in bodies:
                found += kernels(inner)
        else:
            found.append(node)
    return found


class Value(NamedTuple):
    """A result of an instruction: of one that gives a tuple, the element at `path`."""

    node: Node
    path: tuple[int, ...] = ()


def is_marker(one: Instruction) -> bool:
    """Whether a call tells XLA where its operands are to lie, and computes nothing."""
    target = one.target
    return target in _MARKERS or target.startswith("xla.sdy.")


def traced_back(
    value: Value, through: Collection[str] = (), stops: Collection[str] = ()
) -> Value:
    """Where a value comes from, as long as only one instruction can have made it.

    Args:
        value: of a program.
        through: the opcodes of instructions whose first operand is followed, too.
        stops: the opcodes of instructions that are not followed further."""
    while value.node.one.opcode not in stops:
        before = handed_on(value)
        if before is None and value.node.one.opcode in through:
            before = [Value(value.node.operand(0))]
        if before is None or len(before) != 1:
            break
        (value,) = before
    return value


def handed_on(value: Value) -> list[Value] | None:
    """The values that an instruction hands on as they are.

    None if it computes something, or is an argument of the program. A loop hands on
    what it begins with and what its body gives."""
    (node, path), one = value, value.node.one
    if one.opcode not in _MAY_HAND_ON and not one.opcode.endswith("-done"):
        return None
    match one.opcode:
        case "parameter":
            return _argument(node.body, int(one.literal), path)
        case "get-tuple-element":
            return [Value(node.operand(0), (one.number("index") or 0, *path))]
        case "tuple" if path:
            return [Value(node.operand(path[0]), path[1:])]
        case "while":
            inner = [Value(body.root, path) for body in node.bodies]
            return [Value(node.operand(0), path), *inner]
        case _ if node.bodies:
            return [Value(body.root, path) for body in node.bodies]
        case "custom-call" if one.target == "ConcatBitcast":  # parts side by side
            return list(map(Value, node.operands))
        case "custom-call" if is_marker(one):
            return [Value(node.operand(path[0] if path else 0), path[1:])]
        case opcode if opcode in _HANDED_ON:
            return [Value(node.operand(0), path)]
        case opcode if opcode.endswith("-done"):
            return [_of_start(node.operand(0), path)]
    return None


def written_by(value: Value) -> list[Value]:
    """The results of kernels, or arguments of the program, that a value may be.

    A loop hands on what it begins with and what its body gives. Views are followed."""
    found, seen, pending = [], set(), [value]
    while pending:
        value = pending.pop()
        if value in seen:
            continue
        seen.add(value)
        opcode = value.node.one.opcode
        before = None if opcode in FUSIONS else handed_on(value)
        if opcode in VIEWS:
            before = [Value(value.node.operand(0))]
        if before is None:
            found.append(value)
        else:
            pending += before
    return found


def _of_start(start: Node, path: tuple[int, ...]) -> Value:
    """The result of what was started: of a copy, that is its operand."""
    one = start.one
    if one.opcode == "copy-start":
        return Value(start.operand(0), path)
    if first := first_result(one):
        return Value(start, (first + (path[0] if path else 0), *path[1:]))
    return Value(start, path)


def first_result(one: Instruction) -> int:
    """The place of the first result among the shapes of an instruction.

    What starts a collective has its operands before its results."""
    has_operands = one.opcode in _STARTS and one.opcode != "all-reduce-start"
    return len(one.operands) if has_operands else 0


def main_result(node: Node) -> Value:
    """The result of an instruction; a library's call has its workspace beside it."""
    return Value(node, (0,) if len(node.one.shapes) > 1 else ())


def result_of(node: Node, i: int) -> Value:
    """The `i`-th array that a collective leaves."""
    one = node.one
    if (first := first_result(one)) or len(one.operands) > 1:
        return Value(node, (first + i,))
    return Value(node)


def _argument(
    body: CalledComputation, index: int, path: tuple[int, ...]
) -> list[Value] | None:
    caller = body.caller
    if caller is None:
        return None
    if caller.one.opcode == "while":
        return [Value(caller.operand(0), path), Value(body.root, path)]
    if caller.one.opcode == "conditional":
        return [Value(caller.operand(1 + caller.bodies.index(body)), path)]
    return [Value(caller.operand(index), path)]


def read_by(value: Value) -> Iterator[Node]:
    """The instructions that read a value, also those within fusions, calls and loops.

    What is handed on as it is, in a tuple, through a barrier or from one iteration of a
    loop to the next, is followed. A result of the program is read by the instruction
    that makes it one: that of the value, or the tuple that it is in."""
    seen: set[Value] = set()
    pending = [value]
    while pending:
        value = pending.pop()
        if value in seen:
            continue
        seen.add(value)
        node, path = value
        for reader, i in node.body.readers[node.one.name]:
            passed_on = _passed_on(value, reader, i)
            if passed_on is None:
                yield reader
            else:
                pending += passed_on
        caller = node.body.caller
        if node.one.is_root and caller is None:
            yield node
        elif node.one.is_root and caller is not None:
            pending.append(Value(caller, path))
            if caller.one.opcode == "while":
                pending += _parameters([node.body], 0, path)


def _passed_on(value: Value, reader: Node, i: int) -> list[Value] | None:
    """The values as which an instruction hands its `i`-th operand on.

    None if it computes something of it."""
    (node, path), opcode = value, reader.one.opcode
    match opcode:
        case "tuple":
            return [Value(reader, (i, *path))]
        case "get-tuple-element" if path:
            is_this = (reader.one.number("index") or 0) == path[0]
            return [Value(reader, path[1:])] if is_this else []
        case "while" if not _is_read_by_condition(reader, path):
            return [Value(reader, path), *_parameters(reader.bodies, 0, path)]
        case "conditional" if i > 0:
            return _parameters([reader.bodies[i - 1]], 0, path)
        case _ if opcode in _CALLS:
            return _parameters(reader.bodies, i, path) or None
        case _ if opcode in _HANDED_ON and i == 0:
            return [Value(reader, path)]
        case _ if opcode.endswith("-done") and node.one.opcode in _STARTS:
            return [Value(reader, _after_start(node.one, path))]
    return None


def _parameters(
    bodies: Sequence[CalledComputation], i: int, path: tuple[int, ...]
) -> list[Value]:
    """A part of the `i`-th argument of computations, as it is within them."""
    own = (node for body in bodies for node in body if node.one.opcode == "parameter")
    return [Value(node, path) for node in own if int(node.one.literal) == i]


def _is_read_by_condition(loop: Node, path: tuple[int, ...]) -> bool:
    """Whether the condition of a loop may read a part of what the loop carries."""
    computations = loop.body.module.computations
    taken = set()
    for name in loop.one.called("condition"):
        inner = computations.get(name, {}).values()
        read = {operand for one in inner for operand in one.operands}
        taken |= {
            one.number("index")
            for one in inner
            if one.opcode == "get-tuple-element" and (one.name in read or one.is_root)
        }
    return not path or path[0] in taken


def _after_start(start: Instruction, path: tuple[int, ...]) -> tuple[int, ...]:
    """Where a result of what was started is among the results of its end."""
    if not path or len(start.operands) == 1:
        return path[1:]
    return (path[0] - first_result(start), *path[1:])
