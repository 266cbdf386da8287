"""Binding what is gathered as rounded numbers; `gathers` says what is."""

import functools
from collections.abc import Sequence
from typing import Any

from .._dtypes import DType, cast, lowered
from .._primitives import PLACING
from .._quantised.gathered import (
    ForEachPass,
    GatheredNumbers,
    OnlyForward,
    gathered,
    is_gather,
)
from .._rules import Sent
from .._rules.constant import constant
from .._structural import Step
from .casts import moved_with_full_gradient
from .gathers import Gathers
from .step_binder import StepBinder


class Gathering:
    """The numbers that were gathered so far, while a program is bound."""

    def __init__(self, gathers: Gathers):
        self.gathers = gathers
        self.numbers: dict[tuple[Any, GatheredNumbers], Any] = {}
        self.parts: dict[Step, Any] = {}  # what gathers read

    def bind(self, binder: StepBinder, step: Step, low: DType) -> list[Any] | None:
        """Gathers the numbers that are read of a step's result, if it is a gather.

        Returns what stands in the place of its result; `None` where the step is to be
        bound as it was decided. `low` is its compute dtype."""
        eqn = step.eqn
        if not is_gather(eqn) or eqn.outvars[0] not in self.gathers.made:
            return None
        self._gather(binder, step)
        is_only_rounded = eqn.outvars[0] in self.gathers.only_rounded
        if not is_only_rounded and eqn.primitive.name not in PLACING:
            return None
        return [self._value(binder, step, low, is_only_rounded)]

    def hand_on(self, binder: StepBinder, step: Step) -> None:
        """Lets the contractions in a step read numbers that were gathered before it."""
        for path, var, numbers in self.gathers.read.get(step, ()):
            if path not in binder.hoisted_weights:
                made = [self._numbers(var, one) for one in numbers]
                if len(made) == 2:
                    one = ForEachPass(*made)
                elif var in self.gathers.only_rounded:
                    (one,) = made
                else:
                    one = OnlyForward(*made)
                binder.hoisted_weights = {**binder.hoisted_weights, path: one}

    def before_gathers(
        self, step: Step, operands: Sequence[Any]
    ) -> tuple[Sequence[Any], dict[str, Any]]:
        """Operands of a contraction, or what is gathered to make them, and how.

        A rule's `bind` takes both, see `rounded_contraction`."""
        operands = [*operands]
        gathers: list[Any] = [None] * len(operands)
        for i in range(len(operands)):
            gather = self.gathers.gathered_by_gradient.get((step, i))
            if gather is not None and gather in self.parts:
                operands[i] = cast(self.parts[gather], operands[i].dtype)
                gathers[i] = functools.partial(gathered, gather.eqn)
        return operands, {"gathers": tuple(gathers)} if any(gathers) else {}

    def _gather(self, binder: StepBinder, step: Step) -> None:
        (var,), (atom, *_) = step.eqn.outvars, step.eqn.invars
        for numbers in self.gathers.made[var]:
            before = numbers.before(step.eqn)
            assert before is not None
            if atom in self.gathers.made:  # it was gathered itself
                made = self._numbers(atom, before)
            else:
                is_parameter = var in self.gathers.of_parameters
                as_it_is = is_parameter and numbers.rounds_parameters_in_full
                made = before.made(
                    binder.env[atom] if as_it_is else binder.operand(step, 0)
                )
            self.numbers[var, numbers] = numbers.moved(step.eqn, made)

    def _numbers(self, var: Any, numbers: GatheredNumbers) -> Any:
        """The numbers of a value that was gathered, or of a view of one."""
        if (var, numbers) not in self.numbers:
            view = self.gathers.movers[var].eqn
            before = numbers.before(view)
            assert before is not None
            made = numbers.moved(view, self._numbers(view.invars[0], before))
            self.numbers[var, numbers] = made
        return self.numbers[var, numbers]

    def _value(
        self, binder: StepBinder, step: Step, low: DType, is_only_rounded: bool
    ) -> Any:
        """What a step gathers, for derivatives; its cotangents are sent in few bits.

        Where it is read as rounded numbers only, it is what these stand for, which
        sends nothing more. Else it is sent in the compute dtype."""
        (fact,), (var,) = step.decision.out_facts, step.eqn.outvars
        assert fact is not None
        low, decided = lowered(fact.dtype, low), step.decision.bind
        back = decided.back if isinstance(decided, Sent) else low

        def sent(x: Any, dtype: DType) -> Any:
            return cast(gathered(step.eqn, cast(x, dtype)), fact.dtype)

        operand = self.parts[step] = binder.operand(step, 0)
        if is_only_rounded:
            numbers = self.numbers[var, self.gathers.made[var][0]]
            value = cast(numbers.restored(), fact.dtype)
        else:
            value = sent(constant(operand), low)
        return moved_with_full_gradient(operand, value, lambda t: sent(t, back))
