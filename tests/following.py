"""A policy that decides op by op, by marks: what presets are made of.

Under it arithmetic between ops that run low is low, where the default policy computes
in full. It holds each of the rules that go by what is known of an op's operands and by
who reads its result, so that what they do is seen in one place."""

from jaxamp_like._policies.classes import CLASSES
from jaxamp_like._policies.dictionary import policy_by_name
from jaxamp_like._policies.presets.common import ByRange
from jaxamp_like._primitives import FIXED
from jaxamp_like._rules import (
    ConvertAsWritten,
    Rule,
    choose_exactly,
    move_exactly,
    sort_exactly,
    take_extremes,
)
from jaxamp_like._rules.storing import ComputeInFull
from jaxamp_like.rules import (
    follow_inputs,
    keep_each_input,
    keep_inputs,
    use_original_precision,
    use_original_precision_locally,
)

_BY_RANGE = ByRange(narrow=use_original_precision_locally, wide=follow_inputs)
_SMOOTH = ByRange(narrow=use_original_precision, wide=use_original_precision_locally)
_FEW = ByRange(narrow=use_original_precision_locally, wide=keep_each_input)

_ROWS: tuple[tuple[str, Rule], ...] = (
    ("add sub mul tanh erf atan asinh atan2 cbrt", follow_inputs),
    ("square integer_pow div sqrt logistic", _BY_RANGE),
    ("log log1p log2 rsqrt", _SMOOTH),
    ("add_any erfc reduce_window_sum", use_original_precision_locally),
    ("psum psum2 psum_invariant reduce_scatter", _FEW),
)


def _rule(name: str, rule: Rule) -> Rule:
    if name in FIXED:
        return rule
    if name == "convert_element_type":
        return ConvertAsWritten()
    if rule in (move_exactly, take_extremes, choose_exactly):
        return keep_inputs
    if rule == sort_exactly:
        return keep_each_input
    return use_original_precision if isinstance(rule, ComputeInFull) else rule


_TABLE = {name: _rule(name, rule) for name, rule in CLASSES.items()}

FOLLOWING = policy_by_name(
    _TABLE | {name: rule for names, rule in _ROWS for name in names.split()}
)
