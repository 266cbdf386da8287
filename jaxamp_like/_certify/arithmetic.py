"""What a contraction multiplies, by its `precision` or its algorithm.

Matrix units round float32 operands, unless the precision `highest` is asked for: those
of GPUs to TF32, those of TPUs to bfloat16. With `high`, TPUs multiply in 3 passes, for
which each operand is split into 2 parts of bfloat16; in 6 passes it has 3 parts. The
smallest of the products of parts are left out."""

import re
from typing import Literal, NamedTuple

from .._hlo.graph import Node
from .._hlo.numbers import Numbers, of_dtype
from .._hlo.text import contraction_flops

Platform = Literal["cpu", "gpu", "tpu"]


class Arithmetic(NamedTuple):
    """How a contraction rounds its operands.

    Args:
        limit: the numbers that they are rounded to; None if they are read as they are.
        asks: whether the author asked for it, rather than allowed it.
        name: for reports."""

    limit: Numbers | None = None
    asks: bool = False
    name: str = ""


_BF16 = of_dtype("bf16")
_TF32 = Numbers(8, 10, "tf32")
_IN_THREE = Numbers(8, 15, "bfloat16 in 3 passes")
_IN_SIX = Numbers(8, 23, "bfloat16 in 6 passes")
_TF32_IN_THREE = Numbers(8, 21, "tf32 in 3 passes")
_ALGORITHMS = {
    "TF32": _TF32,
    "TF32_X3": _TF32_IN_THREE,
    "BF16": _BF16,
    "BF16_X3": _IN_THREE,
    "BF16_X6": _IN_SIX,
    "BF16_X9": of_dtype("f32"),
    "F16": of_dtype("f16"),
    "F32": of_dtype("f32"),
    "F64": of_dtype("f64"),
}
# From the lowest to the highest, and what units round float32 to.
_PRECISIONS = ("default", "high", "highest")
OF_UNITS: dict[Platform, dict[str, Arithmetic]] = {
    "tpu": {
        "default": Arithmetic(_BF16, name="one bfloat16 pass"),
        "high": Arithmetic(_IN_THREE, name="three bfloat16 passes"),
    },
    "gpu": {
        "default": Arithmetic(_TF32, name="tf32"),
        "high": Arithmetic(_TF32, name="tf32"),
    },
    "cpu": {},
}


def arithmetic(node: Node, platform: Platform) -> Arithmetic:
    """How a contraction of float32 or complex numbers rounds its operands."""
    one = node.one
    dtypes = {node.operand(i).one.shape.dtype for i in (0, 1)}
    found = re.match(r"(TF32|BF16|F16|F32|F64)_\w*?(_X\d)?$", one.algorithm)
    if found is not None:
        name = found[1] + (found[2] or "")
        return Arithmetic(_ALGORITHMS[name], True, name.lower())
    if not dtypes & {"f32", "c64"}:
        return Arithmetic()
    given = re.search(r'operand_precision"?[=:][{\[]([^}\]]*)', one.attributes)
    names = re.findall(r"\w+", given[1].lower()) if given else []
    known = (name for name in names if name in _PRECISIONS)
    precision = max(known, key=_PRECISIONS.index, default="default")
    return OF_UNITS[platform].get(precision, Arithmetic())


def rounding_of_unit(reader: Node, platform: Platform) -> Numbers | None:
    """What a matrix unit rounds the operands of a contraction to, if it does."""
    return arithmetic(reader, platform).limit if flops_of(reader) else None


def flops_of(node: Node) -> int:
    """The FLOPs of one run of a contraction; 0 for any other instruction."""
    return contraction_flops(node.one, node.body.computation)
