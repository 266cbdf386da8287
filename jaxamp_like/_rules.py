"""Casting rules: what a policy says for one equation.

A rule never sees the policy or the values of other equations. It gets a `Site` (one
equation, with what is known of its operands) and returns a `Decision`: the dtype in
which each operand is read, the parameters to bind with, and what is then known of the
results. Nothing is computed here: deciding and binding are two passes, so that a report
can read the very decisions that the binding follows.

Any other callable with the signature

    rule(compute_dtype, original_dtypes, *invars, **bind_params)
        -> (invars, bind_params)

is a rule too: it is given the operands as they are and returns them cast."""

import enum
import functools
import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.typing import DTypeLike

from ._dtypes import (
    DType,
    as_float_dtype,
    bits,
    cast,
    is_float,
    lowered,
    survives,
    widest,
)
from ._errors import AmpError
from ._jax import SymbolicZero, is_array_aval, typeof


class Mark(enum.IntEnum):
    """How far the precision of a float value is decided; see `follow_inputs`."""

    NEUTRAL = 0  # an input, a constant, or one of these moved about
    LOW = 1  # made in low precision, or in full but fit to be read low
    FULL = 2  # made by an op whose result must stay in the author's dtype


class Leaf(enum.IntEnum):
    """How cheaply a float value can be had again in the backward pass."""

    NO = 0
    ROOT = 1  # an input: live anyway
    VIEW = 2  # an input, reshaped, transposed or sliced
    CONST = 3  # a constant or a view of one: nothing differentiates it
    RERUN = 4  # an input of code that is run again in the backward pass anyway


class Demand(enum.Flag):
    """How a value is read, directly or through ops that follow their inputs."""

    NONE = 0
    LOW = enum.auto()  # by an op that computes low
    FULL = enum.auto()  # by an op that computes in full
    CARRY = enum.auto()  # by the next iteration, as a carry that adds up in full
    OTHER = enum.auto()  # low, but not in the compute dtype of the function


def is_full(demand: Demand) -> bool:
    """Whether a value is read, and never low."""
    return Demand.LOW not in demand and demand != Demand.NONE


def demand_in(dtype: DType, demand: Demand) -> Demand:
    """The demand of a rule whose compute dtype is not the function's but `dtype`.

    What is read low in float16 here and in bfloat16 there must not be cast ahead: it
    would be rounded twice, and lose its range on the way."""
    if Demand.LOW not in demand:
        return demand
    if bits(dtype) < 32:
        return demand | Demand.OTHER
    return demand & ~(Demand.LOW | Demand.OTHER) | Demand.FULL


class Fact(NamedTuple):
    """What is known of a float value of the rewritten program."""

    dtype: DType  # as it is now; the author's dtype is in the variable's aval
    mark: Mark = Mark.NEUTRAL
    leaf: Leaf = Leaf.NO
    small: bool = False  # holds only as much as an array smaller than itself
    values: frozenset[float] | None = None  # the constants that it is made of
    carried: bool = False  # made from a carry that adds up in full


class Site(NamedTuple):
    """One equation, as a rule sees it.

    `authors` and `facts` have one entry for each operand, `None` where it is no float.
    `wanted` says for each result how it is read, directly or through ops that follow
    their inputs."""

    primitive: Any
    params: dict[str, Any]
    scope: tuple[str, ...]
    compute_dtype: DType
    avals: tuple[Any, ...]
    authors: tuple[DType | None, ...]
    facts: tuple[Fact | None, ...]
    out_avals: tuple[Any, ...]
    wanted: tuple[Demand, ...]
    by_scope: bool  # whether the rule was found by a scope, not by the primitive

    @property
    def demand(self) -> Demand:
        """How any of the results is read."""
        return functools.reduce(operator.or_, self.wanted, Demand.NONE)

    @property
    def out_authors(self) -> tuple[DType | None, ...]:
        return tuple(author_dtype(aval) for aval in self.out_avals)

    def spreads(self, i: int) -> bool:
        """Whether operand `i` is as large as the result: no statistic, no bias."""
        fact = self.facts[i]
        if fact is None or fact.small:
            return False
        return any(
            self.avals[i].shape == getattr(out, "shape", None) for out in self.out_avals
        )


class Decision(NamedTuple):
    """What becomes of one equation."""

    reads: tuple[DType | None, ...]  # the dtype that each operand is cast to
    params: dict[str, Any]
    outs: tuple[Fact | None, ...]
    why: str
    bind: Callable[..., Any] | None = None  # instead of the primitive's own


def author_dtype(aval: Any) -> DType | None:
    """The dtype of a float array's aval, else `None`."""
    dtype = getattr(aval, "dtype", None)
    return dtype if is_array_aval(aval) and is_float(dtype) else None


@dataclass(frozen=True)
class Rule:
    """Base class of the library's own rules: hashable values, one decision each."""

    def decide(self, site: Site) -> Decision:
        raise NotImplementedError

    def demand(self, params: dict[str, Any], wanted: Demand) -> Demand:
        """How operands are read, if the results are read as `wanted`."""
        return Demand.FULL

    @property
    def is_compute(self) -> bool:
        """Whether the equation makes low results whatever it reads."""
        return False

    def __call__(
        self,
        compute_dtype: DType,
        original_dtypes: Sequence[DType],
        *invars: Any,
        **bind_params: Any,
    ) -> tuple[list[Any], dict[str, Any]]:
        """A casting callback that decides alike, to build other callbacks from."""
        facts = tuple(
            Fact(x.dtype, Mark.LOW) if is_float(dtype) else None
            for x, dtype in zip(invars, original_dtypes, strict=True)
        )
        authors = tuple(d if is_float(d) else None for d in original_dtypes)
        avals = tuple(map(typeof, invars))
        site = Site(
            None, bind_params, (), jnp.dtype(compute_dtype), avals,
            authors, facts, avals[:1], (Demand.LOW,), by_scope=True,
        )  # fmt: skip
        decision = self.decide(site)
        return read(invars, decision.reads), decision.params


def read(values: Sequence[Any], dtypes: Sequence[DType | None]) -> list[Any]:
    return [
        x if dtype is None else cast(x, dtype)
        for x, dtype in zip(values, dtypes, strict=True)
    ]


def outs_of(
    site: Site, dtype: DType | None, mark: Mark, **known: Any
) -> tuple[Any, ...]:
    """Facts of results that have the author's dtypes, lowered to `dtype` if given."""
    return tuple(
        author
        and Fact(author if dtype is None else lowered(author, dtype), mark, **known)
        for author in site.out_authors
    )


def asks_for_precision(params: dict[str, Any]) -> bool:
    """Whether the author set the precision of a contraction by hand."""
    precision = params.get("precision")
    parts = precision if isinstance(precision, tuple) else (precision,)
    return any(part not in (None, lax.Precision.DEFAULT) for part in parts)


def _asks_for_wider_result(site: Site) -> bool:
    """Whether the author set a result wider than the operands as written."""
    wide, authors = site.params.get("preferred_element_type"), site.authors
    return wide is not None and all(a is None or bits(wide) > bits(a) for a in authors)


def _beside_partner(dtype: DType, authors: Sequence[DType | None]) -> DType:
    """The dtype that float32 is lowered to beside an operand that is low by hand.

    The operand's own: float16 beside bfloat16 would lose the range that its author
    counted on."""
    partners = {a for a in authors if a is not None and bits(a) == bits(dtype)}
    return partners.pop() if len(partners) == 1 else dtype


def _as_bound(site: Site, dtype: DType) -> tuple[Any, ...]:
    wide = _asks_for_wider_result(site)
    return outs_of(site, None if wide else dtype, Mark.LOW)


@dataclass(frozen=True)
class UsePrecision(Rule):
    """Reads and computes in one dtype; `None` is the compute dtype asked for."""

    dtype: DType | None = None
    wide_result: bool = False

    @property
    def is_compute(self) -> bool:
        return self.dtype is None or bits(self.dtype) < 32

    def demand(self, params: dict[str, Any], wanted: Demand) -> Demand:
        return Demand.LOW if self.is_compute else Demand.FULL

    def decide(self, site: Site) -> Decision:
        if asks_for_precision(site.params) and not site.by_scope:
            decision = use_original_precision.decide(site)
            return decision._replace(why="the author asked for this precision")
        dtype = _beside_partner(self.dtype or site.compute_dtype, site.authors)
        reads = tuple(author and lowered(author, dtype) for author in site.authors)
        if reads == site.authors:
            decision = use_original_precision.decide(site)
            return decision._replace(why="the author's dtype is no wider")
        params = dict(site.params)
        if isinstance(params.get("precision"), lax.DotAlgorithmPreset):
            params["precision"] = (
                None  # names the dtypes of its operands: no longer true
            )
        decision = Decision(
            reads, params, outs_of(site, dtype, Mark.LOW), f"computes in {dtype.name}"
        )
        if "preferred_element_type" not in params or _asks_for_wider_result(site):
            return decision._replace(outs=_as_bound(site, dtype))
        # Else every contraction of the backward pass would read a float32 cotangent.
        low = site.out_authors[0] and lowered(site.out_authors[0], dtype)
        params["preferred_element_type"] = low
        if not self.wide_result:
            return decision
        outs = outs_of(site, None, Mark.LOW)
        bind = wide_contraction(site.primitive, params, site.out_authors[0])
        return decision._replace(outs=outs, bind=bind)


def wide_contraction(primitive: Any, params: dict[str, Any], wide: Any) -> Callable:
    """A contraction of low operands with a wide result and low cotangents.

    The transpose of a contraction with a wide result reads a wide cotangent, so the
    derivative is that of the low contraction; in forward mode, so that both work."""

    @jax.custom_jvp
    def contraction(*operands):
        return primitive.bind(*operands, **params | {"preferred_element_type": wide})

    def jvp(primals, tangents):
        live = [i for i, t in enumerate(tangents) if not isinstance(t, SymbolicZero)]

        def low(*moving):
            operands = list(primals)
            for i, x in zip(live, moving, strict=True):
                operands[i] = x
            return primitive.bind(*operands, **params)

        moving, moves = (tuple(x[i] for i in live) for x in (primals, tangents))
        return contraction(*primals), jax.jvp(low, moving, moves)[1].astype(wide)

    contraction.defjvp(jvp, symbolic_zeros=True)
    return contraction


@dataclass(frozen=True)
class UseOriginalPrecision(Rule):
    """Reads and computes in the author's dtypes; `local` results may be read low."""

    local: bool = False

    def decide(self, site: Site) -> Decision:
        mark = Mark.FULL
        spread = [f for i, f in enumerate(site.facts) if f and site.spreads(i)]
        if self.local and all(fact.mark < Mark.FULL for fact in spread):
            mark = Mark.LOW
        why = "needs the author's precision" + (", its result does not" * self.local)
        return Decision(site.authors, site.params, outs_of(site, None, mark), why)


@dataclass(frozen=True)
class UseWidestPrecision(Rule):
    """Computes in the widest dtype among the operands as they are now.

    A constant has no say, unless it would not survive the cast."""

    def demand(self, params: dict[str, Any], wanted: Demand) -> Demand:
        return Demand.LOW | Demand.FULL  # the other operands decide

    def decide(self, site: Site) -> Decision:
        facts = [fact for fact in site.facts if fact]
        lost = [
            fact
            for fact in facts
            if not all(survives(v, site.compute_dtype) for v in fact.values or ())
        ]
        voting = [fact for fact in facts if fact.values is None] + lost or facts
        if not voting:
            return use_original_precision.decide(site)
        dtype = widest(fact.dtype for fact in voting)
        mark = max(fact.mark for fact in facts)
        reads = tuple(author and lowered(author, dtype) for author in site.authors)
        outs = outs_of(site, dtype, mark)
        return Decision(reads, site.params, outs, "the widest of its inputs")


@dataclass(frozen=True)
class FollowInputs(Rule):
    """Runs low only between ops that run low; see `follow_inputs`."""

    def demand(self, params: dict[str, Any], wanted: Demand) -> Demand:
        how = Demand.LOW if Demand.LOW in wanted else Demand.FULL
        return how | (wanted & (Demand.CARRY | Demand.OTHER))

    def decide(self, site: Site) -> Decision:
        return _follow(site)


def _follow(site: Site) -> Decision:
    dtype = site.compute_dtype
    floats = [(i, fact) for i, fact in enumerate(site.facts) if fact]
    low = [fact.dtype for i, fact in floats if fact.dtype != site.authors[i]]
    mark = max((fact.mark for _, fact in floats), default=Mark.NEUTRAL)
    small = all(fact.small or not site.spreads(i) for i, fact in floats)
    carried = Demand.CARRY in site.demand and any(fact.carried for _, fact in floats)

    def in_full(mark: Mark, why: str) -> Decision:
        outs = outs_of(site, None, mark, small=small, carried=carried)
        return Decision(site.authors, site.params, outs, why)

    if any(not survives(v, dtype) for _, fact in floats for v in fact.values or ()):
        return in_full(Mark.FULL, f"a constant does not survive {dtype.name}")
    if any(fact.mark == Mark.FULL and site.spreads(i) for i, fact in floats):
        return in_full(Mark.FULL, "an input must stay in full precision")
    if mark == Mark.FULL:
        return in_full(Mark.LOW, "a full but smaller input")
    if carried:
        return in_full(mark, "a carry adds up")
    if not low:
        return in_full(mark, "no input is low yet")
    if Demand.LOW not in site.demand:
        return in_full(mark, "nothing low reads the result")
    narrow = widest(low)
    if bits(narrow) < bits(dtype):
        narrow = dtype
    if bits(narrow) >= 32:
        return in_full(mark, "its inputs are low in other dtypes than this op may be")
    reads = tuple(author and lowered(author, narrow) for author in site.authors)
    outs = outs_of(site, narrow, Mark.LOW, small=small)
    return Decision(reads, site.params, outs, "an input is low")


@dataclass(frozen=True)
class KeepInputs(Rule):
    """Moves data in the precision that it has; see `keep_inputs`."""

    def demand(self, params: dict[str, Any], wanted: Demand) -> Demand:
        return wanted

    def decide(self, site: Site) -> Decision:
        if site.primitive and site.primitive.name not in _FANNING_OUT:
            facts = (
                low_if_read_low(fact, site.demand, site.compute_dtype)
                for fact in site.facts
            )
            site = site._replace(facts=tuple(facts))
        floats = [(i, fact) for i, fact in enumerate(site.facts) if fact]
        if not floats:
            return use_original_precision.decide(site)
        if len(floats) == 1:
            return _keep(site, [floats[0]] * len(site.out_avals))
        fixed = {fact.dtype for _, fact in floats if fact.values is None}
        constants = [v for _, fact in floats for v in fact.values or ()]
        if len(fixed) <= 1:
            dtype = next(iter(fixed), floats[0][1].dtype)
            if all(survives(v, dtype) for v in constants):
                return self._join(site, floats, dtype)
        return _follow(site)

    @staticmethod
    def _join(site: Site, floats: list[tuple[int, Fact]], dtype: DType) -> Decision:
        reads = tuple(author and lowered(author, dtype) for author in site.authors)
        if all(fact.values for _, fact in floats):
            values = frozenset().union(*(fact.values or () for _, fact in floats))
        else:
            values = None
        known = {
            "mark": max(fact.mark for _, fact in floats),
            "small": all(fact.small or not site.spreads(i) for i, fact in floats),
            "values": values,
            "carried": any(fact.carried for _, fact in floats),
        }
        outs = outs_of(site, dtype, **known)
        return Decision(reads, site.params, outs, "moves data as it is")


@dataclass(frozen=True)
class KeepEachInput(Rule):
    """Moves several arrays at once, each in the precision that it has."""

    def demand(self, params: dict[str, Any], wanted: Demand) -> Demand:
        return wanted

    def decide(self, site: Site) -> Decision:
        return _keep(site, list(enumerate(site.facts)))


# Their transposes are sums, which add up in the dtype that was moved.
_FANNING_OUT = ("broadcast_in_dim", "gather", "dynamic_slice", "slice", "tile")


def low_if_read_low(fact: Fact | None, demand: Demand, dtype: DType) -> Fact | None:
    """The fact of a value that is moved or handed on, and then only read low.

    What comes out of an island in full precision is cast before it is moved, so that
    nothing on the way is kept in full for the backward pass."""
    if fact is None or fact.mark != Mark.LOW or fact.values or demand != Demand.LOW:
        return fact
    return fact._replace(dtype=lowered(fact.dtype, dtype))


# What shares its operand's storage, or is as cheap to make again as to read.
_VIEWS = (
    "reshape", "transpose", "squeeze", "slice", "dynamic_slice", "rev", "copy",
    "broadcast_in_dim", "expand_dims", "split", "unstack",
)  # fmt: skip


def _keep(site: Site, sources: Sequence[tuple[int, Fact | None]]) -> Decision:
    """Each result has the dtype and mark of one operand."""
    reads = tuple(fact and fact.dtype for fact in site.facts)
    outs: list[Fact | None] = []
    for (i, fact), aval in zip(sources, site.out_avals, strict=True):
        if fact is None or author_dtype(aval) is None:
            outs.append(None)
            continue
        name = site.primitive and site.primitive.name
        grows = _size_key(aval.shape) != _size_key(site.avals[i].shape)
        fans_out = name == "broadcast_in_dim" and grows
        is_view = name in _VIEWS and not fans_out
        small = fact.small or fans_out
        values = (
            fact.values if name in ("broadcast_in_dim", "reshape", "copy") else None
        )
        leaf = view_of(fact.leaf) if is_view else Leaf.NO
        outs.append(Fact(fact.dtype, fact.mark, leaf, small, values, fact.carried))
    return Decision(reads, site.params, tuple(outs), "moves data as it is")


def view_of(leaf: Leaf) -> Leaf:
    """What a view of such a value is."""
    return Leaf.VIEW if leaf == Leaf.ROOT else leaf


def _size_key(shape: tuple[Any, ...]) -> Any:
    """The number of elements, or the shape itself where a dimension is symbolic."""
    if all(isinstance(d, int) for d in shape):
        return prod(shape)
    return tuple(d for d in shape if not (isinstance(d, int) and d == 1))


@dataclass(frozen=True)
class ConvertAsWritten(Rule):
    """An `astype` that the jaxpr shows is the author's voice."""

    def demand(self, params: dict[str, Any], wanted: Demand) -> Demand:
        return wanted

    def decide(self, site: Site) -> Decision:
        (fact,), (old,), (new,) = site.facts, site.authors, site.out_authors
        if fact is not None and old == new:  # only the weak type changes
            out = fact._replace(leaf=view_of(fact.leaf))
            if fact.dtype == old:
                return Decision((old,), site.params, (out,), "keeps its dtype")
            params = site.params | {"new_dtype": fact.dtype, "weak_type": False}
            return Decision((fact.dtype,), params, (out,), "keeps its dtype")
        outs = (None,)
        if new is not None:
            outs = (
                Fact(
                    new, self._mark(site.avals[0].dtype, new), values=self._values(site)
                ),
            )
        reads = (fact and fact.dtype,)
        return Decision(reads, site.params, outs, "a cast that the author wrote")

    @staticmethod
    def _mark(old: Any, new: DType) -> Mark:
        if is_float(old):  # up: pinned by the author; down: as good as an input
            return Mark.FULL if bits(new) > bits(old) else Mark.NEUTRAL
        # Integers are exact in float16 only up to 2048, in bfloat16 up to 256.
        return Mark.NEUTRAL if old == np.bool_ else Mark.FULL

    @staticmethod
    def _values(site: Site) -> frozenset[float] | None:
        if site.facts[0] is not None:
            return site.facts[0].values
        return frozenset({0.0, 1.0}) if site.avals[0].dtype == np.bool_ else None


@dataclass(frozen=True)
class ByRange(Rule):
    """One rule for compute dtypes of narrow range (float16), another for the rest."""

    narrow: Rule
    wide: Rule

    def _pick(self, dtype: DType) -> Rule:
        return self.narrow if jnp.finfo(dtype).maxexp < 128 else self.wide

    def decide(self, site: Site) -> Decision:
        return self._pick(site.compute_dtype).decide(site)

    def demand(self, params: dict[str, Any], wanted: Demand) -> Demand:
        return self.wide.demand(params, wanted)


@dataclass(frozen=True)
class Callback(Rule):
    """A casting callback that the user wrote."""

    fn: Callable[..., Any]

    def demand(self, params: dict[str, Any], wanted: Demand) -> Demand:
        return wanted

    def decide(self, site: Site) -> Decision:
        low_read = []

        def bind(*operands):
            invars, params = self._call(site, operands)
            low_read.append([x.dtype for x in invars] != [a.dtype for a in site.avals])
            outs = site.primitive.bind(*invars, **params)
            outs = outs if site.primitive.multiple_results else [outs]
            return [  # never more bits than the author wrote
                x if author is None else cast(x, lowered(author, x.dtype))
                for x, author in zip(outs, site.out_authors, strict=True)
            ]

        structs = [
            jax.ShapeDtypeStruct(aval.shape, fact.dtype if fact else aval.dtype)
            for aval, fact in zip(site.avals, site.facts, strict=True)
        ]
        outs = jax.eval_shape(bind, *structs)
        mark = Mark.LOW if low_read[0] else Mark.FULL
        facts = tuple(
            author and Fact(out.dtype, mark)
            for out, author in zip(outs, site.out_authors, strict=True)
        )
        reads = tuple(fact and fact.dtype for fact in site.facts)
        name = getattr(self.fn, "__name__", repr(self.fn))
        return Decision(reads, site.params, facts, f"the rule {name}", bind)

    def _call(self, site: Site, operands: Sequence[Any]) -> tuple[Sequence[Any], dict]:
        dtypes = tuple(aval.dtype for aval in site.avals)
        out = self.fn(site.compute_dtype, dtypes, *operands, **site.params)
        where = f"rule {self.fn!r} for `{site.primitive}`"
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


use_compute_precision = UsePrecision()
"""Casts float inputs to the compute dtype; results are in it too."""

use_compute_precision_wide_result = UsePrecision(wide_result=True)
"""As `use_compute_precision`, but a contraction's result keeps the author's dtype.

The contractions of its backward pass still read low-precision cotangents."""

use_original_precision = UseOriginalPrecision()
"""Computes in the author's dtypes, and what follows keeps them too."""

use_original_precision_locally = UseOriginalPrecision(local=True)
"""Computes in the author's dtypes; the result is fit to be read in low precision."""

use_widest_precision = UseWidestPrecision()
"""Computes in the widest dtype among the inputs as they are now."""

follow_inputs = FollowInputs()
"""Computes low only between ops that compute low (TensorFlow's *infer* colour).

In full precision if an input of the result's size must stay in it; else low, if an
input is low already and an op that computes low reads the result; else as written. A
smaller input (a bias, a mean) never decides. A constant that would overflow, vanish or
turn into 1 keeps the op in full precision.

See TensorFlow's graph rewrite, `auto_mixed_precision.cc`."""

keep_inputs = KeepInputs()
"""Moves data in whatever precision it has (TensorFlow's *clear* colour)."""

keep_each_input = KeepEachInput()
"""As `keep_inputs`, where each result belongs to one input."""


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
