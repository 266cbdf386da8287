"""The facts of constants and literals, and of results that are cast up early."""

import functools
from typing import Any

import numpy as np

from .._dtypes import DType
from .._jax import Atom, Literal, is_tracer
from .._rules import (
    Constants,
    Demand,
    Fact,
    Origin,
    RematSource,
    Site,
    author_dtype,
    is_full,
)
from .._structural import Facts


def upcast_early(site: Site, outs: Facts) -> Facts:
    """A result that is only read in full is cast up once, not by every reader."""
    return tuple(
        fact._replace(dtype=author)
        if fact and is_full(demand) and Demand.AS_HELD not in demand
        else fact
        for fact, author, demand in zip(
            outs, site.out_authors, site.wanted, strict=True
        )
    )


def fact_of(env: dict[Any, Fact | None], atom: Atom) -> Fact | None:
    if not isinstance(atom, Literal):
        return env[atom]
    dtype = author_dtype(atom.aval)
    if dtype is None:
        return None
    return _literal_fact(dtype, _plain(float(atom.val)))


@functools.lru_cache(maxsize=1024)
def _literal_fact(dtype: DType, value: float) -> Fact:
    known = Constants(frozenset([value]))
    return Fact(
        dtype,
        remat_source=RematSource.CONSTANT,
        constants=known,
        origin=Origin.CONSTANT,
    )


def _plain(value: float) -> float:
    # A key with NaN is never found again. inf stands for it, since both survive a cast.
    return np.inf if np.isnan(value) else value


def const_fact(var: Any, const: Any, source: RematSource) -> Fact | None:
    dtype = author_dtype(var.aval)
    if dtype is None:
        return None
    # A constant that is unknown, or a tracer of an outer transformation, may be a
    # parameter that the function closes over.
    is_constant = const is not None and not is_tracer(const)
    source = RematSource.CONSTANT if is_constant else source
    known = _constants(const)
    return Fact(dtype, remat_source=source, constants=known, origin=Origin.CLOSED_OVER)


_SMALL_CONST = 4096  # elements that are looked at; a mask or an epsilon is no larger


def _constants(const: Any) -> Constants | None:
    """The number of a scalar, or the largest magnitude of a small array if over 1e4."""
    if const is None or is_tracer(const) or const.size > _SMALL_CONST:
        return None
    if not getattr(const, "is_fully_addressable", True) or const.size == 0:
        return None
    values = np.asarray(const).astype(np.float64)
    if values.ndim == 0:
        return Constants(frozenset([_plain(float(values))]))
    finite = values[np.isfinite(values)]
    largest = float(np.max(np.abs(finite), initial=0.0))
    # Smaller numbers are in the range of every dtype: such an array needs no care.
    return Constants(frozenset([largest]), are_all=False) if largest > 1e4 else None
