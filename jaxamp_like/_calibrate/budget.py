"""What error is allowed, and how it is measured."""

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields
from typing import Any

import jax.numpy as jnp
import numpy as np

from .._dtypes import is_float


@dataclass(frozen=True)
class Budget:
    """How far a mixed function may be from the function as written.

    Every limit that is given must be met, on each batch.

    Args:
        loss: of the loss, the first result, relative to the loss.
        outputs: of all floating results as one vector, relative to its norm.
        gradients: of the gradient as one vector, relative to its norm.
        cosine: 1 minus the cosine of the angle between the gradients.
        worst_leaf: the relative error of the gradient of the parameter whose is
            largest. Where a gradient is zero but for rounding, it is no measure.
        overflow: the share of numbers that are finite as written and not in mixed
            precision, results and gradients together.
    Raises:
        ValueError: a limit is negative or no number, or none but `overflow` is given.

    >>> Budget(gradients=0.01)
    Budget(gradients=0.01)
    """

    loss: float | None = None
    outputs: float | None = None
    gradients: float | None = None
    cosine: float | None = None
    worst_leaf: float | None = None
    overflow: float = 0.0

    def __post_init__(self) -> None:
        limits = asdict(self)
        for name, limit in limits.items():
            if limit is None:
                continue
            is_number = isinstance(limit, int | float) and not isinstance(limit, bool)
            if not is_number or not 0 <= limit < math.inf:
                raise ValueError(
                    f"`{name}` of a `Budget` must be a number of at least 0, such as "
                    f"0.01 for one percent, but got {limit!r}."
                )
        if not self.limits():
            raise ValueError(
                "A `Budget` needs a limit on an error: `Budget(gradients=0.01)`, or on "
                "`loss`, `outputs`, `cosine` or `worst_leaf`."
            )

    def limits(self) -> dict[str, float]:
        """The limits on errors, those that were given."""
        given = {name: getattr(self, name) for name in ERRORS}
        return {name: limit for name, limit in given.items() if limit is not None}

    @property
    def needs_gradients(self) -> bool:
        return bool(self.limits().keys() & {"gradients", "cosine", "worst_leaf"})

    def __repr__(self) -> str:
        given = self.limits() | ({"overflow": self.overflow} if self.overflow else {})
        return f"Budget({', '.join(f'{k}={v!r}' for k, v in given.items())})"


ERRORS = ("loss", "outputs", "gradients", "cosine", "worst_leaf")


@dataclass(frozen=True)
class Errors:
    """Measured errors, as a `Budget` has them; NaN where there is no such thing."""

    loss: float = math.nan
    outputs: float = math.nan
    gradients: float = math.nan
    cosine: float = math.nan
    worst_leaf: float = math.nan
    overflow: float = 0.0

    def over(self, budget: Budget) -> float:
        """How many budgets this error is: 1 and less is met; infinite if it overflows.

        Of a cosine the root, which grows with an error as the others do."""
        if self.overflow > budget.overflow:
            return math.inf
        shares = [0.0]
        for name, limit in budget.limits().items():
            share = _share(getattr(self, name), limit)
            shares.append(math.sqrt(share) if name == "cosine" else share)
        return max(shares)

    def __or__(self, other: "Errors") -> "Errors":
        """The worst of both."""
        pairs = {
            f.name: (getattr(self, f.name), getattr(other, f.name))
            for f in fields(self)
        }
        return Errors(**{name: float(np.fmax(*pair)) for name, pair in pairs.items()})


def _share(error: float, limit: float) -> float:
    if not math.isfinite(error):
        return math.inf
    return error / limit if limit else (math.inf if error else 0.0)


def compare(true: Sequence[Any], got: Sequence[Any]) -> list[Any]:
    """For each floating array: sums of squares, and how much is not finite.

    Relative to the largest number of `true`, so that nothing small is lost."""
    return [_compare(a, b) for a, b in zip(true, got, strict=True) if is_float(a.dtype)]


def _compare(true: Any, got: Any) -> Any:
    dtype = jnp.promote_types(true.dtype, jnp.float32)
    true, got = true.astype(dtype), got.astype(dtype)
    fine = jnp.isfinite(true)
    lost = jnp.sum(fine & ~jnp.isfinite(got))
    both = fine & jnp.isfinite(got)
    true, got = jnp.where(both, true, 0), jnp.where(both, got, 0)
    scale = jnp.maximum(jnp.max(jnp.abs(true), initial=0), jnp.finfo(dtype).tiny)
    a, b = true / scale, got / scale
    sums = [jnp.sum((a - b) ** 2), jnp.sum(a * a), jnp.sum(b * b), jnp.sum(a * b)]
    return jnp.stack([scale, *sums, lost.astype(dtype), jnp.asarray(a.size, dtype)])


def errors(rows: Sequence[Any], num_outs: int, has_loss: bool) -> Errors:
    """The errors that the rows of `compare` tell, of results and then of gradients."""
    table = np.asarray([np.asarray(row) for row in rows], np.float64).reshape(-1, 7)
    sums = table[:, 1:5] * table[:, :1] ** 2
    outs, grads = sums[:num_outs], sums[num_outs:]
    overflow = float(table[:, 5].sum() / max(table[:, 6].sum(), 1))
    gradient = grads.sum(0)
    return Errors(
        loss=_of_loss(table[0], outs[0]) if has_loss else math.nan,
        outputs=_relative(outs.sum(0)),
        gradients=_relative(gradient) if len(grads) else math.nan,
        cosine=_one_minus_cosine(gradient) if len(grads) else math.nan,
        worst_leaf=max(map(_relative, grads), default=math.nan),
        overflow=overflow,
    )


def _of_loss(row: Any, sums: Any) -> float:
    return math.inf if row[5] else _relative(sums)


def _relative(sums: Any) -> float:
    error, true = float(sums[0]), float(sums[1])
    return math.sqrt(error / true) if true else (math.inf if error else 0.0)


def _one_minus_cosine(sums: Any) -> float:
    # |a/|a| - b/|b||^2 / 2, from sums that cancel less than 1 - ab/|a||b|.
    error, aa, bb, _ = map(float, sums)
    if not aa or not bb:
        return 1.0 if aa != bb else 0.0
    norms = math.sqrt(aa), math.sqrt(bb)
    return max(0.0, (error - (norms[0] - norms[1]) ** 2) / (2 * norms[0] * norms[1]))


def non_finite(arrays: Sequence[Any]) -> list[Any]:
    """How many numbers of each floating array are NaN, and how many infinite."""
    return [
        jnp.stack([jnp.sum(jnp.isnan(x)), jnp.sum(jnp.isinf(x))])
        if is_float(x.dtype)
        else jnp.zeros(2, jnp.int32)
        for x in arrays
    ]


def as_budget(value: Any, has_loss: bool) -> Budget:
    """A number is a limit on gradients, or on results if there are no gradients.

    Raises:
        TypeError: it is neither a number nor a `Budget`."""
    if isinstance(value, Budget):
        return value
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise TypeError(
            "`budget` must be a relative error, such as 0.01, or a `Budget`, but got "
            f"{type(value).__name__}. For example: `Budget(loss=0.001, gradients=0.01)`"
        )
    return Budget(gradients=value) if has_loss else Budget(outputs=value)


