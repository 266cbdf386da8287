"""Reads the name stack of an equation, and makes equations with other name stacks.

A name stack holds frames: the scopes that an author has opened, and the transforms that
JAX has applied. Private to JAX are the attribute `stack`, which holds the frames, and
the name of their class `Scope` (checked on JAX 0.6.2, 0.8.3, 0.10.2 and 0.12.0).

Differentiation may push frames that are in the stack already. Such a repetition is the
same object. A scope that the author opens within one of the same name has a frame of
its own, which is another object."""

import functools
from collections.abc import Sequence
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import jax.extend.source_info_util as source_info

from ._programs import Eqn, Jaxpr, jaxprs_in, raw, with_eqns, with_jaxprs

RECOMPUTED = "rematted_computation"
"""The scope of equations that `jax.checkpoint` runs again in the backward pass."""

HI_PRIMITIVE = "hi_primitive"
"""The parameter of a classic equation that holds the hi-primitive it stands for."""

_Frames = tuple[Any, ...]


def without_scopes(eqn: Eqn) -> Eqn:
    """`eqn` without its name scopes, for when these are in force already."""
    return _with_stack(eqn, source_info.new_name_stack())


def in_scope(eqn: Eqn, name: str) -> Eqn:
    """`eqn` in one more name scope, the innermost."""
    return _with_stack(eqn, eqn.source_info.name_stack.extend(name))


def scopes(eqn: Eqn) -> tuple[str, ...]:
    """The components of the `jax.named_scope`s around `eqn`, outermost first.

    These are the scopes that the author opened, each once, whatever JAX has made of
    the equation: it is the same for what runs in the forward pass, in the backward
    pass, and again for the backward pass. Frames of transforms (jvp, transpose, vmap)
    are left out, and so are the scopes that `jnp.einsum` opens for its subscripts."""
    return names(eqn).scopes


def scope_frames(eqn: Eqn) -> _Frames:
    """The frames of the author's scopes in the name stack of `eqn`, each once."""
    return _scope_frames(_Same(_frames_of(eqn)))


def with_frames(eqn: Eqn, frames: _Frames, before: Any) -> Eqn:
    """`eqn` with `frames` inserted into its name stack.

    They go in front of the frame `before`, or to the end if that is not there."""
    old = _frames_of(eqn)
    place = next((i for i, frame in enumerate(old) if frame is before), len(old))
    return _with_frames(eqn, (*old[:place], *frames, *old[place:]))


def as_recomputed(eqn: Eqn) -> Eqn:
    """`eqn` of a forward pass, named as one that the backward pass runs again."""
    transposed = source_info.new_name_stack().transform("transpose")
    stack = transposed + eqn.source_info.name_stack
    return _with_stack(eqn, stack.extend(RECOMPUTED))


class Names(NamedTuple):
    """What the name stack of an equation tells."""

    scopes: tuple[str, ...]  # names given to `jax.named_scope`, outermost first
    backward: bool  # made by transposing a derivative
    recomputed: bool  # run again in the backward pass, by `jax.checkpoint`
    phases: tuple[str, ...]  # "jvp" and "transpose", outermost first


def names(eqn: Eqn) -> Names:
    """What the name stack of `eqn` tells; see `Names`."""
    return _names(_Same(_frames_of(eqn)))


def is_recomputed(eqn: Eqn) -> bool:
    """Whether an equation is named as one that the backward pass runs again."""
    return names(eqn).recomputed


class _Same:
    """Frames that are equal only to themselves: repetitions are told by identity."""

    __slots__ = ("frames",)

    def __init__(self, frames: _Frames):
        self.frames = frames

    def __hash__(self) -> int:
        return id(self.frames)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Same) and self.frames is other.frames


# Many equations share the frames of their name stacks, and each is asked about often.
@functools.lru_cache(maxsize=4096)
def _names(stack: _Same) -> Names:
    frames = stack.frames
    opened = (frame.name for frame in _scope_frames(stack))
    parts = (part for name in opened if "->" not in name for part in name.split("/"))
    phases = tuple(x for x in _transforms(frames) if x in ("jvp", "transpose"))
    return Names(
        scopes=tuple(filter(None, parts)),
        backward="transpose" in phases,
        recomputed=any(map(_is_recomputed, frames)),
        phases=phases,
    )


@functools.lru_cache(maxsize=4096)
def _scope_frames(stack: _Same) -> _Frames:
    frames = _without_repetitions(stack.frames)
    return tuple(x for x in frames if _is_scope(x) and x.name != RECOMPUTED)


def classic_name_stacks(jaxpr: Jaxpr) -> Jaxpr:
    """The program with the name stacks that it would have without hi-primitives.

    In a classic program, the name stack of an equation that another one holds begins
    where that one's ends. Where JAX differentiates `jax.checkpoint` as a hi-primitive,
    three things differ. The inner name stack begins with the frames of the outer one.
    The frame that marks recomputation is in the outer name stack. And in the backward
    pass, the checkpoint's own transforms come in addition to those of the loss."""
    return _classic(jaxpr, frozenset(), ())


def _classic(jaxpr: Jaxpr, around: frozenset[int], recomputed: _Frames) -> Jaxpr:
    """As `classic_name_stacks`; `around` holds the identities of all outer frames.

    Results are cached by those identities that occur in the program too: their frames
    live as long as the program, so no other object can get the same identity."""
    known = _known.setdefault(jaxpr, {})
    key = around & _identities(jaxpr), bool(recomputed)
    if key not in known:
        eqns = [_classic_eqn(eqn, around, recomputed) for eqn in raw(jaxpr).eqns]
        new = with_eqns(jaxpr, eqns)
        known[key] = None if new is jaxpr else new
    return jaxpr if known[key] is None else known[key]


def _classic_eqn(eqn: Eqn, around: frozenset[int], recomputed: _Frames) -> Eqn:
    before = _frames_of(eqn)
    frames = tuple(frame for frame in before if id(frame) not in around)
    inner: _Frames = ()
    is_checkpoint = HI_PRIMITIVE in eqn.params and "differentiated" in eqn.params
    if is_checkpoint:
        inner = tuple(filter(_is_recomputed, frames))[:1]
        frames = tuple(frame for frame in frames if not _is_recomputed(frame))
    frames = _with_one_derivative((*recomputed, *frames))
    inside = around | frozenset(map(id, before))
    params = with_jaxprs(eqn.params, lambda jaxpr: _classic(jaxpr, inside, inner))
    if params is not eqn.params:
        eqn = eqn.replace(params=params)
    return eqn if frames == before else _with_frames(eqn, frames)


class _Repetition(NamedTuple):
    """A name stack, split at the last frame that repeats an earlier one.

    Args:
        first: the frames up to the first occurrence of that frame, which is included.
        new: the frames between its first and last occurrence that repeat none.
        rest: the frames after its last occurrence."""

    first: _Frames
    new: _Frames
    rest: _Frames


def _last_repetition(frames: _Frames) -> _Repetition | None:
    if len(set(map(id, frames))) == len(frames):  # which is most often so
        return None
    first: dict[int, int] = {}
    places = [first.setdefault(id(x), i) for i, x in enumerate(frames)]
    end = max(i for i, j in enumerate(places) if i != j)
    start = places[end]
    new = tuple(frames[i] for i in range(start + 1, end) if places[i] == i)
    return _Repetition(frames[: start + 1], new, frames[end + 1 :])


def _without_repetitions(frames: _Frames) -> _Frames:
    """A name stack without the frames that differentiation has pushed again.

    Where JAX differentiates a `jax.checkpoint`, the resulting equations have the stack
    A S P S. Frames A are around the backward pass, P are around the differentiation,
    and S were opened within it. The other equations of the backward pass have A S.
    (With JAX 0.6 the stack is A P S, where A mostly begins with P.)"""
    while (found := _last_repetition(frames)) is not None:
        is_around = "transpose" in _transforms(found.new)
        frames = (*found.first, *(found.new * is_around), *found.rest)
    return frames


def _with_one_derivative(frames: _Frames) -> _Frames:
    """The frames of a backward pass without those of a checkpoint's own derivative.

    The frames are A S T J F A' S. A and S are around the checkpoint, and A' is the end
    of A. T and J are the transposition and differentiation of the checkpoint; of nested
    checkpoints, each adds a pair. F are the scopes around the forward pass, if they
    differ from those around the backward pass."""
    while (found := _last_repetition(frames)) is not None:
        transforms = _transforms(found.new)
        pairs = ["transpose", "jvp"] * (len(transforms) // 2)
        is_backward = "transpose" in _transforms(found.first)
        if not is_backward or not transforms or transforms != pairs:
            break
        frames = (*found.first, *found.rest)
    return frames


def _frames_of(eqn: Eqn) -> _Frames:
    """The scopes and transforms around an equation, the outermost first."""
    return eqn.source_info.name_stack.stack


def _with_frames(eqn: Eqn, frames: _Frames) -> Eqn:
    return _with_stack(eqn, type(eqn.source_info.name_stack)(frames))


def _with_stack(eqn: Eqn, stack: Any) -> Eqn:
    return eqn.replace(source_info=eqn.source_info.replace(name_stack=stack))


def _transforms(frames: Sequence[Any]) -> list[str]:
    return [frame.name for frame in frames if not _is_scope(frame)]


def _is_scope(frame: Any) -> bool:
    """Whether a frame is a `jax.named_scope`, and no transform."""
    return type(frame).__name__ == "Scope"


def _is_recomputed(frame: Any) -> bool:
    return frame.name == RECOMPUTED and _is_scope(frame)


def _identities(jaxpr: Jaxpr) -> frozenset[int]:
    """The identities of the frames in a program, at any depth."""
    if jaxpr not in _of_frames:
        eqns = raw(jaxpr).eqns
        own = {id(frame) for eqn in eqns for frame in _frames_of(eqn)}
        inner = (one for eqn in eqns for one in jaxprs_in(eqn.params.values()))
        _of_frames[jaxpr] = frozenset(own.union(*map(_identities, inner)))
    return _of_frames[jaxpr]


# Caches by program. Equal questions must get one object, since JAX's own caches look
# programs up by identity.
_known: Any = WeakKeyDictionary()
_of_frames: Any = WeakKeyDictionary()
