"""Everything as its author wrote it."""

from typing import Any

from ..._rules import use_original_precision
from ..classes import CLASSES
from ..dictionary import policy_by_name


def full_precision() -> dict[Any, Any]:
    """Everything as its author wrote it.

    Extend it with the few ops or scopes that are to run low, or use it to switch mixed
    precision off where a policy must be passed.

    Returns:
        A policy dict.

    >>> from jax import lax
    >>> policy = full_precision() | {"encoder": "bfloat16"}
    >>> policy[lax.dot_general_p]
    UseOriginalPrecision(local=False)
    """
    return policy_by_name(dict.fromkeys(CLASSES, use_original_precision))
