"""Sets of primitives by what is true of them, as the table has it."""

import math
from typing import Any

import jax.numpy as jnp

from .._jax import Atom, Eqn, Literal
from .contractions import is_contraction
from .table import Kind, those

CONTRACTIONS = those(lambda row: row.kind == Kind.CONTRACTION)
"""Primitives that multiply and add up; see `contractions` for when they do."""

FIXED = those(lambda row: row.fixed)
"""Primitives that no rule can lower: they have no other kernel or carry code."""

VIEWS = those(lambda row: row.view)
"""Primitives that only show their operand in another way, or in another dtype."""

WHOLE_VIEWS = those(lambda row: row.view and row.whole and not row.identity)
"""Views of all numbers of an operand."""

MOVING_VIEWS = those(lambda row: row.view and row.moves)
"""Views that leave the dtype as it is."""

PART_VIEWS = those(lambda row: row.view and row.moves and not row.whole)
"""Views of some numbers of an operand."""

MOVES = those(lambda row: row.moves)
"""Primitives whose results hold numbers of their operands, and no others."""

FANNING_OUT = those(lambda row: row.fans_out)
"""Primitives whose transposes are sums, which add up in the dtype that was moved."""

REPEATING = those(lambda row: row.repeats)
"""Primitives that may show one number of an operand many times in one result."""

IDENTITIES = those(lambda row: row.identity)
"""Primitives that hand on their operands as they are."""

LINEAR = those(lambda row: row.linear)
"""Primitives whose derivative reads none of their float operands."""

KEEPING_INPUTS = those(lambda row: row.keeps_inputs)
"""Primitives whose derivative is made of their operands, not of their result."""

EXTREMES = those(lambda row: row.kind == Kind.EXTREME)
"""Primitives that select by size: their derivatives jump, and their results do not."""

REDUCTIONS = those(lambda row: row.reduces)
"""Primitives that make one number of many."""

RANKING = those(lambda row: row.ranks)
"""Primitives that choose by size: a rounding may change what they choose."""

JUMPING = EXTREMES | those(lambda row: row.kind in (Kind.CHOICE, Kind.SORT))
"""Primitives of which the result or the derivative jumps."""

STEEP = those(lambda row: row.steep)
"""Primitives that have poles or jump; see `steep_operands`."""

SATURATING = those(lambda row: row.saturates)
"""Primitives that level off for large operands."""

LOOKUPS = those(lambda row: row.looks_up)
"""Primitives that pick from an operand by numbers that may be data."""

BROADCASTING = those(lambda row: row.broadcasts)
"""Primitives that repeat operands along their axes of size 1."""

ADDING = those(lambda row: row.adds)
"""Primitives that make sums of their operands' numbers."""

ASKING_SIGNS = those(lambda row: row.asks_sign)
"""Primitives of two operands that ask for a sign, where one of them is 0."""

PLACING = those(lambda row: row.places)
"""Primitives that say where their operand lies. A parameter is cast before, once."""

SUMMED_BACK = those(lambda row: row.summed_back)
"""Primitives that hand the same numbers to several devices."""

GATHERING = those(lambda row: row.gathers)
"""Primitives that make an array whole of which each device has a part."""

LOCAL = those(lambda row: row.local)
"""Primitives that name an axis of devices, and make no device wait for another."""

EACH_ALONE = those(lambda row: row.kind in (Kind.SEVERAL, Kind.SUM_OVER_DEVICES))
"""Primitives that may have many operands, and make one result of each."""

COLLECTIVES = EACH_ALONE | those(lambda row: row.kind == Kind.SENDING)
"""Primitives that may concern several devices."""

CHEAP = those(lambda row: row.cheap)
"""Primitives that cost no more to run twice than their results cost to keep."""


def may_repeat(name: str, params: dict[str, Any]) -> bool:
    """Whether a result of a primitive may show one number of an operand many times."""
    if name not in REPEATING:
        return False
    windows, strides = (params.get(f"window_{x}") for x in ("dimensions", "strides"))
    if windows is None or strides is None:
        return True
    return any(size > step for size, step in zip(windows, strides, strict=True))


def steep_operands(eqn: Eqn) -> list[int]:
    """The operands of an equation in which it, or its derivative, has a pole or jumps.

    A comparison jumps where its operands are equal. If one is 0, it asks for a sign,
    which is kept."""
    name, operands = eqn.primitive.name, eqn.invars
    if name not in STEEP or (name == "integer_pow" and eqn.params["y"] > 0):
        return []
    if name == "convert_element_type" and not _is_cut_off(eqn):
        return []
    if name in ASKING_SIGNS and any(map(_is_zero_or_inf, operands)):
        return []
    if name == "ne" and operands[0] is operands[1]:
        return []  # asks for NaN
    if name in ("div", "pow"):
        return [1] if name == "div" else [0]
    return [*range(len(operands))]


def jumps(eqn: Eqn) -> bool:
    """Whether the result of an equation, or its derivative, jumps."""
    return eqn.primitive.name in JUMPING or _is_cut_off(eqn)


def _is_cut_off(eqn: Eqn) -> bool:
    """Whether an equation makes integers of floats, but for truth values."""
    if eqn.primitive.name != "convert_element_type":
        return False
    (old,), new = eqn.invars, eqn.params["new_dtype"]
    is_float = jnp.issubdtype(old.aval.dtype, jnp.floating)
    return is_float and jnp.issubdtype(new, jnp.integer)


def _is_zero_or_inf(atom: Atom) -> bool:
    return isinstance(atom, Literal) and (atom.val == 0 or abs(atom.val) == math.inf)


_MANY = 16


def is_cheap(eqn: Eqn) -> bool:
    """Whether an equation costs no more to run twice than its results cost to keep."""
    if eqn.primitive.name not in CONTRACTIONS:
        return eqn.primitive.name in CHEAP
    return not is_contraction(eqn.params, [atom.aval for atom in eqn.invars])


def is_statistic(eqn: Eqn) -> bool:
    """Whether an equation makes one number of many, as the mean of a row is.

    It takes a pass over an array to make that again, and next to nothing to keep."""
    if eqn.primitive.name not in REDUCTIONS:
        return False
    shape = eqn.invars[0].aval.shape
    count = math.prod(shape[axis] for axis in eqn.params["axes"])
    return not isinstance(count, int) or count >= _MANY  # a symbolic one is long
