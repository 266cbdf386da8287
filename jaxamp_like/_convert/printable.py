"""Text of an artifact, which anyone may have written, made fit for a terminal."""

from typing import Any


def printable(data: Any) -> Any:
    """A string, or all strings of data as of JSON, with control characters written out.

    An escape sequence can retitle a terminal or hide a line, a mark of direction turns
    text around, a line break begins a line that looks like one of the program's own.

    >>> printable(["\\x1b[2J", "µ"])
    ['\\\\x1b[2J', 'µ']
    """
    if isinstance(data, str):
        return "".join(map(_shown, data))
    if isinstance(data, dict):
        return {printable(key): printable(value) for key, value in data.items()}
    if isinstance(data, list):
        return [printable(item) for item in data]
    return data


def _shown(char: str) -> str:
    if char.isprintable():
        return char
    return char.encode("unicode_escape", "surrogatepass").decode("ascii")
