"""Gradients of functions that change NNX objects, without losing these changes.

The changes are results of the step, like its gradients: those of the last attempt are
kept, and none if the step was skipped. If a transform would lose them, it is refused.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import equinox as eqx
import jax

from .._errors import AmpError
from .._frameworks.nnx import (
    FunctionalCall,
    NodeChanges,
    Snapshot,
    is_node,
    nnx_nodes,
    with_nnx_advice,
)
from .packing import pack, unpack
from .state import Scaler

# The transforms that are only given functions of arrays, and whether they return the
# value too. Other transforms must handle NNX objects themselves.
_OF_ARRAYS = (
    (jax.grad, False),
    (jax.value_and_grad, True),
    (eqx.filter_grad, False),
    (eqx.filter_value_and_grad, True),
)


Filters = dict[int, Any]
"""By the positions of arguments, filters of NNX, as an `nnx.DiffState` holds one."""


class NnxCall:
    """A call that may be run several times, and changes NNX objects once.

    Args:
        fun: what is called.
        args: its positional arguments.
        kwargs: its keyword arguments."""

    def __init__(self, fun: Callable[..., Any], args: Any, kwargs: Any):
        self._given = fun, args, kwargs
        self._taken = FunctionalCall(fun, args, kwargs)
        self._before = Snapshot(self._taken.nodes) if self._taken.nodes else None

    def run(
        self, wrap: Callable[[Callable[..., Any]], Callable[..., Any]]
    ) -> tuple[Any, NodeChanges | None]:
        """Calls `wrap(fun)`; returns its result and what it left in NNX objects."""

        def body(fun: Callable[..., Any], args: Any, kwargs: Any) -> Any:
            return wrap(fun)(*args, **kwargs)

        with with_nnx_advice():
            if self._before is None:
                return body(*self._given), None
            return self._taken.run(body)

    def put_back(self, left: NodeChanges | None, following: Sequence[Scaler]) -> None:
        """Writes what a run has left into the objects, unless the step was skipped."""
        if left is None or self._before is None:
            return
        with with_nnx_advice():
            self._taken.put_back(None, left)
            for state in following:
                self._before.rewrite(state.accept)


def is_of_arrays(transform: Callable[..., Any]) -> bool:
    return any(transform is one for one, _ in _OF_ARRAYS)


def of_nodes(
    transform: Callable[..., Any], filters: Filters | None = None
) -> Callable[..., Any]:
    """`transform`, for functions that may also take NNX objects.

    Derivatives are taken by the `nnx.Param`s of an object, as `nnx.grad` does, or by
    the variables that a filter of `filters` names for its argument."""
    has_value = next((v for t, v in _OF_ARRAYS if t is transform), None)
    if has_value is None:
        return _watched(transform)

    def transformed(fun: Callable[..., Any], **options: Any) -> Callable[..., Any]:
        plain = transform(fun, **options)

        def call(*args: Any, **kwargs: Any) -> Any:
            if not nnx_nodes((fun, args, kwargs)):
                return plain(*args, **kwargs)
            return _of_arrays(
                transform, fun, args, kwargs, options, has_value, filters or {}
            )

        return call

    return transformed


def _of_arrays(
    transform: Callable[..., Any],
    fun: Callable[..., Any],
    args: Any,
    kwargs: Any,
    options: dict[str, Any],
    has_value: bool,
    filters: Filters,
) -> Any:
    """`transform(fun, **options)(*args, **kwargs)`, where `fun` returns a pair."""
    argnums = options.get("argnums", 0)
    argnums = argnums if isinstance(argnums, tuple | list) else (argnums,)
    active = sorted({range(len(args))[i] for i in argnums})
    taken = FunctionalCall(
        fun, args, kwargs, first=nnx_nodes([args[i] for i in active])
    )

    def of_active(*given: Any) -> Any:
        by_path: dict[Any, Any] = {}

        def take(leaf: Any, x: Any) -> None:
            if is_node(leaf):
                by_path.update(taken.with_parameters(leaf, x))

        for i in active:
            jax.tree.map(take, args[i], given[i], is_leaf=is_node)

        def body(fun: Callable[..., Any], args: Any, kwargs: Any) -> Any:
            args = list(args)
            for i in active:
                args[i] = jax.tree.map(
                    lambda leaf, x: leaf if is_node(leaf) else x,
                    args[i],
                    given[i],
                    is_leaf=is_node,
                )
            return fun(*args, **kwargs)

        (loss, aux), left = taken.run(body, by_path)
        return loss, (aux, pack(left))

    of_argument = {range(len(args))[i]: wanted for i, wanted in filters.items()}
    given: list[Any] = [None] * len(args)
    for i in active:
        wanted = of_argument.get(i)
        given[i] = jax.tree.map(
            lambda x, wanted=wanted: taken.parameters(x, wanted) if is_node(x) else x,
            args[i],
            is_leaf=is_node,
        )
        if wanted is not None and not jax.tree.leaves(given[i]):
            raise ValueError(
                f"`argnums` says to differentiate by the variables {wanted!r} of "
                f"argument {i}, a {type(args[i]).__name__}, which holds none."
            )
    results = transform(of_active, **options)(*given)
    if has_value:
        (loss, (aux, left)), grads = results
        results = (loss, aux), grads
    else:
        grads, (aux, left) = results
        results = grads, aux
    taken.put_back(None, unpack(*left))
    return results


def _watched(transform: Callable[..., Any]) -> Callable[..., Any]:
    """`transform`, with an error if it loses what a function changes in NNX objects."""

    def transformed(fun: Callable[..., Any], **options: Any) -> Callable[..., Any]:
        plain = transform(fun, **options)

        def call(*args: Any, **kwargs: Any) -> Any:
            nodes = nnx_nodes((args, kwargs))
            if not nodes:
                return plain(*args, **kwargs)
            before, written = Snapshot(nodes), []

            @functools.wraps(fun, updated=())
            def watching(*args: Any, **kwargs: Any) -> Any:
                inner = Snapshot(nnx_nodes((args, kwargs)))
                out = fun(*args, **kwargs)
                written.extend(inner.changed())
                return out

            results = transform(watching, **options)(*args, **kwargs)
            if written and not before.changed():
                raise AmpError(
                    "`transform` loses what the function changes in the NNX objects "
                    "that it is given.\nUse `dynamic_scale_grad` or "
                    "`dynamic_scale_value_and_grad`, or give a transform that keeps "
                    "it, such as `nnx.value_and_grad`."
                )
            return results

        return call

    return transformed
