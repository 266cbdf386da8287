"""Hi-primitives, translated to the classic equations that they stand for.

JAX is moving its structural primitives into one primitive, `call_hi_primitive`, whose
only parameter is an object. The class of the object says what the equation is
(`RematTraced` is `jax.checkpoint`), and its fields hold what used to be parameters.
Users can write such classes, too (`jax.experimental.hijax.HiPrim`).

`to_classic` replaces each of these equations, at any depth, by the classic equation of
the same meaning, which also holds the object. So the rest of the package handles the
classic form only. What is bound in the end is a hi-primitive again wherever the
author's was one: the object itself, or a new one of its class around the rewritten
program. `from_classic` is the way back, for programs that are run as they stand.

Checked on JAX 0.12.0 with the flags `jax_remat3`, `jax_custom_vjp3`, `jax_custom_jvp3`
on and off; JAX without hi-primitives is unaffected. The names below are private to
JAX: `call_hi_primitive` and its parameter `_prim`, the methods `expand`, `jvp`, `lin`
and `vjp_fwd` of its classes, their fields `in_avals`, `in_avals_flat`, `in_tree`,
`out_tree` and `params`, `is_high` of a type, and the names of JAX's own classes and of
their fields."""

import functools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import jax
import jax.extend.core as jex
from jax.extend.core import primitives

from ._name_stacks import HI_PRIMITIVE, classic_name_stacks, is_recomputed
from ._programs import SIMPLE, Eqn, Jaxpr, closed, raw, with_eqns, with_jaxprs

CALL = "call_hi_primitive"

_HIJAX = "jax._src.hijax"  # where the base class is

# Whether this JAX can make checkpoints as hi-primitives, under a flag.
_MAKES_CHECKPOINTS = hasattr(jax.config, "jax_remat3")


@dataclass(frozen=True)
class _HiObject:
    """The object of a hi-primitive, as a parameter of the classic equation.

    In a class of its own, since the object may look like a program."""

    hi: Any


class _Row(NamedTuple):
    """How one class of hi-primitives is translated to a classic equation.

    Args:
        name: the classic primitive.
        params: its parameters, from the equation; `None` if it can't be translated.
        rebuild: makes an object of the class from the old one, the parameters and the
            operands. Without it, the old object is bound."""

    name: str
    params: Callable[[Eqn], dict[str, Any] | None]
    rebuild: Callable[[Any, dict[str, Any], Sequence[Any]], Any] | None = None


def hi_params(params: dict[str, Any]) -> Iterator[Any]:
    """The parameters of an equation; of a hi-primitive, the fields of its object.

    If an equation has parameters beside the object, it is a linear equation that was
    made of another one. Then the fields of the object don't tell what runs."""
    is_linear = "_prim" in params and len(params) > 1
    for value in params.values():
        if isinstance(value, SIMPLE):
            yield value
        elif isinstance(value, jax.stages.Traced):
            yield value.jaxpr
        elif _is_object(value):
            yield from () if is_linear else hi_params(value.params)
        else:
            yield value


def is_hi(eqn: Eqn) -> bool:
    """Whether an equation is a hi-primitive, or is shown in the place of one."""
    return eqn.primitive.name == CALL or HI_PRIMITIVE in eqn.params


def is_hi_type(aval: Any) -> bool:
    """Whether a type is one that JAX lowers to several arrays (`HiType`)."""
    return getattr(aval, "is_high", False)


def is_opaque_hi(eqn: Eqn) -> bool:
    """Whether an equation is a hi-primitive that `to_classic` could not translate.

    Those of JAX that hold no contraction don't count: nothing in them could be low."""
    name = eqn.primitive.name
    if not name.startswith(CALL):
        return False
    of = _class_name(eqn.params["_prim"])
    # Like the classic `custom_lin`, this one is there to be transposed, and never runs.
    is_to_transpose = name != CALL and of == "CustomVJPTraced"
    return of not in _AS_WRITTEN and not is_to_transpose


def describe(eqn: Eqn) -> str:
    """The name of an equation's primitive, with the class of a hi-primitive."""
    hi = _hi_of(eqn)
    name = eqn.primitive.name
    return name if hi is None else f"{name}[{type(hi).__module__}.{type(hi).__name__}]"


def to_classic(jaxpr: Jaxpr) -> Jaxpr:
    """A program with classic equations in place of hi-primitives, at any depth."""
    opened = _opened_program(jaxpr)
    if opened is jaxpr or not _MAKES_CHECKPOINTS:
        return opened
    return classic_name_stacks(opened)


def from_classic(jaxpr: Jaxpr) -> Jaxpr:
    """A program with hi-primitives again where `to_classic` has replaced them."""
    return _translated(jaxpr, from_classic_eqn, _hi_cache)


def from_classic_eqn(eqn: Eqn) -> Eqn:
    """An equation with the hi-primitive that it stands for, or else as it is."""
    params = with_jaxprs(eqn.params, from_classic)
    if HI_PRIMITIVE not in params:
        return eqn if params is eqn.params else eqn.replace(params=params)
    hi = _rebuilt(params, eqn.invars)
    return eqn.replace(primitive=_call_primitive(), params={"_prim": hi})


def bind(primitive: Any, operands: Sequence[Any], params: dict[str, Any]) -> Any:
    """Binds a primitive; for an equation that was translated, its hi-primitive."""
    if HI_PRIMITIVE not in params:
        return primitive.bind(*operands, **params)
    hi = _rebuilt(with_jaxprs(params, from_classic), operands)
    outs = _call_primitive().bind(*operands, _prim=hi)
    return outs if primitive.multiple_results else outs[0]


# The programs that were translated, or `None` where nothing was to be done: JAX finds
# what it has made of a program by its identity.
_classic_cache: Any = WeakKeyDictionary()
_hi_cache: Any = WeakKeyDictionary()


def _translated(jaxpr: Jaxpr, of_eqn: Callable[[Eqn], Eqn], known: Any) -> Jaxpr:
    if jaxpr not in known:
        new = with_eqns(jaxpr, list(map(of_eqn, raw(jaxpr).eqns)))
        known[jaxpr] = None if new is jaxpr else new
    return jaxpr if known[jaxpr] is None else known[jaxpr]


def _opened_program(jaxpr: Jaxpr) -> Jaxpr:
    return _translated(jaxpr, _to_classic_eqn, _classic_cache)


def _to_classic_eqn(eqn: Eqn) -> Eqn:
    if eqn.primitive.name == CALL:
        eqn = _expanded_eqn(eqn)
    params = with_jaxprs(eqn.params, _opened_program)
    return eqn if params is eqn.params else eqn.replace(params=params)


def _expanded_eqn(eqn: Eqn) -> Eqn:
    """The classic equation of a hi-primitive; the same equation if there is none."""
    hi = eqn.params["_prim"]
    if _class_name(hi) in _AS_WRITTEN:
        return eqn
    types = (*hi.in_avals_flat, *(v.aval for v in eqn.outvars))
    if any(map(is_hi_type, types)):
        return eqn
    row = _row_of(hi)
    params = None if row is None else row.params(eqn)
    if row is None or params is None:
        return eqn
    primitive = getattr(primitives, row.name)
    return eqn.replace(
        primitive=primitive, params=params | {HI_PRIMITIVE: _HiObject(hi)}
    )


def _row_of(hi: Any) -> _Row | None:
    row = _ROWS.get(_class_name(hi))
    return _by_expansion(hi) if row is None else row


def _class_name(hi: Any) -> str | None:
    """The name of a class of JAX's own; none of a user's."""
    cls = type(hi)
    return cls.__name__ if cls.__module__.startswith("jax.") else None


def _by_expansion(hi: Any) -> _Row | None:
    """How a class without a row is translated, such as a user's; `None` if it can't be.

    Its program is what it expands to. A class with a rule for forward differentiation
    alone becomes a `custom_jvp`: JAX derives its backward pass from that rule. Any
    other becomes a `custom_vjp`. A class with rules of its own for both can't be
    translated, since each classic equation would lose one of them. Nor can one with a
    rule for transposition, or with effects, for which neither of the two has room."""
    backward = _is_own(hi, "vjp_fwd")
    # A rule `lin` is of use to `jax.jvp` only where a `jvp` is derived from it.
    has_jvp = getattr(type(hi), "jvp", None) is not getattr(_base(hi), "jvp", None)
    forward = _is_own(hi, "jvp") or (_is_own(hi, "lin") and has_jvp)
    if hi.effects or _is_own(hi, "transpose") or (forward and backward):
        return None
    name = "custom_jvp_call_p" if forward else "custom_vjp_call_p"
    return _Row(name, _params_of_expansion)


def _base(hi: Any) -> Any:
    """The class of JAX that the class of `hi` is derived from."""
    return next(cls for cls in type(hi).__mro__ if cls.__module__ == _HIJAX)


def _is_own(hi: Any, rule: str) -> bool:
    """Whether a class has a rule that JAX has not derived from another."""
    function = getattr(type(hi), rule, None)
    return getattr(function, "__module__", _HIJAX) != _HIJAX


def _rebuilt(params: dict[str, Any], operands: Sequence[Any]) -> Any:
    hi = params[HI_PRIMITIVE].hi
    row = _ROWS.get(_class_name(hi))
    return (
        hi if row is None or row.rebuild is None else row.rebuild(hi, params, operands)
    )


def _hi_of(eqn: Eqn) -> Any:
    held = eqn.params.get(HI_PRIMITIVE)
    return eqn.params.get("_prim") if held is None else held.hi


def _is_object(value: Any) -> bool:
    """Whether a parameter is the object of a hi-primitive."""
    return hasattr(value, "in_avals_flat") and hasattr(value, "expand")


@functools.cache
def _call_primitive() -> Any:
    # A program with such an equation came before, so this JAX has the primitive.
    from jax._src.hijax import call_hi_primitive_p

    return call_hi_primitive_p


def _expanded(hi: Any) -> Jaxpr | None:
    def flat(*operands: Any) -> Any:
        return jax.tree.leaves(hi.expand(*jax.tree.unflatten(hi.in_tree, operands)))

    try:
        return jax.make_jaxpr(flat)(*hi.in_avals_flat)
    except Exception:  # whatever the author's code raises
        return None


def _params_of_remat(eqn: Eqn) -> dict[str, Any] | None:
    hi = eqn.params["_prim"]
    if getattr(hi.jaxpr, "consts", ()):
        return None  # the classic equation has no room for them
    inner = raw(hi.jaxpr)
    return {
        "jaxpr": inner,
        "prevent_cse": getattr(hi, "prevent_cse", True),
        "differentiated": is_recomputed(eqn) or _is_recomputed(inner),
        "policy": hi.policy,
    }


def _is_recomputed(program: Any) -> bool:
    """Whether a checkpoint's equations are named as recomputed."""
    return any(is_recomputed(eqn) for eqn in program.eqns if not is_hi(eqn))


def _rebuild_remat(hi: Any, params: dict[str, Any], operands: Sequence[Any]) -> Any:
    del operands
    fields = params | {"jaxpr": _closed(params["jaxpr"])}
    return type(hi)(*(fields[name] for name in hi.params))


def _closed(jaxpr: Jaxpr) -> Jaxpr:
    return jaxpr if raw(jaxpr) is not jaxpr else closed(jaxpr, [])


def _rebuild_name(hi: Any, params: dict[str, Any], operands: Sequence[Any]) -> Any:
    (x,) = operands
    is_atom = isinstance(x, jex.Var | jex.Literal)
    return type(hi)(params["name"], x.aval if is_atom else jax.typeof(x))


def _params_of_rule(eqn: Eqn) -> dict[str, Any] | None:
    hi = eqn.params["_prim"]
    # What a rule writes beside the gradients goes through the object alone.
    if getattr(hi, "with_logs", False) or getattr(hi, "bwd_accums", None) is not None:
        return None
    is_whole = len(raw(hi.traced.jaxpr).invars) == len(hi.in_avals_flat)
    program = hi.traced.jaxpr if is_whole else _expanded(hi)
    if program is None:
        return None
    # The first two arguments hold what the function and its rule close over.
    closed_over = hi.in_avals[:2] if hasattr(hi, "drop_fwd_consts") else ()
    return {
        "call_jaxpr": program,
        "num_consts": len(jax.tree.leaves(closed_over)),
        "symbolic_zeros": bool(hi.symbolic_zeros),
    }


def _params_of_call(eqn: Eqn) -> dict[str, Any] | None:
    program = _expanded(eqn.params["_prim"])
    return None if program is None else {"call_jaxpr": program}


def _params_of_expansion(eqn: Eqn) -> dict[str, Any] | None:
    params = _params_of_call(eqn)
    return params and params | {"num_consts": 0, "symbolic_zeros": True}


_ROWS: dict[str | None, _Row] = {
    "RematTraced": _Row("remat_p", _params_of_remat, _rebuild_remat),
    "CheckpointName": _Row(
        "name_p", lambda eqn: dict(eqn.params["_prim"].params), _rebuild_name
    ),
    "CustomVJPTraced": _Row("custom_vjp_call_p", _params_of_rule),
    "CustomJVPTraced": _Row("custom_jvp_call_p", _params_of_rule),
    "Einsum": _Row("closed_call_p", _params_of_call),
}

# Classes of JAX that hold no contraction. They run in the author's dtypes.
_AS_WRITTEN = frozenset(
    """
    CheckpointNameFwd Frexp Ldexp Nonzero PrimalLeftTangentRight SearchSorted
    _RootLinearMap
    """.split()
)
