"""Running a rewritten program beside what its author's dtypes would give.

Every value is a `Pair`: as the rewritten program computes it, and as it would be if
nothing had been cast. The rewritten program is enough to compute both: casts and
roundings that `amp` inserted leave the second value as it is, and every other equation
is evaluated a second time, in the dtypes that its operands then have. So both runs stay
in step through loops, remat and the backward pass, and can be compared value by value.
Control flow follows the values of the rewritten program."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from jax import lax

from ..._dtypes import DType, bits, cast, holds, is_float
from ..._jax import Eqn, Literal, bind_flat, eqn_context, has_effect, rebind, subjaxprs
from ..._quantised import FORMATS
from ..._quantised.stored import ROUNDED
from .. import walk


class Pair(NamedTuple):
    """A value as the program computes it, and in the author's dtypes.

    `true` is `None` where both are the same. It is a float even if `run` holds the
    integers of an int8 contraction. `measured` is what `measure` found, if it was
    called."""

    run: Any
    true: Any = None
    measured: Any = None

    @property
    def exact(self) -> Any:
        return self.run if self.true is None else self.true

    @property
    def is_float(self) -> bool:
        return is_float(getattr(self.exact, "dtype", None))

    @property
    def arrays(self) -> list[Any]:
        return [self.run] if self.true is None else [self.run, self.true]

    def bare(self) -> "Pair":
        return self._replace(measured=None)


class Slices(NamedTuple):
    """The slices that a loop stacks up, not joined yet: most are read by loops only."""

    pairs: list[Pair]  # by index

    @property
    def arrays(self) -> list[Any]:
        return arrays_of(self.pairs)

    def bare(self) -> "Slices":
        return self


Value = Pair | Slices


def arrays_of(values: Iterable[Value]) -> list[Any]:
    return [x for value in values for x in value.arrays]


@dataclass(frozen=True)
class Role:
    """What an equation does, as far as the step tells that it was bound for.

    Args:
        inserted: if it is a cast or a rounding that `amp` inserted, the number of the
            operand that is its result in the author's dtypes.
        target: if it is a cast that the author wrote, the dtype that it casts to.
        is_scale: whether it makes the scale of 8-bit numbers a power of two. Numbers
            are divided by the scale and multiplied by it again, so a different scale is
            no error, and both runs use the same one.
    """

    inserted: int | None = None
    target: str | None = None
    is_scale: bool = False


def role_of(eqn: Eqn, at: walk.ReportContext) -> Role:
    name = eqn.primitive.name
    if eqn.primitive is ROUNDED:
        return Role(inserted=1)
    if (rounded := rounded_operand(eqn, at)) is not None:
        return Role(inserted=rounded)
    # Scales that are known before a training step belong to no step of the plan.
    is_scale = _is_of_8_bits(at) or (at.in_amp and at.step is None)
    if name == "bitcast_convert_type" and is_scale:
        return Role(is_scale=True)
    author = at.step and at.step.eqn
    if name == "reduce_precision":
        # JAX puts one on what `jax.checkpoint` saves, in the dtype that it has now.
        is_ours = author is not None and author.primitive.name != name
        return Role(inserted=0 if is_ours else None)
    if name != "convert_element_type":
        return Role()
    if author is None or author.primitive.name != name:
        is_ours = (author is not None or at.in_amp) and walk.is_float_cast(eqn)
        return Role(inserted=0 if is_ours else None)
    atom = author.invars[0] if at.phase == "backward" else author.outvars[0]
    return Role(target=atom.aval.dtype.name)


def rounded_operand(eqn: Eqn, at: walk.ReportContext) -> int | None:
    """The number of the operand that an equation rounds to 8 bits or casts back.

    It is `None` for other equations. Such an equation clips the operand to the range of
    the format, rounds it, or casts it to or from float8, int8 or the int32 of sums."""
    if not _is_of_8_bits(at):
        return None
    if eqn.primitive.name == "clamp":
        least, _, most = eqn.invars
        is_known = isinstance(least, Literal) and isinstance(most, Literal)
        # Else it is a scale that is kept within bounds.
        is_range = is_known and bool(np.asarray(least.val) == -np.asarray(most.val))
        return 1 if is_range else None
    if eqn.primitive.name != "convert_element_type":
        return 0 if eqn.primitive.name == "round" else None
    both = eqn.invars[0].aval.dtype, eqn.params["new_dtype"]
    has_numbers = all(is_float(x) or x in _INTEGERS for x in both)
    return 0 if has_numbers and any(map(is_float, both)) else None


def _is_of_8_bits(at: walk.ReportContext) -> bool:
    return at.step is not None and at.step.decision.eight_bits is not None


_INTEGERS = frozenset(dtype for one in FORMATS.values() for dtype in one.integers)


def as_written(atom: Any, at: walk.ReportContext) -> float | None:
    """The literal that `atom` was before it was rounded to a lower precision."""
    if not isinstance(atom, Literal) or at.step is None:
        return None
    now: Any = atom.aval
    for written in at.step.eqn.invars:
        then: Any = written.aval
        if (
            isinstance(written, Literal)
            and is_float(then.dtype)
            and is_float(now.dtype)
        ):
            rounded = np.asarray(written.val).astype(now.dtype)
            if then.dtype != now.dtype and rounded == np.asarray(atom.val):
                return float(np.asarray(written.val))
    return None


_MOVES = frozenset(
    "reshape transpose broadcast_in_dim squeeze expand_dims copy copy_p rev name "
    "stop_gradient optimization_barrier sharding_constraint device_put pvary "
    "pcast amp_constant amp_tied amp_stored "
    "amp_last_derivative".split()
)


def is_move(eqn: Eqn) -> bool:
    """Whether an equation only moves data: not worth statistics of its own."""
    return eqn.primitive.name in _MOVES


def keeps_magnitudes(eqn: Eqn, role: Role) -> bool:
    """Whether the measurements of the operand are true of the result."""
    if role.inserted is not None and eqn.primitive.name == "convert_element_type":
        new, old = eqn.outvars[0].aval.dtype, eqn.invars[0].aval.dtype
        return is_float(new) and is_float(old) and holds(new, old)
    return is_move(eqn) or eqn.primitive.name in ("neg", "abs")


def literal_pair(atom: Any) -> Pair:
    return Pair(jnp.asarray(atom.val, getattr(atom.aval, "dtype", None)))


def rebind_pairs(
    eqn: Eqn,
    role: Role,
    pairs: Sequence[Pair],
    run: Callable[[Eqn, list[Any]], Sequence[Any]] = rebind,
) -> list[Pair]:
    """Binds an equation whose inner programs, if any, are not looked into.

    `run` binds it on the values that the program computes."""
    runs = run(eqn, [pair.run for pair in pairs])
    trues = _in_author_dtypes(eqn, role, pairs, runs)
    return [Pair(run, true) for run, true in zip(runs, trues, strict=True)]


def with_measures(operands: Sequence[Pair], outs: list[Pair]) -> list[Pair]:
    """The results, with the measurements of their operands."""
    same = len(outs) == len(operands)
    return [
        out._replace(measured=operands[i if same else 0].measured)
        if out.is_float
        else out
        for i, out in enumerate(outs)
    ]


def _in_author_dtypes(
    eqn: Eqn, role: Role, pairs: Sequence[Pair], runs: Sequence[Any]
) -> list[Any]:
    """The results in the author's dtypes, `None` where they are the same."""
    if role.is_scale:
        return [None for _ in runs]
    if role.inserted is not None and pairs[role.inserted].is_float:
        return [pairs[role.inserted].exact]
    # An equation with an effect must not run twice.
    if all(pair.true is None for pair in pairs) or has_effect(eqn):
        return [None] * len(runs)
    values = _harmonised(pairs)
    if role.target is not None:
        target = jnp.dtype(role.target)
        return [values[0].astype(target)]
    is_same = all(
        not pair.is_float or value.dtype == pair.run.dtype
        for pair, value in zip(pairs, values, strict=True)
    )
    if is_same:
        return list(_bind_on(eqn, values))
    try:
        return list(_bind_wider(eqn, values))
    except (TypeError, ValueError, NotImplementedError):
        # Code that only exists in the dtypes that it was traced with.
        down = [
            cast(value, pair.run.dtype) if pair.is_float else value
            for pair, value in zip(pairs, values, strict=True)
        ]
        return list(_bind_on(eqn, down))


def _harmonised(pairs: Sequence[Pair]) -> list[Any]:
    """Operands in the author's dtypes; those that share a dtype now share one there."""
    widest: dict[DType, DType] = {}
    for pair in pairs:
        if pair.is_float:
            now, then = pair.run.dtype, pair.exact.dtype
            widest[now] = max(widest.get(now, then), then, key=bits)
    return [
        cast(pair.exact, widest[pair.run.dtype]) if pair.is_float else pair.exact
        for pair in pairs
    ]


def _bind_on(eqn: Eqn, values: Sequence[Any]) -> Sequence[Any]:
    if any(True for _ in subjaxprs(eqn.params)):
        return rebind(eqn, values)
    return _bind(eqn, values, eqn.params)


def _bind(eqn: Eqn, values: Sequence[Any], params: dict[str, Any]) -> Sequence[Any]:
    with eqn_context(eqn):
        return bind_flat(eqn.primitive, values, params)


def _bind_wider(eqn: Eqn, values: Sequence[Any]) -> Sequence[Any]:
    """Binds on operands that are wider than those that the equation was made for."""
    name, params = eqn.primitive.name.replace("-", "_"), eqn.params
    if name in _SCATTERS:
        options = ("indices_are_sorted", "unique_indices", "mode")
        return [
            _SCATTERS[name](
                *values, params["dimension_numbers"], **{k: params[k] for k in options}
            )
        ]
    if any(True for _ in subjaxprs(params)):
        raise TypeError("its reducer was traced in other dtypes")
    wide = max((x.dtype for x in values if is_float(x.dtype)), key=bits)
    for key in ("preferred_element_type", "out_dtype"):
        asked = params.get(key)
        if asked is not None and not (is_float(asked) and bits(asked) >= bits(wide)):
            params = params | {key: wide}
    return _bind(eqn, values, params)


_SCATTERS: dict[str, Callable[..., Any]] = {
    "scatter": lax.scatter,
    "scatter_add": lax.scatter_add,
    "scatter_mul": lax.scatter_mul,
    "scatter_min": lax.scatter_min,
    "scatter_max": lax.scatter_max,
}


def pinned(pairs: Iterable[Pair], like: Iterable[Any]) -> list[Pair]:
    """Pairs with a value in the author's dtype wherever those of `like` have one."""
    return [_pinned(pair, form) for pair, form in zip(pairs, like, strict=True)]


def _pinned(pair: Pair, like: Any) -> Pair:
    if like.true is None:
        return pair.bare()
    exact = pair.exact
    return Pair(pair.run, exact.astype(like.true.dtype) if like.is_float else exact)


def common(*pairs: Any) -> Any:
    """A form to which `pinned` can bring all of these pairs."""
    trues = [pair.true for pair in pairs if pair.true is not None]
    if not trues:
        return pairs[0].bare()
    floats = [pair.exact for pair in pairs if pair.is_float]
    widest = max(floats, key=lambda x: bits(x.dtype)) if floats else pairs[0].exact
    return Pair(pairs[0].run, widest)
