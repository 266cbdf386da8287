"""Rules that go by what an op's inputs are now, and by who reads its result."""

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import numpy as np

from .._dtypes import DType, bits, is_float, lowered, widest
from .._errors import AmpError
from .._primitives import FANNING_OUT, LOCAL, MOVES, MOVING_VIEWS, PLACING, WHOLE_VIEWS
from .base import (
    INPUT_SOURCES,
    Constants,
    Decision,
    Demand,
    Fact,
    Precision,
    RematSource,
    Rule,
    Site,
    author_dtype,
    joined_constants,
    out_facts_of,
    survive,
)
from .computing import use_original_precision


@dataclass(frozen=True)
class FollowInputs(Rule):
    """Runs low only between ops that run low; see `follow_inputs`."""

    def demand(self, params: dict[str, Any], wanted: Demand) -> Demand:
        how = Demand.LOW if Demand.LOW in wanted else Demand.FULL
        return how | (wanted & (Demand.ACCUMULATOR | Demand.OTHER))

    def decide(self, site: Site) -> Decision:
        return _follow(site)


def _follow(site: Site) -> Decision:
    dtype = site.compute_dtype
    floats = [(i, fact) for i, fact in enumerate(site.facts) if fact]
    low = [fact.dtype for i, fact in floats if fact.dtype != site.authors[i]]
    precision = max((fact.precision for _, fact in floats), default=Precision.NEUTRAL)
    is_broadcast = all(fact.is_broadcast or not site.spreads(i) for i, fact in floats)
    accumulates = Demand.ACCUMULATOR in site.demand and any(
        fact.from_accumulator for _, fact in floats
    )

    def in_full(precision: Precision, why: str) -> Decision:
        outs = out_facts_of(
            site,
            None,
            precision,
            is_broadcast=is_broadcast,
            from_accumulator=accumulates,
        )
        return Decision(site.authors, site.params, outs, why)

    if not all(survive(fact.constants, dtype) for _, fact in floats):
        return in_full(Precision.FULL, f"a constant does not survive {dtype.name}")
    if any(fact.precision == Precision.FULL and site.spreads(i) for i, fact in floats):
        return in_full(Precision.FULL, "an input must stay in full precision")
    if precision == Precision.FULL:
        return in_full(
            Precision.LOW, "what it reads in full precision is smaller than the result"
        )
    if accumulates:
        return in_full(precision, "a loop carry accumulates in it")
    if not low:
        return in_full(precision, "no input is in low precision")
    if Demand.LOW not in site.demand:
        return in_full(
            precision, "nothing that computes in low precision reads the result"
        )
    narrow = widest(low)
    if bits(narrow) < bits(dtype):
        narrow = dtype
    if bits(narrow) >= 32:
        return in_full(precision, "its inputs are in different low-precision dtypes")
    reads = tuple(author and lowered(author, narrow) for author in site.authors)
    outs = out_facts_of(site, narrow, Precision.LOW, is_broadcast=is_broadcast)
    return Decision(reads, site.params, outs, "an input is in low precision")


@dataclass(frozen=True)
class KeepInputs(Rule):
    """Moves data in the precision that it has; see `keep_inputs`."""

    def demand(self, params: dict[str, Any], wanted: Demand) -> Demand:
        return wanted

    def decide(self, site: Site) -> Decision:
        if site.primitive and site.primitive.name not in FANNING_OUT:
            facts = (
                low_if_read_low(fact, site.demand, site.compute_dtype)
                for fact in site.facts
            )
            site = site._replace(facts=tuple(facts))
        floats = [(i, fact) for i, fact in enumerate(site.facts) if fact]
        if not floats:
            return use_original_precision.decide(site)
        if len(floats) == 1:
            return keep_one(site, floats[0])
        fixed = {fact.dtype for _, fact in floats if fact.constants is None}
        if len(fixed) <= 1:
            dtype = next(iter(fixed), floats[0][1].dtype)
            if all(survive(fact.constants, dtype) for _, fact in floats):
                return self._join(site, floats, dtype)
        return _follow(site)

    @staticmethod
    def _join(site: Site, floats: list[tuple[int, Fact]], dtype: DType) -> Decision:
        reads = tuple(author and lowered(author, dtype) for author in site.authors)
        known = {
            "precision": max(fact.precision for _, fact in floats),
            "is_broadcast": all(
                fact.is_broadcast or not site.spreads(i) for i, fact in floats
            ),
            "constants": joined_constants([fact.constants for _, fact in floats]),
            "from_accumulator": any(fact.from_accumulator for _, fact in floats),
        }
        outs = out_facts_of(site, dtype, **known)
        return Decision(reads, site.params, outs, "moves data unchanged")


@dataclass(frozen=True)
class KeepEachInput(Rule):
    """Moves several arrays at once, each in the precision that it has."""

    def demand(self, params: dict[str, Any], wanted: Demand) -> Demand:
        return wanted

    def decide(self, site: Site) -> Decision:
        ins, outs = len(site.facts), len(site.out_avals)
        if ins != outs:
            raise AmpError(
                "`keep_each_input` is for primitives that give back each of their "
                f"operands, one result for one operand; `{site.primitive}` makes "
                f"{outs} of {ins}. Give it `keep_inputs` if it moves data, and "
                "`follow_inputs` if it computes."
            )
        return _keep(site, list(enumerate(site.facts)))


def low_if_read_low(fact: Fact | None, demand: Demand, dtype: DType) -> Fact | None:
    """The fact of a value that is moved or handed on, and then only read low.

    What comes out of a remat region in full precision is cast before it is moved, so
    that nothing on the way is kept in full for the backward pass."""
    if fact is None or fact.precision != Precision.LOW or fact.constants:
        return fact
    low = lowered(fact.dtype, dtype)
    is_of_another = fact.exact_dtype not in (None, low)  # a low dtype of another range
    if demand & ~Demand.WIDE != Demand.LOW or is_of_another:
        return fact
    return fact._replace(dtype=low)


# What shares its operand's storage, or is as cheap to make again as to read.
_VIEWS = MOVING_VIEWS | (LOCAL & MOVES)


def keep_one(site: Site, source: tuple[int, Fact]) -> Decision:
    """Every result has the dtype and precision of the one operand that is a float."""
    return _keep(site, [source] * len(site.out_avals))


def _keep(site: Site, sources: Sequence[tuple[int, Fact | None]]) -> Decision:
    """Each result has the dtype and precision of one operand."""
    reads = tuple(fact and fact.dtype for fact in site.facts)
    outs: list[Fact | None] = []
    for (i, fact), aval in zip(sources, site.out_avals, strict=True):
        if fact is None or author_dtype(aval) is None:
            outs.append(None)
            continue
        name = site.primitive and site.primitive.name
        grows = _size_key(aval.shape) != _size_key(site.avals[i].shape)
        fans_out = name in WHOLE_VIEWS and grows
        is_view = name in _VIEWS and not fans_out
        is_placed = name in PLACING and fact.remat_source in INPUT_SOURCES
        is_broadcast = fact.is_broadcast or fans_out
        is_same = name in ("broadcast_in_dim", "reshape", "copy")
        constants = fact.constants if is_same else None
        source = view_of(fact.remat_source) if is_view else RematSource.NONE
        if is_placed:  # also if all devices are to hold all of it: that is a gather
            source = RematSource.SHARDED
        exact = fact.exact_dtype if name is None or name in MOVES else None
        is_turned = name == "transpose" and _moves_last_axis(site.params)
        known = {
            "is_broadcast": is_broadcast,
            "constants": constants,
            "exact_dtype": exact,
            "is_transposed": fact.is_transposed != is_turned,
        }
        outs.append(fact._replace(remat_source=source, **known))
    return Decision(reads, site.params, tuple(outs), "moves data unchanged")


def _moves_last_axis(params: dict[str, Any]) -> bool:
    order = params["permutation"]
    return bool(order) and order[-1] != len(order) - 1


def view_of(source: RematSource) -> RematSource:
    """The remat source of a view of a value with this source."""
    return RematSource.VIEW if source == RematSource.INPUT else source


def _size_key(shape: tuple[Any, ...]) -> Any:
    """The number of elements, or the shape itself where a dimension is symbolic."""
    if all(isinstance(d, int) for d in shape):
        return prod(shape)
    return tuple(d for d in shape if not (isinstance(d, int) and d == 1))


@dataclass(frozen=True)
class ConvertAsWritten(Rule):
    """Casts as the jaxpr does: an `astype` in it is what its author asked for."""

    @property
    def is_run_again(self) -> bool:
        return True

    def demand(self, params: dict[str, Any], wanted: Demand) -> Demand:
        return wanted

    def decide(self, site: Site) -> Decision:
        (fact,), (old,), (new,) = site.facts, site.authors, site.out_authors
        # To NumPy, float64 and `None` are equal.
        is_same = old is not None and new is not None and old == new
        if is_same:  # only the weak type changes
            assert fact is not None
            out = fact._replace(remat_source=view_of(fact.remat_source))
            if fact.dtype == old:
                return Decision((old,), site.params, (out,), "keeps its dtype")
            params = site.params | {"new_dtype": fact.dtype, "weak_type": False}
            return Decision((fact.dtype,), params, (out,), "keeps its dtype")
        outs = (None,)
        if new is not None:
            precision = self._precision(site.avals[0].dtype, new)
            outs = (Fact(new, precision, constants=self._constants(site)),)
        reads = (fact and fact.dtype,)
        return Decision(reads, site.params, outs, "a cast that the author wrote")

    @staticmethod
    def _precision(old: Any, new: DType) -> Precision:
        if is_float(old):  # up: pinned by the author; down: as good as an input
            return Precision.FULL if bits(new) > bits(old) else Precision.NEUTRAL
        # Integers are exact in float16 only up to 2048, in bfloat16 up to 256.
        return Precision.NEUTRAL if old == np.bool_ else Precision.FULL

    @staticmethod
    def _constants(site: Site) -> Constants | None:
        if site.facts[0] is not None:
            return site.facts[0].constants
        is_bool = site.avals[0].dtype == np.bool_
        return Constants(frozenset({0.0, 1.0})) if is_bool else None


follow_inputs: Rule = FollowInputs()
"""Computes low only between ops that compute low (TensorFlow's *infer* colour).

An op runs in full precision if an input of the result's size must stay in it. Else it
runs low if an input is low already and an op that computes low reads the result. Else
it runs as written. A smaller input (a bias, a mean) never decides. A constant that
would overflow, vanish or turn into 1 keeps the op in full precision.

See TensorFlow's graph rewrite, `auto_mixed_precision.cc`."""

keep_inputs: Rule = KeepInputs()
"""Moves data in whatever precision it has (TensorFlow's *clear* colour)."""

keep_each_input: Rule = KeepEachInput()
"""As `keep_inputs`, where each result belongs to one input.

For primitives that make one result of each operand, such as `optimization_barrier`."""
