"""Parses HLO: the program that JAX hands to XLA, and the one that XLA compiles.

Both are written in one language (https://openxla.org/xla/hlo_to_thunks). The compiled
one has a percent sign before each name, the other one has none."""

import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from math import prod
from typing import Any

_NAME = r"%?([A-Za-z_][\w.-]*)"
_HEADER = re.compile(rf"(ENTRY )?{_NAME} (?:\(.*)?{{$")
_DEFINITION = re.compile(rf"\s+(ROOT )?{_NAME} = (.*)$")
_OPCODE = re.compile(r"\s*([\w-]+)\(")
# A whole line, if neither the shape nor the operands hold parentheses: most lines.
_PLAIN = re.compile(rf"\s+(ROOT )?{_NAME} = ([^\s(]+) ([\w-]+)\(([^()]*)\)(.*)$")
_OPERANDS = re.compile(r"%?[\w.-]+(?:, %?[\w.-]+)*$")  # and nothing else
_CALLED = re.compile(r"%?[\w.-]+|{[^}]*}")
_SHAPE = re.compile(r"([a-z]\w*)\[([^\]]*)\]")
_OP_NAME = 'op_name="'
_METADATA = re.compile(r', metadata={(?:[^{}"]|"[^"]*")*}')
# An instruction has `algorithm=dot_...`, a library's call `"algorithm":"ALG_DOT_..."`.
_ALGORITHM = re.compile(r'\balgorithm"?[=:]"?(?:alg_)?dot_(\w+)', re.IGNORECASE)
_FLOAT = re.compile(r"(b?f\d+)(\w*)$")
_ROW = re.compile(r"(\d+) (.*)$")
_LITERALS = frozenset({"constant", "parameter"})
_TABLES = ("FileNames", "FunctionNames", "FileLocations", "StackFrames")


def is_float(dtype: str) -> bool:
    """Whether XLA's name is that of a floating dtype, such as `bf16` or `f8e4m3fn`."""
    return _FLOAT.match(dtype) is not None


@lru_cache
def full_name(dtype: str) -> str:
    """NumPy's name of a floating dtype, and XLA's of all else."""
    found = _FLOAT.match(dtype)
    if found is None:
        return dtype
    kind, form = found.groups()
    return kind.replace("f", "float") + (f"_{form}" if form else "")


@dataclass(frozen=True)
class Shape:
    """The dtype and the dimensions of an array, in XLA's words."""

    dtype: str
    dims: tuple[int, ...] = ()

    @property
    def bits(self) -> int:
        """Of one element; a token or an opaque handle has none."""
        found = re.match(r"[a-z]+?(\d+)", self.dtype)
        return int(found[1]) if found else 8 * (self.dtype == "pred")

    @cached_property
    def is_float(self) -> bool:
        return is_float(self.dtype)

    @cached_property
    def elements(self) -> int:
        return prod(self.dims)

    @cached_property
    def size_in_bytes(self) -> int:
        return self.elements * self.bits // 8


@dataclass(eq=False)
class Instruction:
    """One line of HLO.

    Args:
        name: without the percent sign.
        opcode: such as `fusion`.
        shapes: of the result; those of a tuple one after the other.
        operands: names of other instructions of the same computation.
        attributes: the rest of the line, unparsed.
        is_root: whether it is the computation's result.
        literal: the value of a constant and the number of a parameter, as written.
        nested: the shapes as written, if the result is a tuple that holds a tuple."""

    name: str
    opcode: str
    shapes: tuple[Shape, ...]
    operands: tuple[str, ...] = ()
    attributes: str = ""
    is_root: bool = False
    literal: str = ""
    nested: str = ""

    @cached_property
    def paths(self) -> tuple[tuple[int, ...], ...]:
        """Where each of `shapes` is in the result: `()` if it is the result."""
        if self.nested:
            return tuple(_leaves_of(self.nested))
        count = len(self.shapes)
        return tuple((i,) for i in range(count)) if count > 1 else ((),) * count

    @property
    def shape(self) -> Shape:
        return self.shapes[0] if self.shapes else Shape("token")

    @cached_property
    def largest(self) -> int:
        """Bytes of its largest result."""
        return max((shape.size_in_bytes for shape in self.shapes), default=0)

    def called(self, *keys: str) -> list[str]:
        """The computations named by an attribute, such as `calls`."""
        for key in keys:
            start = self.attributes.find(f" {key}=")
            if start >= 0:
                found = _CALLED.match(self.attributes, start + len(key) + 2)
                return re.findall(_NAME, found[0]) if found else []
        return []

    def number(self, key: str) -> int | None:
        """The number that an attribute such as `index` holds."""
        found = re.search(rf"\b{key}=(\d+)", self.attributes)
        return int(found[1]) if found else None

    @property
    def target(self) -> str:
        """What a custom call calls; "" of all else."""
        if self.opcode != "custom-call":
            return ""
        found = re.search(r'custom_call_target="([^"]*)"', self.attributes)
        return found[1] if found else ""

    @property
    def algorithm(self) -> str:
        """What the author chose for a contraction, as in "BF16_BF16_F32_X3"; or ""."""
        found = _ALGORITHM.search(self.attributes)
        return found[1].upper() if found else ""

    @property
    def settings(self) -> str:
        """The attributes that say what it computes, and not where it comes from."""
        return _METADATA.sub("", self.attributes)

    @cached_property
    def op_name(self) -> str:
        """JAX's name stack and primitive, of the equation that it was made for."""
        text = self.attributes
        start = text.find(_OP_NAME)
        if start < 0:
            return ""
        start += len(_OP_NAME)
        end = text.find('"', start)
        while text[end - 1] == "\\":  # a quotation mark in the name
            end = text.find('"', end + 1)
        return text[start:end].replace('\\"', '"')


# Every instruction comes after its operands.
Computation = dict[str, Instruction]


@dataclass(frozen=True)
class Module:
    """A program.

    Args:
        computations: by their names.
        entry: the name of the one that is run.
        name: of the program, as in `jit_step`.
        tables: of file names, functions, locations and stack frames, by number; older
            versions of XLA write files and lines beside the instructions instead."""

    computations: dict[str, Computation]
    entry: str
    name: str = ""
    tables: dict[str, dict[int, str]] = field(default_factory=dict)

    def frames(self, one: Instruction) -> list[tuple[str, int]]:
        """The files and lines that led to an instruction, the innermost first."""
        if (line := one.number("source_line")) is not None:
            file = re.search(r'source_file="([^"]*)"', one.attributes)
            return [(file[1] if file else "", line)]
        found, seen = [], set()
        frame = one.number("stack_frame_id")
        while frame in self._frames and frame not in seen:
            seen.add(frame)
            location, frame = self._frames[frame]
            found.append(location)
        return found

    @cached_property
    def _frames(self) -> dict[int, tuple[tuple[str, int], int]]:
        """By number, the location of a stack frame, and the number of its parent."""
        files, _, locations, frames = (self.tables.get(name, {}) for name in _TABLES)

        def location(number: int) -> tuple[str, int]:
            text = locations.get(number, "")
            file = files.get(_field(text, "file_name_id"), '""')
            return file.strip('"'), _field(text, "line")

        # `parent_frame_id` is one more than the parent's number; 1 stands for none.
        return {
            number: (
                location(_field(text, "file_location_id")),
                _field(text, "parent_frame_id") - 1,
            )
            for number, text in frames.items()
        }


def _field(text: str, key: str) -> int:
    found = re.search(rf"\b{key}=(\d+)", text)
    return int(found[1]) if found else 0


def until_closed(text: str, start: int) -> int:
    """The position behind the parenthesis that closes the one at `start`."""
    end = text.find(")", start)
    if text.find("(", start + 1, end) < 0 <= end:  # nothing is nested
        return end + 1
    depth = 0
    for i in range(start, len(text)):
        depth += (text[i] == "(") - (text[i] == ")")
        if depth == 0:
            return i + 1
    raise ValueError(f"unbalanced parentheses in HLO: {text}")


@lru_cache(maxsize=4096)
def parse_shapes(text: str) -> tuple[Shape, ...]:
    found = _SHAPE.findall(text)
    if any("?" in dims for _, dims in found):
        raise ValueError(
            "The program has arrays whose sizes are not known before XLA compiles it, "
            "such as those of an exported function with symbolic sizes "
            "(`jax.export.symbolic_shape`). Export it for the sizes that it is called "
            "with, or certify the function that was exported."
        )
    return tuple(
        # A dimension that may be smaller at run time is written as `<=8`.
        Shape(dtype, tuple(int(dim) for dim in re.findall(r"\d+", dims)))
        for dtype, dims in found
    )


def parse_instruction(line: str) -> Instruction | None:
    found = _PLAIN.match(line)
    parts = found.groups() if found else _parts(line)
    if parts is None:
        return None
    root, name, shapes, opcode, inner, attributes = parts
    is_literal = opcode in _LITERALS
    return Instruction(
        name=name,
        opcode=opcode,
        shapes=parse_shapes(shapes),
        operands=() if is_literal else _operands(inner),
        attributes=attributes,
        is_root=root is not None,
        literal=inner if is_literal else "",
        nested=shapes if _NESTED.search(shapes) else "",
    )


_LAYOUT = re.compile(r"\{[^}]*\}|/\*.*?\*/")
_NESTED = re.compile(r"\(\(|, \(|\*/\(")


def _leaves_of(text: str) -> Iterator[tuple[int, ...]]:
    """The paths of the arrays in a nested tuple, as XLA writes it."""
    path: list[int] = []
    for found in re.finditer(r"[(),]|\w+\[", _LAYOUT.sub("", text)):
        match found[0]:
            case "(":
                path.append(0)
            case ")":
                path.pop()
            case ",":
                path[-1] += 1
            case _:
                yield tuple(path)


def _parts(line: str) -> tuple[Any, ...] | None:
    """The parts of a line, as `_PLAIN` has them, with parentheses in any of them."""
    found = _DEFINITION.match(line)
    if found is None:
        return None
    root, name, text = found.groups()
    end = until_closed(text, 0) if text.startswith("(") else text.index(" ")
    opcode = _OPCODE.match(text, end)
    if opcode is None:
        raise ValueError(f"no opcode in HLO: {line}")
    close = until_closed(text, opcode.end() - 1)
    inner = text[opcode.end() : close - 1]
    return root, name, text[:end], opcode[1], inner, text[close:]


def _operands(text: str) -> tuple[str, ...]:
    if "/*" in text:  # comments, as in `/*index=5*/`
        text = re.sub(r"/\*.*?\*/", "", text)
    if _OPERANDS.match(text):
        return tuple(text.replace("%", "").split(", "))
    if "%" in text:  # some versions write the shapes of operands, too
        return tuple(re.findall(r"%([\w.-]+)", text))
    return tuple(re.findall(_NAME, text))


def parse(text: str) -> Module:
    """Parses a program: `compiled.as_text()` or `lowered.as_text(dialect="hlo")`.

    Raises:
        ValueError: the text is no HLO."""
    computations: dict[str, Computation] = {}
    tables: dict[str, dict[int, str]] = {}
    current: Computation = {}
    table: dict[int, str] = {}
    entry, name = "", ""
    for line in text.splitlines():
        if line.startswith(" "):
            if instruction := parse_instruction(line):
                current[instruction.name] = instruction
        elif found := re.match(r"HloModule ([^\s,]+)", line):
            name = found[1]
        elif header := _HEADER.match(line):
            current = computations[header[2]] = {}
            entry = header[2] if header[1] else entry
        elif line in _TABLES:
            table = tables[line] = {}
        elif row := _ROW.match(line):
            table[int(row[1])] = row[2]
    if not entry:
        raise ValueError("HLO without an entry computation")
    return Module(computations, entry, name, tables)


def trip_count(module: Module, one: Instruction, scope: Computation) -> int | None:
    """How often a loop runs, if XLA says so or its condition counts up to a constant.

    Args:
        module: the program.
        one: the loop.
        scope: the computation that it is in."""
    found = re.search(r'"known_trip_count":\{"n":"(\d+)"\}', one.attributes)
    if found is not None:
        return int(found[1])
    (body,) = (module.computations[name] for name in one.called("body"))
    for name in one.called("condition"):
        condition = module.computations.get(name, {})
        for root in (each for each in condition.values() if each.is_root):
            if "direction=LT" not in root.attributes:
                continue
            counter, bound = (condition[name] for name in root.operands)
            index = counter.number("index") if counter.operands else None
            begins, steps = _begins(one, scope, index), _steps(body, index)
            if bound.literal.isdigit() and begins is not None and steps == 1:
                return max(int(bound.literal) - begins, 0)
    return None


def _begins(one: Instruction, scope: Computation, index: int | None) -> int | None:
    """The constant that a carry of a loop begins with."""
    carries = scope.get(one.operands[0])
    if index is None or carries is None or carries.opcode != "tuple":
        return None
    first = _copied(scope[carries.operands[index]], scope)
    return int(first.literal) if re.fullmatch(r"-?\d+", first.literal) else None


def _copied(one: Instruction, scope: Computation) -> Instruction:
    """What an instruction copies, or else itself."""
    while one.opcode in ("copy", "bitcast"):
        one = scope[one.operands[0]]
    return one


def _steps(body: Computation, index: int | None) -> int | None:
    """The constant that the body of a loop adds to a carry."""
    root = next(one for one in body.values() if one.is_root)
    if index is None or root.opcode != "tuple":
        return None
    new = _copied(body[root.operands[index]], body)
    if new.opcode != "add":
        return None
    terms = [_copied(body[name], body) for name in new.operands]
    is_carry = any(term.number("index") == index for term in terms if term.operands)
    literals = [term.literal for term in terms if term.opcode == "constant"]
    is_number = bool(literals) and literals[0].isdigit()
    return int(literals[0]) if is_carry and is_number else None


# ---------------------------------------------------------------- FLOPs of contractions


def dims_of(attributes: str, key: str) -> tuple[int, ...]:
    """The numbers in `key={0,1}` or, as library calls have it, in `"key":["0","1"]`."""
    found = re.search(rf'\b{key}"?[=:][{{\[]([^}}\]]*)', attributes)
    return tuple(int(dim) for dim in re.findall(r"\d+", found[1])) if found else ()


def dot_flops(out: Shape, lhs: Shape, attributes: str) -> int:
    contracted = dims_of(attributes, "lhs_contracting_dim(?:ension)?s")
    return 2 * out.elements * prod(lhs.dims[dim] for dim in contracted)


def conv_flops(kernel: Shape, out: Shape, attributes: str) -> int:
    """Multiply-adds, times two, of a forward convolution or of either gradient.

    Each output position of the forward convolution meets the whole kernel once, and
    its gradients pair up the same elements again."""
    found = re.search(r"dim_labels=\w+_(\w+)->", attributes)
    if found is None:
        raise ValueError(f"no dim_labels in HLO: {attributes}")
    features = kernel.dims[found[1].index("o")]
    return 2 * out.elements * kernel.elements // max(features, 1)


def product_flops(one: Instruction, lhs: Shape, rhs: Shape) -> int:
    """FLOPs of a matrix product that is written as a convolution, as for TPUs.

    Axes of a batch become axes of a window, most of which lies on padding and holes."""
    found = re.search(r"dim_labels=(\w+)_(\w+)->(\w+)", one.attributes)
    if found is None:
        raise ValueError(f"no dim_labels in HLO: {one.attributes}")
    of_lhs, of_rhs, of_out = found.groups()
    window = re.search(r"window={([^}]*)}", one.attributes)
    fields = dict(each.split("=") for each in window[1].split()) if window else {}
    count = one.shape.elements * rhs.dims[of_rhs.index("i")]
    for axis in filter(str.isdigit, of_out):
        sizes = {
            key: fields[key].split("x")[int(axis)] if key in fields else default
            for key, default in _WINDOW.items()
        }
        before = int(sizes.pop("pad").split("_")[0])
        size, stride, lhs_dilate, rhs_dilate = map(int, sizes.values())
        end = (lhs.dims[of_lhs.index(axis)] - 1) * lhs_dilate + 1
        length = one.shape.dims[of_out.index(axis)]
        places = (
            out * stride + tap * rhs_dilate - before
            for out in range(length)
            for tap in range(size)
        )
        hits = sum(0 <= at < end and at % lhs_dilate == 0 for at in places)
        count = count * hits // length
    return 2 * count


_WINDOW = {
    "pad": "0_0",
    "size": "1",
    "stride": "1",
    "lhs_dilate": "1",
    "rhs_dilate": "1",
}
_CONTRACTIONS = frozenset({"dot", "ragged-dot", "convolution", "custom-call"})
_LIBRARY = re.compile(r"__(\w+)\$(\w*)")
_BLOCK_SCALED = frozenset({"blockScaledDot", "block_scaled_dot"})
_TILE = 128  # rows of a block-scaled operand that the library takes at once


def contraction_flops(one: Instruction, scope: Computation) -> int:
    """FLOPs of a contraction; zero for all else.

    Args:
        one: an instruction of XLA, or a call of a library of NVIDIA's or Intel's.
        scope: the computation that it is in."""
    if one.opcode not in _CONTRACTIONS:
        return 0
    target = _LIBRARY.match(one.target)
    library, routine = target.groups() if target else ("", "")
    is_product = is_block_scaled(one) or (library, routine) == ("onednn", "matmul")
    is_call = library == "cublas" and routine.startswith(("gemm", "lt"))
    is_dot = one.opcode in ("dot", "ragged-dot") or is_call
    is_conv = one.opcode == "convolution" or routine.startswith("conv")
    if not is_dot and not is_conv and not is_product:
        return 0
    lhs, rhs = (scope[name].shape for name in one.operands[:2])
    if is_product:  # the last axis is summed over
        return 2 * one.shape.elements * lhs.dims[-1]
    if is_dot:
        return dot_flops(one.shape, lhs, one.attributes)
    if routine.startswith("convBackwardInput"):
        return conv_flops(rhs, lhs, one.attributes)
    if routine.startswith("convBackwardFilter"):
        return conv_flops(one.shape, rhs, one.attributes)
    if one.op_name.endswith("/dot_general"):
        return product_flops(one, lhs, rhs)
    return conv_flops(rhs, one.shape, one.attributes)


def is_block_scaled(one: Instruction) -> bool:
    """Whether it is a contraction of operands in blocks, each with its own scale."""
    target = _LIBRARY.match(one.target)
    return target is not None and target[2] in _BLOCK_SCALED


def tiled_flops(one: Instruction, flops: int) -> int:
    """The FLOPs of a contraction after XLA has padded its operands for a library.

    Rows of block-scaled operands are padded to whole tiles, those of others are not."""
    if not is_block_scaled(one):
        return flops
    rows = one.shape.dims[1:]  # of both operands; the first axis is the batch
    return flops * prod(-(-n // _TILE) * _TILE for n in rows) // prod(rows)
