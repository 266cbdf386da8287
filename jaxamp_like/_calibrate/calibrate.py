"""`calibrate`: a policy that meets a budget, found by measurement."""

import math
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

from .._errors import AmpError, showing_call
from .._reports.versions import versions
from .._rules.user_rules import is_integer, is_number
from .budget import Budget
from .candidates import Candidate, as_candidates, compute_of
from .costs import H200, Device
from .deciding import Deciding
from .fingerprint import of_points, of_program
from .groups import GRANULARITIES, Granularity
from .measured_function import (
    MeasuredFunction,
    as_batches,
    measured_function,
    points_of,
    warn_of_changed_places,
)
from .prices import OBJECTIVES, Objective, Profile
from .program import MarkedProgram
from .progress import with_progress
from .result import Calibration
from .runs import Runs
from .state import MeasurementStore


@showing_call("calibrate(fn, [(params, batch), ...], budget=0.01)")
def calibrate(
    fn: Callable[..., Any],
    batches: Iterable[tuple[Any, ...]],
    *,
    budget: float | Budget,
    candidates: Sequence[Any] | None = None,
    objective: Objective = "flops",
    granularity: Granularity = "scope",
    held_out: Iterable[tuple[Any, ...]] | None = None,
    argnums: int | Sequence[int] = 0,
    device: Device | Profile | None = None,
    loss_scale: float = 1.0,
    perturbation: float = 0.01,
    max_passes: int = 26,
    seed: int = 0,
    state: str | Path | None = None,
    progress: bool | None = None,
) -> Calibration:
    """Finds a policy that meets a budget of errors with the most work in low precision.

    The function is run as written, and with the operands and results of some of its
    contractions rounded, forward and backward, as `amp` would round them. One compiled
    program does both: an input says which contractions round. Groups of contractions
    are measured one at a time, ordered by error per cost, and lowered together as far
    as the budget allows. The policy is then compiled as `amp` makes it, and checked on
    batches that had no part in the choice. A decision holds for all iterations of a
    loop, and is measured with all of them.

    Args:
        fn: the function, without `amp`: a loss, or any other function of arrays.
        batches: tuples of arguments: `fn(*batch)`. All batches have the same shapes.
        budget: the allowed error: a `Budget`, or a number for the relative error of
            the gradient (of a loss) or of the results (of any other function). It is
            to be met on each batch.
        candidates: low precisions, of which each group gets one or none: "bfloat16",
            "float16", "float8" and "int8". The last two are the rules
            `float8(where=None)` and `int8(where=None)`, beside the first 16-bit
            candidate as compute dtype (bfloat16, if there is none); a contraction that
            these rules leave alone never gets them. "bfloat16+int8" computes in
            bfloat16, and what a scope keeps for its backward pass is kept in int8, as
            by `saving_low`; "+float8_e4m3fn" (or "+float8") and "+float8_e5m2" are for
            its other formats. By default "bfloat16", and for the objective "memory",
            decided by scope, "bfloat16+int8" too.
        objective: what is to be saved: "flops" (those of contractions, weighted by the
            bits of their operands), "bytes" (those that contractions keep for the
            backward pass), "time" (on `device`) or "memory": all that is kept for the
            backward pass, counted in the program that a policy makes.
        granularity: what is decided together: the contractions in one "scope" (the
            path of `jax.named_scope`s), of one "primitive", or an "equation": those
            of one scope, primitive and shape of operands, where sizes that come from
            the batch don't count.
        held_out: batches to check the policy on; by default the last half of
            `batches`, or the only batch if there is just one. If all of them are among
            the batches that decide, a note of the result says so.
        argnums: the arguments that hold parameters, by which `fn` is differentiated,
            as of `jax.grad`.
        device: for the objective "time", a `Device` (by default an H200), or measured
            seconds by group and by dtype (or "float8", "int8").
        loss_scale: what the loss is multiplied by before the backward pass, as by loss
            scaling in float16. Gradients are divided by it.
        perturbation: parameters are moved by about this share of themselves in all
            batches but the first, so that the policy does not fit one point only. It is
            checked on each held-out batch at the parameters as given, and on the first
            of these batches at moved parameters too.
        max_passes: about how many passes to make, besides those of held-out batches.
        seed: of the perturbations, from 0 to 2**32 - 1. The same seed gives the same
            policy.
        state: a JSON file where measurements are remembered. After a kill, the same
            call goes on where it was: only the pass that was cut short is made again.
            While it runs, up to three files beside this one hold the results and
            gradients of the function as written, each for one batch.
        progress: whether to show each pass; by default on a terminal.
    Returns:
        A `Calibration`, which holds a `policy` for `amp`, and the evidence for it.
    Raises:
        TypeError, ValueError: an argument is of the wrong kind or has no meaning.
        AmpError: the function is not finite or not deterministic as written, or
            `state` is of another calibration.

    >>> import jax, jax.numpy as jnp, numpy as np
    >>> from jaxamp_like import amp
    >>> def loss(w, x):
    ...     with jax.named_scope("plain"):
    ...         y = jnp.tanh(x @ w).mean()
    ...     with jax.named_scope("waves"):
    ...         return y + jnp.sin(50 * x @ w).mean()
    >>> w, xs = np.eye(3, dtype="float32") / 3, np.ones((4, 2, 3), "float32") / 2
    >>> found = calibrate(loss, [(w, x) for x in xs], budget=0.02)
    >>> [(group.name, group.dtype) for group in found.groups]
    [('plain', 'bfloat16'), ('waves', 'float32')]
    >>> mixed = amp(loss, amp_policy=found.policy)

    Sensitivities of single parts, measured by switching them to low precision one at a
    time, are due to Dong et al., "HAWQ" (arXiv:1905.03696), and Micikevicius et al.,
    "Mixed Precision Training" (arXiv:1710.03740), section 3."""
    if candidates is None:
        is_low = objective == "memory" and granularity == "scope"
        candidates = ("bfloat16", "bfloat16+int8") if is_low else ("bfloat16",)
    lows = _checked(
        candidates, objective, granularity, loss_scale, perturbation, max_passes, seed
    )
    loss_scale, perturbation = float(loss_scale), float(perturbation)
    max_passes, seed = int(max_passes), int(seed)
    tuples = as_batches(batches, "batches")
    checks = None if held_out is None else as_batches(held_out, "held_out")
    if checks is None:
        half = len(tuples) // 2
        tuples, checks = (tuples[:-half], tuples[-half:]) if half else (tuples, tuples)
    warn_of_changed_places(tuples, argnums)
    subject = measured_function(fn, tuples[0], argnums, loss_scale, budget)
    _check_kept(lows, granularity, objective, subject)
    points, checks = points_of(subject.call, tuples, checks, perturbation, seed)
    settings = {
        "budget": repr(subject.budget),
        "candidates": [one.name for one in lows],
        "objective": objective,
        "granularity": granularity,
        "loss_scale": loss_scale,
        "max_passes": max_passes,
    }
    with with_progress(progress) as tell:
        program = MarkedProgram(subject, points[0], lows, granularity)
        if state is not None:
            settings["function"] = of_program(program.jaxpr)
            settings["batches"] = of_points([*points, *checks])
            settings["versions"] = versions()
        remembered = MeasurementStore(state, settings)
        runs = Runs(program, remembered, tell)
        on = H200 if device is None else device
        deciding = Deciding(runs, points, checks, objective, on, max_passes)
        try:
            found = deciding.run()
        except AmpError:  # a second start would end here too
            remembered.clear()
            raise
        remembered.clear()
        return found


def _check_kept(
    lows: Sequence[Candidate],
    granularity: str,
    objective: str,
    subject: MeasuredFunction,
) -> None:
    """Raises an error if nothing could be said of what is kept for a backward pass."""
    keeping = [one.name for one in lows if one.saves is not None]
    if keeping and granularity != "scope":
        raise ValueError(
            f"`candidates` names {keeping[0]!r}, and how values are kept is decided by "
            f"scope, but `granularity` is {granularity!r}. Leave `granularity` out, or "
            f"name {compute_of(keeping[0])!r}."
        )
    if (keeping or objective == "memory") and not subject.differentiates:
        what = (
            f"`candidates` names {keeping[0]!r}"
            if keeping
            else "`objective` is 'memory'"
        )
        raise ValueError(
            f"{what}, which is about the backward pass, but `budget` limits no "
            f"gradients: {subject.budget!r}. Limit them, as by "
            "`Budget(gradients=0.01)`."
        )


def _checked(
    candidates: Any,
    objective: Any,
    granularity: Any,
    loss_scale: Any,
    perturbation: Any,
    max_passes: Any,
    seed: Any,
) -> tuple[Candidate, ...]:
    for name, value, known in (
        ("objective", objective, OBJECTIVES),
        ("granularity", granularity, GRANULARITIES),
    ):
        if value not in known:
            raise ValueError(f"`{name}` must be one of {known}, but got {value!r}.")
    for name, value in (("loss_scale", loss_scale), ("perturbation", perturbation)):
        is_fine = is_number(value) and math.isfinite(value) and value >= 0
        if not is_fine or (name == "loss_scale" and value == 0):
            raise ValueError(
                f"`{name}` must be a positive number, but got {value!r}."
                + (" 0 moves nothing." if name == "perturbation" else "")
            )
    if not is_integer(seed) or not 0 <= seed < 2**32:
        raise ValueError(
            f"`seed` must be an integer from 0 to 2**32 - 1, but got {seed!r}. "
            "Take it modulo 2**32."
        )
    if not is_integer(max_passes) or max_passes < 8:
        raise ValueError(
            f"`max_passes` must be an integer of at least 8, but got {max_passes!r}: "
            "the function as written twice, all of it low, and a few sets of groups."
        )
    return as_candidates(candidates)
