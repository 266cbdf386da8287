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
        returns_gradients: whether the results look like gradients by an argument.
        lacks_scale: whether float16 is only the default dtype, no loss was scaled, and
            the result looks like a tree of gradients."""

    fn: Callable[..., Any]
    jaxpr: Any
    arrays: list[Any]
    origins: list[Origin]
    returns_gradients: bool = False
    lacks_scale: bool = False
