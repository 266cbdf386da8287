"""Automatic mixed precision for JAX."""

from ._amp import amp as amp, amp_stop as amp_stop
from ._conditions import (
    not_divisible_by as not_divisible_by,
    param_is as param_is,
    smaller_than as smaller_than,
    sums_more_than as sums_more_than,
    when as when,
)
from ._errors import AmpError as AmpError, AmpWarning as AmpWarning
from ._loss_scale import (
    DynamicScalerState as DynamicScalerState,
    all_finite as all_finite,
    check_scaler as check_scaler,
    dynamic_scale_grad as dynamic_scale_grad,
    dynamic_scale_tx as dynamic_scale_tx,
    dynamic_scale_value_and_grad as dynamic_scale_value_and_grad,
)
from ._policy import default_amp_policy as default_amp_policy
from ._presets import (
    full_precision as full_precision,
    jaxamp as jaxamp,
    jmp as jmp,
    mxnet as mxnet,
    pytorch_autocast as pytorch_autocast,
    tensorflow_graph_rewrite as tensorflow_graph_rewrite,
)
from ._report import (
    NumericsReport as NumericsReport,
    Report as Report,
    ScalerHistory as ScalerHistory,
    explain as explain,
    trace_numerics as trace_numerics,
)
from ._rules import (
    Rule as Rule,
    Site as Site,
    follow_inputs as follow_inputs,
    keep_each_input as keep_each_input,
    keep_inputs as keep_inputs,
    use_compute_precision as use_compute_precision,
    use_compute_precision_wide_result as use_compute_precision_wide_result,
    use_original_precision as use_original_precision,
    use_original_precision_locally as use_original_precision_locally,
    use_precision as use_precision,
    use_widest_precision as use_widest_precision,
)
