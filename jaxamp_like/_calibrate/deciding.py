"""From measurements to a policy: what is tried, and in which order."""

import functools
import math
import operator
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from .._errors import AmpError
from .._policies.named import Policy
from .._policies.policy_map import PolicyMap
from .candidates import FULL, Candidate
from .caveats import nothing_held_out, nothing_measured, unscaled
from .costs import Device
from .measured_function import Point
from .policies import Writer
from .prices import Profile
from .records import show_error, show_errors
from .result import Calibration
from .runs import Runs
from .search import Choices, Ranking, digits, search, sensitivities
from .trials import Trials

ATTEMPTS = 3  # how many policies are compiled and checked
MARGIN = 0.9  # after a miss, this share of what is allowed is aimed at
_MEND = "Allow more, or divide the function into smaller groups."
NEAR = 2.0  # in budgets: all groups low is tried as a policy if roundings err no more
FAR = 2.0  # in budgets: if a policy errs more, the function itself is checked too
FOR_SETS = 12  # passes that are left for sets of groups
FOR_A_SEARCH = 6  # the most of these that one search takes
MOST_POINTS = 4  # the most batches that sets are measured on


@dataclass
class Deciding:
    """Decides which groups become low, and in which precision.

    Args:
        runs: makes the passes.
        points: the points to measure at.
        checks: the points to check at, which are held out.
        objective: what is to be saved.
        device: what it is saved on, for the objective "time".
        max_passes: about how many passes to make."""

    runs: Runs
    points: Sequence[Point]
    checks: Sequence[Point]
    objective: str
    device: Device | Profile
    max_passes: int
    searched: dict[Choices, float] = field(default_factory=dict)
    scale: float = 1.0  # the error of a policy over that of its roundings alone
    first: float = 1.0  # the share of the limit that sets may reach on the first batch

    def __post_init__(self) -> None:
        self.program = self.runs.program
        self.budget = self.program.subject.budget
        self.trials = Trials(self.runs, self.objective, self.device)
        held_out = {point.number for point in self.checks}
        some = [p for p in self.points[:MOST_POINTS] if p.number not in held_out]
        self.certified_on = [*self.checks, *some]

    def run(self) -> Calibration:
        """Finds a policy.

        Raises:
            AmpError: the function is not finite, or not deterministic, as written."""
        self._check_noise()
        groups = self.program.groups
        if not groups:
            return self._nothing_to_decide()
        if told := nothing_held_out(self.points, self.checks):
            self.trials.notes.append(told)
        if len(groups) == 1 and self.program.granularity != "equation":
            self.trials.notes.append(
                f"all contractions are in one group, {groups[0].name!r}: name parts of "
                "the function by `jax.named_scope`, or use granularity='equation'"
            )
        if len(self.points) > MOST_POINTS:
            self.trials.notes.append(
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
        """Checks that the function itself meets the budget when compiled again."""
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
        self.trials.warn(
            "`calibrate` found nothing to decide: the function has no contraction that "
            "`amp` would lower. Contractions of integers or float64, in solvers, with "
            "a `precision=` of their author's, under `amp_stop` or in an `amp` already "
            "are left as written."
        )
        return self._as_written()

    # All groups low: with most budgets, this becomes the policy.

    def _all_low(self) -> Calibration | None:
        """The lowest candidate for all, if that meets the budget."""
        tried = [self.program.all_in(one) for one in self.program.candidates]
        errors = {choices: self._measure(choices) for choices in tried if any(choices)}
        if not errors:
            return None
        # Relative to zero, an error is 0 or infinite; only then may that be the cause.
        if {*errors.values()} <= {0, math.inf}:
            if told := nothing_measured(self.runs, self.points):
                self.trials.warn(told)
        # Of two that cost the same, the one with the smaller error is taken.
        choices = min(errors, key=lambda one: (self.trials.prices.of(one), errors[one]))
        if errors[choices] > NEAR:
            return None
        policy = self._policy(choices)
        first = self.runs.mixed(policy, digits(choices), self.points[0])
        error = first.over(self.budget)
        self._remember(choices, error)
        if math.isfinite(error) and errors[choices] > 0:
            self.scale = min(max(error / errors[choices], 0.5), 2.0)
        return self._certified(choices, policy) if error <= 1 else None

    # Some groups low.

    def _some_low(self) -> Calibration:
        ranking = Ranking(self._sensitivities(), self.trials.prices_alone)
        limit = 1 / max(self.scale, 1.0)
        for _ in range(ATTEMPTS):
            choices, error = self._joint(ranking, limit)
            if not any(choices):
                break
            policy = self._policy(choices)
            found = self._certified(choices, policy, ranking)
            missed = self.trials.tried[-1].error
            found = found or self._kept_in_16_bits(choices, ranking)
            if found is not None:
                told = filter(None, [unscaled(self.program)])
                return replace(found, notes=(*found.notes, *told))
            limit = _within(limit, error, missed)
        return self._nothing_low(ranking)

    def _kept_in_16_bits(
        self, choices: Choices, ranking: Ranking
    ) -> Calibration | None:
        """The same with nothing kept in 8 bits, if that meets the budget.

        It errs less and saves most of the memory. A search with a smaller limit might
        take fewer groups than it."""
        plain = self.program.kept_in_16_bits(choices)
        if plain == choices or self._measure(plain) > 1:
            return None
        return self._certified(plain, self._policy(plain), ranking)

    def _sensitivities(self) -> list[list[float]]:
        """The error of each group alone, by group, then by candidate.

        It is infinite where a group may not have a candidate."""
        num = len(self.program.groups)
        each = (self.max_passes - FOR_SETS) // len(self.program.candidates)
        each = max(each, 3)
        if num > each:
            self.trials.notes.append(
                f"{num} groups in {each} passes: neighbours of small error were "
                "measured together; a larger `max_passes` tells them apart"
            )
        columns = [self._alone(one, each) for one in self.program.candidates]
        return [list(row) for row in zip(*columns, strict=True)]

    def _alone(self, candidate: Candidate, at_most: int) -> list[float]:
        takers = self.program.takers(candidate)
        number = 1 + self.program.candidates.index(candidate)

        def measure(some: Sequence[int]) -> float:
            choices = [*self.program.nothing]
            for i in some:
                choices[takers[i]] = number
            return self._measure(tuple(choices))

        found = [math.inf] * len(self.program.groups)
        if takers:
            errors = sensitivities(measure, len(takers), at_most)
            for i, error in zip(takers, errors, strict=True):
                found[i] = error
        return found

    def _joint(self, ranking: Ranking, limit: float) -> tuple[Choices, float]:
        """Choices that err by at most `limit` on all batches, and their worst error."""
        for _ in range(ATTEMPTS):
            left = self.max_passes - self.runs.spent - 2 * (len(self.points) > 1)
            at_most = max(0, min(FOR_A_SEARCH, left))
            choices = search(
                self._measure, ranking, limit * self.first, at_most, self.searched
            )
            if not any(choices):
                break
            here = self.searched[choices]
            rest = self.points[1:MOST_POINTS]
            error = max((self._measure(choices, p) for p in rest), default=0.0)
            if error <= limit:
                return choices, max(here, error)
            self._remember(choices, error)
            self.first = _within(self.first, here, error)
        return self.program.nothing, limit

    def _nothing_low(self, ranking: Ranking) -> Calibration:
        errors = [ranking.error(i) for i in range(len(self.program.groups))]
        i = min(range(len(errors)), key=errors.__getitem__)
        if not any(map(self.program.takers, self.program.candidates)):
            names = " and ".join(one.name for one in self.program.candidates)
            self.trials.warn(
                f"`calibrate` left everything as written: the rules of {names} leave "
                "all of its contractions to 16 bits: heads, embeddings, and those of "
                "which no operand is a parameter. Name 'bfloat16' as a candidate too."
            )
            return self._as_written(ranking)
        name = self.program.groups[i].name
        self.trials.warn(
            f"`calibrate` left everything as written: no set of groups meets "
            f"{self.budget!r}. The least sensitive one, {name!r}, "
            f"gives {show_error(errors[i])} times the budget alone"
            + (" on one batch, and more on others" if errors[i] <= 1 else "")
            + f". {unscaled(self.program) or _MEND}"
        )
        return self._as_written(ranking)

    def _as_written(self, ranking: Ranking | None = None) -> Calibration:
        noise = self.runs.repeated(self.points[0])
        return self.trials.result(self.program.nothing, Policy(FULL), noise, ranking)

    # Measuring.

    def _measure(self, choices: Choices, point: Point | None = None) -> float:
        """The error if contractions round by `choices`, in budgets.

        What norms and activations make of values that are kept in 8 bits is no matter
        of contractions: there the policy itself is compiled and run."""
        point = point or self.points[0]
        is_real = self.program.keeps_low(choices)
        if is_real:
            found = self.runs.mixed(self._policy(choices), digits(choices), point)
        else:
            found = self.runs.chosen(choices, point)
        error = found.over(self.budget)
        if point is self.points[0]:
            self._remember(choices, error)
        self.trials.remember(choices, error, is_real=is_real)
        return error

    def _remember(self, choices: Choices, error: float) -> None:
        """Keeps the worst error of `choices`, so that a search avoids what missed."""
        self.searched[choices] = max(error, self.searched.get(choices, 0.0))

    def _certified(
        self,
        choices: Choices,
        policy: Policy | PolicyMap,
        ranking: Ranking | None = None,
    ) -> Calibration | None:
        """The result, if the policy meets the budget on all batches that count."""
        error = 0.0
        first, *rest = self.certified_on
        # Points whose results as written are held come first: they need no pass of it.
        rest.sort(key=self.runs.holds, reverse=True)
        for point in [first, *rest]:
            found = self.runs.mixed(policy, digits(choices), point)
            error = max(error, found.over(self.budget))
            if error > 1:
                # The next policy is checked here first, since it may miss here as well.
                self.certified_on.remove(point)
                self.certified_on.insert(0, point)
                break
        self.trials.remember(choices, error, is_real=True)
        self._remember(choices, error)
        if error > FAR:
            self._check_own_rounding()
        if error > 1:
            self.trials.notes.append(
                f"{self.trials.describe(choices)} missed the budget on "
                f"{self.certified_on[0].name}: {show_error(error)} times"
            )
            return None
        held_out = [self.runs.mixed(policy, digits(choices), p) for p in self.checks]
        worst = functools.reduce(operator.or_, held_out)
        return self.trials.result(choices, policy, worst, ranking)

    def _policy(self, choices: Choices) -> Policy | PolicyMap:
        return Writer(self.program).policy(choices)


def _within(limit: float, seen: float, missed: float) -> float:
    """The next limit, if choices that erred as `seen` then erred as `missed`."""
    known = seen > 0 and math.isfinite(missed)
    return MARGIN * seen / missed if known else limit / 2
