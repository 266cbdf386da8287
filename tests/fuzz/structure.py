"""What a program is made of: the structures that the rewrite must leave in place."""

import collections
import functools
from collections.abc import Iterator
from typing import Any

import jax
import numpy as np
from jax import lax

from .code import CONTRACTIONS, is_contraction
from .forms import Reads
from .oracle import scan_counts

SOLVER = "solver"


class Contents:
    """Every equation of a program, at any depth, and what there is among them."""

    def __init__(self, jaxpr: Any):
        self.equations = list(_equations(jaxpr, ()))

    @functools.cached_property
    def parts(self) -> collections.Counter[Any]:
        """How often each structure occurs, with what its author chose."""
        keys = (_key(eqn) for eqn, _ in self.equations)
        return collections.Counter(key for key in keys if key is not None)

    @functools.cached_property
    def contracts(self) -> bool:
        return any(eqn.primitive.name in CONTRACTIONS for eqn, _ in self.equations)

    @functools.cached_property
    def contractions(self) -> collections.Counter[str]:
        """How often there are contractions of some types."""
        return collections.Counter(
            f"{eqn.primitive} {' '.join(v.aval.str_short() for v in eqn.invars[:2])}"
            for eqn, _ in self.equations
            if eqn.primitive.name in CONTRACTIONS
        )

    def read_otherwise(self, reads: Reads) -> str | None:
        """A contraction that doesn't read what it must."""
        for eqn, inside in self.equations:
            if eqn.primitive.name != "dot_general":
                continue
            avals = [v.aval for v in eqn.invars[:2]]
            if not reads.among <= {n for aval in avals for n in aval.shape}:
                continue
            for aval in avals:
                is_meant = reads.of <= set(aval.shape)
                if is_meant and aval.dtype.name not in reads.dtypes:
                    where = "/".join([*inside, str(eqn.source_info.name_stack)])
                    types = " x ".join(aval.str_short() for aval in avals)
                    return f"{types}, not {' or '.join(reads.dtypes)}: {where}"
        return None

    @functools.cached_property
    def has_products(self) -> bool:
        """Whether a `dot_general` is there that is no contraction."""
        return any(
            eqn.primitive.name in CONTRACTIONS and not is_contraction(eqn)
            for eqn, _ in self.equations
        )

    @functools.cached_property
    def low_sum(self) -> str | None:
        """A loop's carry of 16 bits that an iteration hands on without a contraction.

        What is added to it would be lost."""
        found = (_low_sum(eqn) for eqn, _ in self.equations)
        return next((x for x in found if x is not None), None)


def _equations(jaxpr: Any, inside: tuple[str, ...]) -> Iterator[tuple[Any, Any]]:
    """Every equation, with the primitives that it stands in."""
    for eqn in getattr(jaxpr, "jaxpr", jaxpr).eqns:
        yield eqn, inside
        for program in _programs(eqn):
            yield from _equations(program, (*inside, _kind(eqn)))


def _kind(eqn: Any) -> str:
    """The primitive; of a scan that may end early, and is said to, another."""
    name = eqn.primitive.name
    if name == "scan" and "amp_solver" in str(eqn.source_info.name_stack):
        if any(
            e.primitive.name in ("cond", "select_n") for e, _ in _inner_equations(eqn)
        ):
            return SOLVER
    return name


def _inner_equations(eqn: Any) -> Iterator[tuple[Any, Any]]:
    for program in _programs(eqn):
        yield from _equations(program, ())


def _programs(eqn: Any) -> list[Any]:
    """The programs among the parameters of an equation."""
    return [x for value in eqn.params.values() for x in _programs_in(value)]


def _programs_in(value: Any) -> Iterator[Any]:
    if isinstance(value, tuple | list):
        for x in value:
            yield from _programs_in(x)
    elif isinstance(value, dict):
        yield from _programs_in(list(value.values()))
    elif _is_jaxpr(value):
        yield value


def _is_jaxpr(value: Any) -> bool:
    return hasattr(getattr(value, "jaxpr", value), "eqns")


def _key(eqn: Any) -> Any:
    name, params = eqn.primitive.name, eqn.params
    if name in ("checkpoint", "remat2"):
        policy = params["policy"]
        return "checkpoint", getattr(policy, "__qualname__", None)
    if name == "scan":
        return name, params["length"], params["reverse"], params["unroll"]
    if name == "cond":
        return name, len(params["branches"])
    if name in ("while", "debug_callback", "pure_callback", "custom_linear_solve"):
        return name
    return None


def lost(plain: Contents, mixed: Contents) -> str | None:
    """A structure that a rewritten program has less of than the program as written."""
    missing = plain.parts - mixed.parts
    return ", ".join(map(str, missing)) or None


# Their bodies are another's contract, or stay as written for the sake of their end.
_AS_WRITTEN = frozenset(
    f"""{SOLVER} while custom_linear_solve linear_call custom_vmap_call pure_callback
    custom_vjp_call reduce reduce_window""".split()
)


def left_in_full(program: Contents) -> str | None:
    """A contraction that reads two float32 operands, though nobody asked for that."""
    for eqn, inside in program.equations:
        name = eqn.primitive.name
        if name not in CONTRACTIONS or "ragged" in name:
            continue  # those of ragged arrays are in few policies
        if _AS_WRITTEN.intersection(inside):
            continue
        if eqn.params.get("precision") not in (None, lax.Precision.DEFAULT):
            if eqn.params["precision"] != (lax.Precision.DEFAULT,) * 2:
                continue
        if "amp_stop" in str(eqn.source_info.name_stack):
            continue
        is_full = all(v.aval.dtype == np.float32 for v in eqn.invars[:2])
        if is_full and is_contraction(eqn):
            return str(eqn.primitive)
    return None


def _low_sum(eqn: Any) -> str | None:
    if eqn.primitive.name not in ("scan", "while"):
        return None
    body, first, count = _loop(eqn)
    for i, out in enumerate(body.outvars[:count]):
        if _is_low(out) and out in _reached(body, [body.invars[first + i]]):
            return f"carry {i} of a {eqn.primitive}, {out.aval}"
    return None


def _loop(eqn: Any) -> tuple[Any, int, int]:
    """The body of a loop, where its carries begin, and how many there are."""
    if eqn.primitive.name == "while":
        body = eqn.params["body_jaxpr"].jaxpr
        return body, eqn.params["body_nconsts"], len(body.outvars)
    body = eqn.params["jaxpr"]
    return getattr(body, "jaxpr", body), *scan_counts(eqn)


def _is_low(atom: Any) -> bool:
    return getattr(atom.aval, "dtype", None) in (np.float16, jax.numpy.bfloat16)


def _reached(jaxpr: Any, variables: Any) -> set[Any]:
    """What is made of some variables with no contraction on the way."""
    found = set(variables)
    for eqn in jaxpr.eqns:
        ins = [
            i
            for i, atom in enumerate(eqn.invars)
            if not hasattr(atom, "val") and atom in found
        ]
        if ins and not _contracts(eqn):
            found.update(_reached_outside(eqn, ins))
    return found


def _contracts(eqn: Any) -> bool:
    """Whether an equation is a contraction, perhaps with roundings to 8 bits.

    Scales are made of operands too, and add nothing to them."""
    inner = (e for p in _programs(eqn) for e in getattr(p, "jaxpr", p).eqns)
    is_quantised = any(e.primitive.name == "amp_result_8bit" for e in inner)
    return is_quantised or eqn.primitive.name in CONTRACTIONS


def _reached_outside(eqn: Any, ins: Any) -> Iterator[Any]:
    programs = [getattr(p, "jaxpr", p) for p in _programs(eqn)]
    if not programs:
        yield from eqn.outvars
    for program in programs:  # those whose operands are the last of the equation's
        skipped = len(eqn.invars) - len(program.invars)
        if len(program.outvars) != len(eqn.outvars) or skipped < 0:
            continue
        given = [program.invars[i - skipped] for i in ins if i >= skipped]
        reached = _reached(program, given)
        for out, atom in zip(eqn.outvars, program.outvars, strict=True):
            if not hasattr(atom, "val") and atom in reached:
                yield out
