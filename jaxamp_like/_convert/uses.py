"""How each input of a program is read: in which dtypes, by what, and where.

Each jaxpr, at any depth, is walked once, from its end. An operation that only moves
data is no reader: what reads its result reads its operand. So a weight that is stacked,
sliced by a scan, handed through branches and transposed there is read in bfloat16 if
all that is done with it in the end is to cast it to bfloat16."""

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

from .._dtypes import bits, is_float
from .._jax import Eqn, Jaxpr, Literal, raw, scopes, source_line, without_folders
from .._policies.dictionary import REWRITTEN
from .._primitives import CONTRACTIONS, EACH_ALONE, MOVES
from .._primitives.contractions import is_contraction
from .._quantised.stored import STORED
from .._structural import SOLVER, STRUCTURAL, Body

Scope = tuple[str, ...]

RESULT, CARRY = "a result", "a carry that changes"


class Use(NamedTuple):
    """One way in which a value is read.

    Args:
        dtype: the name of the narrower dtype that it is cast to; `None` if it is read
            as it is.
        by: the primitive that reads it, or what else becomes of it.
        scope: the named scopes around the reader, joined by "/".
        line: the file, line and function where the author wrote the reader. Folders are
            left out, since the text is shipped with the model.
        holds: what the value is, if the rule that made it says so.
        is_inner: whether a product reads it that is no contraction for these shapes, as
            one whose result is one number. It is computed in full."""

    dtype: str | None
    by: str
    scope: str = ""
    line: str = ""
    holds: str = ""
    is_inner: bool = False

    def __str__(self) -> str:
        place = ", ".join(filter(None, (self.scope and f"in {self.scope}", self.line)))
        what = self.by if self.dtype is None else f"a cast to {self.dtype}"
        return f"{what} ({place})" if place else what


Uses = frozenset[Use]
_NONE: Uses = frozenset()


def uses_of_inputs(jaxpr: Jaxpr) -> list[Uses]:
    """How each constant of a closed jaxpr is read, then how each of its inputs is."""
    inner = raw(jaxpr)
    results = [frozenset({Use(None, RESULT)})] * len(inner.outvars)
    uses = _uses(inner, results, ())
    return [uses.get(v, _NONE) for v in (*inner.constvars, *inner.invars)]


def holds_programs(eqn: Eqn) -> bool:
    """Whether an equation's programs can be given operands of other dtypes."""
    name = eqn.primitive.name
    if name not in STRUCTURAL or name == "xla_pmap":
        return False
    layouts = (*eqn.params.get("in_layouts", ()), *eqn.params.get("out_layouts", ()))
    # A layout belongs to a dtype, and would not fit another one.
    return all(layout is None for layout in layouts) and bool(bodies(eqn))


def bodies(eqn: Eqn) -> list[Body]:
    return STRUCTURAL[eqn.primitive.name].bodies(eqn)


def is_narrowing(eqn: Eqn) -> bool:
    """Whether an equation casts a float to a narrower one."""
    if eqn.primitive.name != "convert_element_type":
        return False
    old, new = eqn.invars[0].aval.dtype, eqn.outvars[0].aval.dtype
    return is_float(old) and is_float(new) and bits(new) < bits(old)


def moves_data(eqn: Eqn) -> bool:
    """Whether the results hold numbers of the operands, in their dtype."""
    if eqn.primitive.name == "convert_element_type":  # it may change a weak type
        return eqn.invars[0].aval.dtype == eqn.outvars[0].aval.dtype
    return eqn.primitive.name in MOVES


def unchanged_carries(body: Body) -> set[int]:
    """The results of a loop's body that are its carries, unchanged."""
    inner = raw(body.jaxpr)
    return {out for out, i in body.carries if inner.outvars[out] is inner.invars[i]}


def _uses(jaxpr: Jaxpr, results: Sequence[Uses], scope: Scope) -> dict[Any, Uses]:
    uses: dict[Any, Uses] = {}

    def read(atoms: Iterable[Any], how: Iterable[Uses]) -> None:
        for atom, new in zip(atoms, how, strict=True):
            if new and not isinstance(atom, Literal):
                uses[atom] = uses.get(atom, _NONE) | new

    read(jaxpr.outvars, results)
    for eqn in reversed(jaxpr.eqns):
        outs = [uses.get(v, _NONE) for v in eqn.outvars]
        read(eqn.invars, _of_operands(eqn, outs, scope + scopes(eqn)))
    return uses


def _of_operands(eqn: Eqn, outs: list[Uses], scope: Scope) -> list[Uses]:
    if holds_programs(eqn):
        return _through_programs(eqn, outs, scope)
    if is_narrowing(eqn):
        return [frozenset({_use(eqn, scope, eqn.outvars[0].aval.dtype.name)})]
    if moves_data(eqn):
        if eqn.primitive.name in EACH_ALONE:
            return outs
        return [_NONE.union(*outs)] * len(eqn.invars)
    return [frozenset({_use(eqn, scope)})] * len(eqn.invars)


def _through_programs(eqn: Eqn, outs: list[Uses], scope: Scope) -> list[Uses]:
    operands = [_NONE] * len(eqn.invars)
    for body in bodies(eqn):
        handed_on = unchanged_carries(body)
        changing = {out: i for out, i in body.carries if out not in handed_on}
        carried = frozenset({_use(eqn, scope)._replace(by=CARRY)})
        results = [_NONE if out is None else outs[out] for out in body.outs]
        for out in changing:
            results[out] = carried
        inner = raw(body.jaxpr)
        uses = _uses(inner, results, scope)
        for i, var in zip(body.ins, inner.invars, strict=True):
            operands[i] |= uses.get(var, _NONE)
        for i in changing.values():
            operands[body.ins[i]] |= carried
    return operands


def _use(eqn: Eqn, scope: Scope, dtype: str | None = None) -> Use:
    names = (x for x in scope if x not in (REWRITTEN, SOLVER))
    line = without_folders(source_line(eqn))
    holds = eqn.params["holds"] if eqn.primitive is STORED else ""
    return Use(dtype, eqn.primitive.name, "/".join(names), line, holds, _is_inner(eqn))


def _is_inner(eqn: Eqn) -> bool:
    is_product = eqn.primitive.name in CONTRACTIONS
    return is_product and not is_contraction(eqn.params, [v.aval for v in eqn.invars])
