"""Warnings where a statement drops the result of a call that changes nothing."""

import dis
import functools
import inspect
import itertools
import linecache
import os
import re
import sys
import sysconfig
import types
from collections import ChainMap
from collections.abc import Callable
from typing import Any, NamedTuple, ParamSpec, TypeVar

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
            call = frame and _call_for_nothing(frame.f_code, frame.f_lasti)
            if frame and call and _calls(frame, call, checked, args[:1]):
                warn_or_raise(
                    f"`{function.__name__}` changes nothing in place, and what it "
                    f"returns is dropped here. Write `{instead}`.",
                    strict=False,
                )
            return out

        return checked

    return decorate


_LIBRARIES = tuple(
    path + os.sep
    for key, path in sysconfig.get_paths().items()
    if key in ("stdlib", "platstdlib", "purelib", "platlib")
)


class _Call(NamedTuple):
    """A call as it is written.

    Args:
        dotted: what it names, such as "x.f".
        rest: what follows in its line."""

    dotted: str
    rest: str


@functools.lru_cache(maxsize=256)
def _call_for_nothing(code: types.CodeType, called_at: int) -> _Call | None:
    """The call at an offset, if its result is dropped and its source is known.

    Libraries are not looked at: their calls are not for the user to change."""
    if code.co_filename.startswith(_LIBRARIES):
        return None
    later = (x.opname for x in dis.get_instructions(code) if x.offset > called_at)
    if next(later, "") != "POP_TOP":
        return None
    index = called_at // 2
    places = itertools.islice(code.co_positions(), index, index + 1)
    line, _, column, _ = next(places, (None, None, None, None))
    source = linecache.getline(code.co_filename, line or 0).encode()[column or 0 :]
    found = re.match(r"([\w.]+)\s*\((.*)", source.decode(errors="ignore"))
    return _Call(*found.groups()) if found else None


def _calls(
    frame: types.FrameType, call: _Call, function: Any, first: tuple[Any, ...]
) -> bool:
    """Whether what a call in a frame names is a function, as far as it shows.

    It need not be: the result of a call in C may be dropped, which calls the function,
    as in `fns.extend(map(amp, fns))` or `record.update(map(scaler.update, flags))`.
    What a property would give is not asked, since that runs the user's code: there, the
    function's name tells, unless it stands in the line again."""
    *path, name = call.dotted.split(".")
    names = ChainMap({}, frame.f_locals, frame.f_globals, frame.f_builtins)
    found: Any = names.get((*path, name)[0], _UNKNOWN)
    for attribute in path[1:]:
        found = _attribute(found, attribute)
    if path and first and found is first[0]:  # the `self` of a method
        found = _UNKNOWN
    elif path:
        found = _attribute(found, name)
    if found is _UNKNOWN:
        return name == function.__name__ and not re.search(rf"\b{name}\b", call.rest)
    return found is function


_UNKNOWN = object()


def _attribute(owner: Any, name: str) -> Any:
    found = inspect.getattr_static(owner, name, _UNKNOWN)
    if isinstance(found, types.MemberDescriptorType):  # a slot
        return getattr(owner, name, _UNKNOWN)
    return _UNKNOWN if inspect.isdatadescriptor(found) else found
