"""Chooses the groups to lower: guesses by sensitivities, and measures the guesses.

Rounding errors of groups are taken as independent, so that their squares add up. By
this, a set of groups is guessed; what counts is the error that is then measured. All
errors here are in budgets: 1 is what is allowed."""

import math
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

from .prices import Prices

Choices = tuple[int, ...]  # by group: 0 is as written, n the n-th candidate
Measure = Callable[[Choices], float]

NEGLIGIBLE = 0.05  # in budgets: a set of groups that errs less is not split further


def digits(choices: Choices) -> str:
    """The choices as a text, which is part of the key of a measurement."""
    return "".join(map(str, choices))


def sensitivities(
    measure: Callable[[Sequence[int]], float], num_groups: int, at_most: int
) -> list[float]:
    """The error of each group when it alone is low, in at most `at_most` passes.

    With fewer passes than groups, sets of neighbours are measured, and the worst are
    split in halves. The members of a set get equal errors, whose squares add up to the
    square of the set's error.

    Args:
        measure: gives the error when the groups of these numbers are low.
        num_groups: how many there are.
        at_most: how often to measure."""
    if num_groups <= at_most:
        return [measure([i]) for i in range(num_groups)]
    sets = [(-measure(range(num_groups)), 0, num_groups)]
    for _ in range((at_most - 1) // 2):
        worst = min((one for one in sets if one[2] - one[1] > 1), default=None)
        if worst is None or -worst[0] < NEGLIGIBLE:
            break
        sets.remove(worst)
        _, start, stop = worst
        middle = (start + stop) // 2
        for a, b in ((start, middle), (middle, stop)):
            sets.append((-measure(range(a, b)), a, b))
    found = [0.0] * num_groups
    for less, start, stop in sets:
        found[start:stop] = [-less / math.sqrt(stop - start)] * (stop - start)
    return found


class Lowering(NamedTuple):
    """One group, lowered by one level: from `before` to `after`, as in `Choices`."""

    group: int
    before: int
    after: int
    slope: float  # how much the squared error grows, over the cost that is saved


class Ranking:
    """The order in which groups should be lowered, each perhaps in several steps.

    Args:
        errors: the error of each group alone, by group, then by candidate; infinite
            where it may not have the candidate.
        prices: what the groups cost."""

    def __init__(self, errors: Sequence[Sequence[float]], prices: Prices):
        self.errors = errors
        self.prices = prices
        self._least = 1e-30 * (sum(prices.full) or 1.0)
        steps = [step for i in range(len(errors)) for step in self._lowerings(i)]
        self.steps = sorted(steps, key=lambda one: (one.slope, one.group))

    def error(self, i: int) -> float:
        """The least error of a group alone."""
        return min(self.errors[i])

    def _lowerings(self, i: int) -> Iterator[Lowering]:
        """The steps of a group that save most for their error, as on a convex hull."""
        now, low = 0, self.prices.low[i]
        while True:
            finite = [c for c, e in enumerate(self.errors[i], 1) if e < math.inf]
            lower = [c for c in finite if self._gain(i, now, c) > 0]
            if not lower and now == 0 and finite:  # it saves nothing, so it comes last
                lower = [min(finite, key=lambda c: (low[c - 1], self._square(i, c)))]
            if not lower:
                return
            slopes = [(self._slope(i, now, c), low[c - 1], c) for c in lower]
            slope, _, after = min(slopes)
            yield Lowering(i, now, after, slope)
            now = after

    def _slope(self, i: int, before: int, after: int) -> float:
        more = self._square(i, after) - self._square(i, before)
        return more / max(self._gain(i, before, after), self._least)

    def _square(self, i: int, choice: int) -> float:
        return self.errors[i][choice - 1] ** 2 if choice else 0.0

    def _gain(self, i: int, before: int, after: int) -> float:
        prices = [self.prices.full[i], *self.prices.low[i]]
        return prices[before] - prices[after]

    def choose(self, budget: float) -> Choices:
        """Takes all steps, in order, that fit into a `budget` if squares add up."""
        left = budget**2
        chosen = [0] * len(self.errors)
        for i, before, after, _ in self.steps:
            more = self._square(i, after) - self._square(i, before)
            if chosen[i] == before and more <= left:
                left -= more
                chosen[i] = after
        return tuple(chosen)

    def total_gain(self, choices: Choices) -> float:
        """How much of the cost `choices` save."""
        return self.prices.of([0] * len(choices)) - self.prices.of(choices)


def search(
    measure: Measure,
    ranking: Ranking,
    limit: float,
    at_most: int,
    tried: dict[Choices, float] | None = None,
) -> Choices:
    """Of all choices that were measured to be within `limit`, those that save most.

    The search bisects the budget of `Ranking.choose`, since errors may add up to more,
    or less, than it guesses. Choices in `tried` are not measured again; new ones are
    added to it."""
    nothing = (0,) * len(ranking.errors)
    tried = {} if tried is None else tried
    tried[nothing] = 0.0
    before = len(tried)

    def worth(choices: Choices) -> tuple[float, float]:
        return ranking.total_gain(choices), -tried[choices]

    best = max((one for one, error in tried.items() if error <= limit), key=worth)
    lowest = ranking.choose(math.inf)
    fine, bad, guess = 0.0, math.inf, limit
    for _ in range(4 * at_most):
        choices = ranking.choose(guess)
        if choices not in tried:
            if len(tried) - before >= at_most:
                break
            tried[choices] = measure(choices)
        error = tried[choices]
        if error <= limit:
            fine = max(fine, guess)
            best = max(best, choices, key=worth)
            if choices == lowest:
                break
        else:
            bad = min(bad, guess)
        if bad / max(fine, 1e-9) < 1.02:
            break
        if bad == math.inf:
            guess *= 1.5
        elif fine == 0:
            guess *= min(0.7, limit / error) if error < math.inf else 0.5
        else:
            guess = math.sqrt(fine * bad)
        if guess < 1e-6 * limit or guess > 1e6 * limit:
            break
    return best
