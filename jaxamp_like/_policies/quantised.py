"""Policies whose large contractions are quantised."""

from typing import Any

from .._quantised.rule import Quantising
from .._rules import Rule
from .classes import CLASSES
from .dictionary import policy_by_name


def quantised(rule: Rule) -> dict[Any, Any]:
    """The default policy, with contractions by a rule that quantises.

    Those that the rule leaves alone, and all else, are as in `default_amp_policy`.

    Args:
        rule: what `float8(...)` or `int8(...)` gives.
    Returns:
        A policy dict.
    Raises:
        TypeError: `rule` is no such rule.

    >>> from jaxamp_like import Policy, get_policy
    >>> from jaxamp_like.rules import float8
    >>> policy = Policy("bfloat16", "float32", rules=quantised(float8()))
    >>> policy == get_policy("float8_from_mixed_bfloat16")
    True
    """
    if not isinstance(rule, Quantising):
        raise TypeError(
            "`rule` must be a rule that quantises, such as `float8()` or `int8()`, but "
            f"got {rule!r}."
        )
    return policy_by_name({**CLASSES, **dict.fromkeys(rule.primitives, rule)})
