"""Repeating a step that overflowed, on the same batch with smaller scales."""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax

from .._jax import jaxpr_as_fun, writes_references, zeros_like_aval
from .agree import AxisName, check_uniform
from .arithmetic import chosen
from .packing import Static, pack, unpack
from .state import NoScaler, Scaler

Attempt = Callable[[list[Scaler]], tuple[list[Array], Any]]


def retry(
    attempt: Attempt, states: list[Scaler], redo: int, axis_name: AxisName
) -> tuple[list[Scaler], Any]:
    """Attempts a step up to `1 + redo` times, with one copy of its code.

    Args:
        attempt: a function of the groups' states. It returns, for each group, whether
            its gradients are finite (the same on all devices), and the results.
        states: the states of the groups, one or several.
        redo: how often the step may be repeated.
        axis_name: the axes over which `attempt` agrees.
    Returns:
        The next states, and the results of the last attempt.
    Raises:
        ValueError: the step writes to a `jax.Ref`, which each attempt would do again,
            or devices that repeat it would wait for others."""

    def packed_attempt(states: list[Scaler]) -> tuple[list[Array], Any, Static]:
        finite, results = attempt(states)
        return finite, *pack(results)

    # It is traced before the loop, whose carry needs the types of the results.
    program, outs = jax.make_jaxpr(packed_attempt, return_shape=True)(states)
    if writes_references(program):
        raise ValueError(
            "The loss writes to a `jax.Ref` that it did not make, and with "
            "`redo_on_nan` every attempt would write to it again.\nReturn what is to "
            "be written as `aux` (`has_aux=True`), and write that of the step; or "
            "leave out `redo_on_nan`."
        )
    unflatten = functools.partial(jax.tree.unflatten, jax.tree.structure(outs))
    blank = unflatten(map(_zeros, program.out_avals))

    def body(carry: Any) -> Any:
        _, tries, states, _ = carry
        outs = unflatten(jaxpr_as_fun(program)(*jax.tree.leaves(states)))
        # A result that is constant comes as a Python number.
        finite_of = [jnp.asarray(finite) for finite in outs[0]]
        lower = [state.lower() for state in states]
        # At the minimum another attempt would only repeat this one.
        hopeful = [
            ~finite & _is_below(low, state)
            for finite, low, state in zip(finite_of, lower, states, strict=True)
        ]
        again = functools.reduce(jnp.logical_or, hopeful) & (tries < redo)
        check_uniform(program, again, axis_name)
        states = [
            chosen(again & ~finite, low, state)
            for finite, low, state in zip(finite_of, lower, states, strict=True)
        ]
        return again, tries + 1, states, outs

    # `begin` is true, with the type of `finite`, which may vary over mesh axes.
    begin = functools.reduce(jnp.logical_or, blank[0]) | True
    start = begin, jnp.int32(0), states, blank
    _, _, last, outs = lax.while_loop(lambda carry: carry[0], body, start)
    finite_of, *results = outs
    # A batch that fails at every scale is not the scale's fault. It lowers the scale by
    # one step of the first attempt's, or a few such batches would use up the range.
    following = [
        chosen(finite, end, state).update(finite)
        for finite, end, state in zip(finite_of, last, states, strict=True)
    ]
    return following, unpack(*results)


def _is_below(low: Scaler, state: Scaler) -> Array:
    if isinstance(low, NoScaler) or isinstance(state, NoScaler):
        return jnp.array(False)
    return low.scaler < state.scaler


def _zeros(aval: Any) -> Array:
    if jnp.issubdtype(aval.dtype, jax.dtypes.extended):  # a PRNG key has no zero to AD
        return jnp.zeros(aval.shape, aval.dtype)
    return zeros_like_aval(aval)  # with its sharding, varying over its mesh axes
