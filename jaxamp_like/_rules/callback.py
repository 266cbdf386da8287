"""The rule that calls a casting callback which the user wrote."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax

from .._dtypes import cast, lowered
from .._errors import AmpError, why_not_called
from .._primitives import COLLECTIVES
from .._primitives.matmul_precision import settled_bind
from .base import Decision, Demand, Fact, Precision, Rule, Site

SIGNATURE = (
    "`rule(compute_dtype, original_dtypes, *invars, **bind_params) -> (invars, "
    "bind_params)`"
)


@dataclass(frozen=True)
class Callback(Rule):
    """A casting callback that the user wrote."""

    fn: Callable[..., Any]

    @property
    def may_compute_low(self) -> bool:
        return True

    def demand(self, params: dict[str, Any], wanted: Demand) -> Demand:
        return wanted

    def decide(self, site: Site) -> Decision:
        def read(*operands):
            invars, params = self._call(site, operands)
            is_low = [x.dtype for x in invars] != [a.dtype for a in site.avals]
            return invars, params, is_low

        def compute(invars, params, is_low):
            outs = settled_bind(site.primitive, params, is_low)(*invars)
            outs = outs if site.primitive.multiple_results else [outs]
            return [  # never more bits than the author wrote
                x if author is None else cast(x, lowered(author, x.dtype))
                for x, author in zip(outs, site.out_authors, strict=True)
            ]

        def bind(*operands):
            return compute(*read(*operands))

        # No axis of a collective is bound yet; its results have its operands' dtypes.
        is_collective = getattr(site.primitive, "name", None) in COLLECTIVES
        was_low = False

        def try_out(*operands):
            nonlocal was_low
            invars, params, was_low = read(*operands)
            return invars if is_collective else compute(invars, params, was_low)

        structs = [
            jax.ShapeDtypeStruct(aval.shape, fact.dtype if fact else aval.dtype)
            for aval, fact in zip(site.avals, site.facts, strict=True)
        ]
        outs = jax.eval_shape(try_out, *structs)
        precision = Precision.LOW if was_low else Precision.FULL
        facts = tuple(
            author and Fact(lowered(author, out.dtype), precision)
            for out, author in zip(outs, site.out_authors, strict=True)
        )
        reads = tuple(fact and fact.dtype for fact in site.facts)
        name = getattr(self.fn, "__name__", repr(self.fn))
        return Decision(reads, site.params, facts, f"the rule {name}", bind)

    def _call(self, site: Site, operands: Sequence[Any]) -> tuple[Sequence[Any], dict]:
        dtypes = tuple(aval.dtype for aval in site.avals)
        where = f"rule {self.fn!r} for `{site.primitive}`"
        given = site.compute_dtype, dtypes, *operands
        try:
            out = self.fn(*given, **site.params)
        except TypeError:
            if not (misfit := why_not_called(self.fn, given, site.params)):
                raise
            raise AmpError(
                f"The {where} can't be called as one: {misfit}. It is given the "
                f"operands and all parameters of a primitive: {SIGNATURE}."
            ) from None
        if not (isinstance(out, tuple) and len(out) == 2 and isinstance(out[1], dict)):
            raise AmpError(
                f"The {where} must return `(invars, bind_params)`, a sequence of "
                f"inputs and a dict of parameters, but returned {type(out).__name__}."
            )
        invars, params = out
        if not isinstance(invars, tuple | list) or len(invars) != len(operands):
            given = len(invars) if isinstance(invars, tuple | list) else repr(invars)
            raise AmpError(
                f"The {where} was given {len(operands)} inputs and must return as "
                f"many, but returned {given}. Return `(invars, bind_params)`."
            )
        return invars, params
