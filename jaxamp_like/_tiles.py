"""Arrays in blocks, so that each block can have a scale.

A block is a tile: a number of neighbours along each axis. It is as long as it may be
along the last axis, and goes on along the axes before where the last is shorter."""

from collections.abc import Sequence
from math import prod
from typing import Any

import jax
import jax.numpy as jnp

from ._jax import is_tracer
from ._magnitudes import largest_magnitude, words

Tile = tuple[int, ...]  # a length for each axis


def tile_of(x: Any, size: int) -> Tile:
    """A tile of at most `size` numbers of `x`, which crosses no border of its shards.

    Where borders leave too little to share a scale, as between shards of a prime
    length, they are not heeded, unless they are explicit: JAX then refuses to."""
    tile = _tile(x.shape, shard_shape(x), size)
    is_small = prod(tile) < min(_WORTH_A_SCALE, size, x.size)
    if is_small and _part_of(x.shape, jax.typeof(x)) == x.shape:
        tile = _tile(x.shape, x.shape, size)
    return tile


_WORTH_A_SCALE = 32  # numbers, of which each then pays one bit for the scale


def shard_shape(x: Any) -> tuple[int, ...]:
    """The shape of the part of an array that one device holds, as far as it is known.

    In `jit` it is known where the mesh has axes of explicit sharding. In `shard_map`
    an array is such a part itself."""
    return _part_of(x.shape, jax.typeof(x) if is_tracer(x) else x)


def _part_of(shape: tuple[int, ...], placed: Any) -> tuple[int, ...]:
    sharding = getattr(placed, "sharding", None)
    try:
        return sharding.shard_shape(shape) if sharding is not None else shape
    # Of an abstract mesh, or, as an AssertionError, of one with manual axes.
    except (TypeError, ValueError, AttributeError, AssertionError):
        return shape


def _tile(shape: Sequence[int], shards: Sequence[int], size: int) -> Tile:
    tile: list[int] = []
    for length, shard in zip(reversed(shape), reversed(shards), strict=True):
        longest = max(min(shard, size), 1)
        if shard < length:
            longest = max(n for n in range(1, longest + 1) if shard % n == 0)
        tile.insert(0, longest)
        size //= longest
    return tuple(tile)


def range_in_tiles(x: Any, tile: Tile) -> tuple[Any, Any]:
    """Of each tile, the largest magnitude, and whether any of its numbers has a sign.

    Both are shaped as the grid of tiles. A NaN of a tile is its largest magnitude."""
    x, axes = _in_tiles(x, tile)
    return largest_magnitude(x, axes), words(x).min(axes) < 0


def largest_in_tiles(x: Any, tile: Tile) -> Any:
    """The largest magnitude of each tile, shaped as the grid of tiles, or its NaN."""
    x, axes = _in_tiles(x, tile)
    return largest_magnitude(x, axes)


def _in_tiles(x: Any, tile: Tile) -> tuple[Any, tuple[int, ...]]:
    """An array whose axes are split by tiles, and the axes within tiles."""
    # Leading axes that `tile` has no length for are those of `vmap`.
    tile = (1,) * (x.ndim - len(tile)) + tile
    x = jnp.pad(x, [(0, -n % t) for n, t in zip(x.shape, tile, strict=True)])
    inner: list[int] = []
    # One axis at a time, and the last first: where axes are sharded explicitly, JAX
    # splits no two at once.
    for axis in reversed(range(len(tile))):
        if tile[axis] > 1:
            shape = x.shape
            length = shape[axis] // tile[axis]
            x = x.reshape(*shape[:axis], length, tile[axis], *shape[axis + 1 :])
            inner = [axis + 1, *(a + 1 for a in inner)]
    return x, tuple(inner)


def over_tiles(grid: Any, tile: Tile, shape: Sequence[int]) -> Any:
    """What each tile has, for each number of an array of `shape`."""
    tile = (1,) * (len(shape) - len(tile)) + tile
    for axis, t in enumerate(tile):
        if t > 1:
            before, (n, *after) = grid.shape[:axis], grid.shape[axis:]
            spread = jnp.broadcast_to(
                jnp.expand_dims(grid, axis + 1), (*before, n, t, *after)
            )
            grid = spread.reshape(*before, n * t, *after)
    return grid[tuple(slice(n) for n in shape)]
