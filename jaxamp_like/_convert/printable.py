"""Text of an artifact, which anyone may have written, made fit for a terminal."""

from typing import Any


def printable(data: Any) -> Any:
    """Data as of JSON, with control characters in all strings written as escapes.

    An escape sequence can retitle a terminal or hide a line, a mark of direction can
    turn text around, and a line break can begin a line that looks like one of the
    program's own.

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
