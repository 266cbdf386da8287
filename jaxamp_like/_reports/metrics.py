"""Numbers for a logger: what the loss scale does, and what share runs low."""

from typing import Any

import jax
import numpy as np

from .._errors import hiding_frames
from .._loss_scale.host import scalers_in
from .report import Report

# What is logged of a state, by the name of its field.
_OF_SCALER = {
    "loss_scale": "scaler",
    "skipped_steps": "skipped",
    "overflows_in_a_row": "overflows",
    "steps_at_this_scale": "count",
}


@hiding_frames
def amp_metrics(
    state: Any = None, *, report: Report | None = None, prefix: str = "amp/"
) -> dict[str, float]:
    """Numbers of mixed-precision training as a flat dict, ready for a logger.

    `wandb.log(amp_metrics(opt_state), step=i)` takes it as it is; for TensorBoard, call
    `writer.add_scalar(name, value, i)` with each item. Reading a state waits for the
    step that makes it, so that every hundredth step may be enough.

    Args:
        state: a `DynamicScalerState`, the state of a `loss_scale_optimizer`, or any
            tree that holds some. Of the stacked states of a scan, the last counts. A
            state without a scale, as of bfloat16, has no numbers.
        report: what `explain` returned. Its numbers stay the same from step to step.
        prefix: what all names begin with.
    Returns:
        Python floats by name: of the state `loss_scale`, `skipped_steps` (so far),
        `overflows_in_a_row` and `steps_at_this_scale`, each with the path of its state
        behind it where there are several; of the report `low_share`, the share of the
        FLOPs of contractions that run in fewer than 32 bits, `share/DTYPE` of each
        dtype, `casts`, and `saved_bytes` where these are known.
    Raises:
        TypeError: `state` holds no state of a loss scale or is traced, or `report` is
            no report.

    >>> from jaxamp_like import DynamicScalerState
    >>> amp_metrics(DynamicScalerState(scaler=1024).update(False))["amp/loss_scale"]
    512.0
    """
    found: dict[str, float] = {}
    if state is not None:
        states = jax.device_get(scalers_in(state))
        for path, one in states.items():
            end = path if len(states) > 1 else ""
            for name, field in _OF_SCALER.items():
                latest = np.asarray(getattr(one, field)).reshape(-1)[-1]
                found[f"{name}{end}"] = float(latest)
    if report is not None:
        found |= _of_report(report)
    return {f"{prefix}{name}": value for name, value in found.items()}


def _of_report(report: Report) -> dict[str, float]:
    if not isinstance(report, Report):
        raise TypeError(
            "`report` must be what `explain` returned, but was given a "
            f"{type(report).__name__}.\nWrite `explain(fn)(*args)`."
        )
    totals = report.now.totals
    flops = totals.flops_by_dtype
    found = {"low_share": totals.low_share, "casts": float(len(report.now.casts))}
    for dtype, count in flops.items():
        found[f"share/{dtype}"] = count / sum(flops.values())
    if totals.saved_bytes is not None:
        found["saved_bytes"] = float(totals.saved_bytes)
    return found
