"""Rules of the default policy: values are stored low, and computed with in full.

What a contraction hands over is held low until an op computes with it, and that op
reads it in the author's dtype. Nothing between contractions is rounded, so there is no
question which op may run low; what is kept for the backward pass is chosen elsewhere,
by remat regions of ops that are run again there."""

from dataclasses import dataclass, replace
from typing import Any

from .._dtypes import bits, is_float, lowered
from .._primitives import FANNING_OUT, VIEWS, may_repeat
from .base import Decision, Demand, Precision, Rule, Site, held_in_full, out_facts_of
from .following import ConvertAsWritten, keep_each_input, keep_one, low_if_read_low

# No operand may be rounded for the op; one that is held low is handed over low.
_AS_IT_IS = Demand.FULL | Demand.AS_HELD


@dataclass(frozen=True)
class ComputeInFull(Rule):
    """Computes in the author's dtypes; see `compute_in_full`."""

    @property
    def is_run_again(self) -> bool:
        return True

    def demand(self, params: dict[str, Any], wanted: Demand) -> Demand:
        return _AS_IT_IS

    def decide(self, site: Site) -> Decision:
        outs = out_facts_of(site, None, Precision.LOW)
        return Decision(
            site.authors, site.params, outs, "computes in its author's dtype"
        )


@dataclass(frozen=True)
class MoveExactly(Rule):
    """Moves data without rounding it; see `move_exactly` and `take_extremes`.

    Args:
        extremes: whether its results are extremes, and so are compared with what they
            were taken from.
        of_zero: whether one of two operands is 0: a rounding makes the other equal to
            it only by underflow."""

    extremes: bool = False
    of_zero: bool = False

    @property
    def is_run_again(self) -> bool:
        return True

    @property
    def _rounds_ahead(self) -> bool:
        return not self.extremes or self.of_zero

    def beside_zero(self) -> Rule:
        return replace(self, of_zero=True) if self.extremes else self

    def demand(self, params: dict[str, Any], wanted: Demand) -> Demand:
        is_full = self.extremes and Demand.FULL in wanted
        rounds_ahead = self._rounds_ahead and not is_full
        return wanted if rounds_ahead else compute_in_full.demand(params, wanted)

    def decide(self, site: Site) -> Decision:
        if self.extremes and Demand.FULL in site.demand:
            return compute_in_full.decide(site)
        facts = site.facts
        if _may_repeat(site):
            facts = tuple(map(held_in_full, facts, site.authors))
        elif site.primitive.name not in FANNING_OUT and self._rounds_ahead:
            facts = tuple(
                low_if_read_low(fact, site.demand, site.compute_dtype) for fact in facts
            )
        floats = [(i, fact) for i, fact in enumerate(facts) if fact]
        if not floats:
            return compute_in_full.decide(site)
        site = site._replace(facts=facts)
        if len(floats) == 1:
            return keep_one(site, floats[0])
        # Constants may be written in any dtype that holds them.
        constants = [f.constants for _, f in floats if f.constants]
        constants = [known for known in constants if known.are_all]
        dtypes = {f.dtype for _, f in floats if f.constants not in constants}
        dtype = dtypes.pop() if len(dtypes) == 1 else None
        if dtype is None or not all(known.exact_in(dtype) for known in constants):
            return compute_in_full.decide(site)
        reads = tuple(author and lowered(author, dtype) for author in site.authors)
        outs = out_facts_of(site, dtype, max(fact.precision for _, fact in floats))
        return Decision(reads, site.params, outs, "moves data unchanged")


@dataclass(frozen=True)
class ReadExactly(Rule):
    """Decides as another rule does, of operands that were not rounded for the op.

    See `choose_exactly`.

    Args:
        rule: the other rule.
        of_zero: whether it asks for an operand's sign, which a rounding changes only by
            underflow."""

    rule: Rule
    of_zero: bool = False

    @property
    def is_run_again(self) -> bool:
        return self.rule.is_run_again

    def beside_zero(self) -> Rule:
        return replace(self, of_zero=True)

    def demand(self, params: dict[str, Any], wanted: Demand) -> Demand:
        return Demand.NONE if self.of_zero else _AS_IT_IS

    def decide(self, site: Site) -> Decision:
        wanted = (_AS_IT_IS,) * len(site.wanted)
        return self.rule.decide(site._replace(wanted=wanted))


@dataclass(frozen=True)
class ConvertExactly(ConvertAsWritten):
    """Casts as the author wrote; see `convert_exactly`.

    An operand that becomes an integer, or that the author casts to a low dtype, must
    not be rounded before: it would be rounded twice, to the compute dtype first."""

    def demand(self, params: dict[str, Any], wanted: Demand) -> Demand:
        dtype = params["new_dtype"]
        is_wide = is_float(dtype) and bits(dtype) >= 32
        return wanted if is_wide else _AS_IT_IS


def _may_repeat(site: Site) -> bool:
    """Whether a number of an operand may be repeated in one result."""
    name = site.primitive.name
    if site.partly_mapped and name not in VIEWS:
        return True  # what all examples share is repeated for each
    return may_repeat(name, site.params)


compute_in_full = ComputeInFull()
"""Computes in the author's dtypes, from operands that may be held low.

The op is run again in the backward pass, together with the ops around it, so that its
result in full precision need not be kept."""

move_exactly = MoveExactly()
"""Moves data in the precision that it has, and never rounds it.

Operands that are held in several dtypes are moved in the author's."""

take_extremes = MoveExactly(extremes=True)
"""As `move_exactly`, for extremes: they are compared with what they came from.

XLA leaves out a rounding where a value is made and cast up in one kernel. A maximum of
the rounded values would then not be one of those that it is subtracted from, or that
its derivative compares it with. So what is read in full is taken in full. Nor is any
operand rounded ahead: numbers that a rounding has made equal share a gradient."""

choose_exactly = ReadExactly(compute_in_full)
"""Comparisons, steps and ranks: a rounding, or a missing one, may change the choice.

An operand that is to be rounded for contractions is rounded after such an op."""

sort_exactly = ReadExactly(keep_each_input)
"""As `choose_exactly`, for several arrays at once."""

convert_exactly = ConvertExactly()
"""An `astype` as its author wrote it."""
