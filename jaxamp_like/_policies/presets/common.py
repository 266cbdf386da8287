"""What the presets share: rules, and the rules that are given by the kind of op."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp

from ..._dtypes import DType
from ..._jax import Primitive
from ..._primitives import FIXED, Kind, those
from ..._rules import (
    ConvertAsWritten,
    Decision,
    Demand,
    Fact,
    Leaf,
    Mark,
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
        return self.narrow if jnp.finfo(dtype).maxexp < 128 else self.wide

    def decide(self, site: Site) -> Decision:
        return self._pick(site.compute_dtype).decide(site)

    @property
    def may_compute_low(self) -> bool:
        return any(rule.may_compute_low for rule in (self.narrow, self.wide))

    def demand(self, params: dict[str, Any], wanted: Demand) -> Demand:
        return self.wide.demand(params, wanted)


# What the systems say nothing of: sums over devices, and what is given by the kind of
# the primitive.
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
    """The widest dtype among the operands, as a type promotion has it.

    Constants do not vote, unless they would not survive the compute dtype. Nor does the
    `bias` of a layer: a parameter that is smaller than what it is added to."""

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
        if fact.leaf == Leaf.CONST or (known and fact.leaf == Leaf.NO):
            return not survive(known, site.compute_dtype)
        is_bias = fact.mark == Mark.NEUTRAL and not site.spreads(i)
        return not (self.bias and is_bias)


@dataclass(frozen=True)
class ComputeUnlessFull(Rule):
    """The compute dtype, unless an operand was made in full on purpose.

    As with inputs that are cast beforehand: what is drawn at random or made of integers
    inside the function is float32, and promotes what it meets."""

    @property
    def may_compute_low(self) -> bool:
        return True

    def demand(self, params: dict[str, Any], wanted: Demand) -> Demand:
        return Demand.LOW

    def decide(self, site: Site) -> Decision:
        full = any(
            fact.mark == Mark.FULL or not survive(fact.constants, site.compute_dtype)
            for fact in site.facts
            if fact
        )
        return (use_original_precision if full else use_compute_precision).decide(site)


@dataclass(frozen=True)
class Unlisted(Rule):
    """The author's dtypes, which neither spread nor keep others from being low."""

    def decide(self, site: Site) -> Decision:
        decision = use_original_precision.decide(site)
        outs = (fact and fact._replace(mark=Mark.NEUTRAL) for fact in decision.outs)
        return decision._replace(outs=tuple(outs), why="in no list")


promote = Promote()


def make_table(
    other: Rule, lists: Mapping[str, Rule], moving: Rule = keep_inputs
) -> Table:
    """The rules of all primitives: by `lists`, or `other`; `moving` for movement."""
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
