"""A call that is traced instead of run, as a function of its arrays alone."""

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import compress
from typing import Any

import jax

from .._dtypes import is_float
from .._frameworks.nnx import FunctionalCall
from .._jax import (
    Jaxpr,
    hands_on_what_is_unread,
    is_array_or_shape,
    merged,
    raw,
    tangent_aval,
    to_classic,
    trace,
    traced_afresh,
    variables_read,
)
from .._rewrite.record import Recorder, recording
from .._structural.zeros import zeros


@dataclass(frozen=True)
class FlatCall:
    """A function of arrays, and the arrays that it is called on.

    Args:
        fn: takes a flat list of arrays and returns one.
        arrays: the arrays among the arguments, or their shapes.
        names: where each of them stands, as in "[0]['w']".
        active: the indices of those that are differentiated.
        name: what the function is called."""

    fn: Callable[..., list[Any]]
    arrays: tuple[Any, ...]
    names: tuple[str, ...]
    active: tuple[int, ...]
    name: str

    def trace(self, recorder: Recorder) -> Jaxpr:
        return _trace(self.fn, self.arrays, recorder, self.name)

    def replaced(self, arrays: Sequence[Any], some: Sequence[Any]) -> list[Any]:
        """`arrays`, with `some` in place of those that are differentiated."""
        full = list(arrays)
        for i, x in zip(self.active, some, strict=True):
            full[i] = x
        return full

    def trace_residuals(self, recorder: Recorder) -> tuple[Jaxpr, int]:
        """Traces the forward pass of the derivative.

        Returns:
            A jaxpr whose last results are what the backward pass would be given, and
            the number of results that come before these."""
        counts = []

        def forward(*arrays):
            def of_active(*some):
                return self.fn(*self.replaced(arrays, some))

            outs, vjp = jax.vjp(of_active, *(arrays[i] for i in self.active))
            counts.append(len(outs))
            return [*outs, *_read_residuals(vjp, outs)]

        return _trace(forward, self.arrays, recorder, self.name), counts[-1]


def _read_residuals(vjp: Any, outs: Sequence[Any]) -> list[Any]:
    """What the forward pass hands to the backward pass `vjp`, which reads all of it."""
    residuals, tree = jax.tree.flatten(vjp)
    if not hands_on_what_is_unread():
        return residuals

    def backward(*residuals):
        cotangents = [zeros(tangent_aval(x)) for x in outs]
        return jax.tree.leaves(jax.tree.unflatten(tree, residuals)(cotangents))

    jaxpr = trace(backward, residuals)
    read = variables_read(jaxpr)
    return [x for x, v in zip(residuals, raw(jaxpr).invars, strict=True) if v in read]


def _trace(fn: Any, arrays: Sequence[Any], recorder: Recorder, name: str) -> Jaxpr:
    with recording(recorder), traced_afresh():
        try:
            return to_classic(trace(fn, arrays))
        except Exception as e:
            e.add_note(f"While tracing {name!r} for a report; it was not run.")
            raise


def function_name(fn: Any) -> str:
    """What a function is called; a `functools.partial` is called as what it calls."""
    while isinstance(fn, functools.partial):
        fn = fn.func
    name = getattr(fn, "__name__", None)  # of some callables, it is no string
    return name if isinstance(name, str) else type(fn).__name__


def flat_call(
    fn: Callable[..., Any], args: Any, kwargs: Any, active: Sequence[int], name: str
) -> FlatCall:
    """`fn(*args, **kwargs)` as a function of the arrays among its arguments.

    Args:
        fn: what is called.
        args: its positional arguments.
        kwargs: its keyword arguments.
        active: the positional arguments that are differentiated.
        name: what the function is called."""
    call = FunctionalCall(fn, args, kwargs)
    if not call.nodes:
        return _flat_call(fn, args, kwargs, active, name)
    return _flat_call(call, (call.held, call.others), {}, (0,), name)


def _flat_call(
    fn: Any, args: Any, kwargs: Any, active: Sequence[int], name: str
) -> FlatCall:
    paths, tree = jax.tree_util.tree_flatten_with_path((args, kwargs))
    leaves = [leaf for _, leaf in paths]
    dynamic = list(map(is_array_or_shape, leaves))
    places = list(compress(range(len(leaves)), dynamic))
    owners = [i for i, arg in enumerate(args) for _ in jax.tree.leaves(arg)]

    def flat(*arrays):
        args, kwargs = jax.tree.unflatten(tree, merged(leaves, dynamic, arrays))
        outs = jax.tree.leaves(fn(*args, **kwargs))
        return [x for x in outs if isinstance(x, jax.Array)]

    differentiated = tuple(
        place
        for place, i in enumerate(places)
        if i < len(owners)
        and owners[i] in active
        and is_float(getattr(leaves[i], "dtype", None))
    )
    arrays = tuple(leaves[i] for i in places)
    names = tuple(jax.tree_util.keystr(paths[i][0][1:]) for i in places)
    return FlatCall(flat, arrays, names, differentiated, name)
