"""The operations of an HLO program whose precision matters."""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from .._hlo.graph import Node, Value, handed_on, nodes, program
from .._hlo.numbers import (
    TF32,
    Numbers,
    numbers,
    numbers_read,
    of_dtype,
    rounded,
    union,
)
from .._hlo.text import FLOATS, Instruction, Module, Shape, contraction_flops
from .._primitives import CONTRACTIONS

Kind = Literal["contraction", "reduction", "collective", "quantisation", "kernel"]
Platform = Literal["cpu", "gpu", "tpu"]

_COLLECTIVES = frozenset(
    "all-gather all-reduce reduce-scatter all-to-all ragged-all-to-all "
    "collective-permute collective-broadcast".split()
)
# What may stand between the multiplication and the sum of a contraction.
_BEFORE_SUMS = frozenset(
    {"bitcast", "convert", "reduce-window", "reshape", "transpose"}
)
_REDUCTIONS = frozenset({"reduce", "reduce-window", "scatter"})
# Calls that tell XLA something, and compute nothing.
_TRIVIAL = frozenset(
    "Sharding SPMDFullToShardShape SPMDShardToFullShape AllocateBuffer X64Combine "
    "annotate_device_placement MoveToHost MoveToDevice".split()
)


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
        reads: the numbers that it computes with: those, rounded to what the arithmetic
            takes. JAX's default precision allows this, and does not ask for it.
        stored: the dtypes of the operands as they are handed to it.
        makes: the numbers that are left of its result.
        arithmetic: the numbers that it multiplies, if fewer than those of its operands;
            "" elsewhere.
        flops: of a contraction, of one run.
        num_bytes: of a collective's results, of one run."""

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
    num_bytes: int = 0

    @property
    def times(self) -> int:
        return self.node.body.times

    @property
    def work(self) -> int:
        """What it costs: FLOPs or bytes of all its runs, or how many these are."""
        return (self.flops or self.num_bytes or 1) * self.times

    @property
    def op_name(self) -> str:
        return self.node.op_name

    @property
    def signature(self) -> tuple[tuple[str, ...], str]:
        """The names of the numbers that it reads and makes."""
        return tuple(one.name for one in self.reads), self.makes.name


def operations(module: Module, platform: Platform) -> list[Operation]:
    """All operations of a program, in the order in which they stand."""
    return [
        found for node in nodes(program(module)) for found in _of_node(node, platform)
    ]


def _of_node(node: Node, platform: Platform) -> Iterator[Operation]:
    one = node.one
    opcode = one.opcode.removesuffix("-start")
    if flops := contraction_flops(one, node.body.computation):
        yield _contraction(node, flops, platform)
    elif opcode in _COLLECTIVES:
        yield from _collective(node, opcode, platform)
    elif opcode in _REDUCTIONS and one.shape.is_float and _adds(node):
        # A sum in two parts is told by its second, which has the name.
        product = _product(node)
        if product is None:
            yield _reduction(node, platform)
        else:  # a product with a vector, say
            flops = 2 * product.one.shape.elements
            yield _contraction(product, flops, platform, result=node)
    elif opcode == "convert" and _is_quantisation(node):
        yield _quantisation(node, platform)
    elif opcode == "custom-call" and any(shape.is_float for shape in one.shapes):
        yield from _kernel(node, platform)


def _product(node: Node) -> Node | None:
    """The multiplication of a contraction that XLA writes as one and a sum."""
    if node.op_name.rpartition("/")[2] not in CONTRACTIONS:
        return None
    here = Value(node.operand(0))
    while here.node.one.opcode != "multiply":
        before = handed_on(here)
        if before is None and here.node.one.opcode in _BEFORE_SUMS:
            before = [Value(here.node.operand(0))]
        if before is None or len(before) != 1:
            return None
        (here,) = before
    return here.node


def _contraction(
    node: Node, flops: int, platform: Platform, result: Node | None = None
) -> Operation:
    one = node.one
    operands = [node.operand(i) for i in (0, 1)]
    # Where XLA writes a multiplication and a sum, it multiplies what is there.
    limit, arithmetic = (None, "") if result else _arithmetic(node, platform)
    held = tuple(numbers(Value(operand)) for operand in operands)
    reads = tuple(rounded(each, limit) if limit else each for each in held)
    return Operation(
        platform,
        kind="contraction",
        opcode=_target(one) or one.opcode,
        node=result or node,
        holds=held,
        reads=reads,
        stored=tuple(_dtype(operand.one.shape) for operand in operands),
        makes=numbers_read(result or node),
        arithmetic=arithmetic if reads != held else "",
        flops=flops,
    )


def _arithmetic(node: Node, platform: Platform) -> tuple[Numbers | None, str]:
    """What float32 operands are rounded to by the units that multiply them."""
    one = node.one
    if all(node.operand(i).one.shape.dtype != "f32" for i in (0, 1)):
        return None, ""
    algorithm = re.search(
        r"\b(?:ALG_)?DOT_(TF32|BF16|F32|F16)_\w*?F32(?:_X(\d))?\b",
        one.attributes.upper(),
    )
    if algorithm is not None:
        dtype, passes = algorithm.groups()
        if passes is not None or dtype == "F32":
            return None, ""
        return (TF32 if dtype == "TF32" else of_dtype(dtype.lower())), dtype.lower()
    found = re.search(r'operand_precision"?[=:][{\[]"?(\w+)', one.attributes)
    precision = found[1].lower() if found else "default"
    if platform == "tpu" and precision == "default":
        return of_dtype("bf16"), "one bfloat16 pass"
    if platform == "gpu" and precision == "default":
        return TF32, "tf32"
    return None, ""


def _collective(node: Node, opcode: str, platform: Platform) -> Iterator[Operation]:
    one = node.one
    floats = [
        (i, node.operand(i))
        for i in range(len(one.operands))
        if node.operand(i).one.shape.is_float
    ]
    if not floats:
        return
    reads = tuple(numbers(Value(operand)) for _, operand in floats)
    yield Operation(
        platform,
        kind="collective",
        opcode=opcode,
        node=node,
        holds=reads,
        reads=reads,
        stored=tuple(_dtype(operand.one.shape) for _, operand in floats),
        makes=numbers_read(node) if len(floats) == 1 else union(reads),
        num_bytes=sum(operand.one.shape.size_in_bytes for _, operand in floats),
    )


def _reduction(node: Node, platform: Platform) -> Operation:
    one = node.one
    operand = node.operand(2 if one.opcode == "scatter" else 0)
    return Operation(
        platform,
        kind="reduction",
        opcode=one.opcode,
        node=node,
        holds=(of_dtype(one.shape.dtype),),
        reads=(of_dtype(one.shape.dtype),),
        stored=(_dtype(operand.one.shape),),
        makes=of_dtype(one.shape.dtype),
    )


def _quantisation(node: Node, platform: Platform) -> Operation:
    return Operation(
        platform,
        kind="quantisation",
        opcode="convert",
        node=node,
        holds=(),
        reads=(),
        stored=(_dtype(node.operand(0).one.shape),),
        makes=of_dtype(node.one.shape.dtype),
        num_bytes=node.one.shape.size_in_bytes,
    )


def _kernel(node: Node, platform: Platform) -> Iterator[Operation]:
    """A call of what is no HLO: a kernel of Pallas or Triton, or of a library."""
    one = node.one
    target = _target(one)
    floats = [node.operand(i) for i in range(len(one.operands))]
    floats = [operand for operand in floats if operand.one.shape.is_float]
    if not floats or target in _TRIVIAL:
        return
    reads = tuple(of_dtype(operand.one.shape.dtype) for operand in floats)
    # XLA for TPUs has kernels for some contractions.
    is_contraction = node.op_name.rpartition("/")[2] in CONTRACTIONS
    yield Operation(
        platform,
        kind="contraction" if is_contraction else "kernel",
        opcode=target,
        node=node,
        holds=reads,
        reads=reads,
        stored=tuple(_dtype(operand.one.shape) for operand in floats),
        makes=of_dtype(one.shape.dtype),
    )


def _target(one: Instruction) -> str:
    found = re.search(r'custom_call_target="([^"]*)"', one.attributes)
    return found[1] if found else ""


def _adds(node: Node) -> bool:
    """Whether a reduction adds up numbers, rather than choose the largest, say.

    The sum over an axis of length 1 adds up nothing."""
    if node.operand(0).one.shape.elements == node.one.shape.elements:
        return False
    names = node.one.called("to_apply")
    bodies = [node.body.module.computations.get(name, {}) for name in names]
    return any(each.opcode == "add" for body in bodies for each in body.values())


def _is_quantisation(node: Node) -> bool:
    old, new = node.operand(0).one.shape, node.one.shape
    return old.is_float and new.bits <= 8 and new.dtype != "pred" and bool(new.dims)


def _dtype(shape: Shape) -> str:
    return FLOATS.get(shape.dtype, shape.dtype)
