"""What a user may write for a rule, and what is said of anything else."""

import inspect
import numbers
import sys
import textwrap
from typing import Any

import jax.numpy as jnp
import numpy as np

from .._dtypes import NAMES, SHORT_NAMES, as_float_dtype, bits
from .._errors import why_not_called
from .._suggestions import did_you_mean
from .base import PACKAGE, Rule
from .callback import SIGNATURE, Callback
from .computing import use_precision
from .low_bits import as_format

_ORIGINAL = "amp_stop original none keep skip off exclude as_written".split()
_MAP_HINT = " `PolicyMap` gives whole policies to scopes."


def as_rule(value: Any, argument: str) -> Rule:
    """Returns `value` as a rule, or raises an error that names `argument`."""
    if isinstance(value, Rule):
        return value
    if isinstance(value, str) or is_dtype(value):
        try:
            dtype = as_float_dtype(value, "dtype")
        except TypeError:
            hint = did_you_mean(value, (*NAMES, *SHORT_NAMES)) + _MAP_HINT
            raise TypeError(
                f"`{argument}` is {value!r}, which is no floating dtype."
                f"{_for_name_of_rule(value) or hint}"
            ) from None
        if bits(dtype) < 16:
            raise TypeError(
                f"`{argument}` is {value!r}, which needs scales: without, the range of "
                "so few bits is too small. Write the rule `float8()` (of "
                "`jaxamp_like.rules`), or `amp_policy='float8_from_mixed_bfloat16'`."
            )
        return use_precision(value)
    if is_made_by_calling(value):
        raise TypeError(
            f"`{argument}` is `{value.__name__}`, which makes a rule or a policy when "
            f"it is called: write `{display_name(value)}`."
        )
    if callable(value):
        if misfit := why_not_called(value, (None, ()), partially=True):
            raise TypeError(
                f"`{argument}` is {short(value)}, which can't be called as a rule: "
                f"{misfit}. A rule is {SIGNATURE}; a predicate, which takes one "
                "argument, is given to `when(predicate, rule, otherwise)`."
            )
        return Callback(value)
    raise TypeError(
        f"`{argument}` must be a rule such as `use_compute_precision`, a dtype such as "
        f"'float32' or a callable {SIGNATURE}, but got {short(value)}.{_MAP_HINT}"
    )


def _for_name_of_rule(value: Any) -> str:
    """What to write instead of the name of one of the library's rules; else ""."""
    # The module imports this one, which can't import it too.
    public = sys.modules.get(f"{PACKAGE}.rules")
    if value in _ORIGINAL:
        rule = "`jaxamp_like.rules.use_original_precision`"
        return f" What keeps code as its author wrote it is {rule}, without quotes."
    if value not in getattr(public, "__all__", ()):
        return ""
    rule = getattr(public, value)
    shown = display_name(rule) if is_made_by_calling(rule) else value
    return f" The rule of this name is `jaxamp_like.rules.{shown}`, without quotes."


def is_dtype(value: Any) -> bool:
    """Whether `value` is a dtype, `jnp.float32`, `np.float32`, `float` or the like."""
    if isinstance(value, np.dtype | type(jnp.float32)):
        return True
    return isinstance(value, type) and issubclass(value, np.generic | float | int)


def is_number(value: Any) -> bool:
    """Whether `value` is a real number, of Python or NumPy: a Boolean is none."""
    return isinstance(value, numbers.Real) and not isinstance(value, bool)


def as_bool(value: Any, argument: str) -> bool:
    """Returns `value` if it is a bool: a string such as "no" is none."""
    if not isinstance(value, bool | np.bool_):
        raise TypeError(f"`{argument}` must be True or False, but got {value!r}.")
    return bool(value)


def as_lean(value: Any) -> bool | str:
    """Returns the option `lean`: a bool, or the name of a format of 8 bits."""
    if isinstance(value, bool | np.bool_):
        return bool(value)
    if isinstance(value, str) or is_dtype(value):
        return as_format(value, "lean", "Beside these, True and False are accepted.")
    raise TypeError(
        "`lean` must be True or False, or a format in which to keep values for the "
        f"backward pass, such as 'int8' or 'float8', but got {value!r}."
    )


def is_integer(value: Any) -> bool:
    """Whether `value` is an integer, of Python or NumPy: a Boolean is none."""
    return isinstance(value, numbers.Integral) and not isinstance(value, bool)


def is_made_by_calling(value: Any) -> bool:
    """Whether `value` is a function or class of this library: it may make rules."""
    home = (getattr(value, "__module__", None) or "").split(".")[0]
    is_ours = home == __name__.split(".")[0]
    return is_ours and (isinstance(value, type) or inspect.isfunction(value))


def display_name(value: Any) -> str:
    """How `value` is called."""
    parameters = inspect.signature(value).parameters.values()
    needs = any(
        p.default is p.empty and p.kind == p.POSITIONAL_OR_KEYWORD for p in parameters
    )
    return f"{value.__name__}({'...' * needs})"


def short(value: Any) -> str:
    """The `repr` of what may be long, such as a policy dict."""
    return textwrap.shorten(repr(value), 80, placeholder=" ...")
