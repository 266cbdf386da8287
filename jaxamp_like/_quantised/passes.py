"""Passes that round their operands, and the contraction that has these passes.

A rounded operand has no derivative: rounding has none. So the gradients are those of
the contraction without rounding, each made as its `Pass` says."""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, NoReturn, Protocol

import jax
import jax.numpy as jnp

from .._dtypes import DType
from .._errors import AmpError
from .._jax import is_explicitly_sharded, is_jet_tracer
from .._rules.bilinear import (
    Bilinear,
    as_it_is,
    bilinear,
    by_casts,
    in_dtype,
    mapped,
    transposed,
)
from .._rules.constant import constant, first_operand, no_series, tied
from .._rules.passes import CastPass, Pass, straight_through, with_passes
from .axes import Axes, operand_axes
from .blocks import Blocks
from .gathered import ForEachPass, for_derivative, forward_numbers
from .linear import transposable
from .scaled import rescaled, round_up_to_power_of_two


class Rounding(Protocol):
    """How an operand is rounded, whatever it is contracted with: a named tuple.

    So it can be done once for many contractions: before a loop that reads a weight in
    each of its iterations. See `_rewrite.hoisting`.

    It may depend on which axes of the operand the contraction sums over."""

    def __call__(self, x: Any) -> Any:
        """A pytree with numbers and scales, and with a method `restored`, which gives
        the numbers that they stand for in float32."""

    def along(self, axes: Axes) -> "Rounding":
        """The same rounding where a contraction has other axes."""
        ...

    def batched(self, ndim: int) -> "Rounding":
        """The rounding of a batch of arrays of `ndim` axes, along a first axis."""
        ...


class RoundedContraction(NamedTuple):
    """A contraction, and both of its operands as they are rounded.

    Args:
        fn: the contraction, a function of two arrays and of a hook (`as_it_is`).
        operands: both as they were before, for devices that have no such format.
        numbers: both as they were rounded.
        axes: of both, by which scales are laid along the result.
        is_gradient: whether JAX moves the axes of the result to those of the operand
            that it is the gradient of."""

    fn: Bilinear
    operands: Sequence[Any]
    numbers: Sequence[Any]
    axes: Sequence[Axes]
    is_gradient: bool = False


Product = Callable[[RoundedContraction], Any]
"""Computes a contraction of rounded operands."""


@dataclass(frozen=True, eq=False)
class RoundingPass(Pass):
    """A contraction that rounds its operands itself, whenever it is computed.

    What is kept for it is not rounded, unless its numbers are given for gradients.

    Args:
        roundings: of the moving operand, and of the other.
        product: computes the contraction from both, rounded.
        rounds_sharded: whether operands are rounded that are sharded along `Explicit`
            axes of a mesh. `decide` doesn't see those over which examples of a `vmap`
            lie, and the gradient of what the examples share sums over them.
        given_for: which contraction the values and scales of the other operand are laid
            out for, if they are given beside it: this one or its transpose. This one is
            then the gradient itself."""

    roundings: tuple[Rounding, Rounding]
    product: Product
    rounds_sharded: bool = True
    given_for: Literal["itself", "transpose", "neither"] = "transpose"

    def residuals(
        self, operands: Sequence[Any], numbers: Sequence[Any]
    ) -> Sequence[Any]:
        given = numbers[1 - self.moving] if numbers else None
        if not isinstance(given, ForEachPass):
            return super().residuals(operands, numbers)
        return [operands[1 - self.moving], *jax.tree.leaves(given.gradient)]

    def __call__(self, moving: Any, *others: Any) -> Any:
        other, *given = others
        given = given if self.given_for == "itself" else []
        return self.fn(moving, other, functools.partial(self._hook, given))

    @property
    def swapped(self) -> Pass:
        return dataclasses.replace(super().swapped, given_for="neither")

    def mapped(
        self, args: Sequence[Any], axes: Sequence[int | None]
    ) -> tuple[Pass, Sequence[Any]]:
        return super().mapped(args[:2], axes[:2])

    def _hook(
        self, given: Any, primitive: Any, params: Any, operands: Any, moving: int
    ) -> Any:
        is_sharded = any(is_explicitly_sharded(jax.typeof(x)) for x in operands)
        if is_sharded and not self.rounds_sharded:
            return _in_compute_dtype(self)(primitive, params, operands, moving)
        axes = operand_axes(params, (operands[0].ndim, operands[1].ndim))
        fn, both, numbers = bilinear(primitive, params, moving=0), [], []
        for i, one in enumerate(axes):
            both.append(constant(operands[i]))
            if given and i != moving:
                values, scales, *tensor = given
                scale = tensor[0] if tensor else None
                numbers.append(Blocks(values, scales, scale, operands[i].shape, one))
            else:
                numbers.append(self.roundings[i != moving].along(one)(both[i]))
        is_gradient = self.given_for == "itself"
        return self.product(RoundedContraction(fn, both, numbers, axes, is_gradient))

    def transposed(self, moving: Any, *others: Any) -> Callable[..., Any]:
        fn = transposed_of(self, [moving, others[0]])
        given_for = _GIVEN_FOR_TRANSPOSE[self.given_for]
        made = dataclasses.replace(self, fn=fn, given_for=given_for)
        return straight_through(made)


_GIVEN_FOR_TRANSPOSE: Any = {
    "itself": "transpose",
    "transpose": "itself",
    "neither": "neither",
}


@dataclass(frozen=True, eq=False)
class SavedRoundedPass(Pass):
    """A contraction whose other operand was rounded in the forward pass, and kept so.

    Args:
        rounding: of the moving operand, by one scale.
        result: the dtype in which products are made.
        before: whether scales of what is kept multiply the moving operand rather than
            the result. It matters if there are many scales, one for each example."""

    rounding: Rounding
    result: DType
    before: bool = False

    def residuals(
        self, operands: Sequence[Any], numbers: Sequence[Any]
    ) -> Sequence[Any]:
        one = numbers[1 - self.moving]
        return [one.values, tied(one.scale, operands[1 - self.moving])]

    def __call__(self, moving: Any, *others: Any) -> Any:
        other, scale = others
        if scale.ndim and self.before:
            # Each scale over the largest one is at most 1: nothing overflows.
            top = round_up_to_power_of_two(jnp.max(scale))
            moving, scale = moving.astype(scale.dtype) * (scale / top), top
        values, own = self.rounding(constant(_LAST.bind(moving)))
        out = self.fn(values, other, as_it_is(self.result))
        return rescaled(out, own, scale)

    @property
    def swapped(self) -> NoReturn:
        _refuse()

    def transposed(self, moving: Any, *others: Any) -> Callable[..., Any]:
        fn, before = transposed_of(self, [moving, others[0]]), not self.before
        return straight_through(dataclasses.replace(self, fn=fn, before=before))

    def mapped(
        self, args: Sequence[Any], axes: Sequence[int | None]
    ) -> tuple[Pass, Sequence[Any]]:
        moving, other, scale = args
        at, other_at, scale_at = axes
        if scale_at is not None:
            size = scale.shape[scale_at]
            if other_at is None:
                other, other_at = jnp.broadcast_to(other, (size, *other.shape)), 0
            if self.before and at is None:
                moving, at = jnp.broadcast_to(moving, (size, *moving.shape)), 0
        fn = mapped(self.fn, (at, other_at))
        if self.before:
            scale = _aligned(scale, scale_at, at, moving.ndim)
        else:
            made = functools.partial(fn, hook=_in_compute_dtype(self))
            ndim = jax.eval_shape(made, moving, other).ndim
            scale = _aligned(scale, scale_at, 0, ndim)
        return dataclasses.replace(self, fn=fn), (moving, other, scale)


def _in_compute_dtype(made: Pass) -> Any:
    return by_casts((made.low, made.low), made.low)


def transposed_of(made: Pass, avals: Sequence[Any]) -> Bilinear:
    """The contraction of a pass, transposed; `avals` are those of all that it reads."""
    avals = [*(in_dtype(aval, made.low) for aval in avals[:2]), *avals[2:]]
    return transposed(made.fn, avals, _in_compute_dtype(made))


def _aligned(scale: Any, at: int | None, along: int | None, ndim: int) -> Any:
    """A scale, or one for each example, in a shape to multiply an array of `ndim` axes.

    Examples lie along the axis `along` of that array; `None` if they share it."""
    if at is None:
        if scale.ndim == 0 or along is None:
            return scale
        return jnp.expand_dims(scale, along)
    assert along is not None
    scale = jnp.moveaxis(scale, at, 0)
    if scale.ndim == 1:
        scale = scale.reshape(-1, *[1] * (ndim - 1))
    return jnp.moveaxis(scale, 0, along)


def _refuse(*_: Any, **__: Any) -> NoReturn:
    raise AmpError(
        "The contractions of a `float8` rule keep their operands in 8 bits, which "
        "can't be differentiated again, and this is a second derivative. Say "
        "`float8(keep='compute')`, which keeps them in the compute dtype, or put what "
        "is differentiated twice under `amp_stop`."
    )


_LAST = first_operand("amp_last_derivative", _refuse)
"""Returns its operand, and refuses to be differentiated.

In the backward pass of a loop or a branch, JAX may differentiate the code inside of
`straight_through` instead of using its rule: the derivative of a rounding would be 0.
"""


def _gathering(made: Pass, gather: Callable[[Any], Any] | None) -> Pass:
    """A pass that gathers its moving operand."""
    if gather is None:
        return made

    def fn(moving, other, hook, *rest):
        return made.fn(gather(moving), other, hook, *rest)

    return dataclasses.replace(made, fn=fn)


def rounded_contraction(
    forward: Callable[..., Any],
    gradients: Sequence[Pass],
    in_compute_dtype: Sequence[CastPass],
    roundings: Sequence[Rounding | None],
) -> Callable[..., Any]:
    """`forward(lhs, rhs)`, with a derivative by `gradients`, one for each operand.

    Args:
        forward: computes the result from both operands, and from both as rounded.
        gradients: each a linear function of one operand, which reads the other.
        in_compute_dtype: the same without rounding, where the contraction itself is
            transposed.
        roundings: of each operand, if it is rounded without a look at the other. What
            they make is kept for the backward pass, if a gradient reads it.
    Returns:
        A function of `operands` and of two keywords. `quantised` holds for each operand
        what it was rounded to already, or `None`. `gathers` holds for each `None`, or a
        function that gathers it: then the operand is given as it was before, since only
        its gradient depends on it, and scales multiply a gradient after it was sent."""
    keeps = any(isinstance(made, SavedRoundedPass) for made in gradients)

    def completed(operands, quantised):
        return [
            how(x) if one is None and how is not None else one
            for how, x, one in zip(roundings, operands, quantised, strict=True)
        ]

    def read(lhs, rhs, *quantised):
        quantised = for_derivative(quantised)
        return (lhs, rhs), completed((lhs, rhs), quantised) if keeps else quantised

    def forward_of(lhs, rhs, *quantised):
        # `jet` meets these first, also in a `jit`, and they refuse a Taylor series.
        both = constant(lhs), constant(rhs)
        return forward(*both, *completed(both, forward_numbers(quantised)))

    linear = transposable(forward_of, in_compute_dtype)
    contraction = with_passes(linear, gradients, read)

    def bind(*operands, quantised=(None, None), gathers=(None, None)):
        if any(map(is_jet_tracer, operands)):
            no_series()
        made = contraction
        if any(gathers):
            pairs = zip(gradients, gathers, strict=True)
            made = with_passes(linear, [_gathering(*pair) for pair in pairs], read)
        return made(*map(jnp.asarray, operands), *quantised)

    return bind
