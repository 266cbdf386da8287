"""What is kept from step to step: a scale and a history for each tensor."""

import re
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp

from .._dtypes import in_words
from .._errors import AmpError
from .._jax import is_array
from .._policies.dictionary import REWRITTEN
from .._quantised.delayed import (
    TensorScale,
    initial_scale,
    measured,
    next_scale,
    updated_scale,
)
from .tensors import Tensor

State = dict[str, TensorScale]
"""The states of tensors, by the scopes of a contraction and the tensor's role there."""

_MOST = 6  # keys to list


def first_state(tensors: Mapping[str, Tensor]) -> State:
    return {
        name: initial_scale(tensor.shape(), tensor.request.length)
        for name, tensor in sorted(by_name(tensors).items())
    }


def by_name(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {tensor.name: tensor for tensor in tensors.values()}


def scales_of(tensors: Mapping[str, Tensor], state: State) -> dict[str, Any]:
    """What each tensor is divided by in this step; see `next_scale`."""
    with jax.named_scope(REWRITTEN):
        return {
            key: next_scale(state[tensor.name], tensor.request.fmt)
            for key, tensor in tensors.items()
        }


def next_state(
    tensors: Mapping[str, Tensor], state: State, scales: Any, maxima: Any
) -> State:
    """The state after a step that began with `scales` and saw `maxima`."""
    largest: dict[str, Any] = {}
    for key, tensor in tensors.items():
        known = largest.get(tensor.name)
        amax = maxima[key]
        largest[tensor.name] = amax if known is None else jnp.maximum(known, amax)

    def after(name: str, amax: Any) -> TensorScale:
        scale = measured(scales[name], amax, tensors[name].request.fmt)
        return updated_scale(state[name], scale, amax)

    with jax.named_scope(REWRITTEN):
        return {name: after(name, largest[name]) for name in state}


def as_state(state: Any) -> State:
    """The state that a user gave, which may come from a checkpoint without types.

    Orbax and Flax read a named tuple back from that as a dict of its fields."""
    if isinstance(state, Mapping):
        state = {key: _as_scale(x) for key, x in state.items()}
        if all(map(_is_scale, state.values())):
            return state
    raise TypeError(
        "The first argument of a function of `amp_with_state` is the state that "
        f"`init_amp_state` or the step before has given, but got {_shown(state)}. "
        "Write `out, state = step(state, *args)`; read a checkpoint in the types of "
        "`init_amp_state(step, *args)`."
    )


def _as_scale(value: Any) -> Any:
    is_by_name = isinstance(value, Mapping) and {*value} == {*TensorScale._fields}
    return TensorScale(**value) if is_by_name else value


def checked(state: State, tensors: Mapping[str, Tensor]) -> State:
    """The state that a user gave, after a check that it is one for these tensors."""
    tensors = by_name(tensors)
    state = _by_names_of(state, tensors)
    missing, foreign = tensors.keys() - state.keys(), state.keys() - tensors.keys()
    if missing or foreign:
        raise AmpError(
            "The state is not that of this function: "
            + "; ".join(
                _listed(what, keys)
                for what, keys in (
                    ("the function has, and the state has not,", missing),
                    ("the state has, and the function has not,", foreign),
                )
                if keys
            )
            + f". {_INSTEAD if missing else _PART} {_ONE_ROW}"
        )
    for key, tensor in tensors.items():
        _check(key, state[key], tensor)
    return {key: state[key] for key in sorted(tensors)}


def _by_names_of(state: State, tensors: Mapping[str, Tensor]) -> State:
    """`state` with the names of `tensors`, if `nn.remat` alone has changed these.

    That is so in Linen: an instance without a name is called `CheckpointBlock_0`, and
    not `Block_0`, if `nn.remat` made its class."""
    before = {_without_remat(key): key for key in state}
    now = {_without_remat(key): key for key in tensors}
    is_same = before.keys() == now.keys()
    is_clear = len(before) == len(state) and len(now) == len(tensors)
    if not (is_same and is_clear):
        return state
    return {key: state[before[name]] for name, key in now.items()}


def _without_remat(key: str) -> str:
    return re.sub(r"Checkpoint(?=[A-Z]\w*_\d+/)", "", key)


_INSTEAD = (
    "Keys are paths of scopes: another model, policy or names of scopes give others. "
    "Begin with the state of `init_amp_state(step, *args)`, whose scales settle within "
    "the first steps."
)

_PART = (
    "A function that makes less, as evaluation does, is given its part: `part = {key: "
    "state[key] for key in init_amp_state(step, *args)}`. What it returns of that is "
    "not to train on: `state` is."
)


_ONE_ROW = (
    "If the batch has a single row, or none: the gradient of a weight then sums "
    "nothing, and is left alone. Leave such a last batch out."
)


def _is_scale(value: Any) -> bool:
    return isinstance(value, TensorScale) and all(map(is_array, value))


def _check(key: str, given: TensorScale, tensor: Tensor) -> None:
    length, shape = tensor.request.length, tensor.shape()
    for name, x, wanted in (
        ("scale", given.scale, shape),
        ("history", given.history, (*shape, length)),
    ):
        if x.shape == wanted and x.dtype == jnp.float32:
            continue
        what = "The state is not that of this function"
        if name == "history" and x.shape[:-1] == shape and x.dtype == jnp.float32:
            what = f"The policy says `amax_history_length={length}`"
        raise AmpError(
            f"{what}: the {name} of {key!r} is {in_words(x)}, and must "
            f"be float32{list(wanted)}. {_INSTEAD}"
        )


def _listed(what: str, keys: set[str]) -> str:
    shown = ", ".join(map(repr, sorted(keys)[:_MOST]))
    return f"{what} {shown}" + (
        f" and {n} more" if (n := len(keys) - _MOST) > 0 else ""
    )


def _shown(state: Any) -> str:
    if not isinstance(state, Mapping):
        return type(state).__name__
    key, value = next((k, x) for k, x in state.items() if not _is_scale(x))
    return f"a dict that holds a {type(value).__name__} under {str(key)!r}"
