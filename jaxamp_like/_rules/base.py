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
from typing import Any, NamedTuple, Protocol

import jax.numpy as jnp

from .._dtypes import DType, bits, cast_all, exact_in, is_float, lowered, survives
from .._jax import is_array_aval, typeof
from .fields import check_fields
from .low_bits import LowBits


class Precision(enum.IntEnum):
    """Whether a float value may be read low; see `follow_inputs`."""

    NEUTRAL = 0  # it may: an input, a constant, or one of these moved about
    LOW = 1  # it may: made in low precision, or in full by an op that permits it
    FULL = 2  # it may not: made by an op whose result must stay in the author's dtype


class RematSource(enum.IntEnum):
    """How cheaply a float value can be had again in the backward pass."""

    NONE = 0
    INPUT = 1  # an input: live anyway
    VIEW = 2  # an input, reshaped, transposed or sliced
    CONSTANT = 3  # a constant or a view of one: nothing differentiates it
    RECOMPUTED = 4  # an input of code that is run again in the backward pass anyway
    SHARDED = 5  # as `INPUT` and `VIEW`, but on several devices: costly to read again


INPUT_SOURCES = (RematSource.INPUT, RematSource.VIEW, RematSource.SHARDED)
"""The remat sources of inputs of the function, and of views of them."""


class Origin(enum.IntEnum):
    """What a float value is made of: how surely it is a weight, in rising order.

    A value that is only cast, moved or masked keeps its origin, also inside of the
    programs that equations hold. `RematSource` answers another question: whether a
    value may be read again."""

    CONSTANT = 0  # literals alone, or a single number: it decides nothing
    DATA = 1  # an argument that holds no parameters, or anything made of one
    CLOSED_OVER = 2  # what the function closes over, and no argument
    MADE = 3  # several parameters, or parameters and what is closed over
    PARAMETER = 4  # one parameter: an array of an argument that `argnums` names


class Demand(enum.Flag):
    """How a value is read, directly or through ops that follow their inputs."""

    NONE = 0
    LOW = enum.auto()  # by an op that computes low
    FULL = enum.auto()  # by an op that computes in full
    ACCUMULATOR = enum.auto()  # by the next iteration, as a carry that adds up in full
    OTHER = enum.auto()  # low, but not in the compute dtype of the function
    AS_HELD = enum.auto()  # in full, by an op that casts up: it may be held low
    WIDE = enum.auto()  # low, by an op that makes a gradient which is not to be rounded


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


class Partner(NamedTuple):
    """What a value was multiplied with in a contraction of a forward pass."""

    origin: Origin
    side: int  # on which it stood: 0 or 1
    sizes: tuple[str, ...]  # of its axes, sorted: its gradient may have another order


def sizes_of(aval: Any) -> tuple[str, ...]:
    """The sizes of an array's axes, sorted as text: symbolic sizes have no order."""
    return tuple(sorted(map(str, aval.shape)))


class Constants(NamedTuple):
    """Numbers that a value is made of, known before the program runs."""

    numbers: frozenset[float]
    are_all: bool = True  # False: only the largest number of an array is known

    def exact_in(self, dtype: DType) -> bool:
        """Whether a cast of the value to `dtype` is sure to round nothing."""
        return self.are_all and all(exact_in(x, dtype) for x in self.numbers)


class Fact(NamedTuple):
    """What is known of a float value of the rewritten program."""

    dtype: DType  # as it is now; the author's dtype is in the variable's aval
    precision: Precision = Precision.NEUTRAL
    remat_source: RematSource = RematSource.NONE
    is_broadcast: bool = False  # made only of arrays smaller than itself
    constants: Constants | None = None  # if it is made of nothing else
    from_accumulator: bool = False  # made from a carry that adds up in full
    exact_dtype: DType | None = None  # a lower dtype that holds its numbers exactly
    origin: Origin = Origin.DATA
    partners: frozenset[Partner] = frozenset()  # as far as they are known
    is_transposed: bool = False  # a view whose last axis is another than the value's
    is_copied: bool = False  # by a branch that it goes into, for the backward pass

    @property
    def saved_dtype(self) -> DType | None:
        """The dtype in which it is kept for the backward pass, if not in its own."""
        return None if self.exact_dtype == self.dtype else self.exact_dtype


def held_in_full(fact: Fact | None, author: DType | None) -> Fact | None:
    """The fact of a value cast to the author's dtype, in which its cotangents add up.

    The backward pass still keeps the value in the dtype that it had."""
    if fact is None or author is None or fact.dtype == author:
        return fact
    return fact._replace(dtype=author, exact_dtype=fact.dtype)


def survive(constants: Constants | None, dtype: DType) -> bool:
    """Whether no known constant overflows, vanishes or becomes 1 in `dtype`."""
    return constants is None or all(survives(x, dtype) for x in constants.numbers)


def joined_constants(parts: Sequence[Constants | None]) -> Constants | None:
    """The constants of a value that is put together from `parts`."""
    known = [part for part in parts if part is not None]
    if len(known) < len(parts) or not known:
        return None
    numbers = frozenset[float]().union(*(part.numbers for part in known))
    return Constants(numbers, all(part.are_all for part in known))


class Site(NamedTuple):
    """One equation, as a rule sees it.

    `authors` and `facts` have one entry for each operand, `None` where it is no float.
    `wanted` says for each result how it is read, directly or through ops that follow
    their inputs. Where a rule is called as a casting callback, `primitive` is `None`
    and `out_avals` a guess."""

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
    backward: bool = False  # whether JAX made it by transposing a derivative
    recomputed: bool = False  # whether it is made again in the backward pass
    cotangents: tuple[bool, ...] = ()  # which operands are; none of them, if empty
    device_axes: frozenset[Any] = frozenset()  # named axes that are not of `jax.vmap`
    partly_mapped: bool = False  # whether examples of a `jax.vmap` share some values

    @property
    def demand(self) -> Demand:
        """How any of the results is read."""
        return functools.reduce(operator.or_, self.wanted, Demand.NONE)

    @property
    def out_authors(self) -> tuple[DType | None, ...]:
        return tuple(author_dtype(aval) for aval in self.out_avals)

    @property
    def partners(self) -> frozenset[Partner]:
        """What the result may be the gradient of; empty, where nothing is known.

        Such a partner was multiplied with the operand beside the only cotangent. If
        some partners have the sizes of the result, only these are returned."""
        if self.cotangents[:2].count(True) != 1:
            return frozenset()
        fact = self.facts[self.cotangents.index(False)]
        known = frozenset() if fact is None else fact.partners
        sizes = sizes_of(self.out_avals[0])
        return frozenset(p for p in known if p.sizes == sizes) or known

    def is_cotangent(self, i: int) -> bool:
        """Whether operand `i` is what a backward pass is linear in."""
        return bool(self.cotangents) and self.cotangents[i]

    def spreads(self, i: int) -> bool:
        """Whether operand `i` is as large as the result: no statistic, no bias."""
        fact = self.facts[i]
        if fact is None or fact.is_broadcast:
            return False
        return any(
            self.avals[i].shape == getattr(out, "shape", None) for out in self.out_avals
        )


class Quantiser(Protocol):
    """How a contraction rounds an operand, if it needs no other operand for it."""

    def __call__(self, x: Any) -> Any:
        """The numbers that the contraction itself reads of `x`."""
        ...

    def for_each_pass(self, x: Any) -> Any:
        """The same, with what a gradient reads of `x` if that is rounded otherwise."""
        ...


class EightBits(NamedTuple):
    """What a contraction of operands in 8 or 4 bits is, for a report."""

    scales: str  # what shares one scale, for each operand
    runs: str  # where there are kernels of it, and what runs elsewhere
    needs_state: bool = False  # whether scales follow from what was seen before
    kept: str | None = None  # the name of scales that checkpoints are to keep
    backend: str | None = None  # the only one that quantises it, by JAX's name


class Decision(NamedTuple):
    """What becomes of one equation."""

    reads: tuple[DType | None, ...]  # the dtype that each operand is cast to
    params: dict[str, Any]
    out_facts: tuple[Fact | None, ...]
    why: str
    bind: Callable[..., Any] | None = None  # instead of the primitive's own
    # The dtypes that operands are kept in for the backward pass, if not as read.
    residual_dtypes: tuple[DType | None, ...] = ()
    # How operands are kept in 8 bits for the backward pass, if they are.
    residual_bits: tuple[LowBits | None, ...] = ()
    # Whether the backward pass casts inputs again, rather than keep the casts.
    recomputes_casts: bool = True
    eight_bits: EightBits | None = None  # of a contraction that is quantised
    # Whether cotangents are summed over devices low; `None`: where low has their range.
    sums_low: bool | None = None
    # How `bind` rounds each operand, if it does.
    quantisers: tuple[Quantiser | None, ...] = ()
    # For each operand, whether the derivative, too, reads only its rounded numbers.
    is_only_rounded: tuple[bool, ...] = ()


def author_dtype(aval: Any) -> DType | None:
    """The dtype of a float array's aval, else `None`."""
    dtype = getattr(aval, "dtype", None)
    return dtype if is_array_aval(aval) and is_float(dtype) else None


PACKAGE = __name__.partition(".")[0]

RULE_CLASSES: "dict[str, type[Rule]]" = {}
"""The library's own classes of rules, by the names that a saved policy has for them."""


@dataclass(frozen=True)
class Rule:
    """Base class of the library's own rules: hashable values, one decision each."""

    def __init_subclass__(cls) -> None:
        if cls.__module__.partition(".")[0] == PACKAGE:
            RULE_CLASSES[cls.__name__] = cls

    def __post_init__(self) -> None:
        check_fields(self)

    def decide(self, site: Site) -> Decision:
        raise NotImplementedError

    def demand(self, params: dict[str, Any], wanted: Demand) -> Demand:
        """How operands are read, if the results are read as `wanted`."""
        return Demand.FULL

    @property
    def is_compute(self) -> bool:
        """Whether the equation makes low results whatever it reads."""
        return False

    def is_for(self, name: str) -> bool:
        """Whether it says anything of primitives called `name`, under a scope."""
        return True

    @property
    def parts(self) -> tuple["Rule", ...]:
        """The rules that it may leave an equation to."""
        return ()

    def for_equation(self, params: dict[str, Any], avals: Sequence[Any]) -> "Rule":
        """The rule for an equation of which parameters and operands are known."""
        return self

    def beside_zero(self) -> "Rule":
        """The rule for an equation that sets one operand against a literal 0."""
        return self

    @property
    def may_compute_low(self) -> bool:
        """Whether the equation may compute low although none of its operands is low.

        `Matching.makes_low` asks it of all equations but contractions. Only such an
        equation can have a reason to run as written, which `why_written` tells."""
        return self.is_compute

    @property
    def saves(self) -> LowBits | None:
        """How operands are kept in 8 bits, of a rule that says nothing else."""
        return None

    @property
    def chooses_residuals(self) -> bool:
        """Whether the rule itself decides which numbers gradients read of operands."""
        return False

    @property
    def is_run_again(self) -> bool:
        """Whether the backward pass may run the equation again, to keep less."""
        return False

    def __call__(
        self,
        compute_dtype: DType | None = None,
        original_dtypes: Sequence[DType] = (),
        *invars: Any,
        **bind_params: Any,
    ) -> tuple[list[Any], dict[str, Any]]:
        """A casting callback that decides alike, to build other callbacks from."""
        if compute_dtype is None:
            raise TypeError(f"{self!r} is a rule already: write it without `()`.")
        is_callback = isinstance(compute_dtype, str | DType | type)
        if not is_callback or len(original_dtypes) != len(invars):
            raise TypeError(
                f"`{self!r}` is a rule, which a policy gives to equations: it neither "
                "wraps a function nor is called with arrays. Put it into a policy, "
                "under the name of a scope, and that into `amp`: "
                '`amp(fn, amp_policy=default_amp_policy | {"encoder": rule})`. '
                "(A rule of your own calls it as `rule(compute_dtype, original_dtypes, "
                "*invars, **bind_params)`, with a dtype for each of `invars`.)"
            )
        dtypes = [
            jnp.dtype(d) if isinstance(d, str | type) else d for d in original_dtypes
        ]
        facts = tuple(
            Fact(x.dtype, Precision.LOW) if is_float(dtype) else None
            for x, dtype in zip(invars, dtypes, strict=True)
        )
        authors = tuple(d if is_float(d) else None for d in dtypes)
        avals = tuple(map(typeof, invars))
        site = Site(
            None, bind_params, (), jnp.dtype(compute_dtype), avals,
            authors, facts, avals[:1], (Demand.LOW,), by_scope=True,
        )  # fmt: skip
        decision = self.decide(site)
        return cast_all(invars, decision.reads), decision.params


@dataclass(frozen=True)
class DelegatingRule(Rule):
    """Base class of rules that leave each equation to one of others: their `parts`.

    Until it is known which rule an equation gets, the answers hold for all of them."""

    @property
    def is_compute(self) -> bool:
        return all(rule.is_compute for rule in self.parts)

    @property
    def may_compute_low(self) -> bool:
        return any(rule.may_compute_low for rule in self.parts)

    def is_for(self, name: str) -> bool:
        return any(rule.is_for(name) for rule in self.parts)

    def demand(self, params: dict[str, Any], wanted: Demand) -> Demand:
        demands = (rule.demand(params, wanted) for rule in self.parts)
        return functools.reduce(operator.or_, demands)

    def decide(self, site: Site) -> Decision:
        return self.for_equation(site.params, site.avals).decide(site)


def out_facts_of(
    site: Site, dtype: DType | None, precision: Precision, **known: Any
) -> tuple[Any, ...]:
    """Facts of results that have the author's dtypes, lowered to `dtype` if given."""
    return tuple(
        author
        and Fact(
            author if dtype is None else lowered(author, dtype), precision, **known
        )
        for author in site.out_authors
    )
