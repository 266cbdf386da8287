"""The precision of numbers, whatever they are stored in.

A float32 array that was converted from bfloat16 holds bfloat16's numbers. XLA changes
in which dtype a value is stored where that keeps its numbers, and sometimes where it
does not. To find what a value was rounded to, its definition is followed."""

import re
from collections.abc import Callable, Iterable
from functools import lru_cache
from typing import NamedTuple

from .graph import Node, Value, first_result, handed_on, read_by
from .text import Shape, full_name

# Bits of the exponent, and of the mantissa behind the leading one.
_BITS = {
    "c128": (11, 52),
    "c64": (8, 23),
    "f64": (11, 52),
    "f32": (8, 23),
    "f16": (5, 10),
    "bf16": (8, 7),
    "s8": (3, 7),
    "u8": (3, 8),
    "s4": (2, 3),
    "u4": (2, 4),
    "pred": (0, 0),
}
# The names of smaller floating dtypes tell their bits, as that of `f8e4m3fn`.
_IN_NAME = re.compile(r"f\d+e(\d+)m(\d+)")
# What a rounding to as many bits is called.
_ROUNDINGS = "f64 f32 f16 bf16 f8e4m3fn f8e3m4 f8e5m2 f8e8m0fnu f4e2m1fn".split()


class Numbers(NamedTuple):
    """A set of numbers, by the bits that they need.

    Args:
        exponent: bits of the exponent.
        mantissa: bits behind the leading one.
        name: of a dtype that holds them."""

    exponent: int
    mantissa: int
    name: str

    def are_in(self, other: "Numbers") -> bool:
        """Whether the other set has all of these."""
        return self.exponent <= other.exponent and self.mantissa <= other.mantissa


NONE = Numbers(0, 0, "")
"""The empty set: what a value holds of which nothing is known, such as a scalar."""


@lru_cache
def of_dtype(dtype: str) -> Numbers:
    """The numbers of a dtype, which is given in XLA's words."""
    if found := _IN_NAME.match(dtype):
        exponent, mantissa = map(int, found.groups())
    else:
        exponent, mantissa = _BITS.get(dtype, (64, 64))
    return Numbers(exponent, mantissa, full_name(dtype))


def bits_needed(numbers: Numbers) -> int:
    """The bits of the smallest dtype that holds some numbers."""
    held = (Shape(d).bits for d in _ROUNDINGS if numbers.are_in(of_dtype(d)))
    return min(held, default=64)


def union(sets: Iterable[Numbers]) -> Numbers:
    """The largest of some sets; float32 if none of them contains the others."""
    found = NONE
    for one in sets:
        if found.are_in(one):
            found = one
        elif not one.are_in(found):
            found = of_dtype("f32")
    return found


def rounded(numbers: Numbers, to: Numbers) -> Numbers:
    """What numbers become by rounding; float16's in bfloat16 are those of both."""
    if numbers.are_in(to):
        return numbers
    if to.are_in(numbers):
        return to
    exponent = min(numbers.exponent, to.exponent)
    mantissa = min(numbers.mantissa, to.mantissa)
    return Numbers(exponent, mantissa, f"e{exponent}m{mantissa}")


ROUNDS = frozenset({"convert", "reduce-precision"})
"""Instructions that round their operand."""

# Instructions that choose among the numbers of their operands, or change a sign.
_MOVES = frozenset(
    "bitcast reshape transpose copy broadcast slice dynamic-slice reverse gather "
    "negate abs all-gather all-to-all collective-permute collective-broadcast "
    "all-gather-start collective-permute-start copy-start dynamic-reshape "
    "slice-start".split()
)
_CHOICES = frozenset("concatenate maximum minimum clamp sort".split())
# Rounded before or after these, numbers are the same.
_KEEPS_ROUNDING = _MOVES | _CHOICES | {"dynamic-update-slice", "pad", "select"}


def numbers(value: Value, constants: bool = True) -> Numbers:
    """The numbers that a value can hold, which may be fewer than its dtype has.

    Args:
        value: of a program.
        constants: whether a constant array counts as holding all numbers of its dtype.
            Otherwise it counts as `NONE`, as scalar constants always do."""
    found = NONE
    seen: set[tuple[Value, Numbers]] = set()
    pending = [(value, of_dtype("any"))]
    while pending:  # each with what it is rounded to on the way
        value, limit = one = pending.pop()
        if one in seen:
            continue
        seen.add(one)
        before = handed_on(value)
        if before is None:
            limit = rounded(_own(value), limit)
            before = _chosen(value, constants)
        if before is None:
            found = union([found, limit])
        else:
            pending += ((earlier, limit) for earlier in before)
    return found


def _own(value: Value) -> Numbers:
    """The numbers of the dtype of a value, or those that it is rounded to."""
    (node, path), one = value, value.node.one
    if one.opcode == "reduce-precision":
        return rounding_of(node)
    if path in one.paths:
        return of_dtype(one.shapes[one.paths.index(path)].dtype)
    i = min(path[0], len(one.shapes) - 1) if path else 0
    return of_dtype(one.shapes[i].dtype)


def _chosen(value: Value, constants: bool) -> list[Value] | None:
    """The values whose numbers an instruction gives again; None if it computes."""
    (node, path), one = value, value.node.one
    match one.opcode:
        case "constant":
            return None if constants and one.shape.elements > 1 else []
        case "convert" | "reduce-precision":
            chosen = (0,)
        case "select":
            chosen = (1, 2)
        case "reduce" | "reduce-window" if chooses(node):
            chosen = (0,)
        case "multiply" | "divide" if _is_one(node.operand(1)):  # a mean of 1 number
            chosen = (0,)
        case "scatter" if chooses(node):
            chosen = (0, 2)
        case "topk" if not path or path[0] == 0:
            chosen = (0,)
        case "sort" if path:
            chosen = (path[0],)
        case "dynamic-update-slice" | "pad":
            chosen = (0, 1)
        case opcode if opcode in _MOVES:  # a collective may move several arrays
            chosen = (path[0] - first_result(one),) if path else (0,)
        case opcode if opcode in _CHOICES:
            chosen = range(len(one.operands))
        case _:
            return None
    return [Value(node.operand(i)) for i in chosen]


def _is_one(node: Node) -> bool:
    while node.one.opcode in ("bitcast", "broadcast", "convert", "reshape"):
        node = node.operand(0)
    return node.one.opcode == "constant" and node.one.literal == "1"


def combines_by(node: Node) -> set[str]:
    """The opcodes by which a reduction or a scatter combines two numbers."""
    computations = node.body.module.computations
    bodies = [computations.get(name, {}) for name in node.one.called("to_apply")]
    return {one.opcode for body in bodies for one in body.values()}


def adds(node: Node) -> bool:
    """Whether a reduction or a scatter adds up numbers.

    The sum over an axis of length 1 adds up nothing."""
    one = node.one
    if "add" not in combines_by(node):
        return False
    if one.opcode == "reduce":
        return node.operand(0).one.shape.elements != one.shape.elements
    size = re.search(r"window={size=([\dx]+)", one.attributes)
    return one.opcode == "scatter" or size is None or set(size[1]) != set("1x")


def chooses(node: Node) -> bool:
    """Whether a reduction or a scatter gives numbers of its operands again."""
    combined = combines_by(node) - {"parameter", "tuple"}
    return not adds(node) and combined <= {"maximum", "minimum", "add"}


def rounding_of(node: Node) -> Numbers:
    """What an instruction rounds to, if it rounds."""
    one = node.one
    if one.opcode == "convert":
        return of_dtype(one.shape.dtype)
    exponent, mantissa = (
        one.number(f"{key}_bits") or 0 for key in ("exponent", "mantissa")
    )
    for known in map(of_dtype, _ROUNDINGS):
        if known[:2] == (exponent, mantissa):
            return known
    return Numbers(exponent, mantissa, f"e{exponent}m{mantissa}")


def _keeps_rounding(node: Node) -> bool:
    """Whether rounding its result is rounding its operands."""
    one = node.one
    is_choice = one.opcode in ("reduce", "reduce-window") and chooses(node)
    return is_choice or (one.opcode in _KEEPS_ROUNDING and bool(one.shapes))


def numbers_read(
    value: Value, limit: Callable[[Node], Numbers | None] | None = None
) -> Numbers:
    """The numbers that are left of a result after all of its readers have rounded it.

    XLA may round where a result is made instead of where it is read.

    Args:
        value: the result.
        limit: what a reader that computes rounds its operands to, if it does."""
    own = _own(value)
    found: list[Numbers] = []
    seen: set[tuple[Value, Numbers]] = set()
    pending = [(value, own)]
    while pending:  # each with what it is rounded to on the way
        value, left = one = pending.pop()
        if one in seen:
            continue
        seen.add(one)
        for reader in read_by(value):
            is_result = reader is value.node and reader.one.is_root
            if is_result and reader.body.caller is None:  # of the program
                found.append(left)
            elif reader.one.opcode in ROUNDS:
                found.append(rounded(left, rounding_of(reader)))
            elif _keeps_rounding(reader):
                after = Value(reader)  # which may round, too, on TPUs
                pending.append((after, rounded(left, _own(after))))
            elif limit is not None and (rounding := limit(reader)) is not None:
                found.append(rounded(left, rounding))
            elif left == own:
                return own
            else:
                found.append(left)
    return rounded(own, union(found)) if found else own
