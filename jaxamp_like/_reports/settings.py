"""Settings, keys and rules, as the user would write them."""

import functools
from typing import Any

import jax.numpy as jnp

from .. import _rules
from .._jax import Primitive
from .._policies.codec import RULE_NAMES
from .._policies.dictionary import ByName
from .._policies.limit import LimitedPolicy
from .._policies.named import DTYPE_FIELDS, Policy
from .._policies.names import name_of
from .._policies.presets.common import ByRange
from .._rewrite.planner import Planner
from .._rewrite.record import Recorder
from .._rules import Callback


def settings_of(recorder: Recorder) -> tuple[str, ...]:
    """The settings of each `amp` that was traced, in words."""
    return tuple(dict.fromkeys(_settings(planner) for planner, _ in recorder.plans))


def _settings(planner: Planner) -> str:
    text = f"compute_dtype={planner.compute_dtype.name}" + ", strict" * planner.strict
    if planner.lean:
        named = isinstance(planner.lean, str)
        text += f", lean={planner.lean}" if named else ", lean"
    policy = planner.policy
    rules = dict(policy.items())
    own = [f"{key_name(key)}: {rule_name(rules[key])}" for key in policy.own_keys()]
    if isinstance(policy, LimitedPolicy) and policy.limit.predicate is not None:
        own.append(repr(policy.limit))
    return text + (f", {', '.join(own)}" if own else "")


def key_name(key: Any) -> str:
    if key is None:
        return "(none)"
    if isinstance(key, Primitive):
        return key.name
    return getattr(key, "pattern", key)


@functools.lru_cache(maxsize=1024)
def rule_name(rule: Any) -> str:
    """The text that a user would write for this rule (or limit, or policy)."""
    if isinstance(rule, str):
        return rule
    if rule in RULE_NAMES:
        return RULE_NAMES[rule]
    if isinstance(rule, Callback):
        return getattr(rule.fn, "__name__", repr(rule.fn))
    if isinstance(rule, Policy):
        return _policy_name(rule)
    dtype = getattr(rule, "dtype", None)
    if dtype is not None and rule == _rules.use_precision(dtype):
        return f"use_precision({jnp.dtype(dtype).name!r})"
    if isinstance(rule, ByRange):
        return f"{rule_name(rule.narrow)} if float16 else {rule_name(rule.wide)}"
    return "by primitive" if isinstance(rule, ByName) else repr(rule)


def _policy_name(policy: Policy) -> str:
    """A policy in few words: what is long in it, such as its rules, is not shown."""
    if name := name_of(policy):
        return repr(name)
    fields = [
        f"{name}={x.name!r}" if hasattr(x, "name") else f"{name}=..."
        for name in (*DTYPE_FIELDS, "rules", "limit", "measured")
        if (x := getattr(policy, name)) is not None
    ]
    return f"Policy({', '.join(fields)})"
