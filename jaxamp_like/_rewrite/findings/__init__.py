"""Warnings of what a plan shows and its user can't have meant.

Each module looks for one kind: keys of a policy that match nothing, contractions
that nothing lowers or quantises, float16 without a loss scale."""

from .unquantised import refuse_rules_with_state
from .warn import warn_of_findings

__all__ = ["refuse_rules_with_state", "warn_of_findings"]
