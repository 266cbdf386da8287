"""Calls that don't fit, and what to write instead."""

from collections.abc import Callable, Mapping
from typing import Any, ParamSpec, TypeVar

from .._errors import explaining_misfits

_P = ParamSpec("_P")
_R = TypeVar("_R")

# What the settings of a scale are called by PyTorch, Flax, jmp and Keras.
SETTINGS = {
    "init_scale": "scaler",
    "initial_scale": "scaler",
    "loss_scale": "scaler",
    "scale": "scaler",
    "growth_interval": "patience",
    "dynamic_growth_steps": "patience",
    "period": "patience",
    "growth_factor": "adjust_factor",
    "backoff_factor": "adjust_factor",
    "factor": "adjust_factor",
    "minimum_scale": "min_scaler",
    "min_loss_scale": "min_scaler",
}

UPDATE = "updates, opt_state = tx.update(grads, opt_state, params)"
GRADIENT = "loss, grads = tx.value_and_grad(loss_fn, opt_state)(params, batch)"
# What PyTorch's scaler does, which is the optimizer's work here.
BY_HAND = {
    name: f"With `mixed, tx = enable_amp(loss_fn, optimizer)`, write `{call}`. By "
    "hand, write `dynamic_scale_value_and_grad(loss_fn)(params, batch, "
    "dynamic_scaler_state=scaler)`."
    for name, call in {
        "step": UPDATE,
        "unscale_": GRADIENT,
        "backward": GRADIENT,
    }.items()
}


def with_call_hints(
    example: str, elsewhere: Mapping[str, str] = SETTINGS
) -> Callable[[Callable[_P, _R]], Callable[_P, _R]]:
    """A decorator: where arguments don't fit, the error shows what to write.

    Args:
        example: a call that fits.
        elsewhere: maps names in other libraries to the names of arguments here."""

    def hints(
        parameters: Mapping[str, Any], args: Any, kwargs: dict[str, Any]
    ) -> list[str]:
        called = [
            f"Did you mean `{elsewhere[name]}` by `{name}`?"
            for name in kwargs
            if elsewhere.get(name) in parameters and name not in parameters
        ]
        return [*called, f"Write `{example}`."]

    return explaining_misfits(example.split("(")[0], hints)
