"""Lock files: the precision of a compiled program as a text that can be compared.

A line stands for all operations of a scope, a phase and a primitive that run alike. It
holds the precision that was decided and, if another one runs, that one too. It holds
neither source lines, which move, nor versions, nor what differs among machines of a
kind: the dtypes that operands are stored in, and whether equal operations are one."""

import difflib
import itertools
from collections import Counter
from collections.abc import Iterable, Mapping
from pathlib import Path

from .. import _files
from .records import Certified

_FORMAT = "jaxamp_like precision lock, format 1"


def written(about: Mapping[str, str], operations: Iterable[Certified]) -> str:
    """The text of a lock file.

    Args:
        about: the program that the lock describes: lines of its head, by name.
        operations: of the program."""
    return "\n".join([*_head(about), "", *_lines(operations), ""])


def as_path(path: object, name: str) -> Path:
    """The path of a lock file, which an argument of this name gives."""
    instead = ". Write the file by `certificate.save(path)`, and give its path."
    return _files.as_path(path, name, "a lock file", instead)


def read(path: Path) -> list[str]:
    """The lines of a lock file.

    Raises:
        FileNotFoundError: there is no such file.
        ValueError: the file is no lock file."""
    if path.is_dir():
        raise IsADirectoryError(f"{path} is a folder. Give the path of the lock file.")
    if not path.is_file():
        raise FileNotFoundError(
            f"There is no lock file {path}. Write it with `certificate.save(path)`, or "
            "from a shell with `python -m jaxamp_like check MODULE:FACTORY PATH "
            "--write`."
        )
    try:
        text = path.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError:
        text = ""
    old = [line.rstrip() for line in text.split("\n")]
    if not old or old[0] != _FORMAT:
        first = old[0] if old else ""
        raise ValueError(
            f"{path} is no lock file of this format: its first line must be "
            f"{_FORMAT!r}, but is {first[:80]!r}. Write it anew with "
            "`certificate.save(path)`."
        )
    return old


def difference(
    about: Mapping[str, str], operations: Iterable[Certified], path: Path
) -> str:
    """How operations differ from a lock file, as a diff; "" if they do not.

    Args:
        about: as for `written`.
        operations: of the program.
        path: of the lock file.
    Raises:
        FileNotFoundError: there is no such file.
        ValueError: the file is no lock file, or one of another program."""
    old, head = read(path), _head(about)
    for ours, theirs in itertools.zip_longest(head, old[: len(head)]):
        if ours != theirs:
            raise ValueError(
                f"{path} is the lock of another program: "
                f"{_first_difference(theirs, ours)}. Certify the same function with "
                "arguments of the same shapes for the same kind of device, or write "
                "the lock anew."
            )
    old = sorted(filter(None, old[len(head) :]))
    new = _lines(operations)
    lines = list(difflib.unified_diff(old, new, str(path), "now", lineterm="", n=0))
    if not lines:
        return ""
    changed = [line for line in lines[2:] if not line.startswith("@@")]
    return "\n".join([f"The precision differs from {path}:", *changed])


def _first_difference(theirs: str | None, ours: str | None) -> str:
    """Where two lines of the head begin to differ: of lists, the first such item."""
    name = (ours or "").partition(":")[0]
    items = ((line or "nothing").split(", ") for line in (theirs, ours))
    for i, (old, new) in enumerate(itertools.zip_longest(*items, fillvalue="nothing")):
        if old != new:
            where = f" (item {i} of its {name})" if i else ""
            return f"it says {old!r}{where}, but this one has {new!r}"
    return "it differs"


def _head(about: Mapping[str, str]) -> list[str]:
    return [_FORMAT, *(f"{name}: {text}".rstrip() for name, text in about.items())]


def _lines(operations: Iterable[Certified]) -> list[str]:
    count: Counter[str] = Counter()
    for one in operations:
        # Whether JAX calls something recomputed differs among its versions.
        phase = "forward" if one.phase == "forward" else "backward"
        scope = one.scope.replace("\n", "\\n") or "(no scope)"
        text = f"{scope}: {phase} {one.primitive}: "
        text += one.decided or "decided by no equation"
        if one.real_drifts or not one.decided:
            compiled = " and ".join(sorted(set(one.compiled)))
            text += f", compiled {compiled}"
        if one.real_drifts:
            text += f" ({', '.join(sorted(one.real_drifts))})"
        count[text] += 1
    return sorted(f"{line}, x{n}" for line, n in count.items())
