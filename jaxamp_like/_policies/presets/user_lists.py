"""Lists of ops that the user gives, checked."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from jax.typing import DTypeLike

from ..._dtypes import as_float_dtype
from ..._errors import AmpError
from ..._jax import Primitive
from ..._primitives import FIXED
from ..._structural import STRUCTURAL
from ..._suggestions import did_you_mean
from ..classes import CLASSES
from ..mistakes import instead_of_function_name
from .common import Op, Table


def low_dtype(dtype: DTypeLike) -> str:
    name = as_float_dtype(dtype, "dtype").name
    if name not in ("float16", "bfloat16"):
        raise ValueError(
            f"There are lists for 'float16' and 'bfloat16', but `dtype` is {name!r}."
        )
    return name


def names_of(
    ops: Sequence[Op], argument: str, may_be_fixed: bool = False
) -> frozenset[str]:
    """The names of `ops`; raises for one that is unknown or can't have a rule."""
    if isinstance(ops, str | Primitive) or not isinstance(ops, Iterable):
        raise TypeError(
            f"`{argument}` must be a sequence of primitives or of their names, such as "
            f"['tanh'], but got {ops!r}."
        )
    names = frozenset(_name(op, argument) for op in ops)
    fixed = sorted(names & FIXED)
    if fixed and not may_be_fixed:
        raise AmpError(
            f"`{fixed[0]}` of `{argument}` only exists in the dtypes that it was "
            "traced with: it has no low-precision kernel, or carries code in these "
            "dtypes."
        )
    return names


def _name(op: Any, argument: str) -> str:
    if not isinstance(op, str | Primitive):
        raise TypeError(
            f"`{argument}` must hold primitives, such as `jax.lax.tanh_p`, or their "
            f"names, such as 'tanh', but holds {op!r}."
        )
    name = op if isinstance(op, str) else op.name
    if name in STRUCTURAL:
        raise AmpError(
            f"`{name}` of `{argument}` holds a whole program, so no list can decide "
            "for it; the ops inside are looked up one by one."
        )
    if isinstance(op, str) and name not in CLASSES:
        hint = instead_of_function_name(name) or (
            f"{did_you_mean(name, CLASSES)} A primitive of your own is given as an "
            "object, not by its name."
        )
        raise AmpError(
            f"No primitive is called {name!r}, which `{argument}` holds. {hint.strip()}"
        )
    return name


def conditions_of(
    conditional: Sequence[tuple[Op, str, Sequence[Any]]], argument: str = "conditional"
) -> list[tuple[str, str, tuple[Any, ...]]]:
    conditions = []
    for entry in conditional:
        is_triple = isinstance(entry, tuple | list) and len(entry) == 3
        if not is_triple or isinstance(entry[2], str):
            raise TypeError(
                f"`{argument}` must hold tuples `(op, parameter, values)`, such as "
                f"('integer_pow', 'y', [3]), but holds {entry!r}."
            )
        op, parameter, values = entry
        (name,) = names_of([op], argument)
        conditions.append((name, parameter, tuple(values)))
    return conditions


def check_disjoint(lists: Mapping[str, frozenset[str]], hint: str = "") -> None:
    homes: dict[str, str] = {}
    for key, names in lists.items():
        for name in sorted(names):
            if name in homes:
                raise AmpError(
                    f"`{name}` is in two lists: {homes[name]} and {key}. {hint}".strip()
                )
            homes[name] = key


def lowerable(table: Table) -> Table:
    """The table without primitives that must run in the dtypes they were traced in."""
    return {name: rule for name, rule in table.items() if name not in FIXED}
