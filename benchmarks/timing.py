"""Times steps on the device that is here: compiled together, run in turns."""

import statistics
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jax

MIN_SECONDS = 0.02  # of calls that are timed as one, or their dispatch would count
MOST_CALLS = 50

Make = Callable[[], Any]


def side_by_side(makers: Mapping[str, Make]) -> dict[str, Any]:
    """As `attempts_side_by_side`, but raises the first exception."""
    found = attempts_side_by_side(makers)
    for one in found.values():
        if isinstance(one, Exception):
            raise one
    return found


def attempts_side_by_side(
    makers: Mapping[str, Make], workers: int = 8
) -> dict[str, Any]:
    """Calls all of them, in threads: XLA's compiler leaves other threads alone.

    Args:
        makers: what is to be called.
        workers: how many run at once.
    Returns:
        What each returned, or the exception that it raised."""
    with ThreadPoolExecutor(workers) as pool:
        futures = {name: pool.submit(make) for name, make in makers.items()}
    return {
        name: future.exception() or future.result() for name, future in futures.items()
    }


def step_seconds(
    steps: Mapping[str, Callable[[], Any]], rounds: int
) -> dict[str, float]:
    """The median time of each step, in seconds.

    Rounds are interleaved, so that clocks that drift hit everyone alike. A short step
    is called several times before anything waits for it, as training loops do."""
    calls = {name: _calls(step) for name, step in steps.items()}
    times: dict[str, list[float]] = {name: [] for name in steps}
    for _ in range(rounds):
        for name, step in steps.items():
            times[name].append(_timed(step, calls[name]) / calls[name])
    return {name: statistics.median(found) for name, found in times.items()}


def _calls(step: Callable[[], Any]) -> int:
    _timed(step, 1)  # the first run warms up
    return min(MOST_CALLS, 1 + int(MIN_SECONDS / _timed(step, 1)))


def _timed(step: Callable[[], Any], calls: int) -> float:
    start = time.perf_counter()
    out = None
    for _ in range(calls):
        out = step()
    jax.block_until_ready(out)
    return time.perf_counter() - start
