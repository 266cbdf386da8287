"""A plugin of pytest that puts `amp` around what a test hands to JAX's transforms.

It stands by itself, in a folder of its own on the path: a suite may have a package that
is called `tests`, too."""

import functools
import json
import re
import sys
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import equinox as eqx
import jax
import pytest

from jaxamp_like import amp

_jit = jax.jit


def jitted(fn: Callable[..., Any]) -> Callable[..., Any]:
    """`fn` under `jax.jit`, whose arguments and results need not be arrays."""

    @functools.wraps(fn)
    def run(*args: Any, **kwargs: Any) -> Any:
        arrays, others = eqx.partition((args, kwargs), eqx.is_array)
        results = []

        def flat(arrays: Any) -> Any:
            args, kwargs = eqx.combine(arrays, others)
            outs, rest = eqx.partition(fn(*args, **kwargs), eqx.is_array)
            results.append(rest)
            return outs

        return eqx.combine(_jit(flat)(arrays), results[0])

    return run


SETTINGS: dict[str, Callable[..., Any] | None] = {
    "as written": None,
    "jitted": jitted,
    "empty": functools.partial(amp, amp_policy={}),
    "bfloat16": functools.partial(amp, compute_dtype="bfloat16"),
}
"""What a function is put under. A test that ends otherwise under `jit` as well needs
functions that are not traced, or fails by JAX's own doing."""

TRANSFORMS = (
    "jit grad value_and_grad vjp jvp linearize jacfwd jacrev hessian".split()
)  # fmt: skip

_RAISED = "raised"

outcomes: dict[str, list[str]] = {}
"""By the name of a test, how it ended and what it raised."""


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("amp")
    group.addoption("--amp", choices=[*SETTINGS], default="as written")
    group.addoption("--outcomes", type=Path, help="where to write how tests ended")
    group.addoption("--sample", type=int, help="run so many cases of each test")


def pytest_configure(config: pytest.Config) -> None:
    wrap = SETTINGS[str(config.getoption("amp"))]
    if wrap is not None:
        for name in TRANSFORMS:
            setattr(jax, name, wrapping(getattr(jax, name), wrap))


def pytest_collection_modifyitems(
    config: pytest.Config, items: list[pytest.Item]
) -> None:
    size = config.getoption("--sample")
    if size is None:
        return
    cases: dict[str, list[pytest.Item]] = defaultdict(list)
    for item in items:
        # absl numbers the cases of a test, and pytest has them in brackets.
        cases[re.sub(r"\d+$", "", item.nodeid.partition("[")[0])].append(item)
    chosen = {id(item) for each in cases.values() for item in spread(each, size)}
    config.hook.pytest_deselected(items=[x for x in items if id(x) not in chosen])
    items[:] = [item for item in items if id(item) in chosen]


def spread(cases: list[pytest.Item], size: int) -> list[pytest.Item]:
    """So many of the cases of a test, from the first to the last."""
    if len(cases) <= size:
        return cases
    return [cases[i * len(cases) // size] for i in range(size)]


def wrapping(
    transform: Callable[..., Any], wrap: Callable[..., Any]
) -> Callable[..., Any]:
    """A transform whose function is wrapped, if a test or a library calls it.

    JAX's own calls and those of `amp` stay as they are."""

    @functools.wraps(transform)
    def transformed(*args: Any, **kwargs: Any) -> Any:
        caller = sys._getframe(1).f_globals.get("__name__", "").partition(".")[0]
        if caller in ("jax", "jaxamp_like"):
            return transform(*args, **kwargs)
        if not args and not kwargs.keys() & {"fun", "f"}:
            decorator = transform(**kwargs)  # as in `@jax.jit(donate_argnums=0)`
            return lambda fn: decorator(wrap(fn))
        if not args or not callable(args[0]):
            return transform(*args, **kwargs)
        return transform(wrap(args[0]), *args[1:], **kwargs)

    return transformed


@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]) -> Any:
    made = yield
    if call.excinfo is not None:
        text = str(call.excinfo.value).strip()
        first = text.splitlines()[0] if text else ""
        # All of its bases: a library may derive its own from what assertions raise.
        kinds = ",".join(kind.__name__ for kind in call.excinfo.type.__mro__[:-2])
        made.get_result().user_properties.append((_RAISED, f"{kinds}: {first}"))


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    if report.when != "call" and report.passed:
        return
    raised = str(dict(report.user_properties).get(_RAISED, ""))
    if report.failed or report.nodeid not in outcomes:
        outcomes[report.nodeid] = [report.outcome, raised]


def pytest_sessionfinish(session: pytest.Session) -> None:
    path = session.config.getoption("outcomes")
    if path is not None and not hasattr(session.config, "workerinput"):
        path.write_text(json.dumps(outcomes, indent=2) + "\n")
