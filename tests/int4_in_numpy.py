"""int4 by groups in NumPy, written from its definition, and independent of JAX.

Arrays are `(rows, summed)`, of float32, and numbers below 2^-126 are zeros."""

import ml_dtypes
import numpy as np

F32 = np.float32
LEAST = F32(2.0**-126)


def flushed(x):
    return np.where(np.abs(x) < LEAST, np.copysign(F32(0), x), x).astype(F32)


def scale_and_zero(group, share, zero_point):
    """Of one group, if its 16 numbers reach over a share of its range."""
    low, high = group.min(), group.max()
    if zero_point:
        low, high = min(low, F32(0)), max(high, F32(0))
        scale = F32(high - low) * F32(share * F32(1 / 15))
    else:
        extreme = low if -low >= high else high
        scale = extreme * F32(share * F32(-1 / 8))
    scale = flushed(F32(ml_dtypes.bfloat16(flushed(scale))))
    scale = LEAST if abs(scale) < LEAST else scale
    if not zero_point:
        return scale, F32(8)
    return scale, np.clip(np.round(-flushed(low * share) / scale), 0, 15)


def codes_of(group, scale, zero):
    return np.clip(np.round(group / scale) + zero, 0, 15)


def error(group, scale, zero):
    """Squares, added in halves."""
    differences = (codes_of(group, scale, zero) - zero) * scale - group
    terms = flushed(flushed(differences) * flushed(differences))
    while len(terms) > 1:
        half = len(terms) // 2
        terms = flushed(terms[:half] + terms[half:])
    return terms[0]


def int4(x, size, zero_point):
    """Codes, scales and zero points of all groups, not packed."""
    x = flushed(x)
    x = np.pad(x, [(0, 0), (0, -x.shape[1] % size)]).reshape(len(x), -1, size)
    codes = np.zeros(x.shape, np.uint8)
    scales = np.zeros(x.shape[:2], ml_dtypes.bfloat16)
    zeros = np.zeros(x.shape[:2], np.uint8)
    shares = [F32(i / 32) for i in range(32 if zero_point else 36, 19, -1)]
    for place in np.ndindex(*x.shape[:2]):
        group = x[place]
        is_finite = np.isfinite(group).all()
        group = group if is_finite else np.zeros_like(group)
        with np.errstate(over="ignore", invalid="ignore"):
            found = [scale_and_zero(group, share, zero_point) for share in shares]
            errors = [error(group, *one) for one in found]
            best = 0
            for i, one in enumerate(errors):
                best = i if one < errors[best] else best
            codes[place] = codes_of(group, *found[best])
        scales[place] = found[best][0] if is_finite else np.nan
        zeros[place] = found[best][1]
    return codes, scales, zeros


def restored(codes, scales, zeros, length):
    """What they stand for, in float32."""
    numbers = codes.astype(F32) - zeros.astype(F32)[..., None]
    numbers = numbers * scales.astype(F32)[..., None]
    return numbers.reshape(len(codes), -1)[:, :length]
