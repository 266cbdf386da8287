"""Arrays in blocks, so that each block can have a scale.

A block is a tile: a number of neighbours along each axis. It is as long as it may be
along the last axis, and goes on along the axes before where the last is shorter."""

from collections.abc import Sequence
from math import prod
from typing import Any

import jax
import jax.numpy as jnp

from .._jax import is_tracer

Tile = tuple[int, ...]  # a length for each axis


def tile_of(x: Any, size: int) -> Tile:
    """A tile of at most `size` numbers of `x`, which crosses no border of its shards.

    Where borders leave too little to share a scale, as between shards of a prime
    length, they are not heeded."""
    tile = _tile(x.shape, _shard_shape(x), size)
    if prod(tile) < min(_WORTH_A_SCALE, size, x.size):
        tile = _tile(x.shape, x.shape, size)
    return tile


_WORTH_A_SCALE = 32  # numbers, of which each then pays one bit for the scale


def _shard_shape(x: Any) -> tuple[int, ...]:
    """The shape of the part of an array that one device holds, as far as it is known.

    In `jit` it is known where the mesh has axes of explicit sharding."""
    sharding = getattr(jax.typeof(x) if is_tracer(x) else x, "sharding", None)
    try:
        return sharding.shard_shape(x.shape) if sharding is not None else x.shape
    except (TypeError, ValueError, AttributeError):  # of an abstract mesh
        return x.shape


def _tile(shape: Sequence[int], shards: Sequence[int], size: int) -> Tile:
    tile: list[int] = []
    for length, shard in zip(reversed(shape), reversed(shards), strict=True):
        longest = max(min(shard, size), 1)
        if shard < length:
            longest = max(n for n in range(1, longest + 1) if shard % n == 0)
        tile.insert(0, longest)
        size //= longest
    return tuple(tile)


def largest_in_tiles(x: Any, tile: Tile) -> tuple[Any, Any]:
    """Of each tile, the largest magnitude, and whether any of its numbers is negative.

    Both are shaped as the grid of tiles. A NaN of a tile is its largest magnitude."""
    # Leading axes that `tile` has no length for are those of `vmap`.
    tile = (1,) * (x.ndim - len(tile)) + tile
    x = jnp.pad(x, [(0, -n % t) for n, t in zip(x.shape, tile, strict=True)])
    shape: list[int] = []
    inner: list[int] = []
    for n, t in zip(x.shape, tile, strict=True):
        shape.append(n // t)
        if t > 1:
            inner.append(len(shape))
            shape.append(t)
    tiles = x.reshape(shape)
    axes = tuple(inner)
    least, most = tiles.min(axes), tiles.max(axes)
    return jnp.maximum(jnp.abs(least), jnp.abs(most)), least < 0


def over_tiles(grid: Any, tile: Tile, shape: Sequence[int]) -> Any:
    """What each tile has, for each number of an array of `shape`."""
    tile = (1,) * (len(shape) - len(tile)) + tile
    split: list[int] = []
    whole: list[int] = []
    for n, t in zip(grid.shape, tile, strict=True):
        split += [n, 1] if t > 1 else [n]
        whole += [n, t] if t > 1 else [n]
    padded = [n * t for n, t in zip(grid.shape, tile, strict=True)]
    spread = jnp.broadcast_to(grid.reshape(split), whole).reshape(padded)
    return spread[tuple(slice(n) for n in shape)]
