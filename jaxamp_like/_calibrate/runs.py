"""Runs passes: of the function as written, with chosen roundings, and with a policy."""

import functools
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import jax
import numpy as np

from .._amp import amp
from .._dtypes import is_float
from .._errors import AmpError
from .._policies.named import Policy
from .._policies.policy_map import PolicyMap
from .._quantised.block_dot import emulated
from .budget import ArrayErrors, Errors, compare, errors
from .candidates import FULL
from .choosing import run_chosen
from .measured_function import Point, Results
from .program import MarkedProgram
from .search import Choices, digits
from .state import MeasurementStore

KEPT = 3  # results as written are held for so many points, each as large as parameters


@dataclass
class Runs:
    """Runs passes, counts them, and remembers what they showed.

    Args:
        program: what is run.
        state: where measurements are remembered.
        tell: a function that is called with a line about each pass."""

    program: MarkedProgram
    state: MeasurementStore
    tell: Callable[[str], None]
    passes: int = 0
    spent: int = 0  # passes on batches that are not held out, before a kill too
    compilations: int = 0
    seconds: float = 0.0
    _references: dict[int, Results | None] = field(default_factory=dict)
    _asked: set[str] = field(default_factory=set)
    _mixed: dict[str, Any] = field(default_factory=dict)

    # The programs.

    @functools.cached_property
    def _chosen(self) -> Callable[..., Results]:
        program = self.program
        pairs = enumerate(program.groups)
        numbers = {one: i for i, group in pairs for one in group.contractions}

        def run(arrays, choices):
            outs = run_chosen(program.jaxpr, numbers, choices, arrays)
            return jax.tree.unflatten(program.tree, outs)

        return self._compiled(run, np.zeros(len(program.groups), np.int32))

    def _compiled(self, run: Callable[..., Results], *more: Any) -> Any:
        """`run`, compiled for the arrays of a point and for `more` arguments.

        It first moves the parameters as the point says."""

        def moved(seed, spread, arrays, *more):
            return run(self.program.subject.moved(seed, spread, arrays), *more)

        self.compilations += 1
        return jax.jit(moved).lower(*_args(self.program.point), *more).compile()

    def _timed(self, program: Any, *args: Any) -> Results:
        self.passes += 1
        began = time.perf_counter()
        results = jax.block_until_ready(program(*args))
        self.seconds += time.perf_counter() - began
        return results

    def _run(self, point: Point, choices: Choices) -> Results:
        return self._timed(self._chosen, *_args(point), np.asarray(choices, np.int32))

    # What is measured.

    def reference(self, point: Point) -> Results:
        """What the function gives as written.

        Raises:
            AmpError: it is not finite."""
        known = self._references.get(point.number)
        if known is None:
            kept = self.state.kept(point.number)
            known = self._as_written(point) if kept is None else Results(*kept)
            self._references[point.number] = known
        return known

    def holds(self, point: Point) -> bool:
        """Whether the results of the function as written count as held at a point."""
        return point.number in self._references

    def _as_written(self, point: Point) -> Results:
        self.tell(f"as written, {point.name}")
        results = self._run(point, self.program.nothing)
        self._check(results, point)
        results = _floats(results)
        self.state.keep(point.number, [*results], beside=self._references)
        return results

    def _check(self, results: Results, point: Point) -> None:
        outs, grads = _compared(results, results)
        names = self.program.subject.names(results)
        bad = []
        for i, (name, row) in enumerate(zip(names, [*outs, *grads], strict=True)):
            # Infinities in a result are no mistake: it may be a mask.
            counts = i >= len(outs) or (i == 0 and self.program.subject.has_loss)
            if row.nans or (row.infs and counts):
                bad.append(f"{name} ({_of(int(row.nans), int(row.infs))})")
        if bad:
            more = f" and {len(bad) - 4} more" if len(bad) > 4 else ""
            raise AmpError(
                f"As written, without any low precision, {point.name} gives what is "
                f"not finite: {', '.join(bad[:4])}{more}. There is nothing to compare "
                "with. `trace_numerics(fn)(*batch)` tells where it arises; leave the "
                "batch out, or mend the function."
            )

    def repeated(self, point: Point) -> Errors:
        """The errors of a second run of the function as written against the first."""
        return self.chosen(self.program.nothing, point)

    def chosen(self, choices: Choices, point: Point) -> Errors:
        """The errors if contractions round by `choices`."""
        low = sum(map(bool, choices))
        what = f"{low} of {len(choices)} low" if low else "as written again"

        def run(point):
            self.tell(f"{what}, {point.name}")
            return self._run(point, choices)

        key = digits(choices) if low else "again"
        return self._measure(f"{key} {point.number}", point, run)

    def mixed(self, policy: Policy | PolicyMap, name: str, point: Point) -> Errors:
        """The errors of the function under a policy, as `amp` makes it."""

        def run(point):
            self.tell(f"the policy itself, {point.name}")
            return self._timed(self._program(policy, name), *_args(point))

        return self._measure(f"amp {name} {point.number}", point, run)

    def _program(self, policy: Policy | PolicyMap, name: str) -> Any:
        if name not in self._mixed:
            self._mixed.clear()  # one compiled program at a time

            of = self.program.subject.call.active

            def mix(fn):
                is_as_written = policy == Policy(FULL)
                return fn if is_as_written else amp(fn, amp_policy=policy, argnums=of)

            with emulated():
                self._mixed[name] = self._compiled(self.program.subject.program(mix))
        return self._mixed[name]

    def _measure(
        self, key: str, point: Point, run: Callable[[Point], Results]
    ) -> Errors:
        if key not in self._asked:
            self._asked.add(key)
            self._count(point)
        if key not in self.state.measured:
            true = self.reference(point)
            rows = _compared(true, run(point))
            self.state.add(key, errors(*rows, self.program.subject.has_loss))
        return self.state.measured[key]

    def _count(self, point: Point) -> None:
        """Counts a pass, and the pass as written that it is compared with.

        The latter counts only if its results are not held. A calibration that goes on
        after a kill counts in the same way, and so decides in the same way."""
        is_new = point.number not in self._references
        if is_new:
            while len(self._references) >= KEPT:
                # The first point goes last, since sensitivities are measured there.
                self._references.pop(max(self._references))
            self._references[point.number] = None
        self.spent += 0 if point.held_out else 1 + is_new


def _args(point: Point) -> tuple[Any, ...]:
    return np.uint32(point.seed), np.float32(point.spread), list(point.arrays)


def _compared(
    true: Results, got: Results
) -> tuple[list[ArrayErrors], list[ArrayErrors]]:
    """Rows of the floating results, and of the gradients."""
    outs, grads = (
        [compare(a, b) for a, b in zip(*arrays, strict=True)]
        for arrays in zip(_floats(true), _floats(got), strict=True)
    )
    return outs, grads


def _floats(results: Results) -> Results:
    return Results(*([x for x in some if is_float(x.dtype)] for some in results))


def _of(nans: int, infs: int) -> str:
    parts = [f"{n} {what}" for n, what in ((nans, "NaN"), (infs, "infinite")) if n]
    return " and ".join(parts)
