"""Suites of other people, of which one is written here."""

import subprocess
import sys
from pathlib import Path

import pytest

SUITE = """
import jax, jax.numpy as jnp

X = jnp.linspace(0.1, 1.7, 9).reshape(3, 3)

def product(x):
    return jnp.sum(x @ x)

def test_same():
    assert jax.grad(product)(X).shape == X.shape

def test_numbers():
    assert jax.jit(product)(X) == product(X)

jit = jax.jit(inline=True) if jax.__version_info__ >= (0, 8) else jax.jit

@jit
def inlined(x):
    return x @ x

def test_numbers_of_a_decorated_function():
    assert jnp.all(inlined(X) == X @ X)

def test_exception():
    if jax.jit(product)(X) != product(X):
        raise RuntimeError("They differ.")

def test_fails_anyway():
    raise ValueError

def test_reads_a_number():
    jax.vjp(lambda x: x * bool(x[0, 0] > 0), X)
"""


@pytest.mark.nightly
def test_verdicts_on_a_suite(tmp_path):
    """What ends otherwise by an assertion is numbers, and else a finding."""
    suite = tmp_path / "suite"
    suite.mkdir()
    (suite / "test_theirs.py").write_text(SUITE)
    done = subprocess.run(
        [sys.executable, "-m", "tests.others", str(suite), "--out", str(tmp_path)],
        cwd=Path(__file__).parents[1],
        capture_output=True,
        text=True,
    )
    told = [x for x in done.stdout.splitlines() if x.startswith(("== /", "finding"))]
    empty, low, finding = told
    assert empty.endswith("{'same': 5, 'so under jit': 1}")
    assert low.endswith("{'same': 2, 'numbers': 2, 'finding': 1, 'so under jit': 1}")
    assert finding.startswith("finding: test_theirs.py::test_exception: ")
    assert "RuntimeError: They differ." in finding
    assert done.returncode == 1
