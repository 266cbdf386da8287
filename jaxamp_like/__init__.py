"""Automatic mixed precision for JAX.

The names here are those that most programs need. The others live in `rules`, `presets`,
`scaling`, `storage`, `reports` and `inference`; each can be imported from here too."""

import functools
from typing import Any

from . import (
    inference as inference,
    presets as presets,
    reports as reports,
    rules as rules,
    scaling as scaling,
    storage as storage,
)
from ._amp import amp as amp
from ._amp_stop import amp_stop as amp_stop
from ._calibrate import Budget as Budget, calibrate as calibrate
from ._certify.certify import certify as certify
from ._convert.artifact import load as load
from ._convert.convert import convert as convert
from ._delayed import (
    amp_with_state as amp_with_state,
    init_amp_state as init_amp_state,
)
from ._enable import enable_amp as enable_amp
from ._errors import AmpError as AmpError, AmpWarning as AmpWarning
from ._frameworks.scopes import scope_modules as scope_modules
from ._policies.dictionary import default_amp_policy as default_amp_policy
from ._policies.named import Policy as Policy
from ._policies.names import get_policy as get_policy
from ._policies.policy_map import PolicyMap as PolicyMap
from ._policies.settings import (
    global_policy as global_policy,
    set_global_policy as set_global_policy,
    using_policy as using_policy,
)
from ._reports import explain as explain, trace_numerics as trace_numerics
from ._rewrite.switch import disable_amp as disable_amp
from ._suggestions import refuse_name
from ._version import version as _found_version
from .scaling import (
    DynamicScalerState as DynamicScalerState,
    all_finite as all_finite,
    dynamic_scale_grad as dynamic_scale_grad,
    dynamic_scale_tx as dynamic_scale_tx,
    dynamic_scale_value_and_grad as dynamic_scale_value_and_grad,
    guard_step as guard_step,
    loss_scale_optimizer as loss_scale_optimizer,
)

__all__ = [
    "AmpError",
    "AmpWarning",
    "Budget",
    "DynamicScalerState",
    "Policy",
    "PolicyMap",
    "all_finite",
    "amp",
    "amp_stop",
    "amp_with_state",
    "calibrate",
    "certify",
    "convert",
    "default_amp_policy",
    "disable_amp",
    "dynamic_scale_grad",
    "dynamic_scale_tx",
    "dynamic_scale_value_and_grad",
    "enable_amp",
    "explain",
    "get_policy",
    "global_policy",
    "guard_step",
    "init_amp_state",
    "load",
    "loss_scale_optimizer",
    "scope_modules",
    "set_global_policy",
    "trace_numerics",
    "using_policy",
]


__version__: str  # read when it is asked for
_HOMES = rules, presets, scaling, storage, reports, inference
for _home in _HOMES:  # not where a type checker would take it for any name
    vars(_home).setdefault(
        "__getattr__", functools.partial(refuse_name, _home.__name__)
    )


def __dir__() -> list[str]:
    """What TAB offers: neither private modules nor what this module imports."""
    return [
        "__version__",
        *__all__,
        *(home.__name__[len(__name__) + 1 :] for home in _HOMES),
    ]


def __getattr__(name: str) -> Any:
    if name == "__version__":
        return _found_version()
    for home in _HOMES:
        if name in home.__all__:
            return getattr(home, name)
    refuse_name(__name__, name)
