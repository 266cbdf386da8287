"""Writes files that a user asked for."""

from os import PathLike
from pathlib import Path


def write_text(path: str | PathLike[str], text: str, what: str) -> Path:
    """Writes a text, and makes the parent folders.

    Args:
        path: of the file, which is made or written over.
        text: what to write.
        what: what it is, for errors, such as "report".
    Returns:
        The path.
    Raises:
        TypeError: `path` is no path.
        OSError: the file can't be written; the message says what to do."""
    if not isinstance(path, str | PathLike) or not str(path):
        given = repr(path) if isinstance(path, str) else type(path).__name__
        raise TypeError(
            f"`path` must be the path of a file, but got {given}: say "
            f"where the {what} is to be written."
        )
    path = Path(path)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, "utf-8")
    except OSError as e:
        raise type(e)(
            e.errno,
            f"{e.strerror}; the {what} could not be written, give a `path` to a file "
            "in a folder that you may write to",
            str(path),
        ) from None
    return path
