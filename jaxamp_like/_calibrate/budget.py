"""What error is allowed, and how it is measured."""

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from .._rules.user_rules import is_number


@dataclass(frozen=True)
class _Errors:
    """A number for each kind of error: a limit in a `Budget`, measured in `Errors`."""

    loss: float | None = None
    outputs: float | None = None
    gradients: float | None = None
    cosine: float | None = None
    worst_leaf: float | None = None
    overflow: float = 0.0


ERRORS = ("loss", "outputs", "gradients", "cosine", "worst_leaf")


@dataclass(frozen=True, repr=False)
class Budget(_Errors):
    """How far a mixed function may be from the function as written.

    Every limit that is given must be met, on each batch.

    Args:
        loss: the error of the loss, the first result, relative to the loss.
        outputs: the error of all floating results as one vector, relative to its norm.
        gradients: the error of the gradient as one vector, relative to its norm.
        cosine: 1 minus the cosine of the angle between the gradients.
        worst_leaf: the largest relative error of the gradient of a single parameter. It
            is of no use where a gradient would be zero without rounding errors.
        overflow: the share of numbers that are finite as written and not in mixed
            precision, results and gradients together.
    Raises:
        ValueError: a limit is negative or no number, or none but `overflow` is given.

    >>> Budget(gradients=0.01)
    Budget(gradients=0.01)
    """

    def __post_init__(self) -> None:
        limits = asdict(self)
        for name, limit in limits.items():
            if limit is None:
                continue
            if not is_number(limit) or not 0 <= limit < math.inf:
                raise ValueError(
                    f"`{name}` of a `Budget` must be a number of at least 0, such as "
                    f"0.01 for one percent, but got {limit!r}."
                )
            # A number of NumPy's would be written to files so that it can't be read.
            object.__setattr__(self, name, float(limit))
        if not self.limits():
            raise ValueError(
                "A `Budget` needs a limit on an error: `Budget(gradients=0.01)`, or on "
                "`loss`, `outputs`, `cosine` or `worst_leaf`."
            )

    def limits(self) -> dict[str, float]:
        """The limits that were given, without that on `overflow`."""
        given = {name: getattr(self, name) for name in ERRORS}
        return {name: limit for name, limit in given.items() if limit is not None}

    @property
    def needs_gradients(self) -> bool:
        return bool(self.limits().keys() & {"gradients", "cosine", "worst_leaf"})

    def __repr__(self) -> str:
        given = self.limits() | ({"overflow": self.overflow} if self.overflow else {})
        return f"Budget({', '.join(f'{k}={v!r}' for k, v in given.items())})"


@dataclass(frozen=True)
class Errors(_Errors):
    """Measured errors, of the kinds of a `Budget`; `None` for what does not exist."""

    def over(self, budget: Budget) -> float:
        """How many budgets this error is: up to 1, all limits are met.

        It is infinite if too many numbers overflow. Of a cosine's share the square root
        counts, which is proportional to an error as the other shares are."""
        if self.overflow > budget.overflow:
            return math.inf
        shares = [0.0]
        for name, limit in budget.limits().items():
            share = _share(getattr(self, name), limit)
            shares.append(math.sqrt(share) if name == "cosine" else share)
        return max(shares)

    def __or__(self, other: "Errors") -> "Errors":
        """The worst of both."""

        def worst(name: str) -> float | None:
            both = (getattr(self, name), getattr(other, name))
            return max((x for x in both if x is not None), default=None)

        found: Any = {f.name: worst(f.name) for f in fields(self)}
        return Errors(**found)


def _share(error: float | None, limit: float) -> float:
    if error is None or not math.isfinite(error):
        return math.inf
    return error / limit if limit else (math.inf if error else 0.0)


class ArrayErrors(NamedTuple):
    """What is measured of one array, compared with the array as written.

    The sums are over numbers that are finite in both, after a division by `scale`."""

    scale: float  # the largest finite magnitude in the array as written
    error: float  # the sum of squares of the difference,
    true: float  # of the array as written,
    got: float  # and of the other array
    lost: float  # how many numbers are finite as written only
    nans: float  # how many numbers of the array as written are NaN,
    infs: float  # and how many are infinite
    size: int


@jax.jit
def _compare(true: Any, got: Any) -> Any:
    dtype = jnp.promote_types(true.dtype, jnp.float32)
    true, got = true.astype(dtype).reshape(-1), got.astype(dtype).reshape(-1)
    fine = jnp.isfinite(true)
    both = fine & jnp.isfinite(got)
    top = jnp.max(jnp.where(fine, jnp.abs(true), 0), initial=0)
    scale = jnp.maximum(top, jnp.finfo(dtype).tiny)
    a, b = jnp.where(both, true / scale, 0), jnp.where(both, got / scale, 0)
    counts = [x.astype(dtype) for x in (fine & ~both, jnp.isnan(true), ~fine)]
    # One reduction of a stack, which compiles in a fraction of the time of many.
    sums = jnp.sum(jnp.stack([(a - b) ** 2, a * a, b * b, *counts]), axis=1)
    return jnp.concatenate([scale[None], sums])


def compare(true: Any, got: Any) -> ArrayErrors:
    """Compares one floating array with the array as written."""
    found = map(float, np.asarray(_compare(true, got)))
    scale, error, aa, bb, lost, nans, strange = found
    return ArrayErrors(scale, error, aa, bb, lost, nans, strange - nans, true.size)


def errors(
    outs: Sequence[ArrayErrors], grads: Sequence[ArrayErrors], has_loss: bool
) -> Errors:
    """The errors that follow from the rows of results and gradients."""
    rows = [*outs, *grads]
    num_lost = sum(row.lost for row in rows)
    gradient = _total(grads)
    return Errors(
        loss=_of_loss(outs[0]) if has_loss else None,
        outputs=_relative(_total(outs)),
        gradients=_relative(gradient) if grads else None,
        cosine=_one_minus_cosine(gradient) if grads else None,
        worst_leaf=max((_relative(_total([row])) for row in grads), default=None),
        overflow=num_lost / max(sum(row.size for row in rows), 1),
    )


def _total(rows: Sequence[ArrayErrors]) -> tuple[float, float, float]:
    """The sums of all rows together."""
    error, true, got = (
        math.fsum(row[i] * row.scale**2 for row in rows) for i in (1, 2, 3)
    )
    return error, true, got


def _of_loss(row: ArrayErrors) -> float:
    return math.inf if row.lost else _relative(_total([row]))


def _relative(sums: tuple[float, float, float]) -> float:
    error, true, _ = sums
    return math.sqrt(error / true) if true else (math.inf if error else 0.0)


def _one_minus_cosine(sums: tuple[float, float, float]) -> float:
    # This is |a/|a| - b/|b||^2 / 2, which cancels less than 1 - ab/|a||b| would.
    error, true, got = sums
    if not true or not got:
        return 1.0 if true != got else 0.0
    a, b = math.sqrt(true), math.sqrt(got)
    return max(0.0, (error - (a - b) ** 2) / (2 * a * b))


def as_budget(value: Any, has_loss: bool) -> Budget:
    """The argument `budget`: a number limits gradients, or results if there is no loss.

    Raises:
        TypeError: it is neither a number nor a `Budget`.
        ValueError: it is a number of 1 or more, which mostly means a percentage, or it
            is 0."""
    if isinstance(value, Budget):
        return value
    if not is_number(value):
        raise TypeError(
            "`budget` must be a relative error, such as 0.01, or a `Budget`, but got "
            f"{type(value).__name__}. For example: `Budget(loss=0.001, gradients=0.01)`"
        )
    name = "gradients" if has_loss else "outputs"
    if value >= 1:
        raise ValueError(
            f"`budget` is {value!r}, a relative error of {value:.0%}: zeros in the "
            f"place of the {name} are no further off. One percent is 0.01. If so much "
            f"is meant, write `Budget({name}={value!r})`."
        )
    if value == 0:
        raise ValueError(
            "`budget` is 0, which allows no rounding at all. One percent is 0.01. If "
            f"exact {name} are meant, write `Budget({name}=0)`."
        )
    return Budget(**{name: value})
