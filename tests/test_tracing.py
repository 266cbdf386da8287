"""The cost of tracing grows with the program, not with its square.

Counted in calls of the package's own functions: the same on every machine."""

import json
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest
from jax import lax

import jaxamp_like
from benchmarks import tracing
from jaxamp_like import amp

PACKAGE = str(Path(jaxamp_like.__file__).parent)


def calls(fn, *args):
    """How often a function of the package is called while `fn` is traced."""
    count = 0

    def profile(frame, event, arg):
        nonlocal count
        is_ours = frame.f_code.co_filename.startswith(PACKAGE)
        count += event == "call" and is_ours

    sys.setprofile(profile)
    try:
        jax.make_jaxpr(fn)(*args)
    finally:
        sys.setprofile(None)
    return count


def calls_by_size(make, contender, sizes):
    return [
        calls(program.written_by(contender), *program.args)
        for program in map(make, sizes)
    ]


def assert_linear(counts):
    """Of a size, twice that and four times that."""
    one, two, four = counts
    assert 0 < four - two <= 2.1 * (two - one), counts


GROWING = {name: case for name, case in tracing.CASES.items() if "scanned" not in name}


@pytest.mark.parametrize("contender", ("amp", "amp lean"))
@pytest.mark.parametrize("case", GROWING.values(), ids=GROWING)
def test_linear_in_the_size(case, contender):
    sizes = (2, 4, 8) if case.size_of == "layers" else (10, 20, 40)
    assert_linear(calls_by_size(case.make, contender, sizes))


@pytest.mark.parametrize("contender", ("amp", "amp lean"))
def test_a_scan_costs_the_same_for_any_number_of_layers(contender):
    few, many = calls_by_size(tracing.CASES["GPT scanned"].make, contender, (2, 64))
    assert few == many


def nested(wrap, depth):
    def fn(w, x):
        def inner(x):
            return jnp.tanh(x @ w)

        for _ in range(depth):
            inner = wrap(inner)
        return inner(x)

    return amp(fn, compute_dtype="bfloat16")


NESTS = {
    "jit": lambda fn: jax.jit(lambda x: x + fn(x)),
    "remat": lambda fn: jax.checkpoint(lambda x: x + fn(x)),
    "cond": lambda fn: lambda x: lax.cond(jnp.any(x > 0), fn, jnp.cos, x),
    "scan": lambda fn: (
        lambda x: lax.scan(lambda c, _: (c + fn(c), None), x, length=2)[0]
    ),
    "scan of low": lambda fn: (
        lambda x: lax.scan(lambda c, _: (fn(jnp.sin(c)), None), x, length=2)[0]
    ),
    "while": lambda fn: lambda x: lax.while_loop(lambda c: c[0, 0] < 3, fn, x),
}


@pytest.mark.parametrize("wrap", NESTS.values(), ids=NESTS)
def test_linear_in_the_depth(wrap):
    w, x = jnp.eye(8), jnp.ones((2, 8))
    calls(nested(wrap, 1), w, x)  # what is done once for all
    assert_linear([calls(nested(wrap, depth), w, x) for depth in (2, 4, 8)])


def test_the_command_prints_tables_and_writes_a_record(tmp_path, capsys):
    path = tmp_path / "record.json"
    options = "--largest 30 --repeats 1 --compile-to 10 --contenders float32 amp --json"
    tracing.main([*options.split(), str(path), "--cases", "a history in carries"])
    record = json.loads(path.read_text())
    assert record["versions"]["jax"] == jax.__version__
    history = record["a history in carries"]
    assert {*history["10"]["amp"]} == {"trace", "lower", "compile"}
    assert {*history["30"]["amp"]} == {"trace", "lower"}
    out = capsys.readouterr().out
    assert "growth" in out and "amp / float32" in out
