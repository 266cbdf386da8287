"""What was tried and found, in words and as a result."""

import functools
import math
from collections import Counter
from dataclasses import dataclass, field

import jax

from .._errors import warn_or_raise
from .._policies.named import Policy
from .._policies.policy_map import PolicyMap
from .._reports.versions import versions
from .budget import Budget, Errors
from .candidates import FULL
from .costs import Device
from .kept import KeptBytes
from .prices import Prices, Profile, prices
from .program import MarkedProgram
from .records import Decided, Tried, show_error
from .result import Calibration
from .runs import Runs
from .search import Choices, Ranking

NONE_FOR_IT = "no candidate is for it: `explain` says why rules of 8 bits leave it"


@dataclass
class Trials:
    """Remembers what was tried, and makes the result of it.

    Args:
        runs: makes the passes.
        objective: what is to be saved.
        device: what it is saved on, for the objective "time"."""

    runs: Runs
    objective: str
    device: Device | Profile
    tried: list[Tried] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    @property
    def program(self) -> MarkedProgram:
        return self.runs.program

    @functools.cached_property
    def kept(self) -> KeptBytes:
        return KeptBytes(self.program)

    @functools.cached_property
    def prices(self) -> Prices:
        groups, lows = self.program.groups, self.program.candidates
        return prices(groups, lows, self.objective, self.device, self.kept.of)

    @property
    def prices_alone(self) -> Prices:
        """What groups cost if each is low alone, by which they are ranked.

        What a scope keeps in full is more than what its contractions read and make, so
        for the objective "memory" it is counted in the program."""
        if self.objective != "memory":
            return self.prices
        program, lows = self.program, range(1, 1 + len(self.program.candidates))

        def alone(i: int, choice: int) -> int:
            is_fine = program.groups[i].may_have(program.candidates[choice - 1])
            choices = [*program.nothing]
            choices[i] = choice * is_fine
            return self.kept.of(tuple(choices))

        numbers = range(len(program.groups))
        full = [float(self.kept.of(program.nothing)) for _ in numbers]
        low = [[float(alone(i, choice)) for choice in lows] for i in numbers]
        return Prices(full, low, self.kept.of)

    def remember(self, choices: Choices, error: float, is_real: bool) -> None:
        full = self.prices.of(self.program.nothing)
        cost = self.prices.of(choices) / full if full else 0.0
        one = Tried(self.describe(choices), cost, error, is_real)
        if one not in self.tried:
            self.tried.append(one)

    def warn(self, message: str) -> None:
        self.notes.append(message)
        warn_or_raise(message, strict=False)

    def describe(self, choices: Choices) -> str:
        """In words, which groups are low under `choices`, and how low."""
        pairs = [*zip(self.program.groups, choices, strict=True)]
        low = [group.name for group, choice in pairs if choice]
        full = [group.name for group, choice in pairs if not choice]
        precision = self._precision(choices)
        if not full:
            return f"everything in {precision}"
        some = low if len(low) <= len(full) else full
        shown = ", ".join(some[:3]) + (f" and {len(some) - 3} more" * (len(some) > 3))
        if some is full:
            shown += " as written, the rest"
        return f"{shown} in {precision}"

    def _precision(self, choices: Choices) -> str:
        if len(self.program.candidates) == 1:
            return "low precision"
        found = Counter(self.program.names(tuple(filter(None, choices))))
        if len(found) == 1:
            return next(iter(found))
        return " and ".join(f"{name} ({n})" for name, n in sorted(found.items()))

    def result(
        self,
        choices: Choices,
        policy: Policy | PolicyMap,
        held_out: Errors,
        ranking: Ranking | None = None,
    ) -> Calibration:
        """What is returned to the user."""
        program = self.program
        budget, fixed = program.subject.budget, program.contractions.fixed_flops
        total = fixed + sum(one.flops for one in program.groups)
        decided = tuple(self._decided(i, choices, ranking) for i in range(len(choices)))
        low = sum(one.flops for one, c in zip(decided, choices, strict=True) if c)
        return Calibration(
            policy=policy,
            budget=budget,
            held_out=held_out,
            met=held_out.over(budget) <= 1,
            low_share=low / total if total else 0.0,
            groups=decided,
            tried=tuple(self.tried),
            objective=self.objective,
            granularity=self.program.granularity,
            candidates=tuple(one.name for one in self.program.candidates),
            notes=tuple(dict.fromkeys(self.notes)),
            passes=self.runs.passes,
            compilations=self.runs.compilations,
            versions=versions() | {"device": jax.devices()[0].device_kind},
            seconds=self.runs.seconds,
            saved=self._saved(policy) if self.objective == "memory" else {},
        )

    def _saved(self, policy: Policy | PolicyMap) -> dict[str, int]:
        """The bytes that are kept for the backward pass, by policy."""
        return {
            "as written": self.kept.as_written,
            "default": self.kept.by_default,
            "chosen": self.kept.under(policy),
        }

    def _decided(self, i: int, choices: Choices, ranking: Ranking | None) -> Decided:
        group, every = self.program.groups[i], self.program.names(choices)
        fitting = [one.name for one in self.program.candidates if group.may_have(one)]
        errors = None
        if ranking is not None:
            row = zip(self.program.candidates, ranking.errors[i], strict=True)
            errors = {one.name: error for one, error in row if one.name in fitting}
        why = NONE_FOR_IT
        if fitting:
            budget = self.program.subject.budget
            why = _why(every[i], errors, len({*every}) == 1, budget)
        return Decided(
            name=group.name,
            dtype=every[i],
            sensitivity=errors,
            flops=group.flops,
            kept=4 * group.saved_elements,
            price=self.prices.full[i],
            why=why,
        )


def _why(
    chosen: str, errors: dict[str, float] | None, is_uniform: bool, budget: Budget
) -> str:
    if errors is None and is_uniform:
        return f"everything in {chosen} meets the budget"
    if errors is None:
        return "everything as low as it may be meets the budget"
    if chosen != FULL:
        others = (f", {show_error(e)} in {n}" for n, e in errors.items() if n != chosen)
        alone = f"alone, {show_error(errors[chosen])} of the budget"
        return alone + "".join(others)
    least = min(errors.values())
    if least == math.inf and not all(budget.limits().values()):
        return "rounds in low precision, and the budget allows none of that"
    if least == math.inf:
        return "overflows in low precision"
    if least > 1:
        return f"alone, {show_error(least)} times the budget"
    return f"does not fit beside the others: alone, {show_error(least)} of the budget"
