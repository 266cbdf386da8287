"""Which inputs of a program reach its results without passing a contraction.

A carry that reaches itself so, round its loop, adds up over the iterations what would
be lost in 16 bits: a residual stream, an optimizer's state, a sum of losses."""

from collections.abc import Sequence
from dataclasses import dataclass

from .._jax import Eqn
from .._structural import STRUCTURAL, Body, Scope
from .matching import Matching, stays_as_written
from .reach import Reach, ReachAnalysis, of_input, union


@dataclass(eq=False)
class Accumulators(ReachAnalysis):
    """Which inputs reach which results through no compute op, by a policy."""

    matching: Matching

    def of_leaf(
        self, eqn: Eqn, scope: Scope, operands: Sequence[Reach]
    ) -> Sequence[Reach]:
        match = self.matching.of_equation(eqn, scope)
        # What is pinned to its dtypes, such as a linear solve, ends a path as well.
        is_pinned = eqn.primitive.name in STRUCTURAL and not stays_as_written(match)
        reach = 0 if match.is_compute or is_pinned else union(operands)
        return [reach] * len(eqn.outvars)

    def must_stay_full(self, body: Body, scope: Scope) -> set[int]:
        """The carries, by input, that reach themselves through no compute op."""
        reach = self.fixed_point(body, scope)
        return {i for out, i in body.carries if reach[out] & of_input(i)}
