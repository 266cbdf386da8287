"""The errors and warnings of the package, and warnings that are given once."""

import warnings


class AmpError(Exception):
    """A function can't be rewritten as the policy says; the message says what to do."""


class AmpWarning(UserWarning):
    """Something was left in the author's dtypes that the user may expect to be low."""


_seen: set[str] = set()


def warn_or_raise(message: str, strict: bool) -> None:
    """Raises when `strict`, else warns the first time that this message comes up."""
    if strict:
        raise AmpError(message)
    if message not in _seen:
        _seen.add(message)
        warnings.warn(message, AmpWarning, stacklevel=2)
