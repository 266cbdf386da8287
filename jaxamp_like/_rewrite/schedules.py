"""The schedules of plans: made when they are bound, once for each plan.

Of the plans that a loop tries until the dtypes of its carries settle, only the last one
is bound."""

from .._structural import Plan
from .memo import Memo
from .remat import Schedule, plain_schedule, remat_schedule, schedule

_schedules = Memo()


def schedule_of(plan: Plan, has_regions: bool) -> Schedule:
    """The steps of a plan in order; with remat regions, if a binder has them."""
    make = _with_regions if has_regions else _plain
    return _schedules(plan, has_regions, lambda: make(plan))


def _plain(plan: Plan) -> Schedule:
    if any(step.may_recompute for step in plan.steps):
        return plain_schedule(plan.steps, plan.facts, plan.outvars)
    return schedule(plan.steps, plan.outvars)


def _with_regions(plan: Plan) -> Schedule:
    """The schedule with remat regions, for a derivative that is still to be taken.

    A plan that holds a backward pass has no regions, as JAX has chosen its residuals
    already. A region would only hide from `amp_with_state` and from reports what is
    read and made in it."""
    is_backward = any(step.backward for step in plan.steps)
    if not is_backward and any(step.may_recompute or step.inner for step in plan.steps):
        return remat_schedule(plan.steps, plan.facts, plan.outvars, plan.saves)
    return schedule_of(plan, False)
