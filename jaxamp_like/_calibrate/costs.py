"""What a contraction costs in a dtype: FLOPs, bytes kept, or seconds on a device.

Read off a program with marks: every contraction that may be rounded reads one, in the
forward as in the backward pass."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple, get_args

import jax.numpy as jnp

from .._dtypes import DType, bits
from .._jax import Eqn, Jaxpr, Literal as JaxprLiteral, names, raw, subjaxprs
from .._primitives import CONTRACTIONS
from .._reports.walk import flops, size_of
from .groups import Group
from .marks import MARK, Contraction, is_read_by_its_contraction

Objective = Literal["flops", "bytes", "time"]
OBJECTIVES: tuple[str, ...] = get_args(Objective)


@dataclass(frozen=True)
class Device:
    """A device by what bounds its speed, for the objective "time".

    A contraction takes the longer of its arithmetic and its traffic: the roofline of
    Williams, Waterman and Patterson (2009).

    Args:
        flops: operations a second by the name of a dtype; of one that is not named,
            those of the narrowest named dtype that is at least as wide.
        bandwidth: bytes a second.
    Raises:
        ValueError: a speed is not positive, or float32's is missing.

    >>> Device({"float32": 67e12, "bfloat16": 990e12}, 3.35e12).speed("float16") / 1e12
    990.0
    """

    flops: Mapping[str, float]
    bandwidth: float

    def __post_init__(self) -> None:
        if "float32" not in self.flops:
            raise ValueError(
                f"`flops` of a `Device` needs a speed for 'float32', but names "
                f"{sorted(self.flops)}."
            )
        if not all(speed > 0 for speed in (*self.flops.values(), self.bandwidth)):
            raise ValueError(
                "The speeds of a `Device` must be positive numbers, but got "
                f"{dict(self.flops)} and a bandwidth of {self.bandwidth}."
            )

    def speed(self, dtype: str) -> float:
        """Operations a second in a dtype."""
        if dtype in self.flops:
            return self.flops[dtype]
        width = bits(jnp.dtype(dtype))
        wide = [name for name in self.flops if bits(jnp.dtype(name)) >= width]
        return self.flops[min(wide, key=lambda name: bits(jnp.dtype(name)))]


H200 = Device({"float32": 395e12, "float16": 790e12}, 4.3e12)
"""An NVIDIA H200 as measured; its float32 is TF32."""


@dataclass
class Work:
    """What the contractions of a group do, in numbers that don't depend on a dtype.

    Args:
        flops: multiply-adds, times two, forward and backward.
        kept: elements that the forward contractions read and make, parameters aside:
            what is kept for the backward pass.
        runs: FLOPs and elements moved of each contraction, for a roofline."""

    flops: float = 0.0
    kept: int = 0
    runs: list[tuple[float, int]] = field(default_factory=list)


class Found(NamedTuple):
    """The contractions of a program, in order, and what each does."""

    work: dict[Contraction, Work]
    fixed_flops: float  # of contractions that `amp` leaves as written


def survey(jaxpr: Jaxpr) -> Found:
    """The contractions of a program with marks."""
    work: dict[Contraction, Work] = {}
    fixed = 0.0
    given = frozenset([*raw(jaxpr).invars, *raw(jaxpr).constvars])
    for eqn, of, times, kept in _contractions(jaxpr, 1, given):
        if of is None:
            fixed += times * flops(eqn)
            continue
        one = work.setdefault(of, Work())
        one.flops += times * flops(eqn)
        one.kept += times * kept
        moved = sum(size_of(v.aval) for v in (*eqn.invars[:2], *eqn.outvars))
        one.runs.append((times * flops(eqn), times * moved))
    return Found(work, fixed)


_VIEWS = frozenset("reshape transpose broadcast_in_dim squeeze slice".split())


def _contractions(
    jaxpr: Jaxpr, times: int, given: frozenset[Any]
) -> Iterator[tuple[Eqn, Contraction | None, int, int]]:
    """Contractions with their mark, how often they run, and what they keep.

    `given` are parameters and batches, which are live anyway."""
    eqns = raw(jaxpr).eqns
    marked = {e.outvars[0]: e for e in eqns if e.primitive is MARK}
    known, seen = set(given), set()
    for eqn in eqns:
        operands = [v for v in eqn.invars if not _is_literal(v)]
        if eqn.primitive.name in _VIEWS and operands and operands[0] in known:
            known.update(eqn.outvars)
        if eqn.primitive.name in CONTRACTIONS:
            made = (marked[v] for v in operands if v in marked)
            before = [e for e in made if is_read_by_its_contraction(e)]
            of = before[0].params["of"] if before else None
            kept = 0
            if not _is_backward(eqn):
                values = [e.invars[0] for e in before] + list(eqn.outvars)
                new = {v for v in values if v not in known and v not in seen}
                seen |= new
                kept = sum(size_of(v.aval) for v in new)
            yield eqn, of, times, kept
        length = eqn.params["length"] if eqn.primitive.name == "scan" else 1
        for sub in subjaxprs(eqn.params):
            # Conditions and indices come first in an equation, and are no operands.
            outer = zip(reversed(raw(sub).invars), reversed(eqn.invars), strict=False)
            inner = frozenset(v for v, x in outer if not _is_literal(x) and x in known)
            yield from _contractions(sub, times * length, inner)


def _is_literal(atom: Any) -> bool:
    return isinstance(atom, JaxprLiteral)


def _is_backward(eqn: Eqn) -> bool:
    told = names(eqn)
    return told.backward or told.recomputed


class Prices(NamedTuple):
    """What each group costs as written and in each candidate, by the objective."""

    full: list[float]
    low: list[list[float]]  # by group, then by candidate

    def of(self, choices: Sequence[int]) -> float:
        """What all groups cost under `choices`."""
        pairs = zip(choices, self.full, self.low, strict=True)
        return sum(low[c - 1] if c else full for c, full, low in pairs)


def prices(
    groups: Sequence[Group],
    work: Mapping[Contraction, Work],
    candidates: Sequence[DType],
    objective: str,
    device: Device | Mapping[str, Mapping[str, float]],
) -> Prices:
    """Prices of groups: FLOPs in full, bytes kept, or seconds.

    Raises:
        ValueError: a measured profile lacks a group or a dtype."""

    def price(group: Group, dtype: str) -> float:
        works = [work[one] for one in group.contractions]
        if objective == "flops":
            is_full = dtype == "float32"
            return sum(one.flops for one in works) if is_full else 0.0
        size = bits(jnp.dtype(dtype)) / 8
        if objective == "bytes":
            return size * sum(one.kept for one in works)
        if not isinstance(device, Device):
            return _measured(device, group.name, dtype)
        speed = device.speed(dtype)
        return sum(
            max(n / speed, size * moved / device.bandwidth)
            for one in works
            for n, moved in one.runs
        )

    lows = [dtype.name for dtype in candidates]
    full = [price(group, "float32") for group in groups]
    return Prices(full, [[price(group, name) for name in lows] for group in groups])


def _measured(
    profile: Mapping[str, Mapping[str, float]], group: str, dtype: str
) -> float:
    try:
        return float(profile[group][dtype])
    except (KeyError, TypeError):
        raise ValueError(
            f"The profile given as `device` has no time of {group!r} in {dtype}. It "
            "maps each group, as `granularity` has it, to seconds by dtype: "
            f"{{{group!r}: {{'float32': 2e-3, {dtype!r}: 1e-3}}, ...}}."
        ) from None
