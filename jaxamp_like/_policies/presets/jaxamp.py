"""The original jaxamp."""

from typing import Any

from ..._rules import use_compute_precision, use_original_precision
from ..classes import CLASSES
from ..dictionary import policy_by_name
from .common import CONTRACTIONS, by_name


def jaxamp() -> dict[Any, Any]:
    """Contractions, additions and subtractions low, all else in the author's dtypes.

    The default policy of jaxamp (acutkosky/jaxamp, `src/jaxamp/_amp.py`, commit
    36f958f): `add`, `sub`, `dot_general` and `conv_general_dilated` on the low list,
    `exp`, `log`, `mul` and `div` on the float32 list, and every other equation cast
    back to the dtypes that it was traced with, so that values go up and down often.
    Where this differs from jaxamp:

    - jaxamp leaves whole programs inside (jit, scan, cond, custom rules) in float32;
      here the lists hold inside them too;
    - jaxamp overrules `precision=HIGHEST` and dot algorithms;
    - jaxamp casts literals whatever their value, and so does this preset: a mask of
      -1e9 that is *added* becomes -inf in float16.

    Returns:
        A policy dict.

    >>> from jax import lax
    >>> jaxamp()[lax.add_p]
    UsePrecision(dtype=None, wide_result=False)
    """
    table = dict.fromkeys(CLASSES, use_original_precision)
    low = by_name((f"add sub {CONTRACTIONS}", use_compute_precision))
    return policy_by_name(table | low)
