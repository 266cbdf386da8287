"""Calls that don't fit, and what to write instead."""

import inspect
from collections.abc import Callable, Mapping
from functools import wraps
from typing import Any, ParamSpec, TypeVar

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


def written_so(
    example: str, elsewhere: Mapping[str, str] = SETTINGS
) -> Callable[[Callable[_P, _R]], Callable[_P, _R]]:
    """A decorator: where arguments don't fit, the error shows what to write.

    Args:
        example: a call that fits.
        elsewhere: names that other libraries have for the arguments."""

    def decorate(function: Callable[_P, _R]) -> Callable[_P, _R]:
        signature = inspect.signature(function)

        @wraps(function)
        def checked(*args: _P.args, **kwargs: _P.kwargs) -> _R:
            try:
                return function(*args, **kwargs)
            except TypeError:
                wrong = _misfit(signature, args, kwargs)
                if not wrong:
                    raise
            called = [
                f"Did you mean `{elsewhere[name]}` by `{name}`?"
                for name in kwargs
                if elsewhere.get(name) in signature.parameters
                and name not in signature.parameters
            ]
            what = f"`{example.split('(')[0]}` can't be called so: {wrong}."
            raise TypeError(" ".join([what, *called, f"Write `{example}`."])) from None

        return checked

    return decorate


def _misfit(signature: inspect.Signature, args: Any, kwargs: dict[str, Any]) -> str:
    try:
        signature.bind(*args, **kwargs)
    except TypeError as e:
        return str(e)
    return ""
