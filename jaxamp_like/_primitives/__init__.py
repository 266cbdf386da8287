"""What is known of JAX's primitives: facts, which no policy changes.

`table` has a row for each, `kinds` the sets that follow from it, `contractions` what a
contraction is, `derivative_rules` which equations hold an author's rule,
`matmul_precision` what a global setting makes of them, `fences` what XLA has to leave
where it is. Below this package stand only `_jax`, `_dtypes` and `_errors`."""

from .contractions import is_contraction as is_contraction
from .derivative_rules import RULED as RULED, holds_rule as holds_rule
from .kinds import (
    ADDING as ADDING,
    ASKING_SIGNS as ASKING_SIGNS,
    BROADCASTING as BROADCASTING,
    CHEAP as CHEAP,
    COLLECTIVES as COLLECTIVES,
    CONTRACTIONS as CONTRACTIONS,
    EACH_ALONE as EACH_ALONE,
    EXTREMES as EXTREMES,
    FANNING_OUT as FANNING_OUT,
    FIXED as FIXED,
    GATHERING as GATHERING,
    IDENTITIES as IDENTITIES,
    KEEPING_INPUTS as KEEPING_INPUTS,
    LINEAR as LINEAR,
    LOCAL as LOCAL,
    LOOKUPS as LOOKUPS,
    MOVES as MOVES,
    MOVING_VIEWS as MOVING_VIEWS,
    PART_VIEWS as PART_VIEWS,
    PLACING as PLACING,
    RANKING as RANKING,
    REDUCTIONS as REDUCTIONS,
    SATURATING as SATURATING,
    SUMMED_BACK as SUMMED_BACK,
    VIEWS as VIEWS,
    WHOLE_VIEWS as WHOLE_VIEWS,
    is_cheap as is_cheap,
    is_statistic as is_statistic,
    jumps as jumps,
    may_repeat as may_repeat,
    steep_operands as steep_operands,
)
from .table import TABLE as TABLE, Kind as Kind, those as those
