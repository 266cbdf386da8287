"""Restores states from checkpoints of other versions, containers and dtypes."""

from collections.abc import Mapping, Sequence
from typing import Any

from .state import DynamicScalerState


def restore_scaler(saved: Any) -> DynamicScalerState:
    """Restores a state from an older version, or from another container or dtype.

    The scale goes on as it was saved, with the settings of then, such as `patience`.
    For others, write `restore_scaler(saved)._replace(patience=1000)`.

    Args:
        saved: a mapping by field names, as checkpoints are read back without a target;
            or the fields in order, such as a named tuple. Fields that an older version
            did not have get their defaults.
    Raises:
        TypeError, ValueError: it is no state, or fields are unknown or out of range.

    >>> import numpy as np
    >>> saved = {"scaler": np.float64(1024), "count": np.int64(7)}
    >>> restore_scaler(saved).scaler, int(restore_scaler([2000, 2.0, 1024.0]).patience)
    (Array(1024., dtype=float32), 2000)
    """
    names, given = DynamicScalerState._fields, saved
    if hasattr(saved, "inner_state"):
        raise TypeError(
            "`saved` is the state of an optimizer, of which the scale is one field.\n"
            "Write `saved._replace(scaler=restore_scaler(saved.scaler))`."
        )
    if isinstance(saved, tuple) and hasattr(saved, "_asdict"):
        saved = saved._asdict()  # pyright: ignore[reportAttributeAccessIssue]
    if isinstance(saved, Sequence) and not isinstance(saved, str):
        extra = (f"number {i}" for i in range(len(names), len(saved)))
        saved = dict(zip((*names, *extra), saved, strict=False))
    if not isinstance(saved, Mapping) or "scaler" not in saved:
        raise TypeError(
            "`saved` must hold the fields of a `DynamicScalerState`, by name or in "
            f"order, `scaler` among them, but was given {_shown(given)}."
        )
    if unknown := [str(name) for name in saved if name not in names]:
        raise ValueError(
            f"`saved` has fields that a `DynamicScalerState` has not: "
            f"{', '.join(unknown)}.\nIt may be from a newer version; known are "
            f"{', '.join(names)}."
        )
    return DynamicScalerState(**saved)


def _shown(x: Any) -> str:
    names = x if isinstance(x, Mapping) else getattr(x, "_fields", ())
    return f"a {type(x).__name__}" + f" of {', '.join(map(str, names))}" * bool(names)
