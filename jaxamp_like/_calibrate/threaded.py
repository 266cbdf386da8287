"""A program with marks as one whose roundings are an input.

The choices are handed down into every program that holds a mark; all else is bound as
it stands. One compiled program serves all choices."""

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
from jax import lax
from jax.sharding import PartitionSpec

from .._errors import AmpError
from .._jax import (
    Eqn,
    Jaxpr,
    eqn_context,
    evaluate,
    holds,
    reemit,
    scan_like,
    scan_operands,
    shard_map_options,
    source_line,
    subjaxprs,
    while_operands,
)
from .._structural import CALLS
from .marks import MARK, Contraction
from .rounding import chosen

Run = Callable[..., list[Any]]


class Threaded:
    """Evaluates programs with marks.

    Args:
        numbers: which of the choices is a contraction's. A choice of 0 rounds nothing,
            n as a mark has it of the n-th candidate."""

    def __init__(self, numbers: Mapping[Contraction, int]):
        self.numbers = numbers

    def run(self, jaxpr: Jaxpr, choices: Any, args: Sequence[Any]) -> list[Any]:
        """What `jaxpr` gives for `args` if it rounds by `choices`, an int array."""
        return evaluate(jaxpr, args, functools.partial(self._eqn, choices))

    def _eqn(self, choices: Any, eqn: Eqn, values: list[Any]) -> Sequence[Any]:
        if eqn.primitive is MARK:
            choice = choices[self.numbers[eqn.params["of"]]]
            return [chosen(values[0], choice, eqn.params["to"])]
        if not any(holds(inner, MARK) for inner in subjaxprs(eqn.params)):
            return reemit(eqn, values)
        name = eqn.primitive.name
        handler = _call if name in CALLS else _HANDLERS.get(name)
        if handler is None:
            raise AmpError(
                f"`calibrate` can't look into `{name}` ({source_line(eqn)}), which "
                "holds contractions that `amp` would lower. Put the call that makes it "
                "under `amp_stop()`, and decide on it by hand."
            )
        with eqn_context(eqn):
            return handler(self, eqn, choices, values)


def _call(self: Threaded, eqn: Eqn, choices: Any, values: list[Any]) -> list[Any]:
    if eqn.params.get("differentiated") and eqn.params.get("prevent_cse"):
        # What the backward pass runs again must not be taken from the forward pass.
        values = lax.optimization_barrier(values)
    jaxpr = next(sub for sub in subjaxprs(eqn.params))
    return self.run(jaxpr, choices, values)


def _scan(self: Threaded, eqn: Eqn, choices: Any, values: list[Any]) -> list[Any]:
    fixed, carry, xs = scan_operands(eqn, values)
    num_carry = len(carry)

    def body(carry, x):
        outs = self.run(eqn.params["jaxpr"], choices, [*fixed, *carry, *x])
        return outs[:num_carry], outs[num_carry:]

    carry, ys = scan_like(eqn, body, carry, xs)
    return [*carry, *ys]


def _while(self: Threaded, eqn: Eqn, choices: Any, values: list[Any]) -> list[Any]:
    params = eqn.params
    for_cond, for_body, carry = while_operands(eqn, values)

    def goes_on(carry):
        return self.run(params["cond_jaxpr"], choices, [*for_cond, *carry])[0]

    def step(carry):
        return self.run(params["body_jaxpr"], choices, [*for_body, *carry])

    return lax.while_loop(goes_on, step, carry)


def _cond(self: Threaded, eqn: Eqn, choices: Any, values: list[Any]) -> list[Any]:
    def branch(jaxpr, *operands):
        return self.run(jaxpr, choices, operands)

    branches = [functools.partial(branch, jaxpr) for jaxpr in eqn.params["branches"]]
    index = lax.convert_element_type(values[0], "int32")
    return lax.switch(index, branches, *values[1:])


def _shard_map(self: Threaded, eqn: Eqn, choices: Any, values: list[Any]) -> list[Any]:
    options = shard_map_options(eqn.params)
    options["in_specs"] = (PartitionSpec(), *options["in_specs"])
    shard_map: Any = jax.shard_map

    def body(choices, *operands):
        return self.run(eqn.params["jaxpr"], choices, operands)

    return shard_map(body, **options)(choices, *values)


_HANDLERS = {
    "scan": _scan,
    "while": _while,
    "cond": _cond,
    "shard_map": _shard_map,
}
