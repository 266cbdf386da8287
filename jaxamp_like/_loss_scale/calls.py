"""Calls that don't fit, and what to write instead."""

from collections.abc import Callable, Mapping
from typing import Any, ParamSpec, TypeVar

import jax

from .._errors import explaining_misfits
from .._frameworks.nnx import is_nnx_module, is_node

_P = ParamSpec("_P")
_R = TypeVar("_R")

# What the settings of a scale are called by PyTorch, Flax, jmp and Keras.
SETTINGS = {
    "init_scale": "scaler",
    "initial_scale": "scaler",
    "loss_scale": "scaler",
    "scale": "scaler",
    "growth_interval": "patience",
    "dynamic_growth_steps": "patience",
    "period": "patience",
    "growth_factor": "adjust_factor",
    "backoff_factor": "adjust_factor",
    "factor": "adjust_factor",
    "minimum_scale": "min_scaler",
    "min_loss_scale": "min_scaler",
}


def with_call_hints(
    example: str, elsewhere: Mapping[str, str] = SETTINGS
) -> Callable[[Callable[_P, _R]], Callable[_P, _R]]:
    """A decorator: where arguments don't fit, the error shows what to write.

    Args:
        example: a call that fits.
        elsewhere: maps names in other libraries to the names of arguments here."""

    def hints(
        parameters: Mapping[str, Any], args: Any, kwargs: dict[str, Any]
    ) -> list[str]:
        called = [
            f"Did you mean `{elsewhere[name]}` by `{name}`?"
            for name in kwargs
            if elsewhere.get(name) in parameters and name not in parameters
        ]
        return [*called, f"Write `{example}`."]

    return explaining_misfits(example.split("(")[0], hints)


_STATE_OF_THIS = (
    "Give the state of the optimizer that `loss_scale_optimizer` or `enable_amp` made: "
    "what `tx.init(params)` or `tx.update` returned. To go on from a checkpoint of the "
    "plain optimizer, take `tx.init(params)._replace(inner_state=...)`; one of this is "
    "to be read in the types of `tx.init(params)`."
)


def instead_of_no_scale(opt_state: Any) -> str:
    """What to write instead of `opt_state`, which holds no loss scale."""
    if was_read := of_checkpoint(opt_state):
        return was_read
    kind = type(opt_state).__name__
    if hasattr(opt_state, "tx"):
        made = "nnx.Optimizer(model, tx, wrt=nnx.Param)"
        made = made if is_node(opt_state) else "TrainState.create(..., tx=tx)"
        return (
            f"This {kind} holds the state of another optimizer. Make it with the one "
            f"that `loss_scale_optimizer` or `enable_amp` returned: `{made}`."
        )
    if is_nnx_module(opt_state):
        return (
            f"A model, as this {kind}, comes after the optimizer: "
            "`tx.value_and_grad(loss_fn, optimizer)(model, batch)`."
        )
    return _STATE_OF_THIS


def of_checkpoint(opt_state: Any) -> str:
    """What to write for a state that was read as dicts and lists; "" for others."""

    def is_one(x: Any) -> bool:
        return isinstance(x, Mapping) and {"scaler", "inner_state"} <= x.keys()

    if not any(map(is_one, jax.tree.leaves(opt_state, is_leaf=is_one))):
        return ""
    return (
        "It was read from a checkpoint as dicts and lists. Read it in the types of the "
        "state: `checkpointer.restore(path, tx.init(params))` with Orbax."
    )
