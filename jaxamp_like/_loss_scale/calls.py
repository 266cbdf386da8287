"""Calls that don't fit, and what to write instead."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, ParamSpec, TypeVar

import equinox as eqx
import jax

from .._errors import explaining_misfits, why_not_called
from .._frameworks.modules import holds_parameters, is_module_with_arrays
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

UPDATE = "updates, opt_state = tx.update(grads, opt_state, params)"
GRADIENT = "loss, grads = tx.value_and_grad(loss_fn, opt_state)(params, batch)"
# What PyTorch's scaler does, which is the optimizer's work here.
BY_HAND = {
    name: f"With `mixed, tx = enable_amp(loss_fn, optimizer)`, write `{call}`. By "
    "hand, write `dynamic_scale_value_and_grad(loss_fn)(params, batch, "
    "dynamic_scaler_state=scaler)`."
    for name, call in {
        "step": UPDATE,
        "unscale_": GRADIENT,
        "backward": GRADIENT,
    }.items()
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
        unknown = [name for name in kwargs if name not in parameters]
        of_scale = {"scaler", "optimizer"} <= {*parameters}
        settings = [SETTINGS[name] for name in unknown if name in SETTINGS and of_scale]
        called = [
            f"Did you mean `{elsewhere[name]}` by `{name}`?"
            for name in unknown
            if elsewhere.get(name) in parameters
        ]
        if settings:
            fields = ", ".join(f"{name}=..." for name in dict.fromkeys(settings))
            call = example.split("(")[0]
            called += [
                f"Settings of the loss scale are fields of its state: `{call}(..., "
                f"scaler=DynamicScalerState({fields}))`."
            ]
        if any(isinstance(arg, bool) for arg in args) and "has_aux" in parameters:
            called.append("Name what is true or false: `has_aux=True`.")
        return [*called, f"Write `{example}`."]

    return explaining_misfits(example.split("(")[0], hints)


def instead_of_loss(fun: Any, out: Any, args: tuple[Any, ...]) -> str:
    """What to write, if `fun` is no loss, but its gradient or a model; else "".

    A gradient returns a tree like its first argument, alone or after the loss."""
    if _is_model(fun):
        return _OF_A_MODEL
    is_pair = isinstance(out, tuple) and len(out) == 2
    found = out[1] if is_pair else out
    if (
        not args
        or eqx.is_array_like(found)
        or float_types(found) != float_types(args[0])
    ):
        return ""
    what = "a loss and a tree" if is_pair else "a tree"
    name = "value_and_grad" if is_pair else "grad"
    return (
        f"That is {what} like its first argument, as `jax.{name}(loss_fn)` returns. "
        "Give the loss itself: its gradient is taken here."
    )


def float_types(tree: Any) -> Any:
    """The structure and the shapes of the floating-point arrays in a tree."""
    leaves, structure = jax.tree.flatten(eqx.filter(tree, eqx.is_inexact_array))
    return structure, [x.shape for x in leaves]


@contextmanager
def explaining_models(fun: Any, args: tuple[Any, ...]) -> Iterator[None]:
    """Raises another error if a model fails because it was given for the loss."""
    try:
        yield
    except Exception as e:
        if not _is_model(fun):
            raise
        if why_not_called(fun, args):
            why = f"can't be called so: {e}"
        elif args and _is_model(args[0]) and isinstance(fun, type(args[0])):
            why = f"was called with a {type(args[0]).__name__}"
        else:
            raise
        raise TypeError(
            f"The loss is a {type(fun).__name__}, which holds parameters, and {why}.\n"
            f"{_OF_A_MODEL}"
        ) from e


_OF_A_MODEL = (
    "If it is the model that is to be trained, give a loss that calls it, `def "
    "loss_fn(model, x, y)`: gradients are taken by the first argument of the loss."
)


def _is_model(x: Any) -> bool:
    """Whether `x` is a model of a kind that holds its parameters, and holds some."""
    return holds_parameters(x) and is_module_with_arrays(x)


def difference(name: str, tree: Any, other_name: str, other: Any) -> str:
    """How two trees with these names differ; "" if they don't."""
    paths, others = _paths(tree), _paths(other)
    for alone, here, there in (
        ([p for p in paths if p not in others], name, other_name),
        ([p for p in others if p not in paths], other_name, name),
    ):
        if alone:
            more = ", ..." * (len(alone) > 3)
            shown = ", ".join(f"`{p}`" if p else "one by itself" for p in alone[:3])
            here = here[0].upper() + here[1:]
            return f"{here} holds arrays that {there} does not hold: {shown}{more}."
    if jax.tree.structure(tree) != jax.tree.structure(other):
        return (
            f"{name} and {other_name} hold the same arrays in objects of other "
            "classes, as of a model before and after `scope_modules`."
        )
    return ""


def _paths(tree: Any) -> dict[str, None]:
    paths = jax.tree_util.tree_leaves_with_path(tree)
    return dict.fromkeys(jax.tree_util.keystr(path) for path, _ in paths)


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
    if hasattr(opt_state, "unscale") and hasattr(opt_state, "scale"):
        return (
            f"A {kind} is no state of an optimizer. It scales by itself: "
            f"`scaler.scale(loss)` and `scaler.unscale(grads)`. {_STATE_OF_THIS}"
        )
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
        "state: `checkpointer.restore(path, tx.init(params))` with Orbax, with Flax "
        "`flax.serialization.from_state_dict(tx.init(params), saved)`. A scale alone "
        "is made by `restore_scaler(saved['scaler'])`."
    )
