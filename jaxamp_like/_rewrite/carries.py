"""Which inputs of a program reach its results uncrossed: through no compute op.

A carry that a path takes round its loop uncrossed adds up, iteration by iteration, what
would be lost in 16 bits: a residual stream, an optimizer's state, a sum of losses."""

from collections.abc import Sequence
from dataclasses import dataclass, field

from .._jax import Jaxpr, Literal, raw, scopes
from .._primitives import LINEAR
from .._structural import Body
from .matching import Matching
from .memo import Memo
from .plan import Scope
from .reach import Reach, around, members, of_input, through, union


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
        env = {v: of_input(i) for i, v in enumerate(jaxpr.invars)}

        def read(atoms):
            known = (Reach() if isinstance(x, Literal) else env.get(x) for x in atoms)
            return [reach or Reach() for reach in known]

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
                            env[v] = union((env.get(v, Reach()), through(reach, given)))
            elif not self.matching.found(eqn, inner_scope).is_compute:
                reach = union(read(eqn.invars))
                is_linear = eqn.primitive.name in LINEAR
                reach = reach if is_linear else reach.bend()
                env |= dict.fromkeys(eqn.outvars, reach)
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
        return {i for out, i in body.loop if reach[out].inputs >> i & 1}

    def only_added_to(self, jaxpr: Jaxpr, scope: Scope) -> set[int]:
        """The inputs that reach no result but through linear or compute ops.

        None, if there is no compute op: then nothing is to be had from a low copy."""
        if not self._computes(jaxpr, scope):
            return set()
        bent = union(self.uncrossed(jaxpr, scope)).bent
        return set(range(len(raw(jaxpr).invars))) - set(members(bent))

    def _computes(self, jaxpr: Jaxpr, scope: Scope) -> bool:
        """Whether a program holds a compute op, at any depth."""
        known = self._known.of(jaxpr)
        if (scope, "computes") not in known:
            known[scope, "computes"] = self._find_compute(raw(jaxpr), scope)
        return known[scope, "computes"]

    def _find_compute(self, jaxpr: Jaxpr, scope: Scope) -> bool:
        for eqn in jaxpr.eqns:
            inner = scope + scopes(eqn)
            handler = self.matching.handler(eqn, inner)
            if handler is None:
                found = self.matching.found(eqn, inner).is_compute
            else:
                bodies = handler.bodies(eqn)
                found = any(self._computes(body.jaxpr, inner) for body in bodies)
            if found:
                return True
        return False
