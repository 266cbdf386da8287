"""Passes: the function as written, with a choice of roundings, and with a policy."""

import functools
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import jax
import numpy as np

from .._amp import amp
from .._dtypes import is_float
from .._errors import AmpError
from .._jax import Jaxpr, shown
from .._policies.named import Policy
from .._policies.policy_map import PolicyMap
from .budget import Errors, Row, compare, errors
from .candidates import FULL, Candidate
from .choosing import run_chosen
from .groups import Group, grouped
from .marks import Contraction, shadow
from .search import Choices, digits
from .state import State
from .subject import Point, Results, Subject
from .survey import Contractions, survey

KEPT = 3  # references that are held at a time; each is as large as the parameters


def traced(
    subject: Subject, point: Point, candidates: tuple[Candidate, ...]
) -> tuple[Jaxpr, Any]:
    """The program of a pass, with marks, and the structure of its results."""
    of = subject.call.live
    program = subject.program(lambda fn: shadow(fn, candidates, of))
    traced = jax.make_jaxpr(lambda *arrays: program(arrays), return_shape=True)
    jaxpr, shapes = traced(*point.arrays)
    return shown(jaxpr), jax.tree.structure(shapes)


@dataclass
class Runs:
    """Runs passes, counts them, and remembers what they showed.

    Args:
        subject: what is measured.
        jaxpr: its program with marks.
        tree: the structure of the program's results.
        first: a point, for the types of arguments.
        granularity: what is decided together.
        candidates: the low precisions.
        state: where measurements are remembered.
        tell: is called with a line about each pass.
        patterns: what shapes contractions are of, where these count."""

    subject: Subject
    jaxpr: Jaxpr
    tree: Any
    first: Point
    granularity: str
    candidates: tuple[Candidate, ...]
    state: State
    tell: Callable[[str], None]
    patterns: Mapping[Contraction, str] = field(default_factory=dict)
    passes: int = 0
    spent: int = 0  # passes but those held out; made now, or before a kill
    compilations: int = 0
    seconds: float = 0.0
    _references: dict[int, Results | None] = field(default_factory=dict)
    _asked: set[str] = field(default_factory=set)
    _mixed: dict[str, Any] = field(default_factory=dict)

    @functools.cached_property
    def contractions(self) -> Contractions:
        return survey(self.jaxpr)

    @functools.cached_property
    def groups(self) -> tuple[Group, ...]:
        return grouped(self.contractions.work, self.granularity, self.patterns)

    @property
    def nothing(self) -> Choices:
        """All groups as written."""
        return (0,) * len(self.groups)

    def takers(self, candidate: Candidate) -> list[int]:
        """The groups that may have a candidate."""
        return [i for i, one in enumerate(self.groups) if one.may_have(candidate)]

    def all_in(self, candidate: Candidate) -> Choices:
        """All groups in a candidate.

        Those that may not have it are in the compute dtype beside it, if that is a
        candidate, else in any other that they may have, or as written."""
        beside = Candidate(candidate.compute.name, candidate.compute)
        order = [candidate, beside, *self.candidates]
        known = [one for one in order if one in self.candidates]

        def choice(group: Group) -> int:
            fitting = (one for one in known if group.may_have(one))
            return next((1 + self.candidates.index(one) for one in fitting), 0)

        return tuple(map(choice, self.groups))

    def names(self, choices: Choices) -> list[str]:
        """What each group is computed in under `choices`."""
        known = [FULL, *(one.name for one in self.candidates)]
        return [known[choice] for choice in choices]

    def precisions(self, choices: Choices) -> dict[Contraction, str]:
        """What each contraction is computed in under `choices`."""
        pairs = zip(self.groups, self.names(choices), strict=True)
        return {one: name for group, name in pairs for one in group.contractions}

    # The programs.

    @functools.cached_property
    def _chosen(self) -> Callable[..., Results]:
        numbers = {
            one: i for i, group in enumerate(self.groups) for one in group.contractions
        }

        def run(arrays, choices):
            outs = run_chosen(self.jaxpr, numbers, choices, arrays)
            return jax.tree.unflatten(self.tree, outs)

        return self._compiled(run, np.zeros(len(self.groups), np.int32))

    def _compiled(self, run: Callable[..., Results], *more: Any) -> Any:
        """`run` for a point's arrays, moved as it says, and for more arguments."""

        def moved(seed, spread, arrays, *more):
            return run(self.subject.moved(seed, spread, arrays), *more)

        self.compilations += 1
        return jax.jit(moved).lower(*_args(self.first), *more).compile()

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
        """Whether what the function gives as written is at hand."""
        return point.number in self._references

    def _as_written(self, point: Point) -> Results:
        self.tell(f"as written, {point.name}")
        results = self._run(point, self.nothing)
        self._check(results, point)
        results = _floats(results)
        self.state.keep(point.number, [*results], beside=self._references)
        return results

    def _check(self, results: Results, point: Point) -> None:
        outs, grads = _compared(results, results)
        names = self.subject.names(results)
        bad = []
        for i, (name, row) in enumerate(zip(names, [*outs, *grads], strict=True)):
            # An infinite result is no mistake: a mask may be one.
            counts = i >= len(outs) or (i == 0 and self.subject.has_loss)
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
        """How far the function as written is from itself, run twice."""
        return self.chosen(self.nothing, point)

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

            of = self.subject.call.live

            def mix(fn):
                is_as_written = policy == Policy(FULL)
                return fn if is_as_written else amp(fn, amp_policy=policy, argnums=of)

            self._mixed[name] = self._compiled(self.subject.program(mix))
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
            self.state.add(key, errors(*rows, self.subject.has_loss))
        return self.state.measured[key]

    def _count(self, point: Point) -> None:
        """Counts a pass, and the one as written that it is compared with.

        The latter only if its results are not held. A calibration that goes on after a
        kill counts alike, so that it decides alike."""
        is_new = point.number not in self._references
        if is_new:
            while len(self._references) >= KEPT:
                # The first point is where sensitivities are measured.
                self._references.pop(max(self._references))
            self._references[point.number] = None
        self.spent += 0 if point.held_out else 1 + is_new


def _args(point: Point) -> tuple[Any, ...]:
    return np.uint32(point.seed), np.float32(point.spread), list(point.arrays)


def _compared(true: Results, got: Results) -> tuple[list[Row], list[Row]]:
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
