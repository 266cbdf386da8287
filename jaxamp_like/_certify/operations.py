"""The operations of an HLO program whose precision matters."""

from collections import defaultdict
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property, reduce
from typing import Literal

from .._hlo.graph import (
    COLLECTIVES,
    CalledComputation,
    Node,
    Value,
    is_marker,
    main_result,
    result_of,
    traced_back,
)
from .._hlo.numbers import (
    NONE,
    Numbers,
    adds,
    numbers,
    numbers_read,
    of_dtype,
    rounded,
    union,
)
from .._hlo.text import Shape, is_block_scaled, tiled_flops
from .._primitives import CONTRACTIONS
from .arithmetic import Platform, arithmetic, flops_of, rounding_of_unit
from .places import source_of

Kind = Literal["contraction", "reduction", "collective", "quantisation", "kernel"]

# What may stand between the multiplication and the sum of a contraction.
_BEFORE_SUMS = frozenset(
    {"bitcast", "convert", "reduce-window", "reshape", "transpose"}
)
_REDUCTIONS = frozenset({"reduce", "reduce-window", "scatter"})
# XLA compiles these to calls of a library, or to loops. They count as kernels.
_LIBRARIES = frozenset({"triangular-solve", "cholesky", "fft"})
_MULTIPLY = frozenset({"convolution", "custom-call", "dot"})
_OPCODES = (
    COLLECTIVES
    | _REDUCTIONS
    | _LIBRARIES
    | {"convert", "convolution", "custom-call", "dot", "multiply", "ragged-dot"}
)
# Calls of XLA's own that compute nothing.
_TRIVIAL = frozenset({"AllocateBuffer", "ConcatBitcast", "X64Combine"})


@dataclass(frozen=True, eq=False)
class Operation:
    """What moves or computes most of a program's numbers.

    That is a contraction, a sum over axes, a collective, a rounding to 8 bits or fewer,
    or a kernel that somebody else wrote.

    Args:
        platform: what it is compiled for.
        kind: which of these.
        opcode: XLA's name for it; of a library's call, the name of the routine.
        node: the instruction.
        holds: the numbers that each operand holds.
        reads: the same, rounded to what the matrix unit reads. JAX's default precision
            permits this rounding. A chosen algorithm requires it; then `holds` is
            rounded, too.
        stored: the dtypes of the operands as they are handed to it, in XLA's words.
        makes: the numbers of its result, after all of its readers have rounded it if
            they do; see `numbers_read`.
        arithmetic: the numbers that it multiplies, if fewer than those of its operands;
            "" elsewhere.
        flops: of a contraction, of one run.
        elements: of what a collective sends, or of what is rounded to 8 bits.
        sums: the instructions that add up.
        parts: the instructions whose results these add up, if XLA made several of one
            equation: products, smaller contractions, or sums of parts.
        operands: of a contraction or a sum.
        limit: what a matrix unit rounds them to, if it does."""

    platform: Platform
    kind: Kind
    opcode: str
    node: Node
    holds: tuple[Numbers, ...]
    reads: tuple[Numbers, ...]
    stored: tuple[str, ...]
    makes: Numbers
    arithmetic: str = ""
    flops: int = 0
    elements: int = 0
    sums: tuple[Node, ...] = ()
    parts: tuple[Node, ...] = ()
    operands: tuple[Node, ...] = ()
    limit: Numbers | None = None

    @property
    def surely(self) -> tuple[Numbers, ...]:
        """`reads`, with constants taken to hold nothing.

        XLA computes constants ahead and does not print their values."""
        if not self.operands:
            return self.reads
        return _limited(_held(self.operands, constants=False), self.limit)

    @property
    def times(self) -> int:
        return self.node.body.times

    @property
    def is_counted(self) -> bool:
        """Whether it is known how often it runs."""
        return self.node.body.is_counted

    @property
    def is_only_multiplied(self) -> bool:
        """Whether it is one multiplication, as that of an outer product may be."""
        return self.node.one.opcode == "multiply"

    @property
    def is_block_scaled(self) -> bool:
        """Whether it contracts operands in blocks, each with its own scale."""
        return is_block_scaled(self.node.one)

    @cached_property
    def tiled_flops(self) -> int:
        """FLOPs of one run with all padding, by which both programs are compared."""
        return tiled_flops(self.node.one, self.flops)

    @property
    def work(self) -> int:
        """What it costs: FLOPs or elements of all its runs, or how many these are."""
        return (self.tiled_flops or self.elements or 1) * self.times

    @property
    def results(self) -> int:
        """How many numbers one run makes."""
        return self.node.one.shape.elements

    @property
    def left(self) -> Numbers:
        """`makes`; of a sum, what its readers leave of that."""
        return self._after() if self._is_sum else self.makes

    @cached_property
    def needed(self) -> Numbers:
        """What is left of `makes` if matrix units among its readers round it, too."""
        if not self._is_sum and self.kind != "contraction":
            return self.makes
        return self._after(lambda reader: rounding_of_unit(reader, self.platform))

    @property
    def _is_sum(self) -> bool:
        """Whether it only adds up.

        A scatter may start from what its result was to be added to."""
        if self.opcode == "scatter":
            return self.kind == "reduction" and _is_constant(self.node.operand(0))
        return self.kind == "reduction"

    def _after(self, limit: Callable[[Node], Numbers | None] | None = None) -> Numbers:
        """What its readers leave of `makes`; `limit` is as that of `numbers_read`."""
        results = [self.node] if self._is_sum else self.sums or [self.node]
        left = union(numbers_read(main_result(one), limit) for one in results)
        return rounded(self.makes, left)

    @property
    def returns(self) -> Numbers:
        """The numbers of its result's dtype, whatever its readers make of them."""
        return of_dtype(self.node.one.shape.dtype)

    @cached_property
    def adds_in(self) -> Numbers:
        """The numbers that a sum adds up in, before its result is rounded.

        A contraction adds up in float32 at least. Parts may be rounded before they are
        added up."""
        held = [numbers_read(main_result(part)) for part in self.parts]
        held += map(_adds_in, self.sums)
        if self.kind == "contraction":
            held.append(union([of_dtype("f32"), self.returns]))
        return reduce(rounded, held) if held else NONE

    @cached_property
    def sources(self) -> frozenset[Node]:
        """What its operands are moved and cast copies of."""
        operands = map(Value, self.operands)
        return frozenset(traced_back(one, _COPIES).node for one in operands)

    @cached_property
    def summed(self) -> Node | None:
        """The sum whose results a sum adds up, if it does."""
        if not self._is_sum:
            return None
        return _before_sum(Value(self.operands[0]), _REDUCTIONS)

    @property
    def op_name(self) -> str:
        return self.node.op_name

    @cached_property
    def source(self) -> str:
        """The line of the author's, as "file:line"."""
        return source_of(self.node)

    @cached_property
    def signature(self) -> tuple[tuple[str, ...], str]:
        """The names of the numbers that it reads, and that are needed of its result."""
        return tuple(one.name for one in self.reads), self.needed.name


def _adds_in(node: Node) -> Numbers:
    """The numbers of the dtype in which a sum adds."""
    computations = node.body.module.computations
    names = node.one.called("to_apply")
    inner = [one for name in names for one in computations[name].values()]
    return union(of_dtype(one.shape.dtype) for one in inner if one.opcode == "add")


def operations(body: CalledComputation, platform: Platform) -> list[Operation]:
    """All operations of a program, in the order in which they stand."""
    nodes = [
        node
        for node in body.innermost
        if node.one.opcode.removesuffix("-start") in _OPCODES
    ]
    parts = {node: part for node in nodes if (part := _part(node)) is not None}
    sums: dict[Node, list[Node]] = defaultdict(list)
    for node, part in parts.items():
        sums[part].append(node)
    found = [
        one
        for node in nodes
        if node not in parts
        for one in _of_node(node, platform, sums.get(node, ()))
    ]
    inner = {part for one in found for part in one.parts if part is not one.node}
    return [one for one in found if one.node not in inner]


def _of_node(
    node: Node, platform: Platform, sums: Sequence[Node]
) -> Iterator[Operation]:
    one = node.one
    opcode = one.opcode.removesuffix("-start")
    if flops := flops_of(node):
        yield _contraction(node, flops, platform, sums)
    elif opcode in COLLECTIVES:
        yield from _collective(node, opcode, platform)
    elif _is_sum(node):
        product = _product(node)
        if product is None:
            yield _reduction(node, platform)
        else:  # a product with a vector, say
            flops = 2 * product.one.shape.elements
            yield _contraction(product, flops, platform, [node])
    elif opcode == "multiply" and _is_of_contraction(node) and _is_of_numbers(node):
        yield _contraction(node, 2 * one.shape.elements, platform)
    elif opcode == "convert" and _is_quantisation(node):
        yield _quantisation(node, platform)
    elif opcode == "custom-call" or opcode in _LIBRARIES:
        yield from _kernel(node, platform)


def _is_sum(node: Node) -> bool:
    one = node.one
    return one.opcode in _REDUCTIONS and one.shape.is_float and adds(node)


def _is_of_contraction(node: Node) -> bool:
    return node.op_name.rpartition("/")[2] in CONTRACTIONS


def _is_of_numbers(node: Node) -> bool:
    """Whether it multiplies what the program is about.

    XLA's partitioner computes positions, which it names after the equation as well."""
    shape = node.one.shape
    return _has_floats(shape) or shape.elements > 1


def equation_of(node: Node) -> str:
    """The name of the contraction that an instruction was made for; "" if for none.

    XLA may call a kernel for it, whose name begins with that of the equation."""
    name = node.op_name
    parent = name.rpartition("/")[0]
    named = (one for one in (name, parent) if one.rpartition("/")[2] in CONTRACTIONS)
    return next(named, "")


def _has_floats(shape: Shape) -> bool:
    return shape.is_float or shape.dtype.startswith("c")


def _product(node: Node) -> Node | None:
    """The multiplication of a contraction that XLA writes as one and a sum.

    Where XLA sums in two steps, the second one has the name of the equation."""
    if not _is_of_contraction(node):
        return None
    return _before_sum(Value(node.operand(0)), {"multiply"})


def _part(node: Node) -> Node | None:
    """The contraction whose parts a sum adds up, if it does."""
    if not _is_sum(node):
        return None
    found = _before_sum(Value(node.operand(0)), _MULTIPLY)
    if found is None or not flops_of(found):
        return None
    is_nameless = not found.op_name and _is_of_contraction(node)
    return found if is_nameless or found.op_name == node.op_name != "" else None


def _before_sum(value: Value, opcodes: Collection[str]) -> Node | None:
    """The instruction of these opcodes whose results are summed, moved or cast."""
    node = traced_back(value, _BEFORE_SUMS, opcodes).node
    return node if node.one.opcode in opcodes else None


_COPIES = frozenset({"bitcast", "convert", "copy", "reshape", "transpose"})


def _is_constant(node: Node) -> bool:
    """Whether an array is a copy of one number."""
    source = traced_back(Value(node), _COPIES | {"broadcast"}).node
    return source.one.opcode == "constant"


def _contraction(
    node: Node, flops: int, platform: Platform, sums: Sequence[Node] = ()
) -> Operation:
    """A contraction.

    Args:
        node: the instruction that multiplies.
        sums: the instructions that add up what it makes, if there are any."""
    one = node.one
    operands = (node.operand(0), node.operand(1))
    is_product = one.opcode == "multiply"  # whose operands no matrix unit rounds
    limit, asks, name = (None, False, "") if is_product else arithmetic(node, platform)

    held = _held(operands)
    reads = _limited(held, limit)
    is_complex = one.shape.dtype.startswith("c")
    return Operation(
        platform,
        kind="contraction",
        opcode=one.target or one.opcode,
        node=sums[0] if is_product and sums else node,
        holds=reads if asks else held,
        reads=reads,
        stored=tuple(operand.one.shape.dtype for operand in operands),
        makes=union(numbers_read(main_result(each)) for each in sums or [node]),
        arithmetic=name if reads != held else "",
        flops=flops * (4 if is_complex else 1),
        sums=tuple(sums),
        parts=(node,) if sums else (),
        operands=operands,
        limit=limit,
    )


def _limited(sets: tuple[Numbers, ...], limit: Numbers | None) -> tuple[Numbers, ...]:
    return tuple(rounded(each, limit) for each in sets) if limit else sets


def _held(operands: Sequence[Node], constants: bool = True) -> tuple[Numbers, ...]:
    return tuple(numbers(Value(operand), constants) for operand in operands)


def _collective(node: Node, opcode: str, platform: Platform) -> Iterator[Operation]:
    """An operation for each array of floats that is sent."""
    for i, operand in enumerate(node.operands):
        if operand.one.shape.is_float:
            held = _held([operand])
            yield Operation(
                platform,
                kind="collective",
                opcode=opcode,
                node=node,
                holds=held,
                reads=held,
                stored=(operand.one.shape.dtype,),
                makes=numbers_read(result_of(node, i)),
                elements=operand.one.shape.elements,
            )


def _reduction(node: Node, platform: Platform) -> Operation:
    one = node.one
    operand, makes = _added(node), of_dtype(one.shape.dtype)
    # XLA may compute a sum in several steps, of which the last one stands for all.
    sums = [node]
    while (step := _before_sum(Value(operand), _REDUCTIONS)) is not None:
        if not adds(step) or step.op_name not in ("", node.op_name):
            break
        operand, makes = _added(step), rounded(of_dtype(step.one.shape.dtype), makes)
        sums.append(step)
    held = _held([operand])
    return Operation(
        platform,
        kind="reduction",
        opcode=one.opcode,
        node=node,
        holds=held,
        reads=held,
        stored=(operand.one.shape.dtype,),
        makes=makes,
        sums=tuple(sums),
        parts=tuple(sums[1:]),
        operands=(operand,),
    )


def _added(node: Node) -> Node:
    """What a reduction adds up."""
    return node.operand(2 if node.one.opcode == "scatter" else 0)


def _quantisation(node: Node, platform: Platform) -> Operation:
    return Operation(
        platform,
        kind="quantisation",
        opcode="convert",
        node=node,
        holds=(),
        reads=(),
        stored=(node.operand(0).one.shape.dtype,),
        makes=of_dtype(node.one.shape.dtype),
        elements=node.one.shape.elements,
    )


def _kernel(node: Node, platform: Platform) -> Iterator[Operation]:
    """A call of what is no HLO: a kernel of Pallas or Triton, or of a library."""
    one = node.one
    target = one.target or one.opcode
    floats = [operand for operand in node.operands if _has_floats(operand.one.shape)]
    made = [shape for shape in one.shapes if _has_floats(shape)]
    if not floats or not made or target in _TRIVIAL or is_marker(one):
        return
    reads = tuple(of_dtype(operand.one.shape.dtype) for operand in floats)
    # XLA for TPUs has kernels for some contractions.
    yield Operation(
        platform,
        kind="contraction" if equation_of(node) or _is_ragged(node) else "kernel",
        opcode=target,
        node=node,
        holds=reads,
        reads=reads,
        stored=tuple(operand.one.shape.dtype for operand in floats),
        makes=of_dtype(made[0].dtype),
    )


def _is_ragged(node: Node) -> bool:
    """Whether it is a ragged product whose equation XLA for TPUs does not name."""
    return node.op_name.startswith("ragged-dot-")


def _is_quantisation(node: Node) -> bool:
    old, new = node.operand(0).one.shape, node.one.shape
    return old.is_float and new.bits <= 8 and new.dtype != "pred" and bool(new.dims)
