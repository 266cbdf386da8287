"""A call of a function that `amp` has made, once its program is known."""

from collections.abc import Callable
from typing import Any, NamedTuple

from .._rules import Origin


class TracedCall(NamedTuple):
    """A call, traced.

    Args:
        fn: what is called, as the user gave it.
        jaxpr: its program.
        arrays: the arrays that the program takes.
        origins: for each array, whether it is a parameter.
        is_scaled: whether a loss was scaled so far, or float16 is neither the dtype by
            default nor that of `enable_amp`, so that gradients lack no scale.
        has_gradients: tells whether the results look like gradients by an argument."""

    fn: Callable[..., Any]
    jaxpr: Any
    arrays: list[Any]
    origins: list[Origin]
    is_scaled: bool
    has_gradients: Callable[[], bool]
