"""Loops, branches and calls whose programs an evaluator runs by itself.

An evaluator (see `_jax.evaluate`) that wants to look into the equations that hold
programs needs to say no more than how such a program is run."""

import functools
from collections.abc import Callable, Sequence
from typing import Any

from jax import lax

from .._jax import Eqn, scan_like, scan_operands, while_operands


def run_programs(
    eqn: Eqn,
    values: list[Any],
    run: Callable[[int, list[Any], Sequence[Any]], list[Any]],
    stacks: Sequence[Any] = (),
) -> list[Any]:
    """The results of a loop, a branch or a call, of which `run` runs the programs.

    A call vanishes: what it holds stands in its place.

    Args:
        eqn: a scan, a `while`, a `cond`, or a call that holds one program.
        values: its operands.
        run: gives the results of a program, by its place among those of `eqn`, its
            inputs and slices of `stacks`.
        stacks: arrays that a scan goes through as well; others hand them on whole."""
    name = eqn.primitive.name
    if name == "scan":
        fixed, carry, xs = scan_operands(eqn, values)
        num_carry = len(carry)

        def step(carry: list[Any], slices: Any) -> Any:
            x, more = slices
            outs = run(0, [*fixed, *carry, *x], more)
            return outs[:num_carry], outs[num_carry:]

        carry, ys = scan_like(eqn, step, carry, (xs, list(stacks)))
        return [*carry, *ys]
    if name == "while":
        for_cond, for_body, carry = while_operands(eqn, values)
        return lax.while_loop(
            lambda carry: run(0, [*for_cond, *carry], stacks)[0],
            lambda carry: run(1, [*for_body, *carry], stacks),
            carry,
        )
    if name == "cond":

        def branch(i: int, *operands: Any) -> list[Any]:
            return run(i, [*operands], stacks)

        num_branches = len(eqn.params["branches"])
        branches = [functools.partial(branch, i) for i in range(num_branches)]
        index = lax.convert_element_type(values[0], "int32")
        return lax.switch(index, branches, *values[1:])
    return run(0, values, stacks)
