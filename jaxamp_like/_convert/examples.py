"""Example inputs: what can't be one, and what to give instead."""

import inspect
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from numbers import Integral
from typing import Any

import jax
from jax import export

from .._dtypes import in_words
from .._errors import why_not_called
from .._frameworks.modules import is_keras
from .._jax import is_array_or_shape

# What code raises that is given something else than it takes.
FAILURES = TypeError, ValueError, AttributeError, LookupError


def refuse_bad_shapes(inputs: Sequence[Any]) -> None:
    """Raises for shapes of which a dimension is neither a size nor symbolic."""
    for path, x in jax.tree_util.tree_leaves_with_path(tuple(inputs)):
        if not isinstance(x, jax.ShapeDtypeStruct):
            continue
        for size in x.shape:
            is_size = isinstance(size, Integral) and int(size) >= 0
            if not (is_size or is_symbolic(size)):
                raise ValueError(
                    f"The example input `inputs{jax.tree_util.keystr(path)}` has the "
                    f"shape {x.shape}, but {size!r} is no size of a dimension. Give a "
                    "number, or for one that is open a symbolic dimension: "
                    "`jax.export.symbolic_shape('n, 64')`."
                )


def is_symbolic(size: Any) -> bool:
    return export.is_symbolic_dim(size)


@contextmanager
def explaining_examples(fn: Any, params: Any, inputs: Sequence[Any]) -> Iterator[None]:
    """Raises another error if a model fails because of what it is called with.

    The arguments are those of `convert`: without `params`, `fn` holds them."""
    try:
        yield
    except FAILURES as e:
        if told := _misfit(fn, params, inputs):
            raise TypeError(told) from e
        if told := _instead(fn, inputs):
            why = str(e).partition("\n")[0].rstrip(".")
            raise TypeError(f"`fn` fails: {why}.\n{told}") from e
        raise


def _misfit(fn: Any, params: Any, inputs: Sequence[Any]) -> str:
    """What to write if `fn` can't be called with so many inputs; "" if it can be."""
    called = getattr(fn, "apply", fn) if hasattr(fn, "init") else fn
    given = () if params is None else (params,)
    why = why_not_called(called, (*given, *inputs))
    if why and _takes_state(called):
        return (
            f"`fn` can't be called with `params` ({outlined(params)}) and "
            f"{len(inputs)} example inputs: {why}. It is the `apply` of a Haiku "
            "transform with state, which takes a state and a key (or None) before the "
            "inputs: write `convert(transformed, params, state, None, x)`."
        )
    first = "None" if params is None else "params"
    with_params = f"`params` ({outlined(params)}) and " if given else ""
    return why and (
        f"`fn` can't be called with {with_params}{len(inputs)} example inputs: {why}. "
        f"Write `convert(fn, {first}, *example_inputs)`, with an example of each input "
        "of the model."
    )


def _takes_state(apply: Any) -> bool:
    """Whether a function is the `apply` of what `hk.transform_with_state` returns."""
    return [*inspect.signature(apply).parameters][:3] == ["params", "state", "rng"]


def _instead(fn: Any, inputs: Sequence[Any]) -> str:
    """What to give instead of examples that are hardly meant so; "" if all may be."""
    if is_keras(fn) and len(inputs) > 1:
        listed = ", ".join("abcdefgh"[: len(inputs)])
        return (
            f"A model of Keras with several inputs takes them as one list: write "
            f"`convert(model, None, [{listed}])`, and call `low([{listed}])`. If they "
            "have names, a dict does as well."
        )
    for i, x in enumerate(inputs):
        if not isinstance(x, tuple | list) or not x:
            continue
        if all(isinstance(size, int) for size in x):
            return (
                f"Example input {i} is {x}, of numbers. If that is a shape, write "
                f"`jax.ShapeDtypeStruct({tuple(x)}, 'float32')`."
            )
        if all(map(is_array_or_shape, x)):
            return (
                f"Example input {i} is {outlined(x)}. If the model takes arrays, give "
                "one after the other: `convert(fn, params, x, y)`."
            )
    return several_scopes(inputs)


def several_scopes(inputs: Sequence[Any]) -> str:
    """What to write if symbolic dimensions were made apart; "" if they were not."""
    dims = [d for x in jax.tree.leaves(tuple(inputs)) for d in getattr(x, "shape", ())]
    scopes = {id(d.scope) for d in dims if is_symbolic(d)}
    if len(scopes) < 2:
        return ""
    return (
        "Symbolic dimensions of the example inputs were made by several calls of "
        "`jax.export.symbolic_shape`, and can't be compared. Give the later ones the "
        "scope of the first: `scope = jax.export.SymbolicScope()` and "
        "`jax.export.symbolic_shape('n, 64', scope=scope)`."
    )


def outlined(x: Any) -> str:
    """An input in a few words: the types of arrays, and no numbers."""
    if is_array_or_shape(x):
        return in_words(x)
    if isinstance(x, dict):
        return _listed("{", (f"{k!r}: {outlined(v)}" for k, v in [*x.items()][:5]), x)
    if isinstance(x, tuple | list):
        if x and not any(map(is_array_or_shape, jax.tree.leaves(x))):
            return f"a {type(x).__name__} of {len(x)} {type(x[0]).__name__}s"
        return _listed("(["[isinstance(x, list)], map(outlined, x[:5]), x)
    is_short = x is None or isinstance(x, bool | int | float | str)
    return repr(x)[:40] if is_short else type(x).__name__


def _listed(begin: str, items: Any, whole: Any) -> str:
    shown = ", ".join([*items, *["..."] * (len(whole) > 5)])
    single = "," * (begin == "(" and len(whole) == 1)
    return f"{begin}{shown}{single}{ {'{': '}', '(': ')', '[': ']'}[begin] }"
