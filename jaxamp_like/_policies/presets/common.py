"""What the presets share: rules, and primitives that have one rule in all of them."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp

from ..._dtypes import DType, has_range
from ..._jax import Primitive
from ..._primitives import FIXED, Kind, those
from ..._rules import (
    ConvertAsWritten,
    Decision,
    Demand,
    Fact,
    Precision,
    RematSource,
    Rule,
    Site,
    choose_exactly,
    keep_each_input,
    keep_inputs,
    move_exactly,
    send_low,
    sort_exactly,
    survive,
    take_extremes,
    use_compute_precision,
    use_original_precision,
    use_original_precision_locally,
    use_widest_precision,
)
from ..classes import CLASSES

Op = Primitive | str
Table = dict[str, Rule]


class ListsFor(dict[Any, Any]):
    """A policy made of op lists that are meant for one dtype."""

    def __init__(self, policy: dict[Any, Any], dtype: str) -> None:
        super().__init__(policy)
        self.dtype = jnp.dtype(dtype)


def dtype_of_lists(policy: Any) -> DType | None:
    """The dtype that the op lists of a policy are meant for, if it is made of some."""
    return policy.dtype if isinstance(policy, ListsFor) else None


MOVES = frozenset(
    name
    for name, rule in CLASSES.items()
    if rule in (move_exactly, take_extremes, choose_exactly)
)
MOVES_EACH = frozenset(
    name
    for name, rule in CLASSES.items()
    if rule in (keep_each_input, sort_exactly, send_low)
)


@dataclass(frozen=True)
class ByRange(Rule):
    """One rule for compute dtypes of narrow range (float16), another for the rest."""

    narrow: Rule
    wide: Rule

    def _pick(self, dtype: DType) -> Rule:
        is_wide = has_range(dtype, jnp.dtype("float32"))
        return self.wide if is_wide else self.narrow

    def decide(self, site: Site) -> Decision:
        return self._pick(site.compute_dtype).decide(site)

    @property
    def may_compute_low(self) -> bool:
        return any(rule.may_compute_low for rule in (self.narrow, self.wide))

    def demand(self, params: dict[str, Any], wanted: Demand) -> Demand:
        return self.wide.demand(params, wanted)


# Rules that are the same for all systems: for primitives that no list can lower, and
# for sums over devices and the author's casts, which the systems' lists don't cover.
GIVEN = {
    **{name: CLASSES[name] for name in (*FIXED, "custom_linear_solve")},
    **dict.fromkeys(
        those(lambda row: row.kind == Kind.SUM_OVER_DEVICES),
        ByRange(narrow=use_original_precision_locally, wide=keep_each_input),
    ),
    "convert_element_type": ConvertAsWritten(),
}


@dataclass(frozen=True)
class Promote(Rule):
    """Computes in the widest dtype among the operands, as type promotion does.

    The dtype of a constant does not count, unless the constant would not survive the
    compute dtype. With `bias`, nor does that of a layer's bias: a parameter that is
    smaller than what it is added to."""

    bias: bool = False

    def demand(self, params: dict[str, Any], wanted: Demand) -> Demand:
        return Demand.LOW | Demand.FULL  # the other operands decide

    def decide(self, site: Site) -> Decision:
        facts = dict(enumerate(site.facts))
        if sum(fact is not None for fact in facts.values()) <= 1:
            return keep_inputs.decide(site)
        votes = {i: f for i, f in facts.items() if f and self._votes(site, i, f)}
        if not votes:
            votes = facts
        voters = tuple(votes.get(i) for i in facts)
        return use_widest_precision.decide(site._replace(facts=voters))

    def _votes(self, site: Site, i: int, fact: Fact) -> bool:
        known = fact.constants
        if fact.remat_source == RematSource.CONSTANT or (
            known and fact.remat_source == RematSource.NONE
        ):
            return not survive(known, site.compute_dtype)
        is_bias = fact.precision == Precision.NEUTRAL and not site.spreads(i)
        return not (self.bias and is_bias)


@dataclass(frozen=True)
class ComputeUnlessFull(Rule):
    """Computes in the compute dtype, unless an operand was made in full on purpose.

    This is what type promotion does if all inputs are cast beforehand: random numbers
    and floats made of integers are float32 inside the function, and so are the results
    of ops that read them."""

    @property
    def may_compute_low(self) -> bool:
        return True

    def demand(self, params: dict[str, Any], wanted: Demand) -> Demand:
        return Demand.LOW

    def decide(self, site: Site) -> Decision:
        full = any(
            fact.precision == Precision.FULL
            or not survive(fact.constants, site.compute_dtype)
            for fact in site.facts
            if fact
        )
        return (use_original_precision if full else use_compute_precision).decide(site)


@dataclass(frozen=True)
class Unlisted(Rule):
    """Keeps the author's dtypes; the results don't keep other ops from being low."""

    def decide(self, site: Site) -> Decision:
        decision = use_original_precision.decide(site)
        outs = (
            fact and fact._replace(precision=Precision.NEUTRAL)
            for fact in decision.out_facts
        )
        return decision._replace(out_facts=tuple(outs), why="in no list")


promote = Promote()


def make_table(
    other: Rule, lists: Mapping[str, Rule], moving: Rule = keep_inputs
) -> Table:
    """A rule for each primitive: that of `lists`, else `moving` or `other`.

    `moving` is for primitives that move data. What is `GIVEN` is never changed."""
    table: Table = {}
    for name in CLASSES:
        if name in GIVEN:
            table[name] = GIVEN[name]
        elif name in MOVES_EACH:
            table[name] = keep_each_input
        else:
            table[name] = moving if name in MOVES else other
    return table | {name: rule for name, rule in lists.items() if name not in GIVEN}


def by_name(*rows: tuple[str, Rule]) -> Table:
    return {name: rule for names, rule in rows for name in names.split()}


CONTRACTIONS = "dot_general conv_general_dilated"
