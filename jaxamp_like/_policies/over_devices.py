"""Policies whose sums over devices are float32."""

import reprlib
from collections.abc import Mapping
from typing import Any

from .._rules import FULL_SUMS
from .dictionary import AMP_DEFAULT, ByName, default_amp_policy

_KNOWN = frozenset({*FULL_SUMS, *FULL_SUMS.values()})


def full_sums_over_devices(
    policy: Mapping[Any, Any] = default_amp_policy,
) -> dict[Any, Any]:
    """Makes a policy whose sums over devices are computed in float32.

    By default a product that is split over devices is summed in the dtype that it has
    on one device, the compute dtype, and so are gradients of weights that all devices
    read. Each device's share is rounded, and in float16 it may be too small to be
    held where the sum is not: a mean over 1024 devices begins with shares that are
    2^10 times smaller. Float32 sums send twice the bytes. What is sent to be read by a
    contraction, such as a gathered weight, is sent low as by default. Shares are still
    rounded before they are cast up and summed; if they should not be, see
    `use_precision_by_pass(weight_gradient=wide())`.

    PyTorch sums in float32 too under `torch.amp` with distributed data parallel, and
    with `reduce_dtype=torch.float32` of fully sharded data parallel.

    Args:
        policy: a policy dict that extends the default policy.
    Returns:
        A policy dict.
    Raises:
        TypeError: `policy` does not extend the default policy.

    >>> from jaxamp_like import amp
    >>> from jaxamp_like.presets import full_sums_over_devices
    >>> mixed = amp(lambda w, x: x @ w, amp_policy=full_sums_over_devices())
    """
    table = policy.get(AMP_DEFAULT) if isinstance(policy, Mapping) else None
    if not isinstance(table, ByName) or _KNOWN.isdisjoint(dict(table.rules).values()):
        raise TypeError(
            "`policy` must be a dict of rules that extends the default policy, such as "
            f"`default_amp_policy | {{key: rule}}`, but got {reprlib.repr(policy)}. "
            "Other presets say themselves how they sum."
        )
    full = {key: FULL_SUMS.get(rule, rule) for key, rule in policy.items()}
    by_name = tuple((name, FULL_SUMS.get(rule, rule)) for name, rule in table.rules)
    return {**full, AMP_DEFAULT: ByName(by_name)}
