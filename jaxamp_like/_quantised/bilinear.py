"""A contraction as a function of two operands, and its transposes as such functions.

The backward pass of a contraction is two contractions. JAX knows them: they are the
transposes of the forward one. Here they are traced from it and then evaluated on
whatever the pass reads, 8-bit operands among it, each contraction in them by a `Hook`.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax

from .._dtypes import DType, cast
from .._jax import Eqn, Jaxpr, bind_flat, consts, evaluate, raw, subjaxprs, trace
from .._primitives import CONTRACTIONS, MOVING_VIEWS
from .._primitives.contractions import dot_numbers
from .._primitives.matmul_precision import settled
from .axes import axes_of, onto_result
from .formats import Format, quantised, rescaled

Hook = Callable[[Any, dict[str, Any], Sequence[Any], int], Any]
"""Makes one contraction: of a primitive, its parameters, both operands, and which of
them is the moving one, that of which the contraction is a linear function."""

Bilinear = Callable[[Any, Any, Hook], Any]
"""A contraction of a moving operand and another, made by a hook."""


def bilinear(primitive: Any, params: dict[str, Any], moving: int) -> Bilinear:
    """The contraction that an equation makes; `moving` is the index of that operand."""

    def fn(x: Any, other: Any, hook: Hook) -> Any:
        operands = (x, other) if moving == 0 else (other, x)
        return hook(primitive, params, operands, moving)

    return fn


def swapped(fn: Bilinear) -> Bilinear:
    """The same contraction, as a linear function of its other operand."""

    def swap(other: Any, x: Any, hook: Hook) -> Any:
        def swapped_hook(primitive, params, operands, moving):
            return hook(primitive, params, operands, 1 - moving)

        return fn(x, other, swapped_hook)

    return swap


def transposed(fn: Bilinear, moving: Any, other: Any, low: DType) -> Bilinear:
    """The transpose of `fn` by its moving operand: reads a cotangent in its place.

    `moving` and `other` are avals, `low` is a dtype to trace contractions in."""
    moving, other = (_in_dtype(aval, low) for aval in (moving, other))

    def transpose(ct: Any, other: Any) -> Any:
        def linear(x):
            return fn(x, other, in_dtype(low))

        return jax.linear_transpose(linear, moving)(ct)[0]

    @functools.cache
    def traced() -> Any:
        forward = trace(lambda x, y: fn(x, y, in_dtype(low)), [moving, other])
        return trace(transpose, [raw(forward).outvars[0].aval, other])

    def evaluated(ct: Any, other: Any, hook: Hook) -> Any:
        jaxpr = traced()
        (out,) = _evaluate(jaxpr, [(ct, 0), (other, 1)], hook)
        return out[0]

    return evaluated


def _in_dtype(aval: Any, dtype: DType) -> Any:
    return aval.update(dtype=dtype, weak_type=False)


# How a contraction is made.


def in_dtype(dtype: DType) -> Hook:
    """Operands and results in a dtype."""

    def hook(primitive: Any, params: Any, operands: Any, moving: int) -> Any:
        del moving
        return _bind(primitive, params, [cast(x, dtype) for x in operands], dtype)

    return hook


def as_it_is(result: DType) -> Hook:
    """Operands as they are, perhaps of 8 bits; results in a dtype."""

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


def by_scales(formats: Sequence[Format], by_row: bool, result: DType) -> Hook:
    """Operands that are quantised here, the moving one to the first of two formats."""

    def hook(primitive: Any, params: Any, operands: Any, moving: int) -> Any:
        ndims = operands[0].ndim, operands[1].ndim
        axes = axes_of(params, ndims)
        made = []
        for i, x in enumerate(operands):
            fmt = formats[0] if i == moving else formats[1]
            made.append(
                quantised(x, fmt._replace(axes=axes[i].summed if by_row else None))
            )
        (lhs, lhs_scale), (rhs, rhs_scale) = made
        out = _bind(primitive, params, [lhs, rhs], result)
        scales = (
            onto_result(scale, axes[i], out)
            for i, scale in enumerate((lhs_scale, rhs_scale))
        )
        return rescaled(out, *scales)

    return hook


def _bind(primitive: Any, params: Any, operands: Any, result: DType) -> Any:
    params = settled(primitive, params, is_low=True)
    return primitive.bind(*operands, **params | {"preferred_element_type": result})


# Evaluating a transpose.


def _evaluate(jaxpr: Jaxpr, args: Sequence[Any], hook: Hook) -> list[Any]:
    """Evaluates on pairs of a value, and of which operand (0: the moving one) it is."""

    def bind(eqn: Eqn, pairs: list[Any]) -> Sequence[Any]:
        name, params = eqn.primitive.name, eqn.params
        inner = list(subjaxprs(params))
        if name in ("jit", "pjit") and len(inner) == 1:
            return _evaluate(inner[0], pairs, hook)
        if name in CONTRACTIONS:
            moving = [i for _, i in pairs].index(0)
            return [(hook(eqn.primitive, params, [x for x, _ in pairs], moving), 0)]
        values = [
            x if name in MOVING_VIEWS else cast(x, atom.aval.dtype)
            for (x, _), atom in zip(pairs, eqn.invars, strict=True)
        ]
        which = min((i for _, i in pairs), default=1)
        return [(x, which) for x in bind_flat(eqn.primitive, values, params)]

    constants = [(x, 1) for x in consts(jaxpr)]
    return evaluate(jaxpr, args, bind, constants, literal=lambda value: (value, 1))
