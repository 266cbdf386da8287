"""Policies that quantise, and what few bits should give: by plain formulas of NumPy.

The formulas are those of the papers, not of the library: a scale from the largest
magnitude, a division, a cast. An oracle rounds the operands of every contraction, also
of those that a rule may leave alone, so it tells the most that rounding may cost."""

import random
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from .code import Step
from .oracle import Rounding

E4M3, E5M2, E2M1 = "float8_e4m3fn", "float8_e5m2", "float4_e2m1fn"

_FLOAT8 = [
    'grad_dtype="float8_e4m3fn"',
    'weight_gradient="compute"',
    'granularity="row"',
    'keep="compute"',
    "power_of_two=False",
]
_INT8 = ["weight_only=True", "migration=0.5", "epsilon=0"]
_MXFP8 = [
    'grad_dtype="float8_e5m2"',
    'weight_gradient="compute"',
    'scale_rounding="down"',
]
_NVFP4 = [
    "square_weights=False",
    "rotate=False",
    "stochastic=False",
    "seed=3",
    'weight_gradient="compute"',
]
_INT4 = ["group_size=64", "group_size=128", "zero_point=True"]
_RULES = {
    "float8": _FLOAT8,
    "int8": _INT8,
    "mxfp8": _MXFP8,
    "nvfp4": _NVFP4,
    "int4": _INT4,
}
_BOTH = ["parameters_only=False", "leave=()"]


def make_rule(rng: random.Random) -> str:
    """The code of a rule that quantises contractions of any size."""
    name = rng.choice([*_RULES])
    chosen = [rng.choice(_RULES[name])] if rng.random() < 0.5 else []
    if name in ("mxfp8", "nvfp4"):
        chosen.append("emulate=True")
    chosen += [one for one in _BOTH if rng.random() < 0.5]
    return f"{name}({', '.join(['where=None', *chosen])})"


def make_policy(rng: random.Random, scopes: list[str]) -> str:
    """The code of a policy that quantises: everywhere, or in some scopes."""
    if not scopes or rng.random() < 0.6:
        return f"quantised({make_rule(rng)})"
    base = rng.choice(["default_amp_policy", f"quantised({make_rule(rng)})"])
    rows = [f"{scope!r}: {make_rule(rng)}" for scope in scopes if rng.random() < 0.8]
    return f"{base} | {{{', '.join(rows)}}}"


def oracles(
    settings: str, dtype: str, is_derived: bool
) -> list[tuple[type[Rounding], str]]:
    """The oracles of a policy, by the rules in its code.

    Derivatives have a format of their own. Where there are any, it is not told which
    contraction is of one, so there is an oracle for each format."""
    kinds: list[type[Rounding]] = []
    if "mxfp8(" in settings:
        kinds += [E4M3ByBlock, *[E5M2ByBlock] * is_derived]
    if "nvfp4(" in settings:
        kinds += [E2M1ByBlock]
    if "float8(" in settings:
        kinds += [E4M3ByTensor, *[E5M2ByTensor] * is_derived]
        if 'granularity="row"' in settings:
            kinds += [E4M3ByRow, *[E5M2ByRow] * is_derived]
    if "int8(" in settings:
        kinds += [Int8]
        if "migration" in settings:
            kinds += [Int8Migrated]
    if "int4(" in settings:
        kinds += [Int4]
    return [(kind, dtype) for kind in kinds]


def summed(step: Step) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """The axes of both operands that a contraction sums over."""
    numbers = step.eqn.params["dimension_numbers"]
    if step.name == "dot_general":
        (lhs, rhs), _ = numbers
        return tuple(lhs), tuple(rhs)
    (example, *inside), (_, *filters), _ = numbers
    del example
    return tuple(inside), tuple(filters)


def _np(x: Any) -> Any:
    return jnp if isinstance(x, jax.core.Tracer) else np


def _largest(x: Any, axes: Any) -> Any:
    xp = _np(x)
    return xp.max(xp.abs(x), axis=axes, keepdims=True, initial=0.0)


def as_float8(x: Any, axes: Any, dtype: str) -> Any:
    """`x` rounded to a float8 format, by the power of two above its exact scale."""
    xp, largest = _np(x), float(jnp.finfo(dtype).max)
    amax = _largest(x, axes)
    known = xp.isfinite(amax) & (amax > 0)
    exact = xp.where(known, amax, largest).astype(np.float32) / np.float32(largest)
    mantissa, exponent = xp.frexp(xp.clip(exact, 2.0**-112, 2.0**126))
    exponent = xp.where(mantissa == 0.5, exponent - 1, exponent)
    scale = xp.ldexp(xp.ones_like(exact), exponent)
    y = xp.where(xp.isinf(x), np.float32(np.nan), x / scale)
    y = xp.clip(y, np.float32(-largest), np.float32(largest))
    return (y.astype(jnp.dtype(dtype)).astype(np.float32) * scale).astype(np.float32)


def as_integers(x: Any, axes: Any, largest: int) -> Any:
    """`x` as integers up to a largest one, by the largest magnitude of each row.

    Groups within a row have smaller steps, so that they err less."""
    xp = _np(x)
    top = _largest(x, axes) + np.float32(1e-7)
    step = xp.where(xp.isfinite(top), top, np.float32(np.nan)) / np.float32(largest)
    return (xp.clip(xp.rint(x / step), -largest, largest) * step).astype(np.float32)


def as_blocks(x: Any, axes: Any, dtype: str, size: int) -> Any:
    """`x` rounded to a format, by the exact scale of each block along `axes`."""
    xp, largest = _np(x), float(jnp.finfo(dtype).max)
    moved = xp.moveaxis(x, axes, range(-len(axes), 0))
    kept = moved.shape[: x.ndim - len(axes)]
    rows = moved.reshape(*kept, -1)
    length = rows.shape[-1]
    rows = xp.pad(rows, [*[(0, 0)] * len(kept), (0, -length % size)])
    rows = rows.reshape(*kept, -1, size)
    amax = _largest(rows, -1)
    known = xp.isfinite(amax) & (amax > 0)
    scale = xp.where(known, amax, largest).astype(np.float32) / np.float32(largest)
    scale = xp.clip(scale, 2.0**-112, 2.0**126)
    y = xp.where(xp.isfinite(amax), rows / scale, np.float32(np.nan))
    y = xp.clip(y, np.float32(-largest), np.float32(largest))
    nan = xp.where(xp.isnan(y), np.float32(np.nan), np.float32(0))
    y = xp.where(xp.isnan(y), np.float32(0), y)
    y = y.astype(jnp.dtype(dtype)).astype(np.float32) * scale + nan
    y = y.reshape(*kept, -1)[..., :length].reshape(moved.shape)
    return xp.moveaxis(y, range(-len(axes), 0), axes).astype(np.float32)


_FLOATS = [np.dtype(np.float32), np.dtype(np.float16), jnp.dtype(jnp.bfloat16)]


class Quantising(Rounding):
    """Rounds operands of contractions to 8 bits, and their results."""

    def quantised(self, step: Step, args: list[Any]) -> list[Any]:
        raise NotImplementedError

    def apply(self, step: Step, args: list[Any]) -> Any:
        in_8_bits = step.name in ("dot_general", "conv_general_dilated")
        is_float = all(getattr(x, "dtype", None) in _FLOATS for x in args)
        if not (self.is_rounded(step) and in_8_bits and is_float):
            return super().apply(step, args)
        with np.errstate(all="ignore"):
            # A rule may cast to the compute dtype first: what overflows there is lost.
            low = [x.astype(self.dtype).astype(np.float32) for x in args]
            moved = [self.moved(x) for x in low]
            made = self.quantised(step, moved)
            made = [x.astype(arg.dtype) for x, arg in zip(made, args, strict=True)]
        outs = super(Rounding, self).apply(step, made)
        return [self.round(self._bfloat16(x)) for x in outs]

    size = 0.0  # of half a unit in the last place, by the number

    def moved(self, x: Any) -> Any:
        """`x`, if there is a seed by up to half a unit of 8 bits, as by a rounding."""
        if self.rng is None or isinstance(x, jax.core.Tracer):
            return x
        shift = self.rng.uniform(-self.size, self.size, np.shape(x))
        return np.asarray(x * (1 + shift.astype(np.float32)))

    @staticmethod
    def _bfloat16(x: Any) -> Any:
        # Products of 8 bits are made in it, whatever the compute dtype.
        if getattr(x, "dtype", None) != np.float32:
            return x
        with np.errstate(over="ignore"):
            return x.astype(jnp.bfloat16).astype(np.float32)


class E4M3ByTensor(Quantising):
    format, by_row, size = E4M3, False, 2.0**-4

    def quantised(self, step: Step, args: list[Any]) -> list[Any]:
        axes = summed(step) if self.by_row else (None, None)
        return [as_float8(x, a, self.format) for x, a in zip(args, axes, strict=True)]


class E5M2ByTensor(E4M3ByTensor):
    format, size = E5M2, 2.0**-3


class E4M3ByRow(E4M3ByTensor):
    by_row = True


class E5M2ByRow(E5M2ByTensor):
    by_row = True


class E4M3ByBlock(Quantising):
    format, size, length = E4M3, 2.0**-3, 32

    def quantised(self, step: Step, args: list[Any]) -> list[Any]:
        if step.name != "dot_general":
            return args
        return [
            as_blocks(x, a, self.format, self.length)
            for x, a in zip(args, summed(step), strict=True)
        ]


class E5M2ByBlock(E4M3ByBlock):
    format, size = E5M2, 2.0**-2


class E2M1ByBlock(E4M3ByBlock):
    """Stochastic rounding moves a number by up to a whole step, a half of it."""

    format, size, length = E2M1, 0.5, 16


class Int8(Quantising):
    size, largest = 2.0**-8, 127

    def quantised(self, step: Step, args: list[Any]) -> list[Any]:
        return [
            as_integers(x, a, self.largest)
            for x, a in zip(args, summed(step), strict=True)
        ]


class Int4(Int8):
    size, largest = 2.0**-4, 7


class Int8Migrated(Int8):
    """Channels hand their range on, half of what there is between both operands."""

    def quantised(self, step: Step, args: list[Any]) -> list[Any]:
        if step.name != "dot_general":
            return super().quantised(step, args)
        lhs, rhs = args
        xp = jnp if any(_np(x) is jnp for x in args) else np
        left, right = summed(step)
        # Channels first, in the same order on both sides.
        moved = [
            xp.moveaxis(x, a, range(len(a)))
            for x, a in zip(args, (left, right), strict=True)
        ]
        tops = [_largest(x, tuple(range(len(left), x.ndim))) for x in moved]
        tops = [top.reshape(top.shape[: len(left)]) for top in tops]
        product = tops[0] * tops[1]
        known = xp.isfinite(product) & (product > 0)
        ratio = xp.where(known, tops[0], 1) / xp.where(known, tops[1], 1)
        exponent = xp.clip(xp.ceil(xp.log2(ratio) / 2), -60, 60)
        factor = xp.exp2(exponent).astype(np.float32)

        def times(x, axes, factor):
            shape = [1] * x.ndim
            for i, axis in enumerate(axes):
                shape[axis] = factor.shape[i]
            order = np.argsort(axes)
            return x * xp.transpose(factor, order).reshape(shape)

        made = [times(lhs, left, 1 / factor), times(rhs, right, factor)]
        return super().quantised(step, made)
