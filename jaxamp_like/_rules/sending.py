"""Rules for equations that send values to other devices, or add up over devices."""

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from .._dtypes import DType, cast, has_range, lowered
from .._jax import (
    Primitive,
    bind_flat,
    collective_axes,
    is_partly_manual_on_cpu,
    varying_in,
)
from .._primitives import PLACING, SUMMED_BACK
from .._primitives.fences import fenced
from .base import INPUT_SOURCES, Decision, Demand, Fact, Precision, Rule, Site
from .following import KeepEachInput
from .storing import compute_in_full


def may_sum_over_devices(site: Site, low: DType) -> bool:
    """Whether sums over the named axes of an equation may be made in `low`.

    Sums over axes of devices may, since these are few. A contraction that is split over
    devices would be low on one device as well, so its sum over devices is in range if
    the sum on one device is. (The sum of a mean need not be: it grows with the number
    of devices.) A sum over an axis of `vmap` has many terms on one device. In float16
    only types are trusted to tell that an axis is none of `vmap`."""
    if any(map(is_partly_manual_on_cpu, (*site.avals, *site.out_avals))):
        return False
    typed = frozenset[Any]().union(*map(varying_in, (*site.avals, *site.out_avals)))
    is_wide = has_range(low, jnp.dtype("float32"))
    known = typed | site.device_axes if is_wide else typed
    return collective_axes(site.params) <= known


@dataclass(frozen=True)
class SumOverDevices(KeepEachInput):
    """Adds up over devices in the dtype that operands have; see `sum_over_devices`.

    Args:
        full_sums: whether it adds up in the author's dtype instead."""

    full_sums: bool = False

    def demand(self, params: dict[str, Any], wanted: Demand) -> Demand:
        # Its terms must not be rounded because the sum is read low.
        return compute_in_full.demand(params, wanted)

    def decide(self, site: Site) -> Decision:
        if self.full_sums or not may_sum_over_devices(site, site.compute_dtype):
            return compute_in_full.decide(site)
        return super().decide(site)


@dataclass(frozen=True)
class SendLow(KeepEachInput):
    """Sends what is only read low in the compute dtype; see `send_low`.

    Args:
        full_sums: whether what comes back is summed over devices in full."""

    full_sums: bool = False

    @property
    def is_run_again(self) -> bool:
        return True  # which counts for cheap primitives: these send nothing forward

    def decide(self, site: Site) -> Decision:
        low = _sent_in(site)
        if low is None:
            sums_low = not self._sums_in_full(site, site.compute_dtype)
            return super().decide(site)._replace(sums_low=sums_low)
        (fact,), (wanted,), (author,) = site.facts, site.wanted, site.authors
        assert fact is not None and author is not None
        if Demand.WIDE not in wanted and not self._sums_in_full(site, low):
            why = f"is only read in {low.name}"
            out = Fact(low, Precision.LOW, is_broadcast=fact.is_broadcast)
            return Decision((low,), site.params, (out,), why)
        # A gradient that is not to be rounded comes back as it is.
        held = fact.dtype if Demand.WIDE in wanted else low
        why = f"sends {low.name}, of which the gradient is summed in {fact.dtype.name}"
        precision = fact.precision if held == fact.dtype else Precision.LOW
        out = Fact(held, precision, is_broadcast=fact.is_broadcast)
        bind = _sent(site, low, fact.dtype, held)
        return Decision((fact.dtype,), site.params, (out,), why, bind)

    def _sums_in_full(self, site: Site, low: DType) -> bool:
        """Whether what comes back, if it is low, is summed in full."""
        if site.primitive is None or site.primitive.name not in SUMMED_BACK:
            return False
        return self.full_sums or not may_sum_over_devices(site, low)


def _sent_in(site: Site) -> DType | None:
    """The dtype to send a value in, if that is narrower than the one it has."""
    if site.primitive is None or len(site.facts) != 1:
        return None
    (fact,), (wanted,) = site.facts, site.wanted
    if fact is None:
        return None
    if wanted & ~Demand.WIDE != Demand.LOW or fact.constants or fact.from_accumulator:
        return None
    if is_mark_of_input(site):
        return None  # it sends nothing forward, only cotangents back: see `summed_once`
    if site.primitive.name in PLACING and fact.remat_source in INPUT_SOURCES:
        return None  # a view, whose cast is made before it
    low = lowered(fact.dtype, site.compute_dtype)
    return low if low != fact.dtype else None


@dataclass(frozen=True)
class Sent:
    """Binds an equation of one operand that sends one dtype, and gets another back.

    Two that do the same are equal, so that equal layers are recognised as such.

    Args:
        primitive, params: of the equation.
        there: the dtype that is sent.
        back: the dtype of tangents, and so of the cotangents that come back.
        held: the dtype of the result."""

    primitive: Primitive
    params: tuple[tuple[str, Any], ...]
    there: DType
    back: DType
    held: DType

    def __call__(self, x: Any) -> Any:
        def once(x: Any) -> Any:
            (out,) = bind_flat(self.primitive, [x], dict(self.params))
            return out

        send = fenced(self.primitive.name, once)

        @jax.custom_jvp
        def sent(x):
            return cast(send(cast(x, self.there)), self.held)

        @sent.defjvp
        def _(primals, tangents):
            (x,), (t,) = primals, tangents
            return sent(x), cast(send(cast(t, self.back)), self.held)

        return sent(x)


def _sent(site: Site, there: DType, back: DType, held: DType) -> Sent:
    return Sent(site.primitive, tuple(site.params.items()), there, back, held)


def summed_once(site: Site, decision: Decision) -> Decision:
    """The decision on `pvary` of an input, whose cotangents are then summed low.

    `pvary` marks a value as read by all devices, and its transpose is a sum over them.
    That sum is made once: each device first adds up, in full, the cotangents that its
    readers send back. The sum over devices is low if all of the readers read low, and
    in the dtype of the cotangents if any does not."""
    if not is_mark_of_input(site) or decision.bind is not None:
        return decision
    (fact,), (wanted,) = site.facts, site.wanted
    assert fact is not None
    low = lowered(fact.dtype, site.compute_dtype)
    sums_low = decision.sums_low
    if sums_low is None:
        sums_low = has_range(low, fact.dtype)
    if low == fact.dtype or wanted != Demand.LOW or not sums_low:
        return decision
    return decision._replace(bind=_sent(site, fact.dtype, low, fact.dtype))


def is_mark_of_input(site: Site) -> bool:
    """Whether the equation marks an input of the function as read by all devices."""
    is_mark = site.primitive is not None and site.primitive.name == "pvary"
    return is_mark and all(
        fact and fact.remat_source in INPUT_SOURCES for fact in site.facts
    )


sum_over_devices = SumOverDevices()
"""As `keep_each_input` over axes of devices; over those of `jax.vmap`, in full.

In float16 it sums in full unless types tell that the axes are of devices."""

send_low: Rule = SendLow()
"""As `keep_each_input`; what only contractions read is rounded before it is sent.

The numbers are those that contractions would round anyway, in half the bytes. In the
backward pass their cotangents are summed over devices in the dtype of the contraction's
gradient, which is the compute dtype. They are summed in float32 where the user has
asked for gradients that are not rounded
(`use_precision_by_pass(weight_gradient=wide())`) or for `full_sums_over_devices`, where
the axis is one of `jax.vmap`, or, in float16, where types don't tell what varies over
devices (`check_vma=False`)."""

FULL_SUMS = {
    sum_over_devices: SumOverDevices(full_sums=True),
    send_low: SendLow(full_sums=True),
}
"""For each of these rules, the one that sums over devices in the author's dtype."""
