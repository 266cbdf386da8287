"""What the parts of binding ask of a binder: the values of a program, and how to bind.

The class itself, with what each method does, is in `bind`: it imports the modules that
ask."""

from collections.abc import Iterable, Mapping
from typing import Any, Protocol

from .._dtypes import DType
from .._jax import Atom
from .._rules.low_bits import LowBits
from .._structural import HoistedWeights, Plan, Step
from .._structural.remat_mode import RematMode
from .._structural.views import Views
from .deduplication import Deduplicated
from .remat import Schedule


class NewBinder(Protocol):
    """Makes a binder for other values, by variable."""

    def __call__(
        self, env: dict[Any, Any], remat_mode: RematMode = ..., /
    ) -> "StepBinder": ...


class StepBinder(Protocol):
    """The values of a program, by variable, and how its steps are bound on them."""

    plan: Plan
    schedule: Schedule
    env: dict[Any, Any]
    remat_mode: RematMode
    views: Views
    deduplicated: Deduplicated
    hoisted_weights: HoistedWeights
    read_again: dict[Any, Any]

    @property
    def merges_reads(self) -> bool: ...

    @property
    def with_env(self) -> NewBinder: ...

    def bind(self, step: Step) -> list[Any]: ...

    def apply(self, step: Step, given: dict[int, Any] | None = None) -> list[Any]: ...

    def operand(self, step: Step, i: int) -> Any: ...

    def read(self, atom: Any, dtype: DType | None) -> Any: ...

    def in_full(self, var: Any) -> Any: ...

    def low_copies(
        self,
        variables: Iterable[Any],
        dtypes: Iterable[DType | None],
        bits: Mapping[Any, LowBits] = ...,
    ) -> list[Any]: ...

    def copy_in_8_bits(self, var: Any, dtype: DType | None, how: LowBits) -> Any: ...

    def shared_low_dtype(self, var: Any) -> DType | None: ...

    def is_hoisted_cast(self, atom: Atom, dtype: DType | None) -> bool: ...
