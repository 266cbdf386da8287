"""Name stacks of programs that hold hi-primitives, as those of classic programs.

The name stack of an equation in a program that another equation holds begins where that
one's ends. Where JAX differentiates `jax.checkpoint` as a hi-primitive, the inner one
begins anew instead, with the frames of the outer one again; what is made again for the
backward pass is named so in the outer one; and the backward pass of the checkpoint has
the transforms of the loss's and its own. Frames tell what is the same: one that is
repeated is the same object."""

from collections.abc import Iterator, Sequence
from typing import Any
from weakref import WeakKeyDictionary

from ._programs import Eqn, Jaxpr, is_jaxpr, raw, with_eqns, with_jaxprs

RECOMPUTED = "rematted_computation"
"""The scope of what `jax.checkpoint` makes again in the backward pass."""

HELD = "hi_primitive"
"""The parameter of an equation that is shown for a hi-primitive: its object."""

_Frames = tuple[Any, ...]


def frames_of(eqn: Eqn) -> _Frames:
    """The scopes and transforms around an equation, the outermost first."""
    return eqn.source_info.name_stack.stack


def is_recomputed(eqn: Eqn) -> bool:
    """Whether an equation is named as one that the backward pass makes again."""
    return any(frame.name == RECOMPUTED for frame in frames_of(eqn))


def classic(jaxpr: Jaxpr) -> Jaxpr:
    """A program whose name stacks are those of one without hi-primitives."""
    return _classic(jaxpr, frozenset(), ())


def _classic(jaxpr: Jaxpr, around: frozenset[int], recomputed: _Frames) -> Jaxpr:
    """`around` are the identities of the frames that the equations around have.

    What is found is remembered by those that the program repeats: these are alive."""
    known = _known.setdefault(jaxpr, {})
    key = around & _identities(jaxpr), bool(recomputed)
    if key not in known:
        eqns = [_classic_eqn(eqn, around, recomputed) for eqn in raw(jaxpr).eqns]
        new = with_eqns(jaxpr, eqns)
        known[key] = None if new is jaxpr else new
    return jaxpr if known[key] is None else known[key]


def _classic_eqn(eqn: Eqn, around: frozenset[int], recomputed: _Frames) -> Eqn:
    before = frames_of(eqn)
    frames = tuple(frame for frame in before if id(frame) not in around)
    inner: _Frames = ()
    if eqn.primitive.name in _CHECKPOINTS and HELD in eqn.params:
        inner = tuple(frame for frame in frames if frame.name == RECOMPUTED)[:1]
        frames = tuple(frame for frame in frames if frame.name != RECOMPUTED)
    frames = _with_one_derivative((*recomputed, *frames))
    inside = around | frozenset(map(id, before))
    params = with_jaxprs(eqn.params, lambda jaxpr: _classic(jaxpr, inside, inner))
    if frames == before:
        return eqn if params is eqn.params else eqn.replace(params=params)
    info = eqn.source_info
    stack = type(info.name_stack)(frames)
    return eqn.replace(params=params, source_info=info.replace(name_stack=stack))


def _with_one_derivative(frames: _Frames) -> _Frames:
    """The frames of a backward pass without those of the checkpoint's own.

    These read A S T J F A' S, where A and S stand around the checkpoint, and A' is the
    end of A. T and J are the transposition and differentiation of the checkpoint, once
    for each in a nest of them, and F the scopes around the forward pass, if the
    backward pass is in others."""
    while True:
        first: dict[int, int] = {}
        places = [first.setdefault(id(x), i) for i, x in enumerate(frames)]
        end = max((i for i, j in enumerate(places) if i != j), default=None)
        if end is None:
            return frames
        start = places[end]
        new = [frames[i] for i in range(start + 1, end) if places[i] == i]
        is_backward = "transpose" in _transforms(frames[: start + 1])
        transforms = _transforms(new)
        pairs = ["transpose", "jvp"] * (len(transforms) // 2)
        if not is_backward or not transforms or transforms != pairs:
            return frames
        frames = (*frames[: start + 1], *frames[end + 1 :])


def _transforms(frames: Sequence[Any]) -> list[str]:
    return [frame.name for frame in frames if not is_scope(frame)]


def is_scope(frame: Any) -> bool:
    """Whether a frame is a `jax.named_scope`, and no transform."""
    return type(frame).__name__ == "Scope"  # the class is private


def _identities(jaxpr: Jaxpr) -> frozenset[int]:
    """Of the frames in a program, at any depth."""
    if jaxpr not in _of_frames:
        found = {id(frame) for eqn in raw(jaxpr).eqns for frame in frames_of(eqn)}
        inner = (_identities(one) for eqn in raw(jaxpr).eqns for one in _held(eqn))
        _of_frames[jaxpr] = frozenset(found.union(*inner))
    return _of_frames[jaxpr]


def _held(eqn: Eqn) -> Iterator[Jaxpr]:
    for value in eqn.params.values():
        items = value if isinstance(value, tuple | list) else (value,)
        yield from (item for item in items if is_jaxpr(item))


_CHECKPOINTS = ("remat", "remat2", "checkpoint")

# By programs: JAX finds what it has made of a program by its identity.
_known: Any = WeakKeyDictionary()
_of_frames: Any = WeakKeyDictionary()
