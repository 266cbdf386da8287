"""Eight CPU devices, quick compilation, a source of PRNG keys, a bound on memory."""
# ruff: noqa: E402  (the environment must be set before anything imports JAX or Keras)

import os

from benchmarks import xla_flags

xla_flags.add("--xla_force_host_platform_device_count=8", *xla_flags.QUICK)
os.environ["KERAS_BACKEND"] = "jax"

import gc
import itertools
import resource
from collections import Counter
from pathlib import Path
from weakref import WeakKeyDictionary
from zlib import crc32

import hypothesis
import jax
import jax.random as jr
import pytest

from jaxamp_like import _errors
from jaxamp_like._amp_mistakes import FLOAT16_BY_DEFAULT
from jaxamp_like._policies import settings

# Programs for tests to start, not to look for doctests in.
collect_ignore = ["nan_process.py", "two_processes.py", "sharded_process.py"]

pytest.register_assert_rewrite("tests.programs")

# How long an example takes says more about the machine than about the code.
hypothesis.settings.register_profile("untimed", deadline=None)
hypothesis.settings.load_profile("untimed")

MEMORY_LIMIT = 4 * 2**30


def memory() -> int:
    """Bytes that the process holds now; where that can't be read, at most so far."""
    statm = Path("/proc/self/statm")
    if statm.exists():
        return int(statm.read_text().split()[1]) * resource.getpagesize()
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


@pytest.fixture
def getkey():
    """A function that gives a new PRNG key at each call, the same in every run."""
    count = itertools.count()
    return lambda: jr.fold_in(jr.key(0), next(count))


@pytest.fixture(autouse=True)
def warn_afresh(monkeypatch):
    """A warning is given once in a process, and so once in each test.

    Many tests look at gradients in the default dtype, of which one warns."""
    monkeypatch.setattr(_errors, "_seen", {FLOAT16_BY_DEFAULT})
    monkeypatch.setattr(settings, "_wrapped_before", WeakKeyDictionary())


@pytest.fixture(autouse=True, scope="module")
def clear_caches():
    """Compiled programs stay in JAX's caches for good: with thousands, gigabytes."""
    yield
    if memory() > MEMORY_LIMIT:
        jax.clear_caches()
        gc.collect()


def is_on_diagonal(places: dict[str, int], main: str, sizes: dict[str, int]) -> bool:
    """Whether a combination of parameters is the one that its `main` one is run with.

    The n-th value of `main` goes with the n-th combination of the others, in turn, so
    that each of their combinations comes up as well."""
    turn = places[main]
    for name, size in sizes.items():
        if places[name] != turn % size:
            return False
        turn //= size
    return True


def is_in_sample(item: pytest.Item, place: int, every: int) -> bool:
    """Whether a test marked `sample` runs a case; other tests run others first.

    The mark may stand for a whole file: a test without parameters always runs."""
    if not hasattr(item, "callspec"):
        return True
    return (place + crc32(item.originalname.encode())) % every == 0


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items):
    """Leaves to a night what `cross` and `sample` take no part of."""
    values: dict[tuple[object, str], dict[int, int]] = {}  # the place of each, by `id`
    for item in items:
        for mark in item.iter_markers("cross"):
            places = {}
            for name in (*mark.args, *mark.kwargs):
                seen = values.setdefault((item.function, name), {})
                key = id(item.callspec.params[name])
                places[name] = seen.setdefault(key, len(seen))
            if not is_on_diagonal(places, mark.args[0], mark.kwargs):
                item.add_marker(pytest.mark.nightly)
    counts: Counter[object] = Counter()
    for item in items:
        mark = item.get_closest_marker("sample")
        if mark is not None and item.get_closest_marker("nightly") is None:
            if not is_in_sample(item, counts[item.function], *mark.args):
                item.add_marker(pytest.mark.nightly)
            counts[item.function] += 1


def pytest_collection_finish():
    """What was imported stays: the garbage collector need not look at it again.

    Nor often at what JAX's caches hold, which is most of what tests make. What modules
    of tests have wrapped is no user's, of whom `set_global_policy` would warn."""
    settings._wrapped_before.clear()
    gc.collect()
    gc.freeze()
    gc.set_threshold(20_000, 10, 50)
