"""Which groups to lower: by measured sensitivity, and measured together.

Errors of roundings are independent, so that their squares add up. That is how a set of
groups is guessed; what counts is what is measured of the set. All errors here are in
budgets: 1 is what is allowed."""

import heapq
import math
from collections.abc import Callable, Sequence

from .costs import Prices

Choices = tuple[int, ...]  # by group: 0 is as written, n the n-th candidate
Measure = Callable[[Choices], float]

NEGLIGIBLE = 0.05  # of a budget: a set of groups that is not looked at more closely


def only(groups: Sequence[int], candidate: int, num_groups: int) -> Choices:
    """These groups in a candidate, the others as written."""
    which = set(groups)
    return tuple(candidate if i in which else 0 for i in range(num_groups))


def sensitivities(
    measure: Measure, num_groups: int, candidate: int, at_most: int
) -> list[float]:
    """The error of each group when it alone is low, in at most so many passes.

    With fewer passes than groups, sets of neighbours are measured, and the worst are
    split in halves; a set's error is shared among its members."""

    def error(start: int, stop: int) -> float:
        return measure(only(range(start, stop), candidate, num_groups))

    if num_groups <= at_most:
        return [error(i, i + 1) for i in range(num_groups)]
    sets = [(-error(0, num_groups), 0, num_groups)]
    left = at_most - 1
    while left >= 2:
        split = [one for one in sets if one[2] - one[1] > 1]
        if not split or -min(split)[0] < NEGLIGIBLE:
            break
        worst = min(split)
        sets.remove(worst)
        _, start, stop = worst
        middle = (start + stop) // 2
        for a, b in ((start, middle), (middle, stop)):
            heapq.heappush(sets, (-error(a, b), a, b))
        left -= 2
    found = [0.0] * num_groups
    for less, start, stop in sets:
        found[start:stop] = [-less / math.sqrt(stop - start)] * (stop - start)
    return found


class Ranking:
    """Groups in the order in which they should be lowered.

    Args:
        errors: by group, then by candidate, of the group alone.
        prices: what the groups cost."""

    def __init__(self, errors: Sequence[Sequence[float]], prices: Prices):
        self.errors = errors
        self.prices = prices
        self.candidate = [
            min(range(len(row)), key=lambda c, i=i, row=row: (prices.low[i][c], row[c]))
            if min(row) < math.inf
            else 0
            for i, row in enumerate(errors)
        ]
        # One that can't be lowered without an overflow gives way to one that can.
        for i, row in enumerate(errors):
            if row[self.candidate[i]] == math.inf:
                self.candidate[i] = min(range(len(row)), key=row.__getitem__)
        self.order = sorted(range(len(errors)), key=self._price_of_error)

    def error(self, i: int) -> float:
        """The error of a group alone, in the candidate that it would be lowered to."""
        return self.errors[i][self.candidate[i]]

    def gain(self, i: int) -> float:
        """What is saved when a group is lowered."""
        return self.prices.full[i] - self.prices.low[i][self.candidate[i]]

    def _price_of_error(self, i: int) -> tuple[float, int]:
        gain = max(self.gain(i), 1e-30 * (sum(self.prices.full) or 1.0))
        return self.error(i) ** 2 / gain, i

    def choose(self, budget: float) -> Choices:
        """As much as fits into a `budget`, if the squares of errors add up."""
        left = budget**2
        chosen = [0] * len(self.errors)
        for i in self.order:
            square = self.error(i) ** 2
            if square <= left:
                left -= square
                chosen[i] = self.candidate[i] + 1
        return tuple(chosen)

    def could_choose(self, choices: Choices) -> bool:
        """Whether groups are lowered to their candidates only."""
        pairs = zip(choices, self.candidate, strict=True)
        return all(choice in (0, one + 1) for choice, one in pairs)

    def total_gain(self, choices: Choices) -> float:
        return sum(self.gain(i) for i, choice in enumerate(choices) if choice)


def search(
    measure: Measure,
    ranking: Ranking,
    limit: float,
    at_most: int,
    tried: dict[Choices, float] | None = None,
) -> Choices:
    """The choices that save most of those that were measured to be within `limit`.

    A bisection over how much the guess is allowed, since errors may add up to more, or
    less, than the guess has it. What was `tried` before costs nothing, and is added
    to."""
    nothing = (0,) * len(ranking.errors)
    tried = {} if tried is None else tried
    tried[nothing] = 0.0
    before = len(tried)
    within = (one for one, error in tried.items() if error <= limit)
    best = max(filter(ranking.could_choose, within), key=ranking.total_gain)
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
            if ranking.total_gain(choices) > ranking.total_gain(best):
                best = choices
            if all(choices):
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
