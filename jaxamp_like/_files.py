"""Paths that a user gives, and the files that are written there."""

from os import PathLike
from pathlib import Path


def as_path(path: object, name: str, kind: str, instead: str) -> Path:
    """The path that an argument gives.

    Args:
        path: the argument.
        name: of the argument.
        kind: of the file, for errors, such as "a lock file".
        instead: how the message goes on: what to do.
    Raises:
        TypeError: `path` is no path, or an empty one."""
    if not isinstance(path, str | PathLike) or not str(path):
        given = repr(path) if isinstance(path, str) else type(path).__name__
        raise TypeError(
            f"`{name}` must be the path of {kind}, but got {given}{instead}"
        )
    return Path(path)


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
    instead = f": say where the {what} is to be written."
    path = as_path(path, "path", "a file", instead)
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
