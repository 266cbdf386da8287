"""Warns of all that is found in a plan, or raises if `amp` is strict."""

from weakref import ref

from ..._amp_mistakes import FLOAT16_BY_DEFAULT
from ..._errors import place_of, warn_or_raise
from ..._structural import Plan, Step
from ..planner import Planner
from ..traced_call import TracedCall
from .inner_gradients import report_of_step_of_keras, report_of_unscaled_gradients
from .lean import report_of_lean_inside_out
from .unknown_shapes import reports_of_unknown_shapes
from .unlowered import (
    report_of_float16_on_tpus,
    report_of_float32_over_amp,
    report_of_loss_of_keras,
    report_of_map_that_lowers_nothing,
    report_of_nothing_lowered,
    reports_of_scopes_low_as_written,
)
from .unmatched import reports_of_unmatched_keys
from .unmeasured import reports_of_unmeasured
from .unquantised import reports_of_quantising
from .unsaved import reports_of_keys_that_save_nothing
from .unscaled import report_of_no_scale_in_keras


def warn_of_findings(
    call: TracedCall, planner: Planner, plan: Plan, steps: list[Step]
) -> None:
    """Warns of what the plan of a call shows, or raises an error of the first.

    Args:
        call: what is called, with its program and arguments.
        planner: knows the policy, and whether it is strict.
        plan: the plan of the program.
        steps: all steps of the plan, at any depth."""
    place = f"This is of {place_of(call.fn)}."
    for key, report in (
        *reports_of_unmatched_keys(planner, plan, steps, place),
        *reports_of_scopes_low_as_written(steps),
        *reports_of_keys_that_save_nothing(planner, plan),
    ):
        # Many functions may share a policy: a misspelt key is reported once for all.
        once = ref(planner.policy), key
        warn_or_raise(f"{report} {place}", planner.strict, once)
    for report in (
        *reports_of_unknown_shapes(planner, steps),
        *reports_of_unmeasured(plan),
        *reports_of_quantising(planner.policy, plan, steps),
        report_of_nothing_lowered(planner.compute_dtype, steps),
        report_of_loss_of_keras(call.fn, call.arrays, planner.compute_dtype, steps),
        report_of_float32_over_amp(planner.policy, planner.compute_dtype, steps),
        report_of_map_that_lowers_nothing(planner.policy, planner.compute_dtype, steps),
        report_of_lean_inside_out(planner, call, steps),
        report_of_float16_on_tpus(steps),
    ):
        if report is not None:
            warn_or_raise(f"{report} {place}", planner.strict)
    if not call.is_scaled and call.has_gradients():
        if (report := report_of_unscaled_gradients(steps)) is not None:
            warn_or_raise(f"{report} {place}", strict=False, once=FLOAT16_BY_DEFAULT)
    for report in (
        report_of_no_scale_in_keras(call.fn, call.arrays, steps),
        report_of_step_of_keras(call.fn, steps),
    ):
        if report is not None:
            warn_or_raise(report, strict=False)
