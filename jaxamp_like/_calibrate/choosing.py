"""Runs a program with marks so that an input chooses the roundings.

The choices are handed down into every program that holds a mark; all other equations
are bound as they are. So one compiled program serves all choices."""

from collections.abc import Mapping, Sequence
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
    rebind,
    shard_map_options,
    source_line,
    subjaxprs,
)
from .._structural import CALLS, STRUCTURAL
from .._structural.running import run_programs
from .marks import MARK, Contraction
from .rounding import chosen

_LOOKED_INTO = CALLS | {"scan", "while", "cond", "shard_map"}


def run_chosen(
    jaxpr: Jaxpr, numbers: Mapping[Contraction, int], choices: Any, args: Sequence[Any]
) -> list[Any]:
    """What a program with marks gives for `args` if it rounds by `choices`.

    Args:
        jaxpr: the program.
        numbers: for each contraction, its index in `choices`.
        choices: an array of integers: 0 rounds nothing, and n rounds as the marks say
            for the n-th candidate.
        args: the inputs of the program."""

    def bind(eqn: Eqn, values: list[Any]) -> Sequence[Any]:
        if eqn.primitive is MARK:
            choice = choices[numbers[eqn.params["of"]]]
            return [chosen(values[0], choice, eqn.params["to"])]
        if not any(holds(inner, MARK) for inner in subjaxprs(eqn.params)):
            return rebind(eqn, values)
        if eqn.primitive.name not in _LOOKED_INTO:
            raise AmpError(
                f"`calibrate` can't look into `{eqn.primitive}` ({source_line(eqn)}), "
                "which holds contractions that `amp` would lower. Put the call that "
                "makes it under `amp_stop()`, and decide on it by hand."
            )
        with eqn_context(eqn):
            return _bind_programs(eqn, numbers, choices, values)

    return evaluate(jaxpr, args, bind)


def _bind_programs(
    eqn: Eqn, numbers: Mapping[Contraction, int], choices: Any, values: list[Any]
) -> Sequence[Any]:
    """Binds an equation with the choices handed into the programs that it holds."""
    params = eqn.params
    programs = [body.jaxpr for body in STRUCTURAL[eqn.primitive.name].bodies(eqn)]
    # The handler of a call that `amp` leaves as written lists no bodies.
    programs = programs or [*subjaxprs(params)]
    if params.get("differentiated") and params.get("prevent_cse"):
        # What the backward pass recomputes must not be merged with the forward pass.
        values = lax.optimization_barrier(values)
    if eqn.primitive.name != "shard_map":

        def run(i: int, args: Sequence[Any], _: Any) -> list[Any]:
            return run_chosen(programs[i], numbers, choices, args)

        return run_programs(eqn, values, run)

    def on_device(choices: Any, *args: Any) -> list[Any]:
        return run_chosen(programs[0], numbers, choices, args)

    options = shard_map_options(params)
    options["in_specs"] = (PartitionSpec(), *options["in_specs"])
    return jax.shard_map(on_device, **options)(choices, *values)
