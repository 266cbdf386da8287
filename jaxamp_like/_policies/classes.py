"""The table behind the default policy: which rule each group of primitives gets."""

from .._primitives import kinds
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

_FULL = use_original_precision


def _table() -> dict[str, Rule]:
    rows: list[tuple[str, Rule]] = [
        (kinds.COMPUTE, contract),
        (kinds.EXPONENTIAL, compute_in_full),
        (kinds.ACCUMULATING, compute_in_full),
        (kinds.ILL_CONDITIONED, compute_in_full),
        (kinds.SOURCES, _FULL),
        (kinds.ELEMENTWISE, compute_in_full),
        (kinds.RANGE_BOUND, compute_in_full),
        (kinds.SATURATING, compute_in_full),
        (kinds.COMPRESSING, compute_in_full),
        (kinds.SUMMING_FEW, sum_over_devices),
        ("add_any erfc reduce_window_sum", compute_in_full),
        # Its solver iterates to a tolerance that 16 bits may never reach.
        ("custom_linear_solve", _FULL),
        (kinds.MOVEMENT, move_exactly),
        (kinds.EXTREMES, take_extremes),
        (kinds.CHOICES, choose_exactly),
        (kinds.EACH, keep_each_input),
        (kinds.SENDING, send_low),
        ("sort", sort_exactly),
        ("convert_element_type", convert_exactly),
        (kinds.EXACT, compute_in_full),
        (kinds.NO_KERNEL, _FULL),
        (kinds.KERNELS, _FULL),
        (kinds.SPARSE, _FULL),
        (kinds.ASYNCHRONOUS, _FULL),
        (kinds.OUTSIDE, _FULL),
        (kinds.OPAQUE, _FULL),
    ]
    table: dict[str, Rule] = {}
    for names, rule in rows:
        for name in names.split():
            assert name not in table, f"{name} is classified twice"
            table[name] = rule
    return table


CLASSES: dict[str, Rule] = _table()
