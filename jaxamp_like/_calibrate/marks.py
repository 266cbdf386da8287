"""Marks: identities that stand where a program would round under `amp`.

A contraction that `amp` would lower reads and makes marked values. The cotangent of a
marked value is marked too, so that the backward pass is rounded where that of the mixed
function is. Each mark says what each candidate rounds its value to. `amp` itself
decides whether it would lower a contraction (not in a solver, nor where the author
asked for more), since a rule of a policy puts the marks in."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp

from .._amp import amp
from .._dtypes import widest
from .._jax import Eqn, Jaxpr, Zero, new_primitive, tangent_aval, to_classic
from .._policies.classes import CLASSES
from .._policies.dictionary import policy_by_name
from .._primitives import CONTRACTIONS
from .._primitives.contractions import is_contraction
from .._primitives.matmul_precision import settled_bind
from .._quantised.linear import RESULT_OF
from .._rewrite.solvers import without_solver_scope
from .._rules import (
    Decision,
    Demand,
    Precision,
    Rule,
    Site,
    out_facts_of,
    use_compute_precision,
    use_original_precision,
)
from .._rules.by_shapes import shapes_of
from .._rules.passes import CastPass, in_compute_dtype
from .candidates import Candidate
from .contraction_roundings import ContractionRoundings, contraction_roundings
from .measured_function import MeasuredFunction, Point
from .rounding import UNROUNDED, RoundingSteps


class Contraction(NamedTuple):
    """What a mark says of the contraction that it belongs to."""

    scope: tuple[str, ...]
    primitive: str
    shapes: str


Role = Literal["read", "operand", "result"]
"""What is marked: "read" is an operand for the forward pass alone, "operand" one for
the backward pass, or for both if both round it alike, and "result" is a result."""


def _identity(x: Any, **told: Any) -> Any:
    return x


def _jvp(primals: Any, tangents: Any, **told: Any) -> Any:
    (x,), (t,) = primals, tangents
    out = MARK.bind(x, **told)
    if told["role"] == "read":  # the contraction's derivative reads other marks
        return out, Zero(tangent_aval(out))
    return out, t if isinstance(t, Zero) else MARK.bind(t, **told)


def _transpose(ct: Any, x: Any, *, back: bool, to: Any, then: Any, **told: Any) -> Any:
    if isinstance(ct, Zero):
        return [ct]
    return [MARK.bind(ct, back=not back, to=then, then=to, **told)]


def _batch(args: Any, dims: Any, *, to: Any, then: Any, **told: Any) -> Any:
    x = jnp.moveaxis(args[0], dims[0], 0)
    to, then = (tuple(one.batched(x.ndim - 1) for one in some) for some in (to, then))
    return MARK.bind(x, to=to, then=then, **told), 0


# JAX has no primitive that is an identity and carries parameters into its transpose.
MARK = new_primitive(
    "amp_may_round",
    compute=_identity,
    aval=_identity,
    jvp=_jvp,
    transpose=_transpose,
    batch=_batch,
)


def mark(
    x: Any,
    of: Contraction,
    role: Role,
    to: Sequence[RoundingSteps],
    then: Sequence[RoundingSteps] | None = None,
) -> Any:
    """`x`, marked as what a contraction reads or makes.

    For each candidate, `to` says how `x` is rounded, and `then` how its cotangent is.
    Where no candidate rounds anything, `x` gets no mark."""
    then = (UNROUNDED,) * len(to) if then is None else then
    if all(one == UNROUNDED for one in (*to, *then)):
        return x
    return MARK.bind(x, of=of, role=role, back=False, to=tuple(to), then=tuple(then))


def is_read_by_its_contraction(eqn: Eqn) -> bool:
    """Whether the value that a mark makes is only read by the mark's own contraction.

    That holds for an operand in the forward pass, and for the cotangent of the result
    in the backward pass."""
    return (eqn.params["role"] != "result") != eqn.params["back"]


@dataclass(frozen=True)
class Shadow(Rule):
    """Computes as written, with marks where `use_compute_precision` would round.

    Args:
        candidates: the low precisions, which say how marked values are rounded."""

    candidates: tuple[Candidate, ...]

    @property
    def is_compute(self) -> bool:
        return True

    def for_equation(self, params: dict[str, Any], avals: Sequence[Any]) -> Rule:
        return self if is_contraction(params, avals) else use_original_precision

    def demand(self, params: dict[str, Any], wanted: Demand) -> Demand:
        return Demand.LOW

    def decide(self, site: Site) -> Decision:
        low = use_compute_precision.decide(site)
        if low.reads == site.authors:
            return low
        of = Contraction(
            without_solver_scope(site.scope),
            site.primitive.name,
            shapes_of(site.params, site.avals),
        )
        read_low = [a != b for a, b in zip(low.reads, site.authors, strict=True)]
        ((fact,), (author,)) = low.out_facts, site.out_authors
        makes_low = fact is not None and fact.dtype != author
        places = [
            contraction_roundings(one, site, read_low, makes_low)
            for one in self.candidates
        ]
        outs = out_facts_of(site, None, Precision.LOW)
        bind = _marked(site, of, places)
        return Decision(site.authors, site.params, outs, "may be rounded", bind)


def _marked(
    site: Site, of: Contraction, places: list[ContractionRoundings]
) -> Callable[..., Any]:
    """A function that binds a contraction on marked operands, and marks its result."""
    bind = settled_bind(site.primitive, site.params, is_low=False)
    columns = zip(*places, strict=True)
    *of_operands, result, cotangent = columns
    # Each of these lists is by operand, then by candidate.
    reads, kept, gradients = ([*zip(*some, strict=True)] for some in of_operands)

    def marked(*operands):
        columns = zip(operands, kept, gradients, strict=True)
        some = [mark(x, of, "operand", to, then) for x, to, then in columns]
        if reads == kept:
            out = bind(*some)
        else:
            pairs = zip(operands, reads, strict=True)
            out = bind(*(mark(x, of, "read", to) for x, to in pairs))
            out = RESULT_OF.bind(out, *some, passes=_passes(site))
        return mark(out, of, "result", result, cotangent)

    return marked


def _passes(site: Site) -> tuple[CastPass, CastPass]:
    """How the gradient of each operand is computed if a contraction runs as written."""
    dtype = widest([a for a in site.authors[:2] if a is not None])
    return in_compute_dtype(site, dtype)


def shadow(
    fn: Callable[..., Any], candidates: tuple[Candidate, ...], argnums: Sequence[int]
) -> Callable[..., Any]:
    """`fn` as written, with a mark wherever `amp` would round to a candidate."""
    table = dict.fromkeys(CLASSES, use_original_precision)
    table |= dict.fromkeys(CONTRACTIONS, Shadow(candidates))
    low = candidates[0].compute
    policy = policy_by_name(table)
    return amp(fn, compute_dtype=low, amp_policy=policy, argnums=argnums)


def traced(
    subject: MeasuredFunction, point: Point, candidates: tuple[Candidate, ...]
) -> tuple[Jaxpr, Any]:
    """The program of a pass, with marks, and the structure of its results."""
    of = subject.call.active
    program = subject.program(lambda fn: shadow(fn, candidates, of))
    traced = jax.make_jaxpr(lambda *arrays: program(arrays), return_shape=True)
    jaxpr, shapes = traced(*point.arrays)
    return to_classic(jaxpr), jax.tree.structure(shapes)
