"""MXFP8 and NVFP4 in NumPy, written from their definitions, and independent of JAX.

`ml_dtypes` rounds single numbers; what is scaled, and by what, is here. Arrays are
`(rows, summed)`, and float32 numbers below 2^-126 are zeros."""

import ml_dtypes
import numpy as np

E4M3, E5M2 = ml_dtypes.float8_e4m3fn, ml_dtypes.float8_e5m2
E2M1, E8M0 = ml_dtypes.float4_e2m1fn, ml_dtypes.float8_e8m0fnu


def blocks(x, size):
    """`(rows, blocks, size)` of float64, padded with zeros."""
    x = np.where(np.abs(x) < 2.0**-126, np.copysign(0, x), x).astype(np.float64)
    x = np.pad(x, [(0, 0), (0, -x.shape[1] % size)])
    return x.reshape(x.shape[0], -1, size)


def mxfp8(x, dtype=E4M3, up=True, size=32):
    """The values and the scales of OCP's MX: a power of two for each block."""
    largest = float(ml_dtypes.finfo(dtype).max)
    x = blocks(x, size)
    values, scales = np.zeros(x.shape, dtype), np.zeros(x.shape[:2], E8M0)
    for row, block in np.ndindex(*x.shape[:2]):
        one = x[row, block]
        amax = np.max(np.abs(one))
        if not np.isfinite(amax):
            scales[row, block] = np.nan
            continue
        exponent = -126
        if amax > 0:
            # `amax / 2**exponent` is at most the largest number, or has its exponent.
            exponent = int(np.floor(np.log2(amax)) - np.floor(np.log2(largest)))
            if up:
                while amax / 2.0**exponent > largest:
                    exponent += 1
                while amax / 2.0 ** (exponent - 1) <= largest:
                    exponent -= 1
            exponent = max(exponent, -126)
        scales[row, block] = 2.0**exponent
        values[row, block] = np.clip(one / 2.0**exponent, -largest, largest)
    return values, scales


def nvfp4(x, size=16, square=False):
    """The values, the scales in float8, and the float32 for the whole array.

    Values are given as the least that they may be, by the order here, and as the
    largest. These are the same, but for numbers that lie half-way between two values,
    up to the last bits of float32: XLA multiplies in orders of its own, by which these
    bits differ."""
    x = blocks(x, size).astype(np.float32)
    amax = np.max(np.abs(x), axis=-1)
    if square:
        for row in range(0, len(amax), size):
            amax[row : row + size] = np.max(amax[row : row + size], axis=0)
    finite = np.isfinite(amax)
    one, six, most = np.float32([1, 6, 448 * 6])
    largest = np.max(amax[finite], initial=np.float32(0))
    tensor = np.maximum(largest * (one / most), np.float32(2.0**-112))
    with np.errstate(all="ignore"):
        scales = amax * (one / (tensor * six))
        scales = np.minimum(scales, np.float32(448)).astype(E4M3)
        steps = scales.astype(np.float32) * tensor
        exact = x * np.where(steps > 0, one / steps, 0)[..., None]
        some = [exact * (1 + i * 2.0**-21) for i in (-1, 0, 1)]
        values = [np.clip(one, -6, 6).astype(E2M1) for one in some]
    scales[~finite] = np.nan
    return values, scales, tensor


def restored(values, scales, tensor=1.0, length=None):
    """What they stand for, in float64."""
    values = values[1] if isinstance(values, list) else values
    out = values.astype(np.float64) * scales.astype(np.float64)[..., None]
    out = out.reshape(len(out), -1) * np.float64(tensor)
    return out[:, :length]
