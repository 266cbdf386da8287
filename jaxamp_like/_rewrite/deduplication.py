"""Code that is the same but for its variables, as that of equal layers.

JAX traces, differentiates and transposes a function once for as long as it is the same
object. In a deep model the regions of all layers but the first cost little then."""

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, TypeVar

import numpy as np

from .._jax import Atom, Literal
from .._recording import is_recorded
from .._structural import Step

_T = TypeVar("_T")


@dataclass(eq=False)
class Deduplicated:
    """What was made of code, for other code that is the same."""

    _made: dict[Hashable, Any] = field(default_factory=dict)

    def __call__(self, code: Hashable, make: Callable[[], _T]) -> _T:
        """The result of `make`, or what was made before for equal `code`.

        To a report no two steps are the same: each carries a number of its own."""
        if is_recorded():
            return make()
        try:
            is_new = code not in self._made
        except TypeError:  # a parameter that has no hash
            return make()
        if is_new:
            self._made[code] = make()
        return self._made[code]


def code_of(
    steps: Sequence[Step],
    ins: Mapping[Any, Hashable],
    outs: Mapping[Any, Hashable] = MappingProxyType({}),
    results: Mapping[Any, Hashable] = MappingProxyType({}),
) -> Hashable:
    """Steps without the names of their variables.

    Args:
        steps: in order.
        ins: all variables that they read but don't make, with what matters of each.
        outs: those of their results that are used, with what matters of each.
        results: what matters of some results, used or not, beyond how they are made."""
    number = {v: i for i, v in enumerate(ins)}

    def place(atom: Atom) -> Hashable:
        if isinstance(atom, Literal):
            return atom.aval, np.asarray(atom.val).tobytes()  # 0.0 == -0.0, not so here
        return number[atom]

    lines = []
    for step in steps:
        operands, made = tuple(map(place, step.eqn.invars)), step.eqn.outvars
        number |= {v: len(number) + i for i, v in enumerate(made)}
        lines.append(
            (step.dedup_key, operands, tuple(results.get(v, ...) for v in made))
        )
    return (
        tuple((v.aval, known) for v, known in ins.items()),
        tuple(lines),
        tuple((number[v], known) for v, known in outs.items()),
    )
