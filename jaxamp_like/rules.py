"""Casting rules: what a policy says for a primitive or a scope.

They are the values of a policy dict: `default_amp_policy | {"attention": keep_inputs}`.
A dtype stands for `use_precision(dtype)`, and any function
`rule(compute_dtype, original_dtypes, *invars, **bind_params)` that returns
`(invars, bind_params)` for a rule of your own."""

from ._quantised import (
    float8 as float8,
    int4 as int4,
    int8 as int8,
    mxfp8 as mxfp8,
    nvfp4 as nvfp4,
    worth_eight_bits as worth_eight_bits,
)
from ._rules import (
    Rule as Rule,
    Site as Site,
    follow_inputs as follow_inputs,
    keep_each_input as keep_each_input,
    keep_inputs as keep_inputs,
    send_low as send_low,
    use_compute_precision as use_compute_precision,
    use_compute_precision_wide_result as use_compute_precision_wide_result,
    use_original_precision as use_original_precision,
    use_original_precision_locally as use_original_precision_locally,
    use_precision as use_precision,
    use_widest_precision as use_widest_precision,
)
from ._rules.by_pass import (
    use_precision_by_pass as use_precision_by_pass,
    wide as wide,
)
from ._rules.conditions import (
    not_divisible_by as not_divisible_by,
    param_is as param_is,
    smaller_than as smaller_than,
    sums_more_than as sums_more_than,
    when as when,
)
from ._rules.dot_algorithm import use_dot_algorithm as use_dot_algorithm
from ._rules.saving_low import saving_low as saving_low

__all__ = [
    "Rule",
    "Site",
    "float8",
    "follow_inputs",
    "int4",
    "int8",
    "keep_each_input",
    "keep_inputs",
    "mxfp8",
    "not_divisible_by",
    "nvfp4",
    "param_is",
    "saving_low",
    "send_low",
    "smaller_than",
    "sums_more_than",
    "use_compute_precision",
    "use_compute_precision_wide_result",
    "use_dot_algorithm",
    "use_original_precision",
    "use_original_precision_locally",
    "use_precision",
    "use_precision_by_pass",
    "use_widest_precision",
    "when",
    "wide",
    "worth_eight_bits",
]
