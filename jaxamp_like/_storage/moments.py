"""Which arrays of an optimizer's state are moments, which few bits are enough for."""

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import equinox as eqx
import jax
from jax.extend.core import Literal

from .._dtypes import is_float
from .._frameworks.nnx import as_arrays, is_variable
from .._jax import is_array_or_shape
from .._primitives.table import those
from .._programs import Jaxpr, raw

Where = Callable[[str, Any], bool | None]
"""Of a leaf's path and the leaf: whether it is stored in few bits; `None`, as usual."""


def _leaves_with_path(state: Any) -> list[tuple[Any, Any]]:
    """The leaves of a state, of which an NNX variable is one, by what it holds."""
    leaves = jax.tree_util.tree_leaves_with_path(state, is_leaf=is_variable)
    return [(path, as_arrays(x)) for path, x in leaves]


def stored_low(
    state: Any,
    init: Callable[[Any], Any],
    params: Any,
    min_size: int,
    where: Where | None,
) -> list[bool]:
    """For each leaf of `state`, which is `init(params)`, whether few bits store it.

    By default that is what is large, has the shape of a parameter and begins as one
    number everywhere, as the moments of all optimizers do. What is made of the
    parameters' values is a copy of them, which 8 bits are too few for. What begins as
    different numbers of another origin may be anything, and is asked about."""
    leaves = _leaves_with_path(state)
    origins = iter(_origins(init, params))
    exact = jax.tree.leaves(state, is_leaf=_is_exact)
    kept = {id(x) for part in exact if _is_exact(part) for x in jax.tree.leaves(part)}
    shapes = {x.shape for x in jax.tree.leaves(params) if is_array_or_shape(x)}

    def is_low(path: Any, x: Any) -> bool:
        if not is_array_or_shape(x):
            return False
        is_fill, is_of_params = next(origins)
        if not (x.ndim and is_float(x.dtype) and x.dtype.itemsize > 1):
            return False
        name = jax.tree_util.keystr(path)
        said = None if where is None else where(name, x)
        if said is not None:
            if not isinstance(said, bool):
                raise TypeError(
                    "`where` must return `True` (in few bits), `False` (as it is) or "
                    f"`None` (by the rule), but returned {said!r} for {name!r}."
                )
            return said
        if (
            x.size < min_size
            or x.shape not in shapes
            or _is_no_moment(path)
            or id(x) in kept
        ):
            return False
        if not (is_fill or is_of_params):
            raise ValueError(
                f"`state{name}` of the optimizer begins with different numbers, which "
                "are not those of the parameters. It may be a moment, or an array that "
                "sets something, such as a learning rate for each parameter, and that "
                "few bits would change.\nSay which by `where`: `where=lambda path, x: "
                f"False if path == {name!r} else None` leaves it as it is, and `True` "
                "stores it in few bits."
            )
        return is_fill

    return [is_low(path, x) for path, x in leaves]


# States of Optax whose arrays must not be rounded, by name, as some are not public.
_EXACT = {
    # Two moments whose difference is a variance: rounded, it may be negative.
    "ScaleByRStdDevState",
    "ScaleByRStdDevWithCountState",
    # The parameters and gradients of the last step, which are subtracted from the next.
    "ScaleByLBFGSState",
    "ScaleByZoomLinesearchState",
    "ScaleByBacktrackingLinesearchState",
    # Sums of gradients, from which the parameters are computed anew at each step.
    "COCOBState",
    "MadgradState",
}


def _is_exact(x: Any) -> bool:
    return type(x).__name__ in _EXACT


def _is_no_moment(path: Any) -> bool:
    """Whether a leaf holds settings, or a sum of gradients that is not complete.

    So Optax names the fields that hold them in the states of `inject_hyperparams`,
    `MultiSteps` and `apply_every`. Keys of parameters say nothing."""
    fields = {getattr(key, "name", None) for key in path}
    return bool(fields & {"hyperparams", "acc_grads", "grad_acc"})


def _origins(init: Callable[[Any], Any], params: Any) -> Iterator[tuple[bool, bool]]:
    """Of each array of `init(params)`: is it one number, is it made of `params`?"""
    dynamic, static = eqx.partition(params, is_array_or_shape)

    def arrays(dynamic: Any) -> list[Any]:
        state = init(eqx.combine(dynamic, static))
        return [x for _, x in _leaves_with_path(state) if is_array_or_shape(x)]

    closed = jax.make_jaxpr(arrays)(dynamic)
    number = len(raw(closed).invars)
    return iter(
        zip(
            _reached(closed, [False] * number, _keeps_fills, lambda v: v.ndim == 0),
            _reached(closed, [True] * number, lambda eqn, ins: any(ins), None),
            strict=True,
        )
    )


_KEEP_FILLS = those(lambda row: row.view or row.identity or row.broadcasts)


def _keeps_fills(eqn: Any, ins: Sequence[bool]) -> bool:
    return eqn.primitive.name in _KEEP_FILLS and all(ins)


def _reached(
    jaxpr: Jaxpr,
    given: Sequence[bool],
    rule: Callable[[Any, Sequence[bool]], bool],
    always: Callable[[Any], bool] | None,
) -> list[bool]:
    """Of each result of a jaxpr whether something is true of it, from its inputs on.

    Args:
        given: of each input.
        rule: of the results of an equation, from what is true of its operands.
        always: what it is true of anyway, by the abstract value."""
    known = dict(zip(raw(jaxpr).invars, given, strict=True))

    def at(v: Any) -> bool:
        by_type = always is not None and always(v.aval)
        return by_type or (not isinstance(v, Literal) and known.get(v, False))

    for eqn in raw(jaxpr).eqns:
        ins = [at(v) for v in eqn.invars]
        body = eqn.params.get("jaxpr")
        if eqn.primitive.name in ("jit", "pjit", "closed_call"):
            outs = _reached(body, ins, rule, always)
        else:
            outs = [rule(eqn, ins)] * len(eqn.outvars)
        known.update(zip(eqn.outvars, outs, strict=True))
    return [at(v) for v in raw(jaxpr).outvars]
