"""From measurements to a policy: what is tried, in which order, and what is said."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import jax

from .._dtypes import DType
from .._errors import AmpError, warn_or_raise
from .._policies.named import Policy
from .._policies.policy_map import PolicyMap
from .._reports.versions import versions
from .budget import Budget, Errors
from .costs import Device, Prices, prices
from .evidence import Decided, Tried, show_error, show_errors
from .policies import FULL, dtypes_of, policy_of, primitives_in
from .result import Calibration
from .runs import Runs, worst
from .search import Choices, Ranking, search, sensitivities
from .subject import Point

ATTEMPTS = 3  # policies that are compiled and checked
MARGIN = 0.9  # of what is left after a policy missed the budget
NEAR = 1.5  # budgets: so far from being met, all groups low are not tried as a policy
FAR = 2.0  # budgets: by so much a policy is missed for reasons of its own
FOR_SETS = 12  # passes that are left for what is measured together
FOR_A_SEARCH = 6  # of these
MOST_POINTS = 4  # batches that sets are measured on


@dataclass
class Deciding:
    """Decides on groups.

    Args:
        runs: what makes the passes.
        points: where to measure.
        checks: where to check.
        budget: what is allowed.
        objective: what is to be saved.
        device: what it is saved on, for the objective "time".
        max_passes: about how many passes to make."""

    runs: Runs
    points: Sequence[Point]
    checks: list[Point]
    budget: Budget
    objective: str
    device: Device | Mapping[str, Mapping[str, float]]
    max_passes: int
    tried: list[Tried] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    ranking: Ranking | None = None
    searched: dict[Choices, float] = field(default_factory=dict)
    scale: float = 1.0  # what roundings alone leave out of the error of a policy

    @property
    def candidates(self) -> tuple[DType, ...]:
        return self.runs.candidates

    def run(self) -> Calibration:
        """Finds a policy.

        Raises:
            AmpError: the function is not finite, or not deterministic, as written."""
        self._check_noise()
        groups = self.runs.groups
        if not groups:
            return self._nothing_to_decide()
        found = self.runs.found.work
        self.prices: Prices = prices(
            groups, found, self.candidates, self.objective, self.device
        )
        if len(groups) == 1 and self.runs.granularity != "equation":
            self.notes.append(
                f"all contractions are in one group, {groups[0].name!r}: name parts of "
                "the function by `jax.named_scope`, or use granularity='equation'"
            )
        if len(self.points) > MOST_POINTS:
            self.notes.append(
                f"sets of groups were measured on the first {MOST_POINTS} batches of "
                f"{len(self.points)}"
            )
        return self._all_low() or self._some_low()

    def _check_noise(self) -> None:
        error = self.runs.repeated(self.points[0])
        if error.over(self.budget) > 1:
            limits = self.budget.limits()
            found = show_errors(error, limits)
            raise AmpError(
                f"As written, without any low precision, two runs on the same batch "
                f"differ by more than the budget: {found}; allowed: {self.budget!r}. "
                "The function is not deterministic (a callback, or sums in no fixed "
                "order): make it so, pass its random keys in the batch, or allow more."
            )

    def _check_own_rounding(self) -> None:
        """A policy missed the budget: so may the function itself, compiled again."""
        point = self.checks[0]
        error = self.runs.mixed(Policy(FULL), "as written", point)
        if error.over(self.budget) > 1:
            raise AmpError(
                "As written, without any low precision, the function is not within "
                f"the budget: compiled in two ways, {point.name} differs by "
                f"{show_errors(error, self.budget.limits())}; allowed: "
                f"{self.budget!r}. Rounding in its own dtype decides what it gives: "
                "allow more, or mend what cancels. `trace_numerics(fn)(*batch)` shows "
                "where errors arise."
            )

    def _nothing_to_decide(self) -> Calibration:
        self._warn(
            "`calibrate` found nothing to decide: the function has no contraction that "
            "`amp` would lower. Contractions of integers or float64, in solvers, with "
            "a `precision=` of their author's, under `amp_stop` or in an `amp` already "
            "are left as written."
        )
        noise = self.runs.repeated(self.points[0])
        return self._result((), Policy(FULL), noise)

    # All groups low: the policy that most budgets end in.

    def _all_low(self) -> Calibration | None:
        num = len(self.runs.groups)
        errors = []
        for c in range(1, len(self.candidates) + 1):
            errors.append(self._measure((c,) * num))
        c = min(range(len(errors)), key=errors.__getitem__)
        if errors[c] > NEAR:
            return None
        choices = (c + 1,) * num
        policy = self._policy(choices)
        first = self.runs.mixed(policy, _name(choices), self.points[0])
        error = first.over(self.budget)
        if math.isfinite(error) and errors[c] > 0:
            self.scale = min(max(error / errors[c], 0.5), 2.0)
        return self._certified(choices, policy) if error <= 1 else None

    # Some of them.

    def _some_low(self) -> Calibration:
        self.ranking = ranking = Ranking(self._sensitivities(), self.prices)
        limit = 1 / max(self.scale, 1.0)
        for _ in range(ATTEMPTS):
            choices, limit = self._joint(ranking, limit)
            if not any(choices):
                break
            policy = self._policy(choices)
            found = self._certified(choices, policy)
            if found is not None:
                return found
            missed = self.tried[-1].error
            limit *= MARGIN / missed if math.isfinite(missed) else 0.5
        return self._nothing_low(ranking)

    def _sensitivities(self) -> list[list[float]]:
        num = len(self.runs.groups)
        each = (self.max_passes - FOR_SETS) // len(self.candidates)
        each = max(each, 3)
        if num > each:
            self.notes.append(
                f"{num} groups in {each} passes: neighbours of small error were "
                "measured together; a larger `max_passes` tells them apart"
            )
        columns = [
            sensitivities(self._measure, num, c, each)
            for c in range(1, len(self.candidates) + 1)
        ]
        return [list(row) for row in zip(*columns, strict=True)]

    def _joint(self, ranking: Ranking, limit: float) -> tuple[Choices, float]:
        """What fits into `limit` budgets on all batches, and the limit that it took."""
        for _ in range(ATTEMPTS):
            left = self.max_passes - self.runs.spent - 2 * (len(self.points) > 1)
            at_most = max(0, min(FOR_A_SEARCH, left))
            choices = search(self._measure, ranking, limit, at_most, self.searched)
            rest = self.points[1:MOST_POINTS]
            if not any(choices):
                return choices, limit
            error = max((self._measure(choices, p) for p in rest), default=0.0)
            if error <= limit:
                return choices, limit
            limit *= MARGIN * limit / error if math.isfinite(error) else 0.5
        return (0,) * len(self.runs.groups), limit

    def _nothing_low(self, ranking: Ranking) -> Calibration:
        errors = [ranking.error(i) for i in range(len(self.runs.groups))]
        i = min(range(len(errors)), key=errors.__getitem__)
        self._warn(
            f"`calibrate` left everything as written: no set of groups meets "
            f"{self.budget!r}. The least sensitive one, {self.runs.groups[i].name!r}, "
            f"gives {show_error(errors[i])} times the budget alone"
            + (" on one batch, and more on others" if errors[i] <= 1 else "")
            + ". Allow more, or divide the function into smaller groups."
        )
        nothing = (0,) * len(errors)
        noise = self.runs.repeated(self.points[0])
        return self._result(nothing, Policy(FULL), noise)

    # Measuring.

    def _measure(self, choices: Choices, point: Point | None = None) -> float:
        """The error of roundings, in budgets."""
        point = point or self.points[0]
        error = self.runs.chosen(choices, point).over(self.budget)
        if point is self.points[0]:
            self.searched[choices] = error
        self._remember(choices, error, is_real=False)
        return error

    def _certified(
        self, choices: Choices, policy: Policy | PolicyMap
    ) -> Calibration | None:
        """The result, if the policy meets the budget on what was held out."""
        found, error = [], 0.0
        for point in [*self.checks]:
            found.append(self.runs.mixed(policy, _name(choices), point))
            error = max(error, found[-1].over(self.budget))
            if error > 1:
                # The next policy is measured here first: most that miss do so here.
                self.checks.remove(point)
                self.checks.insert(0, point)
                break
        self._remember(choices, error, is_real=True)
        if error > FAR:
            self._check_own_rounding()
        if error > 1:
            self.notes.append(
                f"{self._what(choices)} missed the budget on held-out batches: "
                f"{show_error(error)} times"
            )
            return None
        return self._result(choices, policy, worst(found))

    def _policy(self, choices: Choices) -> Policy | PolicyMap:
        dtypes = dtypes_of(self.runs.groups, choices, self.candidates)
        return policy_of(dtypes, primitives_in(self.runs.jaxpr), self.runs.patterns)

    def _remember(self, choices: Choices, error: float, is_real: bool) -> None:
        full = sum(self.prices.full)
        cost = self.prices.of(choices) / full if full else 0.0
        one = Tried(self._what(choices), cost, error, is_real)
        if one not in self.tried:
            self.tried.append(one)

    def _what(self, choices: Choices) -> str:
        """A set of groups in words."""
        names = [group.name for group in self.runs.groups]
        low = [n for n, c in zip(names, choices, strict=True) if c]
        full = [n for n, c in zip(names, choices, strict=True) if not c]
        if not full:
            return "everything in low precision"
        some = low if len(low) <= len(full) else full
        shown = ", ".join(some[:3]) + (f" and {len(some) - 3} more" * (len(some) > 3))
        if some is full:
            shown += " as written, the rest"
        return f"{shown} in low precision"

    # The result.

    def _result(
        self, choices: Choices, policy: Policy | PolicyMap, held_out: Errors
    ) -> Calibration:
        groups = self.runs.groups
        found = self.runs.found
        total = found.fixed_flops + sum(one.flops for one in found.work.values())
        decided = tuple(self._decided(i, choices) for i in range(len(groups)))
        low = sum(one.flops for one, c in zip(decided, choices, strict=True) if c)
        return Calibration(
            policy=policy,
            budget=self.budget,
            held_out=held_out,
            met=held_out.over(self.budget) <= 1,
            low_share=low / total if total else 0.0,
            groups=decided,
            tried=tuple(self.tried),
            objective=self.objective,
            granularity=self.runs.granularity,
            candidates=tuple(dtype.name for dtype in self.candidates),
            notes=tuple(dict.fromkeys(self.notes)),
            passes=self.runs.passes,
            compilations=self.runs.compilations,
            versions=versions() | {"device": jax.devices()[0].device_kind},
            seconds=self.runs.seconds,
        )

    def _decided(self, i: int, choices: Choices) -> Decided:
        group = self.runs.groups[i]
        works = [self.runs.found.work[one] for one in group.contractions]
        names = [FULL, *(dtype.name for dtype in self.candidates)]
        errors = None
        if self.ranking is not None:
            errors = dict(zip(names[1:], self.ranking.errors[i], strict=True))
        return Decided(
            name=group.name,
            dtype=names[choices[i]],
            sensitivity=errors,
            flops=sum(one.flops for one in works),
            kept=4 * sum(one.kept for one in works),
            price=self.prices.full[i],
            why=_why(choices[i], errors),
        )

    def _warn(self, message: str) -> None:
        self.notes.append(message)
        warn_or_raise(message, strict=False)


def _why(choice: int, errors: dict[str, float] | None) -> str:
    if errors is None:
        return "everything in low precision meets the budget"
    least = min(errors.values())
    if choice:
        return f"alone, {show_error([*errors.values()][choice - 1])} of the budget"
    if least == math.inf:
        return "overflows in low precision"
    if least > 1:
        return f"alone, {show_error(least)} times the budget"
    return f"does not fit beside the others: alone, {show_error(least)} of the budget"


def _name(choices: Choices) -> str:
    return "".join(map(str, choices))
