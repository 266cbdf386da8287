"""What the rewrite tells a report, while a function is traced for one.

Nothing is recorded unless a report asks, and then for the current thread only. The
report's trace has planners of its own, so it neither reads nor leaves anything in the
caches of ordinary ones; and every equation that is bound carries, as one more name
scope, the number of the step that it was made for. Names survive differentiation, remat
and loops, so a report can tell of every equation, backward ones too, which decision it
comes from: the very `Step` that was bound, not a second guess."""

import contextlib
from collections.abc import Iterable, Iterator
from contextvars import ContextVar
from dataclasses import dataclass, field

import jax
import jax.numpy as jnp

from .._primitives import CONTRACTIONS
from .._recording import recorder_in_force as _current
from .._structural import Plan, Step
from .._within import within
from .planner import Planner

STEP_SCOPE = "amp_equation:"


def number_in(scope: str) -> int | None:
    """The number of the step that a scope of the library names; None of another."""
    number = scope.removeprefix(STEP_SCOPE)
    is_ours = number != scope and number.isdecimal()
    return int(number) if is_ours else None


@dataclass(eq=False)
class Recorder:
    """Collects what is planned and bound while it records.

    With `as_written`, `amp` does nothing: what is traced is the author's program."""

    as_written: bool = False
    steps: list[Step] = field(default_factory=list)
    plans: list[tuple[Planner, Plan]] = field(default_factory=list)
    _numbers: dict[Step, int] = field(default_factory=dict)
    _planners: dict[Planner, Planner] = field(default_factory=dict)

    def number(self, step: Step) -> int:
        if step not in self._numbers:
            self._numbers[step] = len(self.steps)
            self.steps.append(step)
        return self._numbers[step]

    def planner_for(self, planner: Planner) -> Planner:
        if planner not in self._planners:
            self._planners[planner] = planner.without_memory()
        return self._planners[planner]


_NOTHING = contextlib.nullcontext()


@contextlib.contextmanager
def recording(recorder: Recorder) -> Iterator[Recorder]:
    with within(_current, recorder):
        yield recorder


def amp_is_off() -> bool:
    recorder = _current.get()
    return recorder is not None and recorder.as_written


def not_as_written() -> contextlib.AbstractContextManager[None]:
    """A context in which `amp` rewrites, even if all else is traced as written.

    It is for a model whose parameters are stored low: its program as written, without
    the casts, would not fit them."""
    return within(_current, None) if amp_is_off() else _NOTHING


def planner_in_force(planner: Planner) -> Planner:
    recorder = _current.get()
    return planner if recorder is None else recorder.planner_for(planner)


_with_contractions: ContextVar[int] = ContextVar("plans with contractions", default=0)
_in_float16: ContextVar[int] = ContextVar("plans in float16", default=0)


def plans_with_contractions() -> int:
    """How many programs that contract `amp` has rewritten, in this thread or task."""
    return _with_contractions.get()


def plans_in_float16() -> int:
    """How many programs it has rewritten to compute in float16."""
    return _in_float16.get()


def contracts(steps: Iterable[Step]) -> bool:
    return any(step.eqn.primitive.name in CONTRACTIONS for step in steps)


def record_plan(planner: Planner, plan: Plan, steps: Iterable[Step]) -> None:
    _with_contractions.set(_with_contractions.get() + contracts(steps))
    _in_float16.set(_in_float16.get() + (planner.compute_dtype == jnp.float16))
    recorder = _current.get()
    if recorder is not None:
        recorder.plans.append((planner, plan))


def in_step_scope(step: Step) -> contextlib.AbstractContextManager[object]:
    """A context to bind `step` in: it marks the equations if a report listens."""
    recorder = _current.get()
    if recorder is None:
        return _NOTHING
    return jax.named_scope(f"{STEP_SCOPE}{recorder.number(step)}")
