"""Which inputs of a program reach its results uncrossed: through no compute op.

A carry that a path takes round its loop uncrossed adds up, iteration by iteration, what
would be lost in 16 bits: a residual stream, an optimizer's state, a sum of losses."""

from collections.abc import Sequence
from dataclasses import dataclass, field

from .._jax import Jaxpr, Literal, raw, scopes
from .._structural import Body, Scope
from .matching import Matching
from .memo import Memo
from .reach import Reach, around, through, union


@dataclass(eq=False)
class Carries:
    """What reaches what, in the programs that a policy is asked of."""

    matching: Matching
    _known: Memo = field(default_factory=Memo)

    def uncrossed(self, jaxpr: Jaxpr, scope: Scope) -> tuple[Reach, ...]:
        """For each result, the inputs that reach it without crossing a compute op."""
        known = self._known.of(jaxpr)
        if scope not in known:
            known[scope] = self._find_uncrossed(raw(jaxpr), scope)
        return known[scope]

    def _find_uncrossed(self, jaxpr: Jaxpr, scope: Scope) -> tuple[Reach, ...]:
        env = {v: 1 << i for i, v in enumerate(jaxpr.invars)}

        def read(atoms):
            return [0 if isinstance(x, Literal) else env.get(x, 0) for x in atoms]

        for eqn in jaxpr.eqns:
            inner_scope = scope + scopes(eqn)
            handler = self.matching.handler(eqn, inner_scope)
            if handler is not None:
                operands = read(eqn.invars)
                for body in handler.bodies(eqn):
                    given = [operands[i] for i in body.ins]
                    inner = self._around(body, inner_scope)
                    for out, reach in zip(body.outs, inner, strict=True):
                        if out is not None:
                            v = eqn.outvars[out]
                            env[v] = env.get(v, 0) | through(reach, given)
            elif not self.matching.found(eqn, inner_scope).is_compute:
                env |= dict.fromkeys(eqn.outvars, union(read(eqn.invars)))
        return tuple(read(jaxpr.outvars))

    def _around(self, body: Body, scope: Scope) -> Sequence[Reach]:
        """As `uncrossed`, for any number of iterations of the body's loop."""
        loop = tuple(body.loop)
        known = self._known.of(body.jaxpr)
        if (scope, loop) not in known:
            known[scope, loop] = around(self.uncrossed(body.jaxpr, scope), loop)
        return known[scope, loop]

    def must_stay_full(self, body: Body, scope: Scope) -> set[int]:
        """The carries (by input) that some path takes round the loop uncrossed."""
        reach = self._around(body, scope)
        return {i for out, i in body.loop if reach[out] >> i & 1}
