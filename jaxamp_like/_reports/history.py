"""`ScalerHistory`: what became of the loss scale while a model was trained."""

import json
import math
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import jax

from .._jax import is_tracer
from .._loss_scale.host import scalers_in
from .extras import need


@dataclass(repr=False)
class ScalerHistory:
    """Records loss scale, overflows and loss, step by step, in a training loop.

    The arrays are kept as they are and read only when the history is looked at, so
    recording does not make the loop wait for the device.

    Args:
        every: record only every so many steps.

    >>> from jaxamp_like import DynamicScalerState
    >>> from jaxamp_like.reports import ScalerHistory
    >>> history, scaler = ScalerHistory(), DynamicScalerState(scaler=1024)
    >>> for loss in (0.5, 0.4):
    ...     scaler = scaler.update(loss < 0.45)
    ...     history.record(scaler, loss)
    >>> history.rows()[0]["scale"], history.rows()[0]["overflows"]
    (512.0, 1)
    """

    every: int = 1
    _kept: list[tuple[int, dict[str, Any], Any]] = field(default_factory=list)
    _steps: int = 0

    def __post_init__(self) -> None:
        if isinstance(self.every, bool) or not isinstance(self.every, int):
            raise TypeError(f"`every` must be an integer, but got {self.every!r}.")
        if self.every < 1:
            raise ValueError(
                f"`every` must be at least 1, but got {self.every}: 1 keeps every step."
            )

    def record(self, scaler: Any, loss: Any = None) -> None:
        """Records one step; call it once a step, outside of `jax.jit`.

        Args:
            scaler: the state that the step returned: that of one scale, of several by
                group, of a `loss_scale_optimizer`, or any tree that holds one.
                `NoScaler()` counts as a scale of 1.
            loss: the loss of the step, if it is to be shown too.
        Raises:
            TypeError: there is no state in `scaler`, or it is being traced.
            ValueError: its scales are in other places than those of the steps before.
        """
        found = scalers_in(scaler)
        scales = {path: (one.scaler, one.total_resets) for path, one in found.items()}
        _check_concrete([*scales.values(), loss])
        if self._kept and scales.keys() != self._kept[0][1].keys():
            raise ValueError(
                f"`scaler` has its scales at {_places(scales)}, but the steps before "
                f"had them at {_places(self._kept[0][1])}.\nKeep a `ScalerHistory` for "
                "each training."
            )
        if self._steps % self.every == 0:
            self._kept.append((self._steps, scales, loss))
        self._steps += 1

    def rows(self) -> list[dict[str, Any]]:
        """One dict for each recorded step.

        Returns:
            `step`; `scale` after it; `overflows`: how often the scale was lowered since
            the row before; `loss`, or None. Where there are several scales, `scale` and
            `overflows` are dicts by their paths."""
        return [
            row | {key: _alone(row[key]) for key in ("scale", "overflows")}
            for row in self._rows()
        ]

    def _rows(self) -> list[dict[str, Any]]:
        """The same, with scales and overflows by path even if there is only one."""
        rows, before = [], {}
        for step, found, loss in self._kept:
            scales = {path: float(scale) for path, (scale, _) in found.items()}
            resets = {path: int(resets) for path, (_, resets) in found.items()}
            overflows = {path: n - before.get(path, 0) for path, n in resets.items()}
            before = resets
            rows.append(
                {
                    "step": step,
                    "scale": scales or {"": 1.0},
                    "overflows": overflows or {"": 0},
                    "loss": None if loss is None else float(loss),
                }
            )
        return rows

    def __repr__(self) -> str:
        rows = self._rows()
        if not rows:
            return "ScalerHistory of no steps"
        first, last = rows[0]["scale"], rows[-1]["scale"]
        told = [
            f"scale{path and ' of '}{path} {first[path]:g} to {last[path]:g}"
            for path in first
        ]
        overflows = sum(sum(row["overflows"].values()) for row in rows)
        return (
            f"ScalerHistory of {self._steps} steps: {', '.join(told)}, "
            f"{overflows} overflows"
        )

    def to_json(self) -> str:
        """The rows as JSON; a loss that is not finite is null."""

        def plain(value):
            return None if isinstance(value, float) and math.isnan(value * 0) else value

        rows = [{k: plain(v) for k, v in row.items()} for row in self.rows()]
        return json.dumps(rows)

    def plot(self) -> Any:
        """Draws scale, overflows and loss over the steps.

        Returns:
            A matplotlib figure.
        Raises:
            ImportError: matplotlib is not installed.
            ValueError: nothing has been recorded."""
        need("matplotlib")
        from matplotlib.figure import Figure  # no global state, as pyplot has

        rows = self._rows()
        if not rows:
            raise ValueError(
                "There is nothing to plot: call `record(scaler, loss)` once a step."
            )
        has_loss = any(row["loss"] is not None for row in rows)
        figure = Figure(figsize=(7, 4.5 if has_loss else 2.8), layout="constrained")
        axes = figure.subplots(1 + has_loss, sharex=True, squeeze=False)[:, 0]
        steps = [row["step"] for row in rows]
        paths = list(rows[0]["scale"])
        for i, path in enumerate(paths):
            scales = [row["scale"][path] for row in rows]
            lowered = [row["overflows"][path] > 0 for row in rows]
            axes[0].step(
                steps,
                scales,
                where="post",
                color="tab:blue" if len(paths) == 1 else f"C{i}",
                label=f"loss scale {path}".strip(),
            )
            axes[0].plot(
                [x for x, is_bad in zip(steps, lowered, strict=True) if is_bad],
                [y for y, is_bad in zip(scales, lowered, strict=True) if is_bad],
                "v",
                color="tab:red",
                label="" if i else "overflow",
            )
        axes[0].set_yscale("log", base=2)
        axes[0].set_ylabel("loss scale")
        axes[0].legend(loc="best")
        if has_loss:
            losses = [math.nan if r["loss"] is None else r["loss"] for r in rows]
            axes[1].plot(steps, losses, color="tab:green")
            axes[1].set_ylabel("loss")
        axes[-1].set_xlabel("step")
        return figure

    def save_plot(self, path: str | Path) -> Path:
        """Writes the plot; the kind of file follows from the name (png, svg, pdf).

        Raises:
            ImportError: matplotlib is not installed.
            ValueError: nothing has been recorded.
            OSError: the path can't be written to."""
        figure = self.plot()
        path = Path(path)
        path.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(path)
        return path


def _alone(by_path: dict[str, Any]) -> Any:
    """The value of the only scale, or all of several by path."""
    return by_path if len(by_path) > 1 else next(iter(by_path.values()))


def _places(by_path: dict[str, Any]) -> str:
    return ", ".join(path or "its root" for path in by_path) or "no place"


def _check_concrete(values: Any) -> None:
    if any(map(is_tracer, jax.tree.leaves(values))):
        raise TypeError(
            "`record` keeps values, but was given tracers. Call it in the training "
            "loop, with what the jitted step returns, not inside of the step."
        )
