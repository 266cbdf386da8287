"""Docstrings as the reference shows them.

Doctests become blocks of code, and `Returns:` and `Raises:` become lists, though no
empty line stands before them."""

import re
from typing import Any

import griffe

DOCTEST = re.compile(r"^( *)>>> .*(?:\n(?! *$).*)*", re.M)
SECTION = re.compile(r"(?<=[^\n])\n( *(?:Args|Attributes|Returns|Yields|Raises):\n)")


def fenced(text: str) -> str:
    return DOCTEST.sub(lambda m: f"{m[1]}```pycon\n{m[0]}\n{m[1]}```", text)


class Doctests(griffe.Extension):
    def on_object(self, *, obj: griffe.Object, **kwargs: Any) -> None:
        if obj.docstring is not None:
            text = SECTION.sub(r"\n\n\1", obj.docstring.value)
            obj.docstring.value = fenced(text)
