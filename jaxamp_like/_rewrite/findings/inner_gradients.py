"""Gradients that are taken inside of the function that `amp` rewrites."""

from collections.abc import Iterable
from typing import Any

from ..._frameworks.modules import is_method_of_keras
from ..._jax import source_line
from ..._name_stacks import names
from ..._primitives import CONTRACTIONS
from ..._structural import Plan, Step, steps_of
from ..switch import is_traced_by_amp


def of_gradients(steps: Iterable[Step]) -> list[Step]:
    """The contractions that JAX has made by transposing, before `amp` saw them."""
    return [
        step
        for step in steps
        if step.eqn.primitive.name in CONTRACTIONS and names(step.eqn).backward
    ]


def report_of_unscaled_gradients(steps: list[Step]) -> str | None:
    """What to say of gradients in float16 whose loss nothing has scaled."""
    found = [step for step in of_gradients(steps) if step.is_compute]
    if not found:
        return None
    return (
        "`amp` computes in float16 and stands around a gradient that is taken without "
        "a loss scale: below 6e-8 it becomes zero. The gradient is that of "
        f"{source_line(found[0].eqn)}. Give the loss alone, `mixed, tx = enable_amp("
        "loss_fn, optimizer)`, and take the gradient by `tx.value_and_grad(mixed, "
        "opt_state)`, which scales the loss; or put `amp` around the loss, in "
        "bfloat16, `amp(loss_fn, compute_dtype='bfloat16')`. If you scale it by hand, "
        "say `compute_dtype='float16'` to `amp`."
    )


def report_of_step_of_keras(fn: Any, steps: list[Step]) -> str | None:
    """What to say of Keras' `train_step`, which takes the gradient inside of `amp`."""
    if not is_method_of_keras(fn, "train_step") or is_traced_by_amp():
        return None
    if not any(step.is_compute for step in of_gradients(steps)):
        return None
    return (
        f"`train_step` of `{type(fn.__self__).__name__}` takes the gradient inside of "
        "`amp`, so that as much is kept for the backward pass as without `amp`. "
        "Override `compute_loss_and_updates` instead, which is differentiated: `return "
        "amp(super().compute_loss_and_updates, ...)(*args, **kwargs)`."
    )


def note_of_inner_gradients(plans: Iterable[Plan]) -> str | None:
    """What a report says of gradients that were taken before the rewriting."""
    steps = [step for plan in plans for step in steps_of(plan)]
    contractions = [s for s in steps if s.eqn.primitive.name in CONTRACTIONS]
    found = of_gradients(steps)
    if not found:
        return None
    return (
        f"{len(found)} of {len(contractions)} contractions that `amp` rewrote are of a "
        "gradient that was taken inside of it, with what JAX keeps for that. If it is "
        "the gradient of training, `jax.grad(amp(loss))` keeps less than "
        "`amp(jax.grad(loss))`"
    )
