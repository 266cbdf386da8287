"""Casting rules: what a policy says for one equation; see `base`.

Rules that a function makes are in `by_pass`, `conditions`, `dot_algorithm` and
`saving_low`; `user_rules` says what a user may write for a rule."""

from .base import (
    INPUT_SOURCES as INPUT_SOURCES,
    Constants as Constants,
    Decision as Decision,
    Demand as Demand,
    EightBits as EightBits,
    Fact as Fact,
    Origin as Origin,
    Partner as Partner,
    Precision as Precision,
    RematSource as RematSource,
    Rule as Rule,
    Site as Site,
    author_dtype as author_dtype,
    held_in_full as held_in_full,
    is_full as is_full,
    out_facts_of as out_facts_of,
    sizes_of as sizes_of,
    survive as survive,
)
from .callback import Callback as Callback
from .computing import (
    UseOriginalPrecision as UseOriginalPrecision,
    UsePrecision as UsePrecision,
    in_solver as in_solver,
    use_compute_precision as use_compute_precision,
    use_compute_precision_wide_result as use_compute_precision_wide_result,
    use_original_precision as use_original_precision,
    use_original_precision_locally as use_original_precision_locally,
    use_precision as use_precision,
    use_widest_precision as use_widest_precision,
    why_as_written as why_as_written,
    why_written as why_written,
)
from .contracting import contract as contract
from .following import (
    ConvertAsWritten as ConvertAsWritten,
    follow_inputs as follow_inputs,
    keep_each_input as keep_each_input,
    keep_inputs as keep_inputs,
    low_if_read_low as low_if_read_low,
)
from .low_residuals import of_some as of_some, with_low_residuals as with_low_residuals
from .match import Match as Match
from .read_once import read_once as read_once
from .remat_barriers import (
    behind_barrier as behind_barrier,
    keeps_statistics as keeps_statistics,
    saved as saved,
    saved_on_tpus as saved_on_tpus,
    with_cotangent_barrier as with_cotangent_barrier,
)
from .sending import (
    FULL_SUMS as FULL_SUMS,
    Sent as Sent,
    send_low as send_low,
    sum_over_devices as sum_over_devices,
    summed_once as summed_once,
)
from .storing import (
    choose_exactly as choose_exactly,
    compute_in_full as compute_in_full,
    convert_exactly as convert_exactly,
    move_exactly as move_exactly,
    sort_exactly as sort_exactly,
    take_extremes as take_extremes,
)
