"""`saving_low`: a rule by which an op keeps low copies for its backward pass."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from .._dtypes import lowered
from .._primitives.matmul_precision import settled_bind
from . import Decision, Rule, Site
from .base import DelegatingRule
from .low_residuals import low_copies, with_low_residuals
from .user_rules import as_rule


@dataclass(frozen=True)
class SavingLow(DelegatingRule):
    """Decides as another rule; see `saving_low`."""

    rule: Rule

    @property
    def parts(self) -> tuple[Rule, ...]:
        return (self.rule,)

    def for_equation(self, params: dict[str, Any], avals: Sequence[Any]) -> Rule:
        return SavingLow(self.rule.for_equation(params, avals))

    def decide(self, site: Site) -> Decision:
        decision = self.rule.decide(site)
        if decision.bind is not None or site.primitive is None:
            return decision  # has a derivative of its own
        low = [read and lowered(read, site.compute_dtype) for read in decision.reads]
        if low == list(decision.reads):
            return decision
        is_low = decision.reads != site.authors
        op = settled_bind(site.primitive, decision.params, is_low)
        keeping = with_low_residuals(op, op)

        def bind(*operands):
            return keeping(operands, low_copies(operands, low))

        why = f"{decision.why}; keeps its inputs in {site.compute_dtype.name}"
        return decision._replace(bind=bind, why=why)


def saving_low(rule: Any) -> Rule:
    """Computes by `rule`, and keeps low copies of the inputs for the backward pass.

    The value is that of `rule`, to the bit; its derivative is that at inputs which were
    rounded to the compute dtype, computed again in the backward pass. It suits ops that
    compute in full and are cheap to run twice. What several ops share is better left to
    `amp(fn, lean=True)`, which keeps one low input for a whole remat region of them.

    Args:
        rule: a rule or a dtype, as in a policy.
    Returns:
        A rule to put in a policy.
    Raises:
        TypeError: `rule` is no rule.

    >>> from jax import lax
    >>> from jaxamp_like import default_amp_policy
    >>> from jaxamp_like.rules import use_original_precision
    >>> policy = default_amp_policy | {lax.exp_p: saving_low(use_original_precision)}

    Activations stored in few bits are due to Chakrabarti and Moseley, "Backprop with
    Approximate Activations for Memory-efficient Network Training", arXiv:1901.07988."""
    return SavingLow(as_rule(rule, "rule"))
