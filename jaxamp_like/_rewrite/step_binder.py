"""What the parts of binding ask of a binder: the values of a program, and how to bind.

The class itself is in `bind`, which imports the modules that ask."""

from collections.abc import Iterable, Mapping
from typing import Any, Protocol

from .._dtypes import DType
from .._jax import Atom
from .._rules.low_bits import LowBits
from .._structural import HoistedWeights, Step
from .deduplication import Deduplicated
from .remat_mode import RematMode
from .views import Views


class NewBinder(Protocol):
    """Makes a binder for other values, by variable."""

    def __call__(
        self, env: dict[Any, Any], remat_mode: RematMode = ..., /
    ) -> "StepBinder": ...


class StepBinder(Protocol):
    """The values of a program, by variable, and how its steps are bound on them."""

    env: dict[Any, Any]
    remat_mode: RematMode
    views: Views
    deduplicated: Deduplicated
    hoisted_weights: HoistedWeights
    rounded_cotangents: Mapping[Any, int | None]
    kept_whole: frozenset[Any]

    @property
    def with_env(self) -> NewBinder: ...

    def bind(self, step: Step) -> list[Any]:
        """Binds a step, as it was decided."""
        ...

    def apply(self, step: Step, given: dict[int, Any] | None = None) -> list[Any]:
        """Casts the operands, but those that are `given`, and binds the primitive."""
        ...

    def operand(self, step: Step, i: int) -> Any:
        """An operand in the dtype in which its step reads it."""
        ...

    def read(self, atom: Any, dtype: DType | None) -> Any:
        """The value of `atom`, cast to `dtype` if that is given and differs."""
        ...

    def in_full(self, var: Any) -> Any:
        """The value of `var` in the author's dtype, in which cotangents add up."""
        ...

    def low_copies(
        self,
        variables: Iterable[Any],
        dtypes: Iterable[DType | None],
        bits: Mapping[Any, LowBits] = ...,
    ) -> list[Any]:
        """Low copies for the backward pass; `None` where no dtype is given.

        Those of variables in `bits` are in 8 bits."""
        ...

    def copy_in_8_bits(self, var: Any, dtype: DType | None, how: LowBits) -> Any:
        """A copy of `var`, as it is read in `dtype`: one for all that read it so."""
        ...

    def shared_low_dtype(self, var: Any) -> DType | None:
        """The dtype of a low value that is read more than once, else `None`."""
        ...

    def is_hoisted_cast(self, atom: Atom, dtype: DType | None) -> bool:
        """Whether the cast of the input that `atom` shows was made before the loop."""
        ...
