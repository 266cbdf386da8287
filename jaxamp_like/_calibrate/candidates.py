"""Candidates: the low precisions that a group of contractions may get."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax.numpy as jnp

from .._dtypes import DType, full_name, is_float
from .._quantised import FORMATS
from .._quantised.rule import Quantising
from .._rules import Site, why_as_written
from .._rules.low_bits import FORMATS as KEPT_FORMATS, SHORT_FORMATS, LowBits
from .._rules.saving_low import SavingLowBits
from .._suggestions import did_you_mean

# Small contractions are quantised too: prices tell the gain, measurements the error.
EIGHT_BITS: dict[str, Quantising] = {
    name: FORMATS[name](where=None) for name in sorted(FORMATS)
}
_NAMES = ("bfloat16", "float16", *EIGHT_BITS, "bfloat16+int8", "float16+int8")

FULL = "float32"  # the name for what stays as written


class Candidate(NamedTuple):
    """A low precision.

    Args:
        name: what users, tables and prices call it.
        compute: the compute dtype of a policy with this candidate.
        rule: the rule for contractions of 8-bit operands; `None` for a dtype.
        saves: how values are kept for the backward pass, if in 8 bits."""

    name: str
    compute: DType
    rule: Quantising | None = None
    saves: LowBits | None = None

    def quantises(self, site: Site) -> bool:
        """Whether a contraction has operands of 8 bits with this candidate."""
        if self.rule is None or why_as_written(site):
            return False
        return self.rule.why_not(self.site_under(site)) is None

    def site_under(self, site: Site) -> Site:
        """`site`, as a rule sees it in a policy with this candidate."""
        return site._replace(compute_dtype=self.compute)


def as_candidates(given: Any) -> tuple[Candidate, ...]:
    """The argument `candidates`, checked.

    Raises:
        TypeError, ValueError: one is no low precision or is named twice, or there are
            none."""
    if isinstance(given, str) or not isinstance(given, Sequence):
        given = (given,)
    named = [_known(one) for one in given]
    dtypes = [one.compute for one in named if isinstance(one, Candidate)]
    compute = dtypes[0] if dtypes else jnp.dtype(jnp.bfloat16)
    found = tuple(
        one if isinstance(one, Candidate) else Candidate(one, compute, EIGHT_BITS[one])
        for one in named
    )
    if not found or len(set(found)) < len(found):
        raise ValueError(
            "`candidates` must name low precisions, each once, such as ('bfloat16', "
            f"'float8'), but got {given!r}."
        )
    return found


def compute_of(name: str) -> str:
    """The dtype that a candidate computes in which is named "bfloat16+int8" or so."""
    return name.partition("+")[0]


def _known(one: Any) -> str | Candidate:
    """A candidate, or the name of one whose contractions read 8 bits.

    Raises:
        TypeError: it is a rule, or no floating dtype of 16 bits or more.
        ValueError: it is a float8 format, a wide dtype, or an unknown name."""
    if isinstance(one, Quantising):
        (name, rule), *others = EIGHT_BITS.items()
        also = "".join(f", {name!r} for `{rule!r}`" for name, rule in others)
        raise TypeError(
            f"`candidates` holds the rule `{one!r}`. Name it: {name!r} stands for "
            f"`{rule!r}`{also}."
        )
    if isinstance(one, SavingLowBits):
        raise TypeError(
            f"`candidates` holds the rule that keeps values in {one.format}. Name the "
            f"dtype to compute in beside it: 'bfloat16+{one.format}'."
        )
    if isinstance(one, str) and "+" in one:
        return _keeping(one)
    name = _name_of(one)
    if name in EIGHT_BITS:
        return name
    for known, rule in EIGHT_BITS.items():
        if name is not None and name.startswith(known):
            raise ValueError(
                f"`candidates` names {name!r}, a format for one tensor. Write "
                f"{known!r}: {rule.description}."
            )
    dtype = None if name is None else jnp.dtype(name)
    if dtype is None or not is_float(dtype) or dtype.itemsize < 2:
        is_unknown = isinstance(one, str) and dtype is None
        hint = did_you_mean(one, _NAMES) if is_unknown else ""
        raise (ValueError if is_unknown else TypeError)(
            "Each of `candidates` must be a floating dtype of 16 bits, 'bfloat16' or "
            f"'float16', or one of {', '.join(map(repr, EIGHT_BITS))}, but got "
            f"{one!r}.{hint}"
        )
    if dtype.itemsize > 2:
        raise ValueError(
            f"`candidates` names {name}, which is no low precision: what stays as "
            "written is considered anyway. Name 'bfloat16' or 'float16'."
        )
    return Candidate(dtype.name, dtype)


def _keeping(name: str) -> Candidate:
    """The candidate "bfloat16+int8", or another that keeps values in 8 bits.

    Raises:
        TypeError, ValueError: it is none."""
    given, _, format = name.partition("+")
    inner = _known(given)
    format = SHORT_FORMATS.get(format, format)
    if isinstance(inner, str) or format not in KEPT_FORMATS:
        formats = (*SHORT_FORMATS, *KEPT_FORMATS)
        known = ", ".join(map(repr, formats))
        raise ValueError(
            f"`candidates` names {name!r}. Before the plus stands the dtype to compute "
            "in, 'bfloat16' or 'float16', and after it the format in which values are "
            f"kept for the backward pass, one of {known}: 'bfloat16+int8'."
            + did_you_mean(format, formats)
        )
    name = f"{inner.name}+{format}"
    return Candidate(name, inner.compute, saves=LowBits(format))


def _name_of(one: Any) -> str | None:
    if isinstance(one, str) and one in EIGHT_BITS:
        return one
    if one is None:  # NumPy would take it for float64
        return None
    try:
        return jnp.dtype(full_name(one) if isinstance(one, str) else one).name
    except (TypeError, ValueError):
        return None
