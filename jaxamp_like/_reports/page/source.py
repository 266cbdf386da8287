"""The source view: the lines that made equations, and in which precision they run."""

import functools
import linecache
import re
from collections import Counter, defaultdict
from pathlib import Path
from typing import Any

from ..data.records import Program, share_low

_LINE = re.compile(r"(?P<file>.*?):(?P<line>\d+)(?::\d+)? \((?P<function>.*)\)")
_AROUND = 2  # lines shown before and after
MAX_LINES = 4000  # in the whole page


@functools.lru_cache(maxsize=4096)
def parse(source: str) -> tuple[str, int] | None:
    """The file and the line in "file:line (function)"."""
    found = _LINE.fullmatch(source)
    return (found["file"], int(found["line"])) if found else None


def view(program: Program) -> list[dict[str, Any]]:
    """For each file, most FLOPs first, its lines that matter.

    A line has a kind: "low", "full" or "mixed", by the dtypes that its equations
    compute in, weighted by FLOPs where there are any; "" for a line of context."""
    weights: dict[tuple[str, int], Counter[str]] = defaultdict(Counter)
    for op in program.ops:
        where = parse(op.place.source)
        if where is not None and op.dtype and op.primitive != "convert_element_type":
            # A contraction outweighs all other equations of the line.
            weights[where][op.dtype] += max(op.total_flops, 1)
    files: dict[str, dict[int, Counter[str]]] = defaultdict(dict)
    for (file, line), count in weights.items():
        files[file][line] = count
    ranked = sorted(files.items(), key=lambda item: -_total(item[1]))
    views, room = [], MAX_LINES
    for file, lines in ranked:
        shown = _shown(file, lines)[:room]
        room -= len(shown)
        if shown:
            views.append({"file": _name(file), "lines": shown})
    return views


def _name(file: str) -> str:
    """The file as seen from the current folder, if it is below."""
    path = Path(file)
    return str(
        path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path
    )


def _total(lines: dict[int, Counter[str]]) -> int:
    return sum(sum(count.values()) for count in lines.values())


def _shown(file: str, lines: dict[int, Counter[str]]) -> list[dict[str, Any]]:
    text = linecache.getlines(file)
    numbers = sorted(
        {n for line in lines for n in range(line - _AROUND, line + _AROUND + 1)}
    )
    return [
        {
            "number": n,
            "text": text[n - 1].rstrip("\n")[:300],
            "kind": _kind(lines[n]) if n in lines else "",
            "dtypes": ", ".join(lines[n]) if n in lines else "",
        }
        for n in numbers
        if 1 <= n <= len(text)
    ]


def _kind(count: Counter[str]) -> str:
    low = share_low(count)
    if low > 0.99:
        return "low"
    return "full" if low < 0.01 else "mixed"
