"""The rule that an equation got from a policy, and how it was found."""

from dataclasses import dataclass
from typing import Any

from .._dtypes import DType, bits
from .base import Demand, Rule, demand_in
from .low_bits import LowBits


@dataclass(frozen=True)
class Match:
    """A rule, and the key of the policy under which it was found."""

    key: Any
    rule: Rule
    by_scope: bool = False
    compute_dtype: DType | None = None  # `None`: that of the whole function
    also: tuple[Any, ...] = ()  # other keys that led here: maps, limits, `saving_low`
    as_written: bool = False  # the equation runs as written, whatever the rule is
    saves: LowBits | None = None  # how it is to keep what it reads, if a user said so

    def demand(self, params: dict[str, Any], wanted: Demand) -> Demand:
        """How operands are read; see `Rule.demand`."""
        if self.as_written:
            return Demand.FULL
        demand = self.rule.demand(params, wanted)
        dtype = self.compute_dtype
        return demand if dtype is None else demand_in(dtype, demand)

    @property
    def is_compute(self) -> bool:
        """Whether the equation makes low results whatever it reads."""
        is_low = self.compute_dtype is None or bits(self.compute_dtype) < 32
        return is_low and self.rule.is_compute and not self.as_written
