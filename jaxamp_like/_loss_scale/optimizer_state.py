"""The state of a `loss_scale_optimizer`, and where it is found in other states."""

from typing import TYPE_CHECKING, Any, NamedTuple

import optax

from .._errors import calling_library, length_of_state
from .._frameworks.nnx import as_arrays, instances_in
from .._suggestions import no_attribute
from .calls import GRADIENT, UPDATE, instead_of_no_scale, of_checkpoint
from .state import Scaler


class LossScaleState(NamedTuple):
    """The state of a `loss_scale_optimizer`.

    Args:
        scaler: the state of the loss scale.
        inner_state: the state of the wrapped optimizer."""

    # A `Scaler`: `Any`, so that a type checker lets `scaler.scaler` be read, which a
    # `NoScaler` has not, without a test for that.
    scaler: Any
    inner_state: Any

    if not TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any:
            raise no_attribute(self, name, _ELSEWHERE.get(name, _FIELDS))

        def __len__(self) -> int:
            made_by = "`enable_amp` or `loss_scale_optimizer`"
            return length_of_state(self, calling_library(optax), made_by)


def scale_states(tree: Any) -> list[LossScaleState]:
    """The states of loss scales that a tree holds."""
    return instances_in(tree, LossScaleState)


def scaler_of(opt_state: Any) -> Scaler:
    """The one loss scale in a state; raises if there is none, or in a wrong place."""
    found = scale_states(opt_state)
    if len(found) != 1:
        raise ValueError(
            f"`opt_state` must hold one loss scale, but holds {len(found)}.\n"
            + (_SEVERAL if found else instead_of_no_scale(opt_state))
        )
    for wrapper, name in _WRAPPERS.items():
        if any(scale_states(one) for one in instances_in(opt_state, wrapper)):
            raise ValueError(
                f"`optax.{name}` is around `loss_scale_optimizer`, and would keep "
                "overflows from it, or a NaN in its own state for good.\nPut it "
                f"within: `loss_scale_optimizer(optax.{name}(...))`."
            )
    beside = instances_in(opt_state, (optax.ZeroNansState, LossScaleState))
    if len(beside) > 1:
        raise ValueError(
            "`optax.zero_nans` is beside `loss_scale_optimizer`, and before it would "
            "keep overflows from it.\nPut it within: `loss_scale_optimizer(optax.chain("
            "optax.zero_nans(), ...))`; overflows alone need none."
        )
    return as_arrays(found[0].scaler)


def checked_state(state: Any, params: Any) -> LossScaleState:
    """The `state` that `update` is given; raises if it is something else."""
    if not isinstance(state, LossScaleState):
        is_last = isinstance(params, LossScaleState)
        instead = _STATE_LAST if is_last else of_checkpoint(state) or _STATE_SECOND
        raise TypeError(
            "`state`, the second argument of `update` of a `loss_scale_optimizer`, is "
            "the `LossScaleState` that its `init` or its last `update` returned, but "
            f"it was given a {type(state).__name__}.\n{instead}"
        )
    return state


_FIELDS = (
    "The scale is `opt_state.scaler.scaler`, and the state of the wrapped optimizer "
    "`opt_state.inner_state`."
)
# What belongs to the optimizer, which is called `tx` here.
_ELSEWHERE = {
    **dict.fromkeys(("step", "apply_gradients", "update"), f"Write `{UPDATE}`."),
    **dict.fromkeys(("backward", "value_and_grad", "grad"), f"Write `{GRADIENT}`."),
}
_STATE_LAST = "The parameters come last: `tx.update(grads, opt_state, params)`."
_STATE_SECOND = (
    f"Write `{UPDATE}`, where "
    "`opt_state` begins as `tx.init(params)`. To go on from a checkpoint without a "
    "scale, take `tx.init(params)._replace(inner_state=...)`."
)
_SEVERAL = (
    "A loss has one scale. Put what gives each part of the parameters an optimizer of "
    "its own within: `loss_scale_optimizer(optax.partition({...}, labels))`. Of "
    "several losses, give the state of the one optimizer that is to update."
)
_WRAPPERS = {
    optax.ApplyIfFiniteState: "apply_if_finite",
    optax.MultiStepsState: "MultiSteps",
}
