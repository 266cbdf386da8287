"""What a user may say to a quantising rule, and what is said of anything else."""

import re
from collections.abc import Sequence
from math import isfinite
from typing import Any

import jax.numpy as jnp

from .._dtypes import DType
from .._rules.conditions import refuse_misfit
from .._rules.user_rules import display_name, is_made_by_calling, is_number

_FLOAT8 = ("float8_e4m3fn", "float8_e5m2")


def float8_grad_dtype(value: Any) -> DType:
    try:
        name = jnp.dtype(value).name
    except (TypeError, ValueError):
        name = None
    if name not in _FLOAT8:
        raise ValueError(
            "`grad_dtype` must be one of the formats that matrix units of GPUs read, "
            f"{' or '.join(map(repr, _FLOAT8))}, but got {value!r}."
        )
    return jnp.dtype(name)


def predicate_or_none(value: Any) -> Any:
    if value is None:
        return None
    if is_made_by_calling(value):
        raise TypeError(
            f"`where` is `{value.__name__}`, which makes a predicate when it is "
            f"called: write `{display_name(value)}`."
        )
    if not callable(value):
        raise TypeError(
            "`where` must be callable with a `Site` and return a bool, such as "
            f"`worth_eight_bits(side=512)`, or None, but got {value!r}."
        )
    refuse_misfit(value, "where")
    return value


def as_patterns(value: Any) -> tuple[str, ...]:
    """The argument `leave`, a sequence of regular expressions."""
    if isinstance(value, str) or not isinstance(value, Sequence):
        raise TypeError(
            "`leave` must be a sequence of regular expressions, each of which matches "
            f"names of scopes, such as ('head', 'embed.*'), but got {value!r}."
        )
    for one in value:
        try:
            re.compile(one)
        except (TypeError, re.error) as e:
            raise ValueError(
                f"`leave` must hold regular expressions as strings, but holds {one!r}: "
                f"{e}."
            ) from None
    return tuple(value)


def number(value: Any, argument: str, least: float, is_open: bool = False) -> float:
    """The value, if it is finite and at least `least`; more than that if `is_open`."""
    is_finite = is_number(value) and isfinite(value)
    if not is_finite or value < least or (is_open and value == least):
        what = f"above {least:g}" if is_open else f"of {least:g} or more"
        raise ValueError(
            f"`{argument}` must be a finite number {what}, but got {value!r}."
        )
    return float(value)
