"""Rules that say in which dtype an op computes, whatever surrounds it."""

import functools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.typing import DTypeLike

from .._dtypes import DType, as_float_dtype, bits, has_range, lowered, widest
from .._jax import SymbolicZero
from .._primitives.matmul_precision import settled
from .base import (
    Decision,
    Demand,
    Precision,
    Rule,
    Site,
    author_dtype,
    out_facts_of,
    survive,
)
from .low_residuals import of_some


def asks_for_precision(params: dict[str, Any]) -> bool:
    """Whether the author set the precision of a contraction by hand."""
    precision = params.get("precision")
    parts = precision if isinstance(precision, tuple) else (precision,)
    return any(part not in (None, lax.Precision.DEFAULT) for part in parts)


def why_as_written(site: Site) -> str | None:
    """Why a contraction has to compute as its author wrote it, if it has to."""
    return why_written(site.params, site.avals, site.by_scope)


def why_written(
    params: dict[str, Any], avals: Sequence[Any], by_scope: bool
) -> str | None:
    """Why an equation has to compute as its author wrote it, whatever its rule.

    JAX multiplies float32 with float64 or complex operands in one equation, whose
    result is as precise as the more precise of them. Such an equation runs as written.

    Args:
        params: of the equation.
        avals: of its operands.
        by_scope: whether its scope gave the rule, which then wins over `precision`."""
    if asks_for_precision(params) and not by_scope:
        return "the author asked for this precision"
    dtypes = {getattr(aval, "dtype", None) for aval in avals}
    wide = sorted(d.name for d in dtypes if d is not None and _is_never_lowered(d))
    if wide and any(a is not None and a.itemsize < 8 for a in map(author_dtype, avals)):
        return f"its other operand is {wide[0]}"
    return None


@functools.cache
def _is_never_lowered(dtype: DType) -> bool:
    return dtype == np.float64 or jnp.issubdtype(dtype, jnp.complexfloating)


def asks_for_wider_result(site: Site) -> bool:
    """Whether the author set a result wider than the operands as written."""
    wide, authors = site.params.get("preferred_element_type"), site.authors
    return wide is not None and all(a is None or bits(wide) > bits(a) for a in authors)


def _lowered_together(
    dtype: DType, authors: Sequence[DType | None]
) -> tuple[DType, tuple[DType | None, ...]]:
    """The dtype that float32 is lowered to, and what each operand is read in.

    Beside an operand that its author made low, float32 is lowered to that operand's
    dtype: float16 beside bfloat16 would lose the range that the author counted on. For
    the same reason float16 is read in the bfloat16 that was asked for if float32 stands
    beside it."""
    rivals = {a for a in authors if a is not None and bits(a) == bits(dtype)} - {dtype}
    partner = rivals.pop() if len(rivals) == 1 and dtype not in authors else dtype
    if has_range(partner, dtype):
        return partner, tuple(a and lowered(a, partner) for a in authors)
    is_mixed = any(a is not None and lowered(a, dtype) != a for a in authors)
    read = {partner: dtype} if is_mixed else {}
    return dtype, tuple(a and read.get(a, lowered(a, dtype)) for a in authors)


def _as_bound(site: Site, dtype: DType) -> tuple[Any, ...]:
    wide = asks_for_wider_result(site)
    return out_facts_of(site, None if wide else dtype, Precision.LOW)


@dataclass(frozen=True)
class UsePrecision(Rule):
    """Reads and computes in one dtype; `None` is the compute dtype asked for."""

    dtype: DType | None = None
    wide_result: bool = False

    def __post_init__(self) -> None:
        if self.dtype is not None:
            object.__setattr__(self, "dtype", as_float_dtype(self.dtype, "dtype"))
        super().__post_init__()

    @property
    def is_compute(self) -> bool:
        return self.dtype is None or bits(self.dtype) < 32

    def demand(self, params: dict[str, Any], wanted: Demand) -> Demand:
        return Demand.LOW if self.is_compute else Demand.FULL

    def decide(self, site: Site) -> Decision:
        if why := why_as_written(site):
            return use_original_precision.decide(site)._replace(why=why)
        dtype = self.dtype or site.compute_dtype
        dtype, reads = _lowered_together(dtype, site.authors)
        if reads == site.authors:
            decision = use_original_precision.decide(site)
            return decision._replace(why="the author's dtype is no wider")
        if _loses_constant(site, dtype):
            decision = use_original_precision.decide(site)
            why = f"a constant would become 0 or inf in {dtype.name}"
            return decision._replace(why=why)
        params = dict(site.params)
        if site.primitive is not None:
            params = dict(settled(site.primitive, params, is_low=True))
        decision = Decision(
            reads,
            params,
            out_facts_of(site, dtype, Precision.LOW),
            f"computes in {dtype.name}",
        )
        if "preferred_element_type" not in params or asks_for_wider_result(site):
            return decision._replace(out_facts=_as_bound(site, dtype))
        # Else every contraction of the backward pass would read a float32 cotangent.
        low = site.out_authors[0] and lowered(site.out_authors[0], dtype)
        params["preferred_element_type"] = low
        if not self.wide_result:
            return decision
        outs = out_facts_of(site, None, Precision.LOW)
        bind = wide_contraction(site.primitive, params, site.out_authors[0])
        return decision._replace(out_facts=outs, bind=bind)


def _loses_constant(site: Site, dtype: DType) -> bool:
    """Whether a factor such as 1e-9 would become 0, or a mask of -1e9 infinite.

    A rule that names a dtype rounds other constants to it, also those that do not
    `survive` by the default policy, as 0.999 that becomes 1."""
    constants = (fact.constants for fact in site.facts if fact)
    numbers = (x for known in constants if known for x in known.numbers)
    largest = float(jnp.finfo(dtype).max)
    least = float(jnp.finfo(dtype).smallest_subnormal) / 2
    return any(
        math.isfinite(x) and x != 0 and not least < abs(x) <= largest for x in numbers
    )


def wide_contraction(
    primitive: Any, params: dict[str, Any], wide: Any
) -> Callable[..., Any]:
    """A contraction of low operands with a wide result and low cotangents.

    The transpose of a contraction with a wide result reads a wide cotangent, so the
    derivative is that of the low contraction. It is given as a JVP rule, so that both
    forward and reverse mode work."""

    @jax.custom_jvp
    def contraction(*operands):
        return primitive.bind(*operands, **params | {"preferred_element_type": wide})

    def jvp(primals, tangents):
        active = [i for i, t in enumerate(tangents) if not isinstance(t, SymbolicZero)]

        low = of_some(functools.partial(primitive.bind, **params), active, primals)
        some, ts = (tuple(x[i] for i in active) for x in (primals, tangents))
        return contraction(*primals), jax.jvp(low, some, ts)[1].astype(wide)

    contraction.defjvp(jvp, symbolic_zeros=True)
    return contraction


@dataclass(frozen=True)
class UseOriginalPrecision(Rule):
    """Reads and computes in the author's dtypes; `local` results may be read low."""

    local: bool = False

    def decide(self, site: Site) -> Decision:
        precision = Precision.FULL
        spread = [f for i, f in enumerate(site.facts) if f and site.spreads(i)]
        if self.local and all(fact.precision < Precision.FULL for fact in spread):
            precision = Precision.LOW
        why = "needs the author's precision" + (", its result does not" * self.local)
        return Decision(
            site.authors, site.params, out_facts_of(site, None, precision), why
        )


@dataclass(frozen=True)
class InSolver(Rule):
    """Computes in the author's dtypes, so that a solver takes its steps as in them."""

    def decide(self, site: Site) -> Decision:
        decision = use_original_precision_locally.decide(site)
        why = "in a solver, which goes on until what contractions make is good enough"
        return decision._replace(why=why)


@dataclass(frozen=True)
class UseWidestPrecision(Rule):
    """Computes in the widest dtype among the operands as they are now.

    A constant has no say, unless it would not survive the cast."""

    def demand(self, params: dict[str, Any], wanted: Demand) -> Demand:
        return Demand.LOW | Demand.FULL  # the other operands decide

    def decide(self, site: Site) -> Decision:
        facts = [fact for fact in site.facts if fact]
        lost = [
            fact for fact in facts if not survive(fact.constants, site.compute_dtype)
        ]
        voting = [fact for fact in facts if fact.constants is None] + lost or facts
        if not voting:
            return use_original_precision.decide(site)
        dtype = widest(fact.dtype for fact in voting)
        precision = max(fact.precision for fact in facts)
        reads = tuple(author and lowered(author, dtype) for author in site.authors)
        outs = out_facts_of(site, dtype, precision)
        return Decision(reads, site.params, outs, "the widest of its inputs")


use_compute_precision: Rule = UsePrecision()
"""Casts float inputs to the compute dtype; results are in it too."""

use_compute_precision_wide_result: Rule = UsePrecision(wide_result=True)
"""As `use_compute_precision`, but a contraction's result keeps the author's dtype.

The contractions of its backward pass still read low-precision cotangents."""

use_original_precision: Rule = UseOriginalPrecision()
"""Computes in the author's dtypes, and what follows keeps them too."""

use_original_precision_locally: Rule = UseOriginalPrecision(local=True)
"""Computes in the author's dtypes; the result is fit to be read in low precision."""

in_solver = InSolver()
"""As `use_original_precision_locally`, for what stands in a solver; see
`_rewrite.solvers`."""

use_widest_precision: Rule = UseWidestPrecision()
"""Computes in the widest dtype among the inputs as they are now."""


def use_precision(dtype: DTypeLike) -> Rule:
    """Computes in `dtype`, whatever compute dtype was asked for.

    Never in more bits than the author wrote.

    Args:
        dtype: a floating dtype or its name.
    Returns:
        A rule to put in a policy.
    Raises:
        TypeError: `dtype` is no floating dtype.
        ValueError: `dtype` is float64 and x64 is not enabled.

    >>> use_precision("float32")
    UsePrecision(dtype=dtype('float32'), wide_result=False)
    """
    return UsePrecision(as_float_dtype(dtype, "dtype"))
