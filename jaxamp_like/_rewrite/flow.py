"""What may depend on floats that are computed low, by data flow and control flow."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from .._dtypes import is_float
from .._jax import Eqn, Jaxpr, Literal, raw, scopes, subjaxprs
from .._primitives import RANKING
from .._structural import Body, Scope
from .reach import LOW, Reach, ReachAnalysis, union


@dataclass(eq=False)
class Flow(ReachAnalysis):
    """Which inputs of a program reach its results, and whether anything low does.

    Args:
        handler: gives the handler of a structural equation that is rewritten, else
            `None`.
        makes_low: whether an equation computes low by itself.
        by_size: whether floats only reach what depends on how large they are."""

    makes_low: Callable[[Eqn, Scope], bool]
    by_size: bool = False

    follows_control = True

    def of_leaf(
        self, eqn: Eqn, scope: Scope, operands: Sequence[Reach]
    ) -> Sequence[Reach]:
        reach = union(operands) | LOW * self.is_low(eqn, scope)
        places = range(len(eqn.outvars))
        return [0 if self.cuts_flow_at(eqn, i) else reach for i in places]

    def condition(self, eqn: Eqn, bodies: Sequence[Body], scope: Scope) -> Reach:
        """What reaches the condition of a loop, through any number of iterations."""
        return self.control(
            bodies, scope, self.of_previous_iterations(eqn, bodies, scope)
        )

    def is_low(self, eqn: Eqn, scope: Scope) -> bool:
        """Whether an equation, or one of a program that it holds, computes low."""
        if self.handler(eqn, scope) is None:
            return self.makes_low(eqn, scope)
        return any(self._has_low(sub, scope) for sub in subjaxprs(eqn.params))

    def _has_low(self, jaxpr: Jaxpr, scope: Scope) -> bool:
        return any(self.is_low(eqn, scope + scopes(eqn)) for eqn in raw(jaxpr).eqns)

    def cuts_flow_at(self, eqn: Eqn, i: int) -> bool:
        """Whether a result counts as made of nothing: it tells no size of a float.

        It may tell whether one is finite or NaN (`x != x`), or which is largest."""
        name = eqn.primitive.name
        if not self.by_size:
            return False
        if name in ("eq", "ne"):
            left, right = eqn.invars
            return left is right or any(map(_is_infinite, eqn.invars))
        return name == "is_finite" or (name in RANKING and i in exact_results(eqn))


def exact_results(eqn: Eqn) -> frozenset[int]:
    """Results that are no floats, and so may count steps or say that they are done."""
    dtypes = (getattr(v.aval, "dtype", None) for v in eqn.outvars)
    return frozenset(i for i, d in enumerate(dtypes) if d is None or not is_float(d))


def _is_infinite(atom: Any) -> bool:
    if not isinstance(atom, Literal) or np.ndim(atom.val) != 0:
        return False
    aval: Any = atom.aval
    return is_float(aval.dtype) and np.isinf(float(atom.val))
