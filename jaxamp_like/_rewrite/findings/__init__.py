"""What a plan shows to be other than its user will have meant, as warnings.

Each module looks for one kind of it: keys of a policy that match nothing, contractions
that nothing lowers or quantises, float16 without a loss scale."""

from .unquantised import refuse_rules_with_state
from .warn import warn_of_findings

__all__ = ["refuse_rules_with_state", "warn_of_findings"]
