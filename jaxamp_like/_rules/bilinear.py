"""A contraction as a function of two operands, and its transposes as such functions.

The backward pass of a contraction is two contractions, the transposes of the forward
one. Here JAX traces them from it, and they are evaluated on whatever the pass reads,
which may be 8-bit operands. A `Hook` makes each contraction in them.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax

from .._dtypes import DType, cast
from .._jax import (
    Eqn,
    Jaxpr,
    Literal,
    bind_flat,
    consts,
    evaluate,
    result_aval,
    subjaxprs,
    trace,
)
from .._primitives import CONTRACTIONS, MOVING_VIEWS
from .._primitives.contractions import dot_numbers
from .._primitives.matmul_precision import settled

Hook = Callable[[Any, dict[str, Any], Sequence[Any], int], Any]
"""Makes one contraction, from a primitive, its parameters, its operands, and the index
of the moving one: the operand of which the contraction is a linear function."""

Bilinear = Callable[..., Any]
"""A contraction `fn(moving, other, hook, *rest)` of a moving operand and another, made
by a hook; `rest` are operands that are no floats, as the sizes of ragged groups."""


def bilinear(primitive: Any, params: dict[str, Any], moving: int) -> Bilinear:
    """The contraction that an equation makes, as linear in its operand `moving`."""

    def fn(x: Any, other: Any, hook: Hook, *rest: Any) -> Any:
        operands = (x, other) if moving == 0 else (other, x)
        return hook(primitive, params, (*operands, *rest), moving)

    return fn


def swapped(fn: Bilinear) -> Bilinear:
    """The same contraction, as a linear function of its other operand."""

    def swap(other: Any, x: Any, hook: Hook, *rest: Any) -> Any:
        def swapped_hook(primitive, params, operands, moving):
            return hook(primitive, params, operands, 1 - moving)

        return fn(x, other, swapped_hook, *rest)

    return swap


def mapped(fn: Bilinear, axes: Sequence[int | None]) -> Bilinear:
    """The contractions of many examples, which lie along `axes` of the operands."""

    def many(moving: Any, other: Any, hook: Hook, *rest: Any) -> Any:
        def one(moving, other, *rest):
            return fn(moving, other, hook, *rest)

        if all(axis is None for axis in axes):
            return one(moving, other, *rest)
        return jax.vmap(one, in_axes=tuple(axes))(moving, other, *rest)

    return many


def transposed(fn: Bilinear, avals: Sequence[Any], hook: Hook) -> Bilinear:
    """The transpose of `fn` in its moving operand; it reads a cotangent in its place.

    It is traced for operands of `avals`, the moving one first; `hook` makes the
    contraction there."""
    moving, *others = avals

    def made(x, other, *rest):
        return fn(x, other, hook, *rest)

    def transpose(ct, *others):
        return jax.linear_transpose(lambda x: made(x, *others), moving)(ct)[0]

    @functools.cache
    def traced() -> Any:
        result = result_aval(made, avals)
        return trace(transpose, [result, *others])

    def evaluated(ct: Any, other: Any, hook: Hook, *rest: Any) -> Any:
        pairs = [(ct, 0), *((x, 1) for x in (other, *rest))]
        (out,) = _evaluate(traced(), pairs, hook)
        return out[0]

    return evaluated


def in_dtype(aval: Any, dtype: DType) -> Any:
    return aval.update(dtype=dtype, weak_type=False)


# How a contraction is made.


def by_casts(reads: Sequence[DType], result: DType, is_low: bool = True) -> Hook:
    """Casts the left and the right operand to `reads`; results are in `result`."""

    def hook(primitive: Any, params: Any, operands: Any, moving: int) -> Any:
        del moving
        lhs, rhs, *rest = operands
        some = [*map(cast, (lhs, rhs), reads), *rest]
        return _bind(primitive, params, some, result, is_low)

    return hook


def as_it_is(result: DType) -> Hook:
    """Reads operands as they are, perhaps of 8 bits; results are in `result`."""

    def hook(primitive: Any, params: Any, operands: Any, moving: int) -> Any:
        del moving
        params, operands = _batch_first(params, operands)
        return _bind(primitive, params, operands, result)

    return hook


def _batch_first(params: Any, operands: Sequence[Any]) -> tuple[Any, Sequence[Any]]:
    """The same contraction of operands whose batch axes come first, in order.

    XLA for CPUs has no other batched product with a result wider than its operands."""
    numbers = None if "ragged_dot_dimension_numbers" in params else dot_numbers(params)
    if numbers is None or not numbers[1][0]:
        return params, operands
    contracted, batch = numbers
    orders = [
        (*batch[i], *(axis for axis in range(x.ndim) if axis not in batch[i]))
        for i, x in enumerate(operands)
    ]
    moved = [x.transpose(order) for x, order in zip(operands, orders, strict=True)]
    summed = tuple(
        tuple(map(order.index, axes))
        for order, axes in zip(orders, contracted, strict=True)
    )
    first = tuple(range(len(batch[0])))
    return params | {"dimension_numbers": (summed, (first, first))}, moved


def _bind(
    primitive: Any, params: Any, operands: Any, result: DType, is_low: bool = True
) -> Any:
    params = settled(primitive, params, is_low)
    return primitive.bind(*operands, **params | {"preferred_element_type": result})


# Evaluating a transpose.


def _evaluate(jaxpr: Jaxpr, args: Sequence[Any], hook: Hook) -> list[Any]:
    """Evaluates on pairs: a value, and 0 if it comes of the moving operand, else 1."""

    def bind(eqn: Eqn, pairs: list[Any]) -> Sequence[Any]:
        name, params = eqn.primitive.name, eqn.params
        inner = list(subjaxprs(params))
        if name in ("jit", "pjit") and len(inner) == 1:
            return _evaluate(inner[0], pairs, hook)
        if name in CONTRACTIONS:
            moving = [i for _, i in pairs].index(0)
            return [(hook(eqn.primitive, params, [x for x, _ in pairs], moving), 0)]
        values = [
            x
            if name in MOVING_VIEWS or isinstance(atom, Literal)
            # Views of 8-bit data stay in 8 bits; others read the dtype of the trace.
            else cast(x, atom.aval.dtype)
            for (x, _), atom in zip(pairs, eqn.invars, strict=True)
        ]
        which = min((i for _, i in pairs), default=1)
        return [(x, which) for x in bind_flat(eqn.primitive, values, params)]

    constants = [(x, 1) for x in consts(jaxpr)]
    return evaluate(jaxpr, args, bind, constants, literal=lambda atom: (atom.val, 1))
