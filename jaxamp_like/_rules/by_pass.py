"""A precision for each of the three contractions of training.

A contraction (`dot_general`, `ragged_dot_general`, `conv_general_dilated`) is made
three times: forward, for the gradient of its input and for that of its weight. JAX's
own transposes copy the dtype of the result from one to the next, so that these choices
hang together; `use_precision_by_pass` takes them apart."""

import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.typing import DTypeLike

from .._dtypes import DType, as_float_dtype, bits, cast, lowered
from .._jax import (
    Literal as JaxprLiteral,
    SymbolicZero,
    Zero,
    bind_flat,
    consts,
    is_linear_operand,
    new_primitive,
    raw,
    subjaxprs,
    trace,
)
from .._primitives import CONTRACTIONS
from .._primitives.matmul_precision import settled_bind
from . import (
    Decision,
    Demand,
    Mark,
    Rule,
    Site,
    UsePrecision,
    outs_of,
    use_original_precision,
    why_as_written,
    wide_contraction,
)
from .given import as_bool
from .weights import Gradient, gradient_of, weight_side


class PassPrecision(NamedTuple):
    """How one of the three contractions is made; see `wide`."""

    dtype: DType | None = None  # that the operands are read in; None: compute dtype
    wide: bool = False  # whether the result keeps the dtype of what it is for

    @property
    def is_low(self) -> bool:
        return self.dtype is None or bits(self.dtype) < 32


_COMPUTE = PassPrecision()


def wide(dtype: DTypeLike | None = None) -> PassPrecision:
    """Low operands, but a result that is never rounded to their dtype.

    For `use_precision_by_pass`. The hardware adds up in float32 anyway; this keeps it.

    Args:
        dtype: the dtype in which the operands are read, by default the compute dtype.
    Returns:
        A choice for one of the passes.
    Raises:
        TypeError: `dtype` is no floating dtype.
        ValueError: `dtype` is float64 and x64 is not enabled.

    >>> wide("bfloat16")
    PassPrecision(dtype=dtype(bfloat16), wide=True)
    """
    return _choice(dtype, "dtype")._replace(wide=True)


@dataclass(frozen=True)
class UsePrecisionByPass(Rule):
    """A precision for each of the three contractions; see `use_precision_by_pass`."""

    forward: PassPrecision = _COMPUTE
    input_gradient: PassPrecision = _COMPUTE
    weight_gradient: PassPrecision = _COMPUTE
    weight: Literal["lhs", "rhs"] | None = None

    def __post_init__(self) -> None:
        for name in ("forward", "input_gradient", "weight_gradient"):
            object.__setattr__(self, name, _choice(getattr(self, name), name))
        super().__post_init__()

    @property
    def is_compute(self) -> bool:
        return self.forward.is_low

    def demand(self, params: dict[str, Any], wanted: Demand) -> Demand:
        if not self.forward.is_low:
            return Demand.FULL
        gradients = (self.input_gradient, self.weight_gradient)
        if not all(choice.is_low for choice in gradients):
            return Demand.LOW | Demand.FULL
        wide = any(choice.wide for choice in gradients)
        return Demand.LOW | Demand.WIDE if wide else Demand.LOW

    def decide(self, site: Site) -> Decision:
        name = site.primitive and site.primitive.name
        if name in CONTRACTIONS and (of := self._gradient_of(site)) is not None:
            return self._backward(site, of)
        alike = self.forward == self.input_gradient == self.weight_gradient
        is_other = name not in CONTRACTIONS or None in site.authors[:2]
        if is_other or (alike and not self.forward.wide):
            return UsePrecision(self.forward.dtype).decide(site)
        original = use_original_precision.decide(site)
        if why := why_as_written(site):
            return original._replace(why=why)
        forward = _pass(site, self.forward)
        gradients = [_pass(site, self.input_gradient)] * 2
        gradients[self._weight_side(site)] = _pass(site, self.weight_gradient)
        passes = [forward, *gradients]
        if all(made.reads == site.authors[:2] for made in passes):
            return original._replace(why="the author's dtype is no wider")
        full = forward.reads == site.authors[:2]
        author: Any = site.out_authors[0]
        out = author if full or forward.wide else forward.out
        reads = [_bound_in(site, i, forward, gradients) for i in (0, 1)]
        bind = _contraction_by_pass(forward, gradients, out)
        return Decision(
            (*reads, *site.authors[2:]),
            site.params,
            outs_of(site, out, Mark.FULL if full else Mark.LOW),
            self._why(site),
            bind,
        )

    def _gradient_of(self, site: Site) -> Gradient | None:
        """What a contraction of a backward pass makes the gradient of.

        Of one that its author wrote, or of one that JAX made of a gradient inside."""
        side = None if site.partner is None else site.partner.side
        of = gradient_of(site)
        if of is None or self.weight is None or side is None:
            return of
        return "weight" if side == ("lhs", "rhs").index(self.weight) else "input"

    def _backward(self, site: Site, of: Gradient) -> Decision:
        """In the precision of that gradient; both halves of its derivative too."""
        weight, input = self.weight_gradient, self.input_gradient
        either = _more_exact(weight, input, site.compute_dtype)
        choice = {"weight": weight, "input": input, "either": either}[of]
        rule = UsePrecisionByPass(choice, choice, choice, self.weight)
        decision = rule.decide(site._replace(cotangents=()))
        what = "weight or input" if of == "either" else of
        return decision._replace(why=f"{decision.why}: {what} gradient")

    def _weight_side(self, site: Site) -> int:
        if self.weight is None:
            return weight_side(site)
        return ("lhs", "rhs").index(self.weight)

    def _why(self, site: Site) -> str:
        def show(choice):
            name = (choice.dtype or site.compute_dtype).name
            return name + " (wide)" * choice.wide

        if self.forward == self.input_gradient == self.weight_gradient:
            return f"computes in {show(self.forward)}"
        return (
            f"computes in {show(self.forward)}, input gradients in "
            f"{show(self.input_gradient)}, weight gradients in "
            f"{show(self.weight_gradient)}"
        )


def use_precision_by_pass(
    *,
    forward: DTypeLike | PassPrecision | None = None,
    input_gradient: DTypeLike | PassPrecision | None = None,
    weight_gradient: DTypeLike | PassPrecision | None = None,
    weight: Literal["lhs", "rhs"] | None = None,
) -> Rule:
    """Computes each of the three contractions of training in a precision of its own.

    Each choice is a dtype, `None` for the compute dtype, or `wide(dtype)`: operands in
    that dtype, but a result that keeps the author's dtype (forward) or that of what it
    is the gradient of. Never in more bits than the author wrote. Gradients have the
    dtypes of what they are gradients of, so a wide gradient is worth its while for
    parameters, which are read as they are, and for values that are made in full. An
    operand that any pass needs in more than `forward` is kept for the backward pass as
    it is. Casts of parameters never are.

    Under every transformation of JAX: reverse mode of any order, `vmap`, `jit`, `scan`,
    `remat`, and forward mode too. There, the tangent that comes from an operand is
    computed in the precision of that operand's gradient. Gradients taken inside of
    `amp`, and those in a `custom_vjp` rule, are known by the cotangents that they read;
    where it can't be known whether one is of a weight, the more exact choice holds.

    Which operand of a `dot_general` is the weight: the one that is a parameter, by the
    `argnums` of `amp`, or made of parameters alone. Where both are or none is, the one
    that is no vector; else the right one. `weight` says otherwise. Convolutions and
    ragged contractions have theirs on the right.

    What the author gave a precision by hand is left as written, but under the key of a
    scope. Under that, ops that are no contractions run in the dtype of `forward`.

    Args:
        forward: for the contraction itself.
        input_gradient: for the gradient of the operand that is no weight.
        weight_gradient: for the gradient of the weight.
        weight: "lhs" or "rhs", where the operand that is the weight is known.
    Returns:
        A rule to put in a policy.
    Raises:
        TypeError: a choice is neither a floating dtype nor made by `wide`.
        ValueError: `weight` is no side, or a dtype is float64 without x64.

    Weight gradients with float32 results, from low operands:

    >>> from jax import lax
    >>> from jaxamp_like import default_amp_policy
    >>> rule = use_precision_by_pass(weight_gradient=wide())
    >>> policy = default_amp_policy | {lax.dot_general_p: rule}
    """
    return UsePrecisionByPass(
        _choice(forward, "forward"),
        _choice(input_gradient, "input_gradient"),
        _choice(weight_gradient, "weight_gradient"),
        weight,
    )


def _choice(value: Any, argument: str) -> PassPrecision:
    if isinstance(value, tuple):  # one that is made, or a pair from a saved policy
        made = PassPrecision(*value)
        is_wide = as_bool(made.wide, "wide")
        return _choice(made.dtype, argument)._replace(wide=is_wide)
    if value is wide:
        raise TypeError(f"`{argument}` is `wide`, which is called: write `wide()`.")
    return PassPrecision(None if value is None else as_float_dtype(value, argument))


def _more_exact(a: PassPrecision, b: PassPrecision, low: DType) -> PassPrecision:
    """What serves where it is not known which of the two is meant."""
    dtype = max(a.dtype or low, b.dtype or low, key=bits)
    return PassPrecision(dtype, a.wide or b.wide)


class _Pass(NamedTuple):
    """A choice, for one contraction."""

    make: Callable[[DType], Callable[..., Any]]  # the contraction with such results
    reads: tuple[DType, DType]
    out: DType  # of a result that is not wide
    wide: bool


def _pass(site: Site, choice: PassPrecision) -> _Pass:
    dtype = choice.dtype or site.compute_dtype
    lhs, rhs, out = (
        author and lowered(author, dtype)
        for author in (*site.authors[:2], site.out_authors[0])
    )
    is_low = (lhs, rhs) != site.authors[:2]

    def make(out):
        params = site.params | {"preferred_element_type": out}
        return settled_bind(site.primitive, params, is_low)

    return _Pass(make, (lhs, rhs), out, choice.wide)  # type: ignore[arg-type]


def _bound_in(
    site: Site, i: int, forward: _Pass, gradients: list[_Pass]
) -> DType | None:
    """The dtype that operand `i` is cast to before it is bound; `None` is as it is.

    As it is where a pass reads it, or makes its gradient, in more than the forward pass
    does: a gradient has the dtype of what was bound. An input of the function is then
    cast inside, where the backward pass makes the cast again."""
    low = forward.reads[i]

    def is_more(dtype):
        return dtype != low and bits(dtype) >= bits(low)

    more = any(is_more(made.reads[i]) for made in gradients)
    as_is = more or gradients[i].wide or low == site.authors[i]
    return None if as_is else low


def _contraction_by_pass(
    forward: _Pass, gradients: list[_Pass], out: DType
) -> Callable[..., Any]:
    """The contraction with a derivative whose two halves are made by `gradients`."""

    @jax.custom_jvp
    def contraction(*operands):
        return _contract(*operands, made=forward, out=out)

    def jvp(primals, tangents):
        moves = []
        for i, made in enumerate(gradients):
            if isinstance(tangents[i], SymbolicZero):
                continue
            # What is kept for the backward pass is no wider than what reads it.
            operands = [
                x if j > 1 else cast(x, lowered(x.dtype, made.reads[j]))
                for j, x in enumerate(primals)
            ]
            operands[i] = tangents[i]
            moves.append(_contraction_p.bind(*operands, made=made, out=out))
        return contraction(*primals), functools.reduce(lax.add, moves)

    contraction.defjvp(jvp, symbolic_zeros=True)
    return lambda *operands: contraction(*map(jnp.asarray, operands))


def _contract(lhs: Any, rhs: Any, *rest: Any, made: _Pass, out: DType) -> Any:
    result = max(made.out, out, key=bits) if made.wide else made.out
    operands = map(cast, (lhs, rhs), made.reads)
    return cast(made.make(result)(*operands, *rest), out)


def _contraction_aval(*avals: Any, **params: Any) -> Any:
    jaxpr = trace(functools.partial(_contract, **params), avals)
    return raw(jaxpr).outvars[0].aval


def _contraction_jvp(primals: Any, tangents: Any, **params: Any) -> Any:
    moves = []
    for i in (0, 1):
        if not isinstance(tangents[i], Zero):
            operands = [*primals[:i], tangents[i], *primals[i + 1 :]]
            moves.append(_contraction_p.bind(*operands, **params))
    return _contraction_p.bind(*primals, **params), functools.reduce(lax.add, moves)


def _contraction_transpose(ct: Any, *operands: Any, made: _Pass, out: DType) -> Any:
    i = next(i for i in (0, 1) if is_linear_operand(operands[i]))
    aval = operands[i].aval
    cts: list[Any] = [None] * len(operands)
    if isinstance(ct, Zero):
        return [*cts[:i], Zero(aval), *cts[i + 1 :]]
    values = list(operands)
    values[1 - i] = cast(operands[1 - i], made.reads[1 - i])
    low = made.reads[i]

    def contraction(x):
        return made.make(made.out)(*values[:i], x, *values[i + 1 :])

    def transposed(ct):
        example = aval.update(dtype=low, weak_type=False)
        return jax.linear_transpose(contraction, example)(ct)[0]

    ct = cast(ct, made.out)
    if made.wide and bits(aval.dtype) > bits(low):
        gradient = _with_wide_results(transposed, ct, aval.dtype)
    else:
        gradient = transposed(ct)
    cts[i] = cast(gradient, aval.dtype)
    return cts


def _contraction_batch(args: Any, dims: Any, *, made: _Pass, out: DType) -> Any:
    def make(dtype):
        return jax.vmap(made.make(dtype), in_axes=tuple(dims))

    return _contraction_p.bind(*args, made=made._replace(make=make), out=out), 0


# A contraction whose transposes cast the cotangent that they read, and need not round
# their result. No composition of JAX's own primitives has such transposes and is
# mapped by `vmap` as contractions are: with the sum over examples inside.
_contraction_p = new_primitive(
    "amp_contraction",
    compute=_contract,
    aval=_contraction_aval,
    jvp=_contraction_jvp,
    transpose=_contraction_transpose,
    batch=_contraction_batch,
)


# What moves data in whatever dtype they have.
_MOVES = ("transpose", "reshape", "squeeze", "expand_dims", "rev", "slice", "copy")


def _with_wide_results(fn: Callable[..., Any], x: Any, dtype: DType) -> Any:
    """Computes `fn(x)` with results of contractions in `dtype`; also of `fn`, mostly.

    Their operands stay as they are. Ops around them move data, and a later JAX may add
    others: these read the dtypes that they were traced with."""
    jaxpr = trace(fn, [jax.typeof(x)])
    (out,) = _evaluate_wide(raw(jaxpr), consts(jaxpr), [x], dtype)
    return out


def _evaluate_wide(jaxpr: Any, constants: Any, args: Any, dtype: DType) -> list[Any]:
    env = dict(zip((*jaxpr.constvars, *jaxpr.invars), (*constants, *args), strict=True))

    def read(atoms: Any, as_traced: bool) -> Iterator[Any]:
        for atom in atoms:
            if isinstance(atom, JaxprLiteral):
                yield atom.val
            else:
                yield cast(env[atom], atom.aval.dtype) if as_traced else env[atom]

    for eqn in jaxpr.eqns:
        name, params = eqn.primitive.name, eqn.params
        values = list(read(eqn.invars, name not in _MOVES))
        inner = list(subjaxprs(params))
        if name in ("jit", "pjit") and len(inner) == 1:
            outs = _evaluate_wide(raw(inner[0]), consts(inner[0]), values, dtype)
        elif name in CONTRACTIONS:
            outs = [wide_contraction(eqn.primitive, params, dtype)(*values)]
        else:
            outs = bind_flat(eqn.primitive, values, params)
        env |= zip(eqn.outvars, outs, strict=True)
    return list(read(jaxpr.outvars, as_traced=False))
