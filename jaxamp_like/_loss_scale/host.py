"""Reports on the host what happened to a scale; nothing here runs inside a step."""

import warnings
from collections import deque
from collections.abc import Iterator
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np

from .._frameworks.nnx import as_arrays
from .._jax import is_tracer
from .marks import unmarked, were_finite
from .state import DynamicScalerState, is_scaler


def scalers_in(tree: Any) -> dict[str, DynamicScalerState]:
    """The states anywhere in a pytree (an optimizer's state, say), by path."""
    found = jax.tree_util.tree_leaves_with_path(tree, is_leaf=is_scaler)
    if not any(is_scaler(leaf) for _, leaf in found):
        raise TypeError(
            "No `DynamicScalerState` was found in the given "
            f"{type(tree).__name__}.\nGive a state, a tree of states, or the state of "
            "an optimizer made by `loss_scale_optimizer`."
        )
    states = {
        jax.tree_util.keystr(path): as_arrays(leaf)
        for path, leaf in found
        if isinstance(leaf, DynamicScalerState)
    }
    if any(map(is_tracer, jax.tree.leaves(states))):
        raise TypeError(
            "A loss scale was to be read while a function is traced, where it has no "
            "value yet.\nReturn the state from the jitted function; read it outside."
        )
    if any(isinstance(x, jax.ShapeDtypeStruct) for x in jax.tree.leaves(states)):
        raise TypeError(
            "A loss scale was to be read, but its state holds shapes, not numbers, as "
            "`jax.eval_shape` makes them.\nGive the state that a step has returned."
        )
    return states


def check_scaler(state: Any, *, tolerate: int = 0, warn: bool = False) -> None:
    """Raises, on the host, if steps overflow although the scale can't fall further.

    Args:
        state: a state outside `jax.jit`, or any tree that holds some, such as the state
            of an optimizer. The check waits for the step that makes it; to check once
            in a hundred steps is enough.
        tolerate: how many non-finite steps in a row at the minimum are still fine.
        warn: give a `RuntimeWarning` in place of the error.
    Raises:
        FloatingPointError: there were more such steps than `tolerate`.
        TypeError: there is no state in `state`.
        ValueError: a state holds zeros for its settings, as `zeros_like` makes them.

    >>> state = DynamicScalerState(scaler=1, min_scaler=1)
    >>> check_scaler(state)
    >>> check_scaler(state.update(False))  # doctest: +ELLIPSIS
    Traceback (most recent call last):
    FloatingPointError: The loss scale is at its minimum, 1.0, and yet the last 1 ...
    """
    for path, one in scalers_in(state).items():
        if int(jnp.min(one.patience)) < 1 or float(jnp.min(one.adjust_factor)) <= 1:
            raise ValueError(
                f"The loss scale{f' of {path}' if path else ''} has a patience of "
                f"{int(jnp.min(one.patience))} and a factor of "
                f"{float(jnp.min(one.adjust_factor))}, with which it can never be "
                "right: it was made by `zeros_like`, or overwritten. Begin anew with "
                "`tx.init(params)`, or `DynamicScalerState()`."
            )
        stuck = int(jnp.max(one.stuck))
        if stuck <= tolerate:
            continue
        least, greatest = (float(jnp.min(bound)) for bound in one.bounds)
        where = f" of {path}" if path else ""
        fixed = "fixed at" if least == greatest else "at its minimum,"
        cure = (
            "If it is larger than it need be, try a smaller one; else look"
            if least == greatest
            else "No scale will cure this: look"
        )
        message = (
            f"The loss scale{where} is {fixed} {least}, and yet the last {stuck} "
            f"step(s) had gradients that are not finite.\n{cure} for NaN or inf in the "
            "batch, the loss and the parameters."
        )
        if not warn:
            raise FloatingPointError(message)
        warnings.warn(message, RuntimeWarning, stacklevel=2)


class NonFiniteLeaf(NamedTuple):
    """A gradient that is not finite.

    Args:
        path: where it is in the tree, such as `.layers[0].weight`.
        nans: how many of its numbers are NaN.
        infs: how many are infinite.
        size: how many it has."""

    path: str
    nans: int
    infs: int
    size: int


def overflowed_leaves(grads: Any) -> list[NonFiniteLeaf]:
    """Lists the leaves of a tree that hold NaN or inf, such as after a skipped step.

    Args:
        grads: any pytree of arrays outside `jax.jit`; gradients, as a rule. If they are
            spread over several hosts, all hosts must call this. An optimizer's
            `value_and_grad` makes all of them NaN if one overflowed. Numbers that were
            finite before are not counted in gradients that come straight from there (in
            float32, float64 and float16; in other dtypes they may be counted).
    Returns:
        One record for each such leaf, in the order of the tree.
    Raises:
        TypeError: the gradients are being traced.

    >>> overflowed_leaves({"b": jnp.zeros(2), "w": jnp.array([1, jnp.inf, jnp.nan])})
    [NonFiniteLeaf(path="['w']", nans=1, infs=1, size=3)]
    """
    if any(map(is_tracer, jax.tree.leaves(grads))):
        raise TypeError(
            "Gradients were to be read while a function is traced, where they have no "
            "values yet.\nReturn them from the jitted function; ask outside."
        )
    found = [
        _counted(jax.tree_util.keystr(path), jnp.asarray(x))
        for path, x in jax.tree_util.tree_leaves_with_path(unmarked(grads))
        if eqx.is_inexact_array(x)
    ]
    return [leaf for leaf in found if leaf.nans or leaf.infs]


def _counted(path: str, x: jax.Array) -> NonFiniteLeaf:
    nans = jnp.isnan(x) & ~were_finite(x)
    return NonFiniteLeaf(path, int(nans.sum()), int(jnp.isinf(x).sum()), x.size)


class ScalerEvent(NamedTuple):
    """Something that happened to a scale.

    Args:
        step: the number of the record that showed it, from 1.
        kind: "grew"; "lowered"; "skipped", a step that hysteresis forgave; "stuck", a
            step that overflowed at the minimum.
        before: the scale of the record before.
        after: the scale now.
        overflows: non-finite steps in a row up to now, 0 if a retry helped.
        group: the path of the state in a tree of states, else empty.
        leaves: paths of the gradients that were not finite, if these were given."""

    step: int
    kind: str
    before: float
    after: float
    overflows: int
    group: str = ""
    leaves: tuple[str, ...] = ()


class ScalerLog:
    """A record of what happened to the scale, for a logger to read.

    It compares each state with the one before. It may be given the state of every step,
    a state once in a while (an event then sums up what happened between), or the
    stacked states of a `jax.lax.scan`. Reading a state waits for the step that makes
    it.

    Args:
        state: the state, or tree that holds some, that training begins with.
        capacity: how many events are kept; the oldest go first.

    >>> log = ScalerLog(state := DynamicScalerState(scaler=1024))
    >>> for event in log.record(state.update(False)):
    ...     print(event.step, event.kind, event.before, event.after)
    1 lowered 1024.0 512.0
    >>> log.events[0]._asdict()["kind"]  # ready for JSON
    'lowered'
    """

    def __init__(self, state: Any, capacity: int = 10_000):
        self.events: deque[ScalerEvent] = deque(maxlen=capacity)
        self.step: int = 0
        self._last = {path: _read(one) for path, one in scalers_in(state).items()}

    def record(
        self, state: Any, *, grads: Any = None, step: int | None = None
    ) -> list[ScalerEvent]:
        """Records what happened since the last record.

        Args:
            state: what `ScalerLog` was given, some steps later; the fields of its
                states may be stacked along a leading axis, one for each step.
            grads: the step's gradients. If it overflowed, the event names those that
                are not finite.
            step: the number of the (last) step; if not given, steps are counted.
        Returns:
            The new events, which are also added to `events`.
        Raises:
            TypeError: there is no state in `state`.
            ValueError: its states are in other places than at the beginning.
        """
        states = scalers_in(state).items()
        histories = {path: [*_unstacked(_read(one))] for path, one in states}
        if histories.keys() != self._last.keys():
            now, first = (
                ", ".join(path or "its root" for path in paths)
                for paths in (histories, self._last)
            )
            raise ValueError(
                f"`state` has its scales at {now}, but this log began with one that "
                f"has them at {first}.\nGive `record` what was given to `ScalerLog`, "
                "some steps later."
            )
        count = max((len(states) for states in histories.values()), default=1)
        self.step = self.step + count if step is None else step
        events = []
        for path, states in histories.items():
            for i, now in enumerate(states):
                number = self.step - len(states) + 1 + i
                before = self._last[path]
                kind, self._last[path] = _kind(before, now), now
                if kind:
                    scales = float(before["scaler"]), float(now["scaler"])
                    overflows = int(now["overflows"])
                    events.append(ScalerEvent(number, kind, *scales, overflows, path))
        if grads is not None and any(event.overflows for event in events):
            paths = tuple(leaf.path for leaf in overflowed_leaves(grads))
            events = [e._replace(leaves=paths) if e.overflows else e for e in events]
        self.events.extend(events)
        return events


_Values = dict[str, Any]


def _read(state: DynamicScalerState) -> _Values:
    return {name: np.asarray(x) for name, x in state._asdict().items()}


def _unstacked(values: _Values) -> Iterator[_Values]:
    """The values after each step, where they are stacked along leading axes."""
    if values["scaler"].ndim == 0:
        yield values
        return
    for i in range(len(values["scaler"])):
        yield from _unstacked({name: x[i] for name, x in values.items()})


def _kind(before: _Values, now: _Values) -> str:
    def rose(name: str) -> bool:
        return bool(now[name] > before[name])

    if rose("stuck"):
        return "stuck"
    if rose("scaler"):
        return "grew"
    # Between two records, a scale may have fallen and grown back.
    if now["scaler"] < before["scaler"] or rose("total_resets"):
        return "lowered"
    return "skipped" if rose("overflows") else ""
