"""How many bytes a function keeps for its backward pass, under a policy."""

import warnings
from dataclasses import dataclass, replace
from typing import Any

from .._amp import amp
from .._policies.named import Policy
from .._policies.policy_map import PolicyMap
from .._reports.call import FlatCall
from .._reports.walk import residuals
from .._rewrite.record import Recorder
from .policies import Writer
from .program import MarkedProgram
from .search import Choices


@dataclass
class KeptBytes:
    """Counts what the forward pass of a program keeps; nothing is run.

    Args:
        program: what is measured."""

    program: MarkedProgram

    def __post_init__(self) -> None:
        self._counted: dict[Any, int] = {}

    @property
    def as_written(self) -> int:
        return self.under(None)

    @property
    def by_default(self) -> int:
        """Under the default policy, in the first 16-bit candidate."""
        return self.under(Policy(self.program.candidates[0].compute))

    def of(self, choices: Choices) -> int:
        """Under the policy of some choices."""
        return self.under(Writer(self.program).policy(choices))

    def under(self, policy: Policy | PolicyMap | None) -> int:
        """Under a policy; `None`: as written."""
        if policy not in self._counted:
            call = self.program.subject.call
            if policy is not None:
                mixed = amp(call.fn, amp_policy=policy, argnums=call.active)
                call = replace(call, fn=mixed)
            self._counted[policy] = _residual_bytes(call)
        return self._counted[policy]


def _residual_bytes(call: FlatCall) -> int:
    recorder = Recorder()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # what is run warns by itself
        jaxpr, num_outs = call.trace_residuals(recorder)
    return sum(one.num_bytes for one in residuals(jaxpr, num_outs, recorder.steps))
