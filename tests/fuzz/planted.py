"""Faults to plant into the rewrite, each of which the fuzzer must find.

A fault is planted in the modules that are loaded, for as long as a context lasts."""

import contextlib
import dataclasses
import sys
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import jax.numpy as jnp
import numpy as np

from jaxamp_like import _amp
from jaxamp_like._dtypes import bits
from jaxamp_like._quantised import scaled as _scaled
from jaxamp_like._rewrite import (
    accumulators as _accumulators,
    bind as _bind,
    planner as _planner,
)
from jaxamp_like._rewrite.remat import regions as _regions
from jaxamp_like._structural import STRUCTURAL, branches, loops

from .cases import Case, make_case
from .checks import Failure, check, forget

# Their names are those of functions in the package.
float8_module = sys.modules["jaxamp_like._quantised.float8"]
_int8 = sys.modules["jaxamp_like._quantised.int8"]

Fault = Callable[[], contextlib.AbstractContextManager[Any]]
FAULTS: dict[str, Fault] = {}


def fault(make: Fault) -> Fault:
    FAULTS[make.__name__] = make
    return make


@contextlib.contextmanager
def plant(name: str) -> Iterator[None]:
    """Has a fault in the rewrite, and leaves nothing that was made with it."""
    _forget()
    try:
        with FAULTS[name]():
            yield
    finally:
        _forget()


def _forget() -> None:
    forget()
    _amp._planner.cache_clear()


def find(name: str, seed: int = 0, most: int = 20_000) -> tuple[int, Failure] | None:
    """The number of cases until one breaks a check because of a fault, and how."""
    seeds = iter(range(seed, seed + most))
    while (found := _failing(name, seeds)) is not None:
        at, failure = found
        if check(_case(name, at)).failure is None:
            return at - seed + 1, failure
    return None


def _failing(name: str, seeds: Iterator[int]) -> tuple[int, Failure] | None:
    with plant(name):
        for seed in seeds:
            failure = check(_case(name, seed)).failure
            if failure is not None:
                return seed, failure
    return None


def _case(name: str, seed: int) -> Case:
    return make_case(seed, KINDS.get(name))


def handler(name: str, **changes: Any) -> contextlib.AbstractContextManager[Any]:
    """A structural primitive that is decided or bound in another way."""
    changed = STRUCTURAL[name]._replace(**changes)
    return mock.patch.dict(STRUCTURAL, {name: changed})


def _with_params(step: Any, **params: Any) -> Any:
    eqn = step.eqn.replace(params={**step.eqn.params, **params})
    return dataclasses.replace(step, eqn=eqn)


@fault
def dropped_cast():
    """The first operand of an equation is not cast."""
    original = _bind.Binder.operand

    def operand(self, step, i):
        if i == 0:
            return self.read(step.eqn.invars[i], None)
        return original(self, step, i)

    return mock.patch.object(_bind.Binder, "operand", operand)


@fault
def wrong_operand():
    """What a rule says of the first operand is done to the last."""
    original = _planner.Planner._step

    def step(self, *args):
        made = original(self, *args)
        if made.handler is not None:
            return made
        decision = made.decision._replace(reads=made.decision.reads[::-1])
        return dataclasses.replace(made, decision=decision)

    return mock.patch.object(_planner.Planner, "_step", step)


@fault
def lost_carry():
    """The second carry of a scan comes out as it went in."""
    original = STRUCTURAL["scan"].bind

    def bind(binder, step, operands):
        outs = list(original(binder, step, operands))
        num_consts, num_carry = loops.scan_arity(step.eqn)
        if num_carry > 1:
            outs[1] = operands[num_consts + 1]
        return outs

    return handler("scan", bind=bind)


@fault
def wrong_transpose():
    """A transpose of three axes is bound as its inverse."""
    original = _bind.Binder.apply

    def apply(self, step, given=None):
        if step.eqn.primitive.name == "transpose":
            permutation = tuple(np.argsort(step.decision.params["permutation"]))
            params = step.decision.params | {"permutation": permutation}
            decision = step.decision._replace(params=params)
            step = dataclasses.replace(step, decision=decision)
        return original(self, step, given)

    return mock.patch.object(_bind.Binder, "apply", apply)


@fault
def narrow_branches():
    """Branches agree on the narrowest dtype, not on the widest."""

    def narrowest(dtypes):
        return min(set(dtypes), key=bits)

    return mock.patch.object(branches, "widest", narrowest)


@fault
def swapped_branches():
    """The branches of a `cond` are bound in the wrong order."""
    original = STRUCTURAL["cond"].bind

    def bind(binder, step, operands):
        step = _with_params(step, branches=step.eqn.params["branches"][::-1])
        return original(
            binder, dataclasses.replace(step, inner=step.inner[::-1]), operands
        )

    return handler("cond", bind=bind)


@fault
def early_drop():
    """A value is dropped before the results are read."""
    original = _regions.schedule
    return mock.patch.object(
        _regions,
        "schedule",
        lambda units, outvars, *rest: original(units, list(outvars)[:-1], *rest),
    )


@fault
def rounded_const():
    """Constants that a program closes over are held low."""
    original = _bind.Binder.run

    def run(self, plan, consts, args, **kwargs):
        low = self.planner.compute_dtype
        rounded = [
            x.astype(low).astype(np.float32)
            if getattr(x, "dtype", None) == np.float32
            else x
            for x in consts
        ]
        return original(self, plan, rounded, args, **kwargs)

    return mock.patch.object(_bind.Binder, "run", run)


@fault
def lost_reverse():
    """A scan that runs backwards runs forwards."""
    original = STRUCTURAL["scan"].bind

    def bind(binder, step, operands):
        return original(binder, _with_params(step, reverse=False), operands)

    return handler("scan", bind=bind)


@fault
def lost_rule():
    """A derivative rule of the author's gives way to JAX's own."""
    return handler("custom_jvp_call", bind=STRUCTURAL["closed_call"].bind)


@fault
def lost_weak_type():
    """A result that its author left weakly typed is typed strongly."""
    original = _amp._as_author_typed

    def as_author(x, aval):
        out = original(x, aval)
        if getattr(aval, "dtype", None) != np.float32 or not aval.weak_type:
            return out
        return out + jnp.zeros((), np.float32)

    return mock.patch.object(_amp, "_as_author", as_author)


@fault
def lost_checkpoint():
    """What an author asks to be run again is kept."""
    inline = STRUCTURAL["closed_call"].bind
    with contextlib.ExitStack() as stack:
        for name in ("checkpoint", "remat2"):
            stack.enter_context(handler(name, bind=inline))
        return stack.pop_all()


@fault
def shifted_index():
    """A loop's step sees the last slice where it should see its own."""
    original = _bind.Binder.apply

    def apply(self, step, given=None):
        if step.eqn.primitive.name == "dynamic_slice":
            params = step.decision.params
            outs = original(self, step, given)
            return [x[::-1] if params["slice_sizes"][0] > 1 else x for x in outs]
        return original(self, step, given)

    return mock.patch.object(_bind.Binder, "apply", apply)


@fault
def low_accumulator():
    """Carries that add up are held low."""
    return mock.patch.object(
        _accumulators.Accumulators, "must_stay_full", lambda *_: set()
    )


KINDS = dict.fromkeys(
    ("lost_scale", "clipped", "wrong_row", "slices_of_others"), "quantised"
)
"""The kinds of programs that faults are looked for in, if not in all."""


@fault
def lost_scale():
    """The result of a float8 contraction is multiplied by one of both scales."""
    return mock.patch.object(float8_module, "rescaled", lambda x, one, other: x * one)


@fault
def clipped():
    """Scales are too small for the largest numbers."""
    original = _scaled.scale_of
    return mock.patch.object(
        _scaled, "scale_of", lambda *args, **kwargs: original(*args, **kwargs) / 4
    )


@fault
def wrong_row():
    """Rows of an int8 contraction are scaled as the first one."""
    original = _int8.scale_onto_result

    def scale_onto_result(scale, axes, ndim):
        made = original(scale, axes, ndim)
        return jnp.broadcast_to(made.ravel()[0], made.shape)

    return mock.patch.object(_int8, "scale_onto_result", scale_onto_result)


@fault
def slices_of_others():
    """In a loop, each slice of a weight is read as rounded from another."""
    original = _bind.Binder.hoist_weights

    def hoist_weights(self, *args):
        fixed, slices = original(self, *args)
        moved = {
            path: type(made)(*(jnp.roll(x, 1, axis=0) for x in made))
            for path, made in slices.items()
        }
        return fixed, moved

    return mock.patch.object(_bind.Binder, "hoist_weights", hoist_weights)
