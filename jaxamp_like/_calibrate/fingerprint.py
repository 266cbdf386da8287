"""Fingerprints: short texts that tell a program, or data, from others."""

import hashlib
import re
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from .._jax import Jaxpr, Literal, consts, is_array, is_jaxpr, raw
from .measured_function import Point


def of_program(jaxpr: Jaxpr) -> str:
    """A text that tells a program from others.

    It depends on what is computed and on all arrays that are closed over, at any depth,
    but not on what a callback does in Python."""
    text = re.sub(r"0x[0-9a-f]+", "", str(jaxpr))
    return _short([text.encode(), *map(_bytes, _held(jaxpr, set()))])


def of_points(points: Sequence[Point]) -> str:
    """A text that tells data from others."""
    return _short(part for point in points for part in _parts(point))


def _parts(point: Point) -> Iterator[bytes]:
    yield repr((point.seed, point.spread)).encode()
    yield from map(_bytes, point.arrays)


def _short(parts: Any) -> str:
    found = hashlib.sha256()
    for part in parts:
        # The length is hashed too, so that it counts where a part ends.
        found.update(len(part).to_bytes(8, "little") + part)
    return found.hexdigest()[:16]


def _held(jaxpr: Jaxpr, seen: set[int]) -> Iterator[Any]:
    """The arrays that a program holds: constants, literals and parameters."""
    if id(jaxpr) in seen:
        return
    seen.add(id(jaxpr))
    yield from consts(jaxpr)
    for eqn in raw(jaxpr).eqns:
        yield from (atom.val for atom in eqn.invars if isinstance(atom, Literal))
        for name in sorted(eqn.params):
            yield from _in_parameter(eqn.params[name], seen)
    yield from (atom.val for atom in raw(jaxpr).outvars if isinstance(atom, Literal))


def _in_parameter(value: Any, seen: set[int]) -> Iterator[Any]:
    if is_jaxpr(value):
        yield from _held(value, seen)
    elif isinstance(value, tuple | list):
        for item in value:
            yield from _in_parameter(item, seen)
    elif is_array(value):
        yield value


def _bytes(x: Any) -> bytes:
    if isinstance(x, jax.Array) and jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
        x = jax.random.key_data(x)
    x = np.ascontiguousarray(np.asarray(x))
    return f"{x.dtype.name}{x.shape}".encode() + x.tobytes()
