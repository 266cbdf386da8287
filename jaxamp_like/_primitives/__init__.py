"""What is known of JAX's primitives: facts, which no policy changes.

`kinds` groups them and says what their derivatives keep, `contractions` what a
contraction is, `derivative_rules` which equations hold an author's rule,
`matmul_precision` what a global setting makes of them, `fences` what XLA has to leave
where it is. Below this package stand only `_jax`, `_dtypes` and `_errors`."""

from .contractions import is_contraction as is_contraction
from .derivative_rules import RULED as RULED, holds_rule as holds_rule
from .kinds import (
    CHEAP as CHEAP,
    CONTRACTIONS as CONTRACTIONS,
    EACH_ALONE as EACH_ALONE,
    FIXED as FIXED,
    IDENTITIES as IDENTITIES,
    KEEPING_INPUTS as KEEPING_INPUTS,
    LINEAR as LINEAR,
    RANKING as RANKING,
    VIEWS as VIEWS,
    is_cheap as is_cheap,
    is_statistic as is_statistic,
)
