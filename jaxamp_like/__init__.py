"""Automatic mixed precision for JAX."""

from ._amp import amp as amp, amp_stop as amp_stop
from ._convert.artifact import Artifact as Artifact, load as load
from ._convert.convert import convert as convert
from ._convert.converted import Converted as Converted
from ._convert.folder import ArtifactError as ArtifactError
from ._convert.summary import Summary as Summary
from ._enable import enable_amp as enable_amp
from ._errors import AmpError as AmpError, AmpWarning as AmpWarning
from ._frameworks.scopes import scope_modules as scope_modules
from ._loss_scale import (
    DynamicScalerState as DynamicScalerState,
    LossScaleState as LossScaleState,
    NonFiniteLeaf as NonFiniteLeaf,
    NoScaler as NoScaler,
    ScalerEvent as ScalerEvent,
    ScalerLog as ScalerLog,
    Unscaled as Unscaled,
    all_finite as all_finite,
    check_scaler as check_scaler,
    dynamic_scale_grad as dynamic_scale_grad,
    dynamic_scale_tx as dynamic_scale_tx,
    dynamic_scale_value_and_grad as dynamic_scale_value_and_grad,
    guard_step as guard_step,
    loss_scale_optimizer as loss_scale_optimizer,
    merge_scalers as merge_scalers,
    overflowed_leaves as overflowed_leaves,
    restore_scaler as restore_scaler,
    scale_loss as scale_loss,
    static_scaler as static_scaler,
    unscale_grads as unscale_grads,
)
from ._policies.dictionary import default_amp_policy as default_amp_policy
from ._policies.named import Policy as Policy
from ._policies.names import get_policy as get_policy
from ._policies.policy_map import PolicyMap as PolicyMap
from ._policies.presets import (
    full_precision as full_precision,
    jaxamp as jaxamp,
    jmp as jmp,
    mxnet as mxnet,
    pytorch_autocast as pytorch_autocast,
    tensorflow_graph_rewrite as tensorflow_graph_rewrite,
)
from ._policies.settings import (
    global_policy as global_policy,
    set_global_policy as set_global_policy,
    using_policy as using_policy,
)
from ._reports import (
    NumericsReport as NumericsReport,
    Report as Report,
    ScalerHistory as ScalerHistory,
    explain as explain,
    trace_numerics as trace_numerics,
)
from ._rewrite.switch import disable_amp as disable_amp
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
