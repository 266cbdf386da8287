"""Warns if another loss is differentiated than the one that `enable_amp` made low."""

import inspect
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from ._amp import was_called
from ._dtypes import bits, is_float
from ._errors import place_of, warn_or_raise
from ._reports import walk
from ._reports.call import flat_call
from ._rewrite.record import (
    Recorder,
    amp_is_off,
    contracts,
    plans_in_float16,
    plans_with_contractions,
)
from ._rewrite.switch import is_amp_disabled, is_traced_by_amp
from ._structural import steps_of


class Watch:
    """Looks at the losses that an optimizer of `enable_amp` is given.

    The first loss in which no `amp` is seen at work is traced once more: it may have
    been compiled before with `amp` in it, or its author may have lowered it by hand.

    Args:
        expects_float16: whether a loss in float16 is no surprise, as where it is
            scaled."""

    def __init__(self, expects_float16: bool) -> None:
        self.has_looked = False
        self.expects_float16 = expects_float16
        self.loss: Any = None  # the loss of `enable_amp`, as written
        self._is_asked = False
        self._before = plans_with_contractions()

    def expect_use(self) -> None:
        """Warns of gradients that no function of `amp` can have made."""
        if self._is_asked or not inspect.isfunction(self.loss):
            return
        if was_called(self.loss) or plans_with_contractions() > self._before:
            return
        if is_amp_disabled() or amp_is_off() or is_traced_by_amp():
            return
        warn_or_raise(
            "`update` of an optimizer that `enable_amp` made is given gradients, but "
            "the loss that it made was never called: training runs in full precision. "
            "Write `mixed, tx = enable_amp(loss_fn, optimizer)`, and differentiate "
            "`mixed`: `tx.value_and_grad(mixed, opt_state)(params, batch)`. This is of "
            f"{place_of(self.loss)}.",
            strict=False,
        )

    @contextmanager
    def __call__(
        self, fun: Callable[..., Any], args: Any, kwargs: Any
    ) -> Iterator[None]:
        self._is_asked = True
        before, in_float16 = plans_with_contractions(), plans_in_float16()
        yield
        if plans_in_float16() > in_float16 and not self.expects_float16:
            warn_or_raise(
                "A loss in float16 is differentiated by an optimizer that `enable_amp` "
                "made for another dtype, and so without a loss scale: gradients below "
                "6e-8 become zero. Take the loss and the optimizer from one call, "
                "`mixed, tx = enable_amp(loss_fn, optimizer, compute_dtype='float16')`."
                f" This is of {place_of(fun)}.",
                strict=False,
            )
        is_on_purpose = is_amp_disabled() or amp_is_off() or is_traced_by_amp()
        is_mixed = plans_with_contractions() > before
        if self.has_looked or is_mixed or is_on_purpose:
            # A second loss may be in full precision on purpose, as a penalty is.
            self.has_looked |= is_mixed
            return
        self.has_looked = True
        if _is_in_full(fun, args, kwargs):
            warn_or_raise(
                "The optimizer that `enable_amp` made was given a loss whose matrix "
                "products `amp` never saw, and that computes in full precision: write "
                "`mixed, tx = enable_amp(loss_fn, optimizer)`, where `loss_fn` calls "
                "the model, and `tx.value_and_grad(mixed, opt_state)`. This is of "
                f"{place_of(fun)}.",
                strict=False,
            )


def _is_in_full(fun: Callable[..., Any], args: Any, kwargs: Any) -> bool:
    """Whether a function has contractions of floats, none low or seen by `amp`."""
    recorder = Recorder()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            jaxpr = flat_call(fun, args, kwargs, (), "the loss").trace(recorder)
    except Exception:  # it has just run: that it can't be traced again is no mistake
        return False
    found = [
        atom.aval.dtype
        for eqn, *_ in walk.walk(jaxpr, recorder.steps)
        if walk.flops(eqn) and eqn.outvars[0].aval.shape  # no norm of parameters
        for atom in eqn.invars[:2]
        if is_float(atom.aval.dtype)
    ]
    is_seen = any(contracts(steps_of(plan)) for _, plan in recorder.plans)
    return bool(found) and not is_seen and min(map(bits, found)) >= 32
