"""Warnings where a statement drops the result of a call that changes nothing."""

import dis
import functools
import inspect
import linecache
import re
import sys
import types
from collections import ChainMap
from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar

from ._errors import hiding_frames, warn_or_raise

_P = ParamSpec("_P")
_R = TypeVar("_R")


def warns_if_dropped(instead: str) -> Callable[[Callable[_P, _R]], Callable[_P, _R]]:
    """A decorator that warns where a statement drops the result of the call.

    For functions that change nothing in place, unlike those of other libraries that
    they are taken for. `instead` is what to write."""

    def decorate(function: Callable[_P, _R]) -> Callable[_P, _R]:
        @functools.wraps(function)
        def checked(*args: _P.args, **kwargs: _P.kwargs) -> _R:
            with hiding_frames:
                out = function(*args, **kwargs)
            frame = sys._getframe().f_back  # `None` in a thread of C
            called = frame and _called_for_nothing(frame.f_code, frame.f_lasti)
            if frame and called and _is_called(frame, called, function, args[:1]):
                warn_or_raise(
                    f"`{function.__name__}` changes nothing in place, and what it "
                    f"returns is dropped here. Write `{instead}`.",
                    strict=False,
                )
            return out

        return checked

    return decorate


@functools.lru_cache(maxsize=256)
def _called_for_nothing(code: types.CodeType, called_at: int) -> str:
    """What a call at an offset names, such as "x.f", if its result is dropped; else "".

    It is also "" where the source is not known, or calls no name."""
    later = (x.opname for x in dis.get_instructions(code) if x.offset > called_at)
    if next(later, "") != "POP_TOP":
        return ""
    line, _, column, _ = [*code.co_positions()][called_at // 2]
    source = linecache.getline(code.co_filename, line or 0).encode()[column or 0 :]
    called = re.match(r"([\w.]+)\s*\(", source.decode(errors="ignore"))
    return called[1] if called else ""


def _is_called(
    frame: types.FrameType, dotted: str, function: Any, first: tuple[Any, ...]
) -> bool:
    """Whether a dotted name stands for a function in a frame, as far as it shows.

    It need not: the result of a call in C may be dropped, which calls the function, as
    in `fns.extend(map(amp, fns))` or `record.update(map(scaler.update, flags))`. What a
    property would give is not asked, since that runs the user's code."""
    *path, name = dotted.split(".")
    names = ChainMap({}, frame.f_locals, frame.f_globals, frame.f_builtins)
    found: Any = names.get((*path, name)[0], _UNKNOWN)
    for attribute in path[1:]:
        found = _attribute(found, attribute)
    if path and first and found is first[0]:  # the `self` of a method
        found = _UNKNOWN
    elif path:
        found = _attribute(found, name)
    if found is _UNKNOWN:
        return name == function.__name__
    return inspect.unwrap(found) is inspect.unwrap(function)


_UNKNOWN = object()


def _attribute(owner: Any, name: str) -> Any:
    found = inspect.getattr_static(owner, name, _UNKNOWN)
    if isinstance(found, types.MemberDescriptorType):  # a slot
        return getattr(owner, name, _UNKNOWN)
    return _UNKNOWN if inspect.isdatadescriptor(found) else found
