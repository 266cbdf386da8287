"""The rule for what is sent to other devices."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax

from .._dtypes import DType, cast, has_range, lowered
from .._jax import bind_flat
from .._primitives.fences import fenced
from .base import INPUTS, Decision, Demand, Fact, Mark, Site
from .following import PLACING, KeepEachInput


@dataclass(frozen=True)
class SendLow(KeepEachInput):
    """Sends in the compute dtype what is only read so; see `send_low`."""

    @property
    def is_run_again(self) -> bool:
        return True  # but only what is cheap: what sends nothing in the forward pass

    def decide(self, site: Site) -> Decision:
        low = _sent_in(site)
        if low is None:
            return super().decide(site)
        (fact,), (wanted,), (author,) = site.facts, site.wanted, site.authors
        assert fact is not None and author is not None
        if Demand.WIDE not in wanted and has_range(low, fact.dtype):
            why = f"is only read in {low.name}"
            out = Fact(low, Mark.LOW, small=fact.small, shown=fact.shown)
            return Decision((low,), site.params, (out,), why)
        # A gradient that is not to be rounded comes back as it is.
        held = fact.dtype if Demand.WIDE in wanted else low
        why = f"sends {low.name}, of which the gradient is summed in {fact.dtype.name}"
        mark = fact.mark if held == fact.dtype else Mark.LOW
        out = Fact(held, mark, small=fact.small, shown=fact.shown)
        bind = _low_there_full_back(site, low, held)
        return Decision((fact.dtype,), site.params, (out,), why, bind)


def _sent_in(site: Site) -> DType | None:
    """The dtype to send in, if it is narrower than what is at hand."""
    if site.primitive is None or len(site.facts) != 1:
        return None
    (fact,), (wanted,) = site.facts, site.wanted
    if fact is None:
        return None
    if wanted & ~Demand.WIDE != Demand.LOW or fact.values or fact.carried:
        return None
    if site.primitive.name in (*PLACING, "pvary") and fact.leaf in INPUTS:
        return None  # a view, whose cast is made before it
    low = lowered(fact.dtype, site.compute_dtype)
    return low if low != fact.dtype else None


def _low_there_full_back(site: Site, low: DType, held: DType) -> Callable[..., Any]:
    def once(x: Any) -> Any:
        (out,) = bind_flat(site.primitive, [x], site.params)
        return out

    send = fenced(site.primitive.name, once)

    @jax.custom_jvp
    def there(x):
        return cast(send(cast(x, low)), held)

    @there.defjvp
    def _(primals, tangents):
        (x,), (t,) = primals, tangents
        return there(x), cast(send(t), held)

    return there


send_low = SendLow()
"""As `keep_each_input`; what only contractions read is rounded before it is sent.

The numbers are those that contractions would round anyway, in half the bytes. What
comes back of them is a sum over devices in the backward pass: in the dtype that the
contraction's gradient has, which is the compute dtype, or float32 where it has not the
range of float32, or where the user has asked for gradients that are not rounded
(`use_precision_by_pass(weight_gradient=wide())`)."""
