"""What JAX moves out of a loop, put back into the scopes that it was written in.

Where JAX differentiates a scan, it computes what is the same in all iterations (`x @ u`
in `h = tanh(h @ w + x @ u)`) once, before the loop, and forgets the scopes around the
loop. What was moved still has the frames of the name stack, or the traceback, of what
stayed inside: they are the same objects. So it is known from which loop it comes."""

from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import takewhile
from typing import Any

from .._jax import (
    Eqn,
    Jaxpr,
    raw,
    replace_subjaxprs,
    scope_frames,
    subjaxprs,
    traceback_of,
    with_eqns,
    with_frames,
)
from .memo import Memo

Frames = tuple[Any, ...]


@dataclass(eq=False)
class Hoisted:
    """Puts lost scopes back, and remembers the results while the programs live."""

    _known: Memo = field(default_factory=Memo)

    def put_back(self, jaxpr: Jaxpr) -> Jaxpr:
        """`jaxpr` with scopes where they were lost; itself, if they were not."""
        known = self._known.of(jaxpr)
        if () not in known:
            found = self._put_back(jaxpr)
            known[()] = None if found is jaxpr else found  # see `Memo`
        return jaxpr if known[()] is None else known[()]

    def _put_back(self, jaxpr: Jaxpr) -> Jaxpr:
        eqns = [self._inside_of(eqn) for eqn in raw(jaxpr).eqns]
        # Derivatives of what was moved may come after all loops.
        around = {k: v for eqn in eqns for k, v in _inside_of_loop(eqn).items()}
        found = []
        for eqn in reversed(eqns):
            eqn = _put_back(eqn, around)
            around |= _inside_of_loop(eqn)  # of several loops, the next one counts
            found.append(eqn)
        found.reverse()
        return with_eqns(jaxpr, found)

    def _inside_of(self, eqn: Eqn) -> Eqn:
        """`eqn` with lost scopes put back in the programs that it holds."""
        pairs = [(sub, self.put_back(sub)) for sub in subjaxprs(eqn.params)]
        new = {id(old): found for old, found in pairs if found is not old}
        return replace_subjaxprs(eqn, new) if new else eqn


def _put_back(eqn: Eqn, around: dict[int, Frames]) -> Eqn:
    own = scope_frames(eqn)
    for frame in own or (traceback_of(eqn),):
        if id(frame) in around:
            return with_frames(eqn, around[id(frame)], before=frame)
    return eqn


def _inside_of_loop(eqn: Eqn) -> dict[int, Frames]:
    """The frames around each frame and traceback in a loop, by the `id` of that.

    All that was made of a derivative rule has one traceback, wherever it stands in the
    rule: for this one, the frames count that are around all of it."""
    found: dict[int, Frames] = {}
    if eqn.primitive.name == "scan":
        for one, around in _frames_around(eqn, scope_frames(eqn)):
            found[one] = _common(found[one], around) if one in found else around
        for unknown in (None, traceback_of(eqn)):
            found.pop(id(unknown), None)
    return found


def _common(a: Frames, b: Frames) -> Frames:
    pairs = takewhile(lambda pair: pair[0] is pair[1], zip(a, b, strict=False))
    return tuple(frame for frame, _ in pairs)


def _frames_around(eqn: Eqn, frames: Frames) -> Iterator[tuple[int, Frames]]:
    for sub in subjaxprs(eqn.params):
        for inner in raw(sub).eqns:
            own = scope_frames(inner)
            yield id(traceback_of(inner)), frames + own
            for i, frame in enumerate(own):
                yield id(frame), frames + own[:i]
            yield from _frames_around(inner, frames + own)
