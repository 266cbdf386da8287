"""How many passes a calibration makes, on functions of which only errors are known."""

import math
import random
import sys
import warnings
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import example, given, settings, strategies as st

from jaxamp_like import AmpWarning, Budget, Policy
from jaxamp_like._calibrate.budget import Errors
from jaxamp_like._calibrate.candidates import as_candidates
from jaxamp_like._calibrate.costs import H200, ContractionCost
from jaxamp_like._calibrate.deciding import Deciding
from jaxamp_like._calibrate.marks import Contraction
from jaxamp_like._calibrate.measured_function import Point
from jaxamp_like._calibrate.program import MarkedProgram
from jaxamp_like._calibrate.runs import KEPT, Runs
from jaxamp_like._calibrate.search import Choices
from jaxamp_like._calibrate.state import MeasurementStore
from jaxamp_like._calibrate.survey import Survey
from jaxamp_like.reports import Calibration

BUDGET = 0.01
EIGHT = frozenset(["float8", "int8"])
MAX_PASSES = 26


class ImaginedProgram(MarkedProgram):
    def __post_init__(self) -> None:
        """There is nothing to trace."""


class Imagined(Runs):
    """Passes of a function whose errors are roots of sums of squares, and noise."""

    def __init__(
        self,
        errors: list[float],
        noise: float,
        seed: int,
        candidates: tuple[str, ...] = ("bfloat16",),
    ):
        unknown: Any = SimpleNamespace(
            budget=Budget(gradients=BUDGET), differentiates=True, loss_scale=1
        )
        lows = as_candidates(candidates)
        program = ImaginedProgram(unknown, unknown, lows, "scope")
        super().__init__(program, MeasurementStore(None, {}), print)
        self.errors, self.noise, self.seed = errors, noise, seed
        found = [Contraction((f"g{i}",), "dot_general", "") for i in range(len(errors))]
        work = {one: [ContractionCost(1.0, 1, 0, 1, 0, EIGHT)] for one in found}
        program.contractions = Survey(work, 0.0, {})
        self.compilations, self._last = 1, ""

    def _as_written(self, point: Point) -> Any:
        self.passes += 1
        return ()

    def repeated(self, point: Point) -> Errors:
        return self._measured(f"again {point.number}", point, 0.0)

    def chosen(self, choices: Choices, point: Point) -> Errors:
        return self._measured(f"{choices} {point.number}", point, self._error(choices))

    def mixed(self, policy: Any, name: str, point: Point) -> Errors:
        if policy == Policy("float32"):
            return self._measured(f"amp {name} {point.number}", point, 0.0)
        self.compilations += name != self._last
        self._last = name
        error = self._error(tuple(map(int, name)))
        return self._measured(f"amp {name} {point.number}", point, error)

    def _error(self, choices: Choices) -> float:
        pairs = zip(self.errors, choices, strict=True)
        # Each candidate errs more than those that are named before it.
        return BUDGET * math.hypot(*(e * 4 ** (c - 1) for e, c in pairs if c))

    def _measured(self, key: str, point: Point, error: float) -> Errors:
        if key not in self._asked:
            self._asked.add(key)
            self._count(point)
            self.reference(point)
            self.passes += 1
        assert sum(x is not None for x in self._references.values()) <= KEPT
        chance = random.Random(f"{self.seed} {key}").uniform(-1, 1)
        return Errors(gradients=error * (1 + self.noise) ** chance)


class ImaginedDeciding(Deciding):
    def _policy(self, choices: Choices) -> Policy:
        return Policy("bfloat16")


def run(
    errors: list[float],
    noise: float,
    seed: int,
    batches: int = 2,
    candidates: tuple[str, ...] = ("bfloat16",),
) -> Calibration:
    points = [Point(i, i, (), i, 0.01 * (i > 0), False) for i in range(batches)]
    checks = [Point(9 + i, 9, (), 9, 0.01 * (i == 1), True) for i in range(batches + 1)]
    runs = Imagined(errors, noise, seed, candidates)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", AmpWarning)
        deciding = ImaginedDeciding(runs, points, checks, "flops", H200, MAX_PASSES)
        return deciding.run()


several = st.sampled_from(
    [
        ("bfloat16",),
        ("bfloat16", "float8"),
        ("float16", "bfloat16", "int8"),
        ("float16", "bfloat16", "float8", "int8"),
    ]
)
groups = st.lists(
    st.floats(0.001, 3) | st.sampled_from((0.01, 30.0)), min_size=1, max_size=120
)


# The first policy misses the budget on the last batch that it is checked on.
@example([2, 1 / 64, 2, 0.375, 2, 0.625, 0.65625], 0.125, 59, ("bfloat16", "float8"))
@given(groups, st.floats(0, 0.3), st.integers(0, 99), several)
@settings(max_examples=120)
def test_a_calibration_makes_at_most_forty_passes_and_five_compilations(
    errors, noise, seed, candidates
):
    found = run(errors, noise, seed, candidates=candidates)
    assert found.passes <= 40 and found.compilations <= 5
    assert found.met


class WorseOnTheSecond(Imagined):
    """Errors are larger by 2 % on the second batch."""

    def _measured(self, key: str, point: Point, error: float) -> Errors:
        return super()._measured(key, point, error * (1.02 if point.number == 1 else 1))


def test_what_one_batch_misses_by_a_hair_costs_no_more_than_that(monkeypatch):
    monkeypatch.setattr(sys.modules[__name__], "Imagined", WorseOnTheSecond)
    found = run([0.35] * 8, 0.0, 0)  # all of them give 0.99, and 1.01 there
    assert found.met and found.low_share == 7 / 8


@given(groups, st.floats(0, 0.3), st.integers(0, 99))
@settings(max_examples=30)
def test_a_policy_meets_the_budget_on_every_batch_that_decided(errors, noise, seed):
    seen: dict[str, list[float]] = {}

    class Recording(Imagined):
        def mixed(self, policy: Any, name: str, point: Point) -> Errors:
            found = super().mixed(policy, name, point)
            seen.setdefault(name, []).append(found.gradients / BUDGET)
            return found

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys.modules[__name__], "Imagined", Recording)
        found = run(errors, noise, seed)
    if found.low_share:
        name = [*seen][-1]
        assert len(seen[name]) >= 5 and max(seen[name]) <= 1
