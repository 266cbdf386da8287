"""Blocks of equations that run equally often, with the rows of their tables."""

from dataclasses import dataclass, field
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from ..._jax import Eqn
from ..._primitives import ADDING
from .. import walk
from .compiled import Memory, measured
from .pairs import Pair
from .statistics import Table, combined, histograms, measure, no_row, tabulate

Path = tuple[int, ...]
Tables = dict[tuple[Path, int], Table]  # by path of the block and number of the part

PART = 32
"""How many equations a part of a table has, if a block's equations run one by one.

The code that makes a table is compiled once for all parts: to compile it for thousands
of equations at once would take minutes."""


class Loop(NamedTuple):
    """A loop around an equation."""

    reverse: bool
    length: int  # 0 if it is not known beforehand
    depth: int  # the length of the path of the loop's own equation


Loops = tuple[Loop, ...]


@dataclass(frozen=True)
class MeasuredEqn:
    """An equation that was measured.

    Args:
        eqn: the equation.
        at: what is around it.
        path: where it stands: the number of each equation around it, and of the
            program within that.
        loops: the loops around it, outermost first.
        written: the dtypes that its float results have as written.
        made: these results; in the program some are integers, in contractions of int8.
        reads: its operands that are floats as written."""

    eqn: Eqn
    at: walk.ReportContext
    path: Path
    loops: Loops
    written: tuple[str, ...]
    made: tuple[Any, ...]
    reads: tuple[Any, ...]

    @property
    def sizes(self) -> tuple[int, ...]:
        """How many elements the results have."""
        return tuple(v.aval.size for v in self.made)


@dataclass(eq=False)
class EquationBlock:
    """Equations that run equally often: the body of a loop, or all outside of loops.

    Args:
        path: where its program stands.
        loops: the loops around it.
        memory: holds the results of equations that are run one by one.
        compiled: whether the equations are traced and compiled together instead.
        axes: the manual mesh axes around it."""

    path: Path
    loops: Loops
    memory: Memory
    compiled: bool = False
    axes: tuple[Any, ...] = ()
    seen: list[MeasuredEqn] = field(default_factory=list)
    rows: list[Any] = field(default_factory=list)
    inputs: list[list[Any]] = field(default_factory=list)
    codes: list[Any] = field(default_factory=list)

    def measure(self, pair: Pair) -> Pair:
        """The pair, with its measurements if it is one of floats."""
        if pair.measured is not None or not pair.is_float:
            return pair
        if not self.compiled:
            return pair._replace(measured=measured(self.memory, pair))
        row, codes, _ = measure(jnp.asarray(pair.run), pair.true)
        return pair._replace(measured=(row, codes))

    def add(self, seen: MeasuredEqn, outs: list[Pair], inputs: list[Pair]) -> None:
        rows, codes = zip(*(out.measured for out in outs), strict=True)
        self.seen.append(seen)
        self.rows.append(combined(rows, seen.sizes))
        self.inputs.append([pair.measured[0] for pair in inputs])
        self.codes.append(codes[0] if len(codes) == 1 else jnp.concatenate(codes))
        if not self.compiled:  # at once, since the codes of all take much memory
            self.codes[-1] = _histogram(self.codes[-1])

    def tables(self) -> Tables:
        if not self.rows:
            return {}
        none = no_row()
        most = max(map(len, self.inputs))
        inputs = [_padded(rows, most, none) for rows in self.inputs]
        adds_up = [seen.eqn.primitive.name in ADDING for seen in self.seen]
        if self.compiled:
            histogram = histograms(self.codes)
            table = _table(self.rows, inputs, np.asarray(adds_up), histogram)
            return {(self.path, 0): table}
        found: Tables = {}
        for part, start in enumerate(range(0, len(self.rows), PART)):
            some = slice(start, start + PART)
            found[self.path, part] = _part_of_table(
                _padded(self.rows[some], PART, none),
                _padded(inputs[some], PART, [none] * most),
                np.asarray(_padded(adds_up[some], PART, False)),
                _padded(self.codes[some], PART, self.codes[0]),
            )
        return found


def _padded(items: list[Any], length: int, filler: Any) -> list[Any]:
    return [*items, *[filler] * (length - len(items))]


def _table(
    rows: list[Any], inputs: list[list[Any]], adds_up: Any, histogram: Any
) -> Table:
    each = [row for rows in inputs for row in rows]
    read = jnp.stack(each) if each else jnp.zeros((0, rows[0].size), rows[0].dtype)
    read = read.reshape(len(rows), -1, rows[0].size)
    return tabulate(jnp.stack(rows), read, adds_up, histogram)


@jax.jit
def _part_of_table(
    rows: list[Any], inputs: list[list[Any]], adds_up: Any, histogram: list[Any]
) -> Table:
    return _table(rows, inputs, adds_up, jnp.stack(histogram))


@jax.jit
def _histogram(codes: Any) -> Any:
    return histograms([codes])[0]


class Location(NamedTuple):
    """Where an equation stands, or a program."""

    at: walk.ReportContext
    path: Path
    block: EquationBlock

    def within(self, eqn: Eqn, number: int) -> "Location":
        """The same for the program of this number that the equation holds."""
        return Location(self.at.within(eqn), (*self.path, number), self.block)
