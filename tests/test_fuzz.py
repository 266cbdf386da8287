"""A share of the cases as tests, and faults that they must find.

More of them, by a command: `python -m tests.fuzz --cases 100000 --jobs 2`."""

import dataclasses
import subprocess
import sys

import pytest

from .fuzz import planted, planted_gradients
from .fuzz.cases import SHARED, make_case, make_cases
from .fuzz.checks import check, forget
from .fuzz.shrink import shrink, size

PER_TEST = 80
FIRST, THEN, AT_NIGHT = 1, 4, 15  # tests

FIRSTS = [
    pytest.param(i * PER_TEST, marks=marks)
    for i, marks in enumerate(
        [()] * FIRST + [pytest.mark.rest] * THEN + [pytest.mark.nightly] * AT_NIGHT
    )
]


@pytest.mark.sample(2)
@pytest.mark.rest
@pytest.mark.parametrize("first", FIRSTS)
def test_cases(first):
    _check_all(range(first, first + PER_TEST))


@pytest.mark.rest
def test_cases_of_policies_that_quantise():
    _check_all(range(PER_TEST), kind="quantised")


def _check_all(seeds, kind=None):
    outcomes = {seed: check(make_case(seed, kind)) for seed in seeds}
    failures = {s: str(x.failure) for s, x in outcomes.items() if x.failure}
    assert not failures, "See `python -m tests.fuzz --cases 1 --seed ...`."
    # What fails as written says nothing: most cases must say something.
    assert sum(x.numbers for x in outcomes.values()) > 0.75 * PER_TEST


@pytest.mark.sample(2)
@pytest.mark.rest
@pytest.mark.parametrize(
    "name", ["dropped_cast", "wrong_operand", "lost_carry", "lost_scale"]
)
def test_a_planted_fault_is_found(name):
    """The others take more cases: `python -m tests.fuzz --planted NAME`."""
    assert planted.find(name, most=30 * SHARED) is not None


@pytest.mark.sample(4)
@pytest.mark.rest
@pytest.mark.parametrize("name", planted_gradients.OF_GRADIENTS)
def test_a_planted_fault_of_gradients_is_found(name):
    assert planted.find(name, most=planted_gradients.MOST) is not None


@pytest.mark.sample(2)
@pytest.mark.rest
@pytest.mark.parametrize("kind", ["wide", "scoped", "ruled", "contained", "tailed"])
def test_cases_of_a_kind(kind):
    _check_all(range(PER_TEST), kind=kind)


def test_a_seed_is_a_case():
    file = make_case(7).file()
    make_cases.cache_clear()
    assert file == make_case(7).file() != make_case(8).file()


def test_cases_in_a_row_share_a_program():
    cases = [make_case(seed) for seed in range(SHARED)]
    assert len({id(case.program) for case in cases}) == 1
    assert len({case.file() for case in cases}) == SHARED


def test_a_case_alone_is_as_among_others():
    first = dataclasses.replace(make_case(SHARED - 1), again=False)
    alone = check(first)
    forget()
    assert [check(make_case(seed)) for seed in range(SHARED)][-1] == alone


@pytest.mark.rest
def test_a_failing_case_becomes_small_and_runs_as_a_file(tmp_path):
    def holds_a_contraction(case):
        return "@" in case.program.function_code()

    case = next(
        c
        for c in map(make_case, range(0, 100 * SHARED, SHARED))
        if holds_a_contraction(c)
    )
    small = shrink(case, holds_a_contraction)
    assert size(small)[0] <= 2 and holds_a_contraction(small)
    file = tmp_path / "case.py"
    file.write_text(small.file("What is wrong."))
    ran = subprocess.run([sys.executable, file], capture_output=True, text=True)
    assert ran.returncode == 0, ran.stderr
    assert "difference" in ran.stdout
