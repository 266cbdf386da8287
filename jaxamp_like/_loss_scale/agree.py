"""Makes devices agree on whether a step is taken, repeated or skipped.

Under plain `jax.jit` there is one program for all devices, and nothing to agree on.
Inside `jax.shard_map` and `jax.pmap` each device sees its own shard. If one of them
skipped or repeated a step that the others take, their parameters would no longer be
equal, and a collective in the loss would wait for ever."""

from collections.abc import Hashable, Sequence
from typing import Any

import jax.numpy as jnp
from jax import Array, lax

from .._errors import warn_or_raise
from .._jax import (
    UNNAMED_PMAP,
    collective_axes,
    device_axes,
    equations,
    varying_axes,
)
from .._primitives import LOCAL

AxisName = Hashable | Sequence[Hashable] | None


def _named_by(axis_name: AxisName) -> tuple[Hashable, ...]:
    if axis_name is None:
        return ()
    return tuple(axis_name) if isinstance(axis_name, tuple | list) else (axis_name,)


def _index(axis: Hashable) -> Array | None:
    """The index along `axis`, or `None` where no axis of this name is bound."""
    try:
        return lax.axis_index(axis)  # pyright: ignore[reportArgumentType]
    except NameError:
        return None


def all_agree(finite: Array, axis_name: AxisName = None, like: Any = None) -> Array:
    """`finite`, made the same on all devices of the axes.

    Args:
        finite: a boolean scalar.
        axis_name: the axes; each must be bound. `()` says that there are none.
        like: a value (the scale). Devices also agree over axes along which `finite` is
            known to vary, and `like` is not: `jax.shard_map` keeps track of that."""
    axes = _named_by(axis_name)
    for axis in axes:
        if _index(axis) is None:
            raise ValueError(
                f"`axis_name` names {axis!r}, but no axis of this name is bound here.\n"
                "Name an axis of the `jax.shard_map` or `jax.pmap` that runs the step; "
                "under `jax.jit` alone none is needed."
            )
    if like is not None:
        known = varying_axes(finite) - varying_axes(like)
        axes += tuple(sorted(known - {*axes}, key=str))
    if not axes:
        return finite
    return lax.pmin(finite.astype(jnp.int32), axes).astype(bool)


def warn_of_unnamed_axes(axis_name: AxisName, instead: str, scale: Any = None) -> None:
    """Warns if devices along an axis that `axis_name` leaves out decide alone.

    Args:
        axis_name: the axes that are named; `()` says that none is wanted.
        instead: what to do; `{axis_name}` and `{axis}` stand for the axes.
        scale: if it is known to differ from device to device, these decide alone."""
    axes = _named_by(axis_name)
    untracked = _untracked()
    known = frozenset() if scale is None else varying_axes(scale)
    alone = sorted((untracked | known) - {*axes}, key=str)
    if not alone or axis_name == ():
        return
    named = f"only {axis_name!r} by" if axes else "no"
    wanted = (*axes, *alone) if axes or len(alone) > 1 else alone[0]
    where = _UNTRACKED
    if alone[0] not in untracked:
        where, instead = _IN_PARTS.format(alone[0]), _TOGETHER
    instead = instead.format(axis_name=repr(wanted), axis=repr(alone[0]))
    report = _UNNAMED.format(alone[0], where=where, named=named, instead=instead)
    warn_or_raise(report, strict=False)


def _untracked() -> frozenset[Hashable]:
    """The named axes of a `pmap` around here, or of a `shard_map` without `check_vma`.

    Over the axis of a `pmap` without a name nothing is exchanged: its devices train
    models of their own."""
    return frozenset(
        axis
        for axis in device_axes() - {UNNAMED_PMAP}
        if (index := _index(axis)) is not None
        and axis not in varying_axes(index)
        and lax.psum(1, axis) > 1  # pyright: ignore[reportArgumentType]
    )


_UNTRACKED = "in `jax.pmap`, or in `jax.shard_map` with `check_vma=False`"
_IN_PARTS = (
    "in `jax.shard_map`, which hands each device its own part of the state (a "
    "specification such as `P({0!r})`)"
)
_UNNAMED = (
    "A step with a loss scale runs {where}, and names {named} `axis_name`: if "
    "gradients overflow on one device of the axis {0!r}, that one alone skips the "
    "step and lowers its scale, and from then on devices differ. {instead} Where each "
    "device trains a model of its own, pass `axis_name=()`."
)
_TOGETHER = (
    "Pass `axis_name={axis_name}` to `enable_amp` or `loss_scale_optimizer`: then all "
    "devices skip the step."
)
OF_TRANSFORM = (
    "Pass `axis_name={axis_name}` to `dynamic_scale_value_and_grad` (or to the "
    "transform that you call in its place); in `jax.shard_map` you may leave out "
    "`check_vma=False` instead."
)
OF_OPTIMIZER = (
    "If devices share the gradients, average them before `tx.update`: `grads = "
    "jax.lax.pmean(grads, {axis})`. If not, pass `axis_name={axis_name}` to "
    "`enable_amp` or `loss_scale_optimizer`, or leave out the `check_vma=False` of "
    "`jax.shard_map`."
)


def check_uniform(program: Any, pred: Array, axis_name: AxisName) -> None:
    """Raises if `program`, repeated where `pred` holds, could wait for ever.

    That is where it exchanges data over an axis along which `pred` may differ."""
    for axis in sorted(_exchanged(program), key=str):
        index = _index(axis)
        if index is None or axis in _named_by(axis_name):
            continue  # bound within the program itself, or agreed over
        is_tracked = axis in varying_axes(index)
        if not is_tracked or axis in varying_axes(pred):
            raise ValueError(
                f"The loss or its gradient exchanges data over the axis {axis!r}, and "
                "with `redo_on_nan` devices that overflow would wait for those that "
                f"don't.\nPass `axis_name={axis!r}`, so that all of them repeat the "
                "step together."
            )


def _exchanged(jaxpr: Any) -> set[Hashable]:
    """The named axes over which the collectives of a program run, at any depth."""
    # An integer is an axis of an array, as in `reduce_sum`, and none of a mesh.
    return {
        axis
        for eqn in equations(jaxpr)
        if eqn.primitive.name not in LOCAL
        for axis in collective_axes(eqn.params)
        if not isinstance(axis, int | None)
    }
