"""Compares large arrays with the equations that they are the results of.

An array is tied by name to the equation that its kernel ends with. What stands between
arrays, in a kernel, is compared by name as well."""

from collections import defaultdict
from collections.abc import Iterable, Iterator
from functools import cached_property
from typing import NamedTuple

from .._hlo.graph import COLLECTIVES, CalledComputation, Node, Value, read_by
from .._hlo.numbers import (
    ROUNDS,
    Numbers,
    bits_needed,
    numbers,
    numbers_read,
    of_dtype,
    rounded,
    rounding_of,
    union,
)
from .arithmetic import Platform, flops_of, rounding_of_unit
from .arrays import LARGE, MOVES, Array, arrays
from .drifts import EMULATED, KEPT_WIDE, REDUCED_LOW, UNDECIDED, WRITTEN_WIDE
from .places import source_of

_ELEMENTWISE = frozenset(
    "add atan2 cbrt cosine divide erf exponential exponential-minus-one log "
    "log-plus-one logistic multiply power remainder rsqrt sine sqrt subtract tan "
    "tanh".split()
)


class CompiledArray(NamedTuple):
    """What is found of an array, or of what a kernel computes on the way to it.

    Args:
        node: the instruction that it is named after.
        decided: that of the decided program; None if none is known.
        dtype: in which it is compiled, in XLA's words.
        size: in bytes.
        is_kept: whether the forward pass writes it and the backward pass reads it.
        drift: how it differs, "" if it doesn't."""

    node: Node
    decided: Node | None
    dtype: str
    size: int
    is_kept: bool
    drift: str


class Kept(NamedTuple):
    """What is found of all large arrays.

    Args:
        compiled: those of the compiled program.
        decided: how many bytes the decided program keeps, by dtype in XLA's words."""

    compiled: list[CompiledArray]
    decided: dict[str, int]


def stored(
    decided: CalledComputation,
    compiled: CalledComputation,
    platform: Platform,
    large: int = LARGE,
) -> Kept:
    """Compares the arrays of two programs that have so many bytes."""
    comparing = _Comparing(decided, platform, large)
    found: list[CompiledArray] = []
    for one in arrays(compiled, large):
        if one.is_data:
            found += comparing.array(one)
    for node in compiled.innermost:
        found += comparing.computed(node, large)
    count: dict[str, int] = defaultdict(int)
    for one in comparing.kept.values():
        count[one.shape.dtype] += one.shape.size_in_bytes
    return Kept(found, dict(count))


class _Alike:
    """The decided instructions of one name."""

    def __init__(self, nodes: list[Node]):
        self.nodes = nodes

    @cached_property
    def computing(self) -> "_Alike":
        """Those that compute each element of an array from one of another."""
        return _Alike([one for one in self.nodes if one.one.opcode in _ELEMENTWISE])

    def near(self, node: Node) -> list[Node]:
        """Those of an instruction's line, if any are and they differ in dtype."""
        by_line = self._mixed
        return by_line.get(source_of(node), self.nodes) if by_line else self.nodes

    @cached_property
    def _mixed(self) -> dict[str, list[Node]]:
        """All by their lines, if they differ in dtype."""
        if len({one.one.shape.dtype for one in self.nodes}) < 2:
            return {}
        found: dict[str, list[Node]] = defaultdict(list)
        for one in self.nodes:
            found[source_of(one)].append(one)
        return found


_NONE_ALIKE = _Alike([])


class _Comparing:
    def __init__(self, decided: CalledComputation, platform: Platform, large: int):
        self.platform: Platform = platform
        # By name, and by name and number of elements: of an optimizer, the equations of
        # all parameters have one name.
        named: dict[tuple[str, int | None], list[Node]] = defaultdict(list)
        for node in decided.innermost:
            shape = node.one.shape
            # In 8 bits, an array may be large in one program and not in the other.
            if 8 * shape.elements >= large and shape.is_float and node.op_name:
                named[node.op_name, None].append(node)
                named[node.op_name, shape.elements].append(node)
        self.named = {name: _Alike(some) for name, some in named.items()}
        kept = (one for one in arrays(decided, large) if one.is_kept and one.is_data)
        self.kept = {one.kernel: one for one in kept}
        self.untied = {*self.kept}

    def array(self, array: Array) -> Iterator[CompiledArray]:
        node, one = self._tied(array)
        shape, is_kept = array.shape, array.is_kept
        if not is_kept and (_is_product(array) or _is_sent(array)):
            return  # compared as a contraction, or as a collective
        if node.one.opcode == "parameter":  # a copy of an argument
            one, drift = node, ""
        elif one is None:
            drift = UNDECIDED
        else:
            drift = self._drift(array, node, one)
        yield CompiledArray(node, one, shape.dtype, shape.size_in_bytes, is_kept, drift)

    def computed(self, node: Node, large: int) -> Iterator[CompiledArray]:
        """What is computed in fewer bits than any equation of its name."""
        if node.one.opcode not in _ELEMENTWISE:
            return
        shape = node.one.shape
        # In float32, whatever it is computed in.
        if not shape.is_float or 4 * shape.elements < large:
            return
        equations = self._named(node, shape.elements).computing
        if not equations.nodes:  # split over devices, it has fewer elements
            equations = self._named(node, None).computing
        low, alike = of_dtype(shape.dtype), equations.near(node)
        may_be_in = self._may_be_in
        read = {operand.one.shape.dtype for operand in node.operands}
        if self.platform == "tpu" and read != {shape.dtype}:
            # It rounds its own result, perhaps for some of the readers alone.
            may_be_in = self._is_rounded_to
        if alike and not any(may_be_in(each, low) for each in alike):
            size = shape.size_in_bytes
            yield CompiledArray(node, alike[0], shape.dtype, size, False, REDUCED_LOW)

    def _tied(self, array: Array) -> tuple[Node, Node | None]:
        """An instruction that names an array, and the decided one of that name."""
        for is_exact in (True, False):
            for node in array.origins:
                elements = array.shape.elements if is_exact else None
                alike = self._named(node, elements)
                if alike.nodes:
                    return node, self._closest(alike, node, array)
        return array.origins[-1], None

    def _named(self, node: Node, elements: int | None) -> _Alike:
        """The decided instructions of a name that make so many elements."""
        return self.named.get((node.op_name, elements), _NONE_ALIKE)

    def _closest(self, named: _Alike, node: Node, array: Array) -> Node:
        alike, dtype = named.near(node), array.shape.dtype
        same = [one for one in alike if one.one.shape.dtype == dtype]
        if array.is_kept:
            # Each that is kept is tied once: stacks of a loop differ in nothing else.
            kept = [one for one in alike if one in self.untied]
            ours = [one for one in same if one in kept]
            if ours or any(one in self.kept for one in same):
                chosen = (ours or kept or same)[0]
                self.untied.discard(chosen)
                return chosen
        may = [] if same else [one for one in alike if self._may_hold(array, node, one)]
        return (same or may or alike)[0]

    def _drift(self, array: Array, node: Node, one: Node) -> str:
        decided, now = (
            of_dtype(dtype) for dtype in (one.one.shape.dtype, array.shape.dtype)
        )
        if not _is_rounded(array, node) and self._moves_operand(node, one, now):
            return ""
        if not self._may_hold(array, node, one):
            return REDUCED_LOW
        is_wide = decided.are_in(now) and decided != now
        if is_wide and not array.is_kept and _is_widened(one, array.shape.dtype):
            return ""
        if decided == now and _might_be_rounded(array) and one not in self.kept:
            # XLA writes it in place of what is made of it.
            needed = self._needed(array.readers)
            is_wide = needed.are_in(now) and bits_needed(needed) < bits_needed(now)
        if not is_wide:
            return ""
        if self.platform == "cpu":
            return EMULATED
        return KEPT_WIDE if array.is_kept else WRITTEN_WIDE

    def _moves_operand(self, node: Node, one: Node, now: Numbers) -> bool:
        """Whether an instruction may move an operand of what it is named after.

        XLA's partitioner gives what it puts around an equation the name of that. What a
        matrix unit rounds may be rounded before it is moved."""
        moves = MOVES | COLLECTIVES
        is_move = node.one.opcode.removesuffix("-start") in moves
        if not is_move or one.one.opcode in moves:
            return False
        floats = [x for x in one.operands if x.one.shapes and x.one.shape.is_float]
        limit = self._limit(one) or of_dtype("any")
        held = (rounded(numbers(Value(each)), limit) for each in floats)
        return any(each.name and each.are_in(now) for each in held)

    def _may_hold(self, array: Array, node: Node, one: Node) -> bool:
        """Whether the dtype of an array will do for an equation, or its readers.

        A rounded copy may be for one of the readers alone. The partitioner names what
        moves one after the equation that was copied."""
        is_copy = _is_rounded(array, node) or node.one.opcode in MOVES
        holds = self._is_rounded_to if is_copy else self._fits
        return holds(one, of_dtype(array.shape.dtype))

    def _fits(self, one: Node, now: Numbers) -> bool:
        """Whether numbers are those of an equation, or what its readers read."""
        return numbers(Value(one)).are_in(now) or self._read(one).are_in(now)

    def _may_be_in(self, one: Node, low: Numbers) -> bool:
        """Whether an equation may be computed in a dtype with such numbers.

        In a wider one, of such operands and then rounded, it gives the same."""
        return of_dtype(one.one.shape.dtype).are_in(low) or (
            self._read(one).are_in(low)
            and all(numbers(Value(operand)).are_in(low) for operand in one.operands)
        )

    def _is_rounded_to(self, one: Node, now: Numbers) -> bool:
        """Whether any reader of an equation rounds what it reads to such numbers."""
        return self._fits(one, now) or any(
            rounding_of(reader).are_in(now)
            for reader in read_by(Value(one))
            if reader.one.opcode in ROUNDS
        )

    def _read(self, node: Node) -> Numbers:
        return numbers_read(Value(node), limit=self._limit)

    def _limit(self, reader: Node) -> Numbers | None:
        return rounding_of_unit(reader, self.platform)

    def _needed(self, readers: Iterable[tuple[Node, int]]) -> Numbers:
        return union(self._needed_by(*each) for each in readers)

    def _needed_by(self, reader: Node, i: int) -> Numbers:
        if reader.one.opcode in ROUNDS:
            return rounding_of(reader)
        for body in reader.bodies:
            for node in body:
                if node.one.opcode == "parameter" and int(node.one.literal) == i:
                    return self._read(node)
        return of_dtype(reader.operand(i).one.shape.dtype)


def _is_widened(one: Node, dtype: str) -> bool:
    """Whether the decided program itself converts a result to a wider dtype."""
    converts = (
        each.one for each in read_by(Value(one)) if each.one.opcode == "convert"
    )
    return any(each.shape.dtype == dtype for each in converts)


def _might_be_rounded(array: Array) -> bool:
    """Whether XLA could write a rounded array instead, if all readers round it.

    What is kept could be rounded by any kernel of the forward pass. Another array has
    to be rounded by the kernel that writes it: an elementwise one can do so, and one
    that sorts or scatters can't."""
    is_elementwise = array.origins[-1].one.opcode in _ELEMENTWISE
    return array.is_kept or (is_elementwise and bool(array.readers))


def _is_rounded(array: Array, node: Node) -> bool:
    """Whether an array is a rounded copy of what an instruction makes."""
    after = array.origins[: array.origins.index(node)]
    return any(each.one.opcode in ROUNDS for each in after)


def _is_product(array: Array) -> bool:
    """Whether a contraction made it, which may be in several parts that are added."""
    first = array.origins[-1]
    if first.one.opcode == "reduce":
        first = Array(Value(first.operand(0))).origins[-1]
    return flops_of(first) > 0


def _is_sent(array: Array) -> bool:
    return array.kernel.one.opcode.removesuffix("-start") in COLLECTIVES
