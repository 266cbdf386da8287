"""How a parameter is stored, given how it is read."""

import math
from typing import Annotated, Any, NamedTuple

import numpy as np

from .._dtypes import DType, is_float
from .._reports.data.columns import Column
from .uses import Uses

_MOST = 3  # readers to name


class Stored(NamedTuple):
    """How one parameter is stored, and why so.

    Args:
        name: its path in the tree of parameters.
        shape: the shape of the array.
        before: its dtype in the model.
        now: the dtype that it is stored in.
        bytes_before: what it takes in the model.
        bytes_now: what it takes as it is stored.
        why: the reason, in words.
        folded: whether the array is made of a parameter; `before` is then the dtype of
            that parameter."""

    name: Annotated[str, Column("parameter", at=1, terminal=True)]
    shape: tuple[int, ...]
    before: str
    now: Annotated[str, Column("stored", at=3, terminal=True)]
    bytes_before: Annotated[int, Column("bytes before", "bytes", at=4, terminal=True)]
    bytes_now: Annotated[int, Column("bytes now", "bytes", at=5, terminal=True)]
    why: Annotated[str, Column("why", at=6, terminal=True)]
    folded: bool = False

    @property
    def was(self) -> Annotated[str, Column("was", at=2, terminal=True)]:
        return f"{self.before}{list(self.shape)}"

    @property
    def is_changed(self) -> bool:
        return self.folded or self.before != self.now


def storage(name: str, leaf: Any, uses: Uses, keep: str | None = None) -> Stored:
    """Decides how a parameter is stored.

    It is stored in a narrower dtype if every reader casts it to that one, and else in
    its own dtype. `keep` is a reason to leave it as it is, whoever reads it."""
    now, why = _now(leaf.dtype, uses)
    if keep is not None and now is not None:
        now, why = None, keep
    dtype, shape = leaf.dtype if now is None else now, tuple(leaf.shape)
    size = math.prod(shape)
    before, after = size * leaf.dtype.itemsize, size * dtype.itemsize
    return Stored(name, shape, str(leaf.dtype), str(dtype), before, after, why)


def narrower(leaf: Any, stored: Stored) -> DType | None:
    """The dtype that a parameter is to be cast to, if it is not stored as it is."""
    return np.dtype(stored.now) if str(leaf.dtype) != stored.now else None


def _now(dtype: DType, uses: Uses) -> tuple[DType | None, str]:
    if not is_float(dtype):
        return None, "holds no real floats"
    if not uses:
        return None, "nothing reads it"
    low = sorted({use.dtype for use in uses if use.dtype is not None})
    full = [str(use) for use in sorted(uses, key=str) if use.dtype is None]
    if full:
        more = f" and {len(full) - _MOST} more" if len(full) > _MOST else ""
        also = f"; it is cast to {' and '.join(low)} as well" if low else ""
        readers = ", ".join(full[:_MOST])
        return None, f"read in {dtype.name} by {readers}{more}{also}"
    if len(low) > 1:
        return None, f"cast to {' and '.join(low)}: stored once, in the wider"
    return np.dtype(low[0]), f"only ever cast to {low[0]}"
