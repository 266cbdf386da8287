"""What a rule says of the numbers of a weight: for `convert`, and for reports."""

from typing import Any

from .._rules.constant import first_operand, no_derivative


def stored(x: Any, holds: str) -> Any:
    """`x`, which is what to store of the weight that it is made of.

    All that is made of a weight alone can be made before a program runs, and `convert`
    stores what comes out last. Where that is larger than what it was made of, as where
    packed numbers are multiplied by their scales, this says how far to go.

    `holds` says what it is, for reports."""
    return STORED.bind(x, holds=holds)


def rounded(x: Any, whole: Any) -> Any:
    """`x`, which reports compare with `whole`, the same before it was rounded."""
    return ROUNDED.bind(x, whole)


STORED = first_operand("amp_stored", no_derivative)
"""Returns its operand."""

ROUNDED = first_operand("amp_rounded", no_derivative)
"""Returns its first operand."""
