"""Marks: where a program would round under `amp`, which say so and compute nothing.

A contraction that `amp` would lower reads and makes marked values. The cotangent of a
marked value is marked too, so that the backward pass is rounded where that of the mixed
function is. Whether `amp` would lower it (not in a solver, nor where the author asked
for more) is decided by `amp` itself: marks are put in by a rule of a policy."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

from .._amp import amp
from .._dtypes import DType
from .._jax import Eqn, Zero, new_primitive
from .._policies.classes import CLASSES
from .._policies.dictionary import policy_by_name
from .._primitives import CONTRACTIONS
from .._primitives.contractions import is_contraction
from .._primitives.matmul_precision import settled_bind
from .._rewrite.solvers import told
from .._rules import (
    Decision,
    Demand,
    Mark,
    Rule,
    Site,
    outs_of,
    use_compute_precision,
    use_original_precision,
)
from .._rules.by_shapes import shapes_of


class Contraction(NamedTuple):
    """What a mark is told of the contraction that it stands at."""

    scope: tuple[str, ...]
    primitive: str
    shapes: str


Role = Literal["operand", "result"]


def _identity(x: Any, **told: Any) -> Any:
    return x


def _jvp(primals: Any, tangents: Any, **told: Any) -> Any:
    (x,), (t,) = primals, tangents
    return MARK.bind(x, **told), t if isinstance(t, Zero) else MARK.bind(t, **told)


def _transpose(ct: Any, x: Any, *, back: bool, **told: Any) -> Any:
    return [ct if isinstance(ct, Zero) else MARK.bind(ct, back=not back, **told)]


def _batch(args: Any, dims: Any, **told: Any) -> Any:
    return MARK.bind(args[0], **told), dims[0]


# No primitive of JAX's is an identity that carries a name into its own transpose.
MARK = new_primitive(
    "amp_may_round",
    compute=_identity,
    aval=_identity,
    jvp=_jvp,
    transpose=_transpose,
    batch=_batch,
)


def mark(x: Any, of: Contraction, role: Role) -> Any:
    """`x`, marked as what a contraction reads or makes."""
    return MARK.bind(x, of=of, role=role, back=False)


def is_read_by_its_contraction(eqn: Eqn) -> bool:
    """Whether what a mark makes is read by the contraction that it is of, and no other.

    That is an operand in the forward pass, and the cotangent of the result."""
    return (eqn.params["role"] == "operand") != eqn.params["back"]


@dataclass(frozen=True)
class Shadow(Rule):
    """Computes as written, with marks where `use_compute_precision` would round."""

    @property
    def is_compute(self) -> bool:
        return True

    def for_equation(self, params: dict[str, Any], avals: Sequence[Any]) -> Rule:
        shapes = [aval.shape for aval in avals]
        return self if is_contraction(params, shapes) else use_original_precision

    def demand(self, params: dict[str, Any], wanted: Demand) -> Demand:
        return Demand.LOW

    def decide(self, site: Site) -> Decision:
        low = use_compute_precision.decide(site)
        if low.reads == site.authors:
            return low
        of = Contraction(
            told(site.scope), site.primitive.name, shapes_of(site.params, site.avals)
        )
        bind = settled_bind(site.primitive, site.params, is_low=False)
        read_low = [a != b for a, b in zip(low.reads, site.authors, strict=True)]
        made_low = [
            fact is not None and fact.dtype != author
            for fact, author in zip(low.outs, site.out_authors, strict=True)
        ]

        def marked(*operands):
            out = bind(*_marked(operands, read_low, of, "operand"))
            return _marked([out], made_low, of, "result")[0]

        outs = outs_of(site, None, Mark.LOW)
        return Decision(site.authors, site.params, outs, "may be rounded", marked)


def _marked(
    values: Sequence[Any], which: Sequence[bool], of: Contraction, role: Role
) -> list[Any]:
    pairs = zip(values, which, strict=True)
    return [mark(x, of, role) if is_marked else x for x, is_marked in pairs]


def shadow(fn: Callable[..., Any], dtype: DType) -> Callable[..., Any]:
    """`fn` as written, with a mark wherever `amp` would round to `dtype`."""
    table = dict.fromkeys(CLASSES, use_original_precision)
    table |= dict.fromkeys(CONTRACTIONS, Shadow())
    return amp(fn, compute_dtype=dtype, amp_policy=policy_by_name(table))
