"""The table behind the default policy: which rule each kind of primitive gets."""

from .._primitives import TABLE, Kind
from .._rules import (
    Rule,
    choose_exactly,
    compute_in_full,
    contract,
    convert_exactly,
    keep_each_input,
    move_exactly,
    send_low,
    sort_exactly,
    sum_over_devices,
    take_extremes,
    use_original_precision,
)

RULES: dict[Kind, Rule] = {
    Kind.CONTRACTION: contract,
    Kind.FUNCTION: compute_in_full,
    Kind.CONVERSION: convert_exactly,
    Kind.MOVEMENT: move_exactly,
    Kind.EXTREME: take_extremes,
    Kind.CHOICE: choose_exactly,
    Kind.SORT: sort_exactly,
    Kind.SEVERAL: keep_each_input,
    Kind.SENDING: send_low,
    Kind.SUM_OVER_DEVICES: sum_over_devices,
    Kind.SOLVER: use_original_precision,
    Kind.FIXED: use_original_precision,
}

CLASSES: dict[str, Rule] = {name: RULES[row.kind] for name, row in TABLE.items()}
