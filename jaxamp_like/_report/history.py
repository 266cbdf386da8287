"""`ScalerHistory`: what became of the loss scale while a model was trained."""

import json
import math
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from .._jax import is_tracer
from .._loss_scale import DynamicScalerState
from .extras import need


@dataclass(repr=False)
class ScalerHistory:
    """Records loss scale, overflows and loss, step by step, in a training loop.

    The arrays are kept as they are and read only when the history is looked at, so
    recording does not make the loop wait for the device.

    Args:
        every: record only every so many steps.

    >>> from jaxamp_like import DynamicScalerState, ScalerHistory
    >>> history, scaler = ScalerHistory(), DynamicScalerState(scaler=1024)
    >>> for loss in (0.5, 0.4):
    ...     scaler = scaler.update(loss < 0.45)
    ...     history.record(scaler, loss)
    >>> history.rows()[0]["scale"], history.rows()[0]["overflows"]
    (512.0, 1)
    """

    every: int = 1
    _kept: list[tuple[int, Any, Any, Any]] = field(default_factory=list)
    _steps: int = 0

    def __post_init__(self) -> None:
        if isinstance(self.every, bool) or not isinstance(self.every, int):
            raise TypeError(f"`every` must be an integer, but got {self.every!r}.")
        if self.every < 1:
            raise ValueError(
                f"`every` must be at least 1, but got {self.every}: 1 keeps every step."
            )

    def record(self, scaler: DynamicScalerState, loss: Any = None) -> None:
        """Takes down one step; call it once a step, outside of `jax.jit`.

        Args:
            scaler: the state that the step returned.
            loss: the loss of the step, if it is to be shown too.
        Raises:
            TypeError: `scaler` is no state, or is being traced."""
        if not isinstance(scaler, DynamicScalerState):
            raise TypeError(
                "`scaler` must be the `DynamicScalerState` that a step returns, but "
                f"got {type(scaler).__name__}."
            )
        values = (scaler.scaler, scaler.total_resets, loss)
        _check_concrete(values)
        if self._steps % self.every == 0:
            self._kept.append((self._steps, *values))
        self._steps += 1

    def rows(self) -> list[dict[str, Any]]:
        """One dict for each recorded step.

        Returns:
            `step`; `scale` after it; `overflows`: how often the scale was lowered since
            the row before; `loss`, or None."""
        rows, resets_before = [], 0
        for step, scale, resets, loss in self._kept:
            resets = int(resets)
            rows.append(
                {
                    "step": step,
                    "scale": float(scale),
                    "overflows": resets - resets_before,
                    "loss": None if loss is None else float(loss),
                }
            )
            resets_before = resets
        return rows

    def __repr__(self) -> str:
        rows = self.rows()
        if not rows:
            return "ScalerHistory of no steps"
        overflows = sum(row["overflows"] for row in rows)
        return (
            f"ScalerHistory of {self._steps} steps: scale {rows[0]['scale']:g} to "
            f"{rows[-1]['scale']:g}, {overflows} overflows"
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

        rows = self.rows()
        if not rows:
            raise ValueError(
                "There is nothing to plot: call `record(scaler, loss)` once a step."
            )
        has_loss = any(row["loss"] is not None for row in rows)
        figure = Figure(figsize=(7, 4.5 if has_loss else 2.8), layout="constrained")
        axes = figure.subplots(1 + has_loss, sharex=True, squeeze=False)[:, 0]
        steps = [row["step"] for row in rows]
        scales = [row["scale"] for row in rows]
        axes[0].step(steps, scales, where="post", color="tab:blue", label="loss scale")
        bad = [row for row in rows if row["overflows"]]
        axes[0].plot(
            [row["step"] for row in bad],
            [row["scale"] for row in bad],
            "v",
            color="tab:red",
            label="overflow",
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


def _check_concrete(values: Any) -> None:

    if any(map(is_tracer, values)):
        raise TypeError(
            "`record` keeps values, but was given tracers. Call it in the training "
            "loop, with what the jitted step returns, not inside of the step."
        )
