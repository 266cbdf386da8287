"""Models that hold their parameters: of Equinox, NNX and Keras."""

import sys
from typing import Any, NoReturn

import equinox as eqx
import jax

from .._errors import warn_or_raise
from .._jax import is_array
from .nnx import is_node


def holds_parameters(fn: Any) -> bool:
    """Whether `fn` is a model of a kind that holds its parameters."""
    return isinstance(fn, eqx.Module) or is_node(fn) or is_keras(fn)


def is_keras(fn: Any) -> bool:
    keras = sys.modules.get("keras")
    return keras is not None and isinstance(fn, keras.Layer)


_LOOPS_OF_KERAS = (
    "fit evaluate predict train_on_batch test_on_batch predict_on_batch"
).split()


def refuse_loops_of_keras(fn: Any) -> None:
    """Raises for methods of Keras that loop over batches."""
    if not is_keras(getattr(fn, "__self__", None)):
        return
    # A method of the user may be traced.
    if fn.__name__ in _LOOPS_OF_KERAS and fn.__module__.startswith("keras."):
        raise TypeError(
            f"`fn` is `{fn.__qualname__}`, a loop of Keras over batches, and can't be "
            "traced. To train, rewrite what it differentiates: a subclass of the model "
            "whose `compute_loss_and_updates` calls `amp(super()."
            "compute_loss_and_updates)`, as the tutorial on Keras does. To predict, "
            "`amp(model.stateless_call)`, or `convert(model, None, x)`."
        )


def warn_if_untracked(fn: Any, name: str) -> None:
    """Warns of a layer of Keras that runs in the step of a model that does not hold it.

    Keras holds the layers that are attributes of a model. A function of a layer hides
    it there, so that its variables would keep their first values for ever."""
    if not is_keras(fn) or not fn.trainable_variables:
        return
    with sys.modules["keras"].StatelessScope(initialize_variables=False) as probe:
        step: Any = probe.original_scope
    if step is None or not step.state_mapping:
        return
    if all(step.get_current_value(v) is None for v in fn.trainable_variables):
        warn_or_raise(
            f"The variables of the layer {fn.name!r} are not among those of the model "
            f"that calls `{name}(layer)`, so they are never trained: Keras finds the "
            f"layers that are attributes, and `{name}(layer)` is a function. Write "
            f"`self.layer = layer` in `__init__`, and `{name}(self.layer)(x)` in "
            "`call`.",
            strict=False,
        )


# The methods of a model that Keras' training step differentiates.
_IN_TRAINING = ("compute_loss_and_updates", "compute_loss")


def is_method_of_keras(fn: Any, name: str) -> bool:
    """Whether `fn` is the method of this name of a model of Keras."""
    keras, model = sys.modules.get("keras"), getattr(fn, "__self__", None)
    return keras is not None and isinstance(model, keras.Model) and fn.__name__ == name


def explain_methods_of_keras(made: Any, model: Any) -> None:
    """Gives a function that was made of `model` methods that say what to do instead."""
    if not is_keras(model):
        return
    kind = type(model).__name__

    def refuse(*_: Any, **__: Any) -> NoReturn:
        raise TypeError(
            f"`amp` has made a function of the `{kind}`, which is called with inputs "
            "and has no methods of Keras: call those of the model itself. To train by "
            "`fit`, override "
            "`compute_loss_and_updates` in a subclass, so that it returns `amp(super()."
            "compute_loss_and_updates)(*args, **kwargs)`, as the tutorial on Keras "
            "does, and `compile` the model itself."
        )

    methods = (name for name in dir(type(model)) if not name.startswith("_"))
    called = (name for name in methods if callable(getattr(type(model), name)))
    vars(made).update(dict.fromkeys(called, refuse))


def optimizer_without_scale(fn: Any) -> Any:
    """The optimizer with which Keras trains by a method `fn`, if it scales no loss.

    It scales the loss if it was given a `loss_scale_factor`, or if its class scales in
    a way of its own, as Keras' `LossScaleOptimizer` does."""
    model = getattr(fn, "__self__", None)
    if not is_keras(model) or fn.__name__ not in _IN_TRAINING:
        return None
    optimizer: Any = getattr(model, "optimizer", None)
    base: Any = sys.modules["keras"].optimizers.Optimizer
    if not isinstance(optimizer, base) or optimizer.loss_scale_factor is not None:
        return None
    return optimizer if type(optimizer).scale_loss is base.scale_loss else None


def is_module_with_arrays(fn: Any) -> bool:
    """Whether `fn` is such a model, or a method that reads what it holds.

    Equinox's transforms are modules that hold what they transform. So is a partial
    application, but only its function counts: its arrays may be any arguments."""
    if isinstance(fn, eqx.Partial):
        return is_module_with_arrays(fn.func)
    model = getattr(fn, "__self__", fn)
    if is_keras(model):  # other methods (`stateless_call`) are given the variables
        return fn is model or fn.__name__ in ("__call__", "call")
    if isinstance(model, eqx.Module):
        return any(map(is_array, jax.tree.leaves(model)))
    return is_node(model)
