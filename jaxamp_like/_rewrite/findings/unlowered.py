"""Where the compute dtype changes nothing, or is not what the user wants."""

from collections.abc import Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from ..._dtypes import DType, bits, is_float
from ..._frameworks.modules import is_method_of_keras
from ..._jax import Eqn, are_differentiated, equations, source_line, subjaxprs
from ..._policies.dictionary import AMP_STOP, REWRITTEN, Key, Lookup, show_key
from ..._policies.named import Policy
from ..._primitives import CONTRACTIONS
from ..._rules import UsePrecision
from ..._rules.computing import asks_for_precision
from ..._structural import Step
from ..switch import is_traced_by_amp

_DECIDED = {*AMP_STOP, REWRITTEN}


def report_of_nothing_lowered(compute_dtype: DType, steps: list[Step]) -> str | None:
    """What to say where no contraction can be lowered, for what its author wrote.

    Nothing is said if any can be, or is left alone by the policy: then the author
    mixed dtypes on purpose."""
    contractions = _left_to_this_policy(steps)
    if not contractions or compute_dtype not in _OTHER:
        return None
    reasons = [_why_not_lowered(compute_dtype, step) for step in contractions]
    if not all(reasons):
        return None
    place = source_line(contractions[0].eqn)
    where = f"in {place}" if place else "in a function of JAX that the code calls"
    return (
        f"{compute_dtype.name} changes nothing: no contraction of the function can be "
        f"lowered. The first, {where}, {reasons[0]}"
    )


def report_of_map_that_lowers_nothing(
    policy: Lookup, compute_dtype: DType, steps: list[Step]
) -> str | None:
    """What to say of a map whose keys of low precision match no contraction."""
    low = {
        key: value.compute_dtype
        for key, value in policy.items()
        if isinstance(value, Policy) and _is_low(value.compute_dtype)
    }
    if not low or _is_low(compute_dtype):
        return None
    contractions = _left_to_this_policy(steps)
    if not contractions or any(_is_low(s.match.compute_dtype) for s in contractions):
        return None
    found = {key for step in steps for key in step.match.also} & low.keys()
    if not found:
        return None  # each key is warned of by itself
    key = next(key for key in low if key in found)
    scopes = dict.fromkeys("/".join(step.scope) for step in contractions)
    return (
        "`amp_policy` lowers nothing: no contraction is under the key "
        f"{show_key(key)}, which asks for {low[key]}. Contractions are "
        f"in the scopes {', '.join(map(repr, scopes))}."
    )


def _is_low(dtype: DType | None) -> bool:
    return dtype is not None and bits(dtype) < 32


def _left_to_this_policy(steps: list[Step]) -> list[Step]:
    """The contractions that neither `amp_stop` nor an `amp` inside has decided."""
    return [
        step
        for step in steps
        if step.eqn.primitive.name in CONTRACTIONS and _DECIDED.isdisjoint(step.scope)
    ]


def report_of_loss_of_keras(
    fn: Any, arrays: Sequence[Any], compute_dtype: DType, steps: list[Step]
) -> str | None:
    """What to say of Keras' `compute_loss`, which is given the model's outputs.

    Nothing is said unless a derivative is taken by the `arrays` that it is called with:
    Keras also calls it to build a model."""
    if not is_method_of_keras(fn, "compute_loss") or bits(compute_dtype) >= 32:
        return None
    if not are_differentiated(arrays):
        return None
    if is_traced_by_amp() or any(True for s in steps for _ in _contractions(s.eqn)):
        return None
    model = type(fn.__self__).__name__
    return (
        f"{compute_dtype.name} changes nothing: `compute_loss` of `{model}` is given "
        "the outputs of the model and holds no contraction, so the layers run as "
        "written. Override `compute_loss_and_updates`, which calls the layers and the "
        "loss: `return amp(super().compute_loss_and_updates, compute_dtype="
        f"{compute_dtype.name!r})(*args, **kwargs)`."
    )


def note_of_another_16_bits(compute_dtype: DType, steps: list[Step]) -> str | None:
    """What a report says of contractions in the other 16 bits, as written.

    It may be meant: of a frozen part, or a cache, in these bits."""
    other = _OTHER.get(compute_dtype)
    if other is None:
        return None
    contractions = _left_to_this_policy(steps)
    found = [step for step in contractions if _is_by_default_in(other, step)]
    if not found or len(found) == len(contractions):
        return None
    return (
        f"{len(found)} of {len(contractions)} contractions run in {other.name}, beside "
        f"{compute_dtype.name}: they read {other.name} as written. The first is in "
        f"{source_line(found[0].eqn)}. If that is not meant, leave the dtypes of "
        f"layers and of the batch at float32, or compute all in {other.name}"
    )


def _is_by_default_in(other: DType, step: Step) -> bool:
    """Whether a contraction reads `other` as written, and no rule of its own asks."""
    rule = step.match.rule
    is_plain = isinstance(rule, UsePrecision) and rule.dtype is None
    if not is_plain or step.match.compute_dtype not in (None, *_OTHER):
        return False
    names = {atom.aval.dtype for atom in step.eqn.invars[:2]}
    return other in names and other in step.decision.reads


def report_of_float32_over_amp(
    policy: Lookup, compute_dtype: DType, steps: list[Step]
) -> str | None:
    """What to say where float32 is asked for, and an `amp` inside computes lower."""
    inside = [step.eqn for step in steps if REWRITTEN in step.scope]
    if not inside or bits(compute_dtype) < 32 or not [*policy.items()]:
        return None
    if policy.own_keys():  # one of mixed dtypes
        return None
    dtypes = {
        atom.aval.dtype
        for eqn in inside
        for contraction in _contractions(eqn)
        for atom in contraction.invars[:2]
    }
    low = sorted(dtype.name for dtype in dtypes if is_float(dtype) and bits(dtype) < 32)
    if not low:
        return None
    return (
        f"{compute_dtype.name} is asked for around another `amp`, whose contractions "
        f"run in {' and '.join(low)}, and that one decides: no rule widens what is "
        f"written. Its code begins in {source_line(inside[0])}. Use `amp` once, on the "
        "function as written."
    )


def _contractions(eqn: Eqn) -> Iterator[Eqn]:
    inside = (one for jaxpr in subjaxprs(eqn.params) for one in equations(jaxpr))
    return (one for one in (eqn, *inside) if one.primitive.name in CONTRACTIONS)


def reports_of_scopes_low_as_written(steps: list[Step]) -> Iterator[tuple[Key, str]]:
    """Each key that asks for float32 where 16 bits are written, and what to say."""
    found: dict[Key, list[Step]] = {}
    for step in steps:
        if step.eqn.primitive.name in CONTRACTIONS and _asks_for_float32(step):
            if _DECIDED.isdisjoint(step.scope):
                # Of a map, its key is the first of those that led to the rule.
                key, *_ = *step.match.also, step.match.key
                found.setdefault(key, []).append(step)
    for key, contractions in found.items():
        if all(map(_is_low_as_written, contractions)):
            dtype = contractions[0].eqn.invars[0].aval.dtype.name
            yield (
                key,
                f"The key {show_key(key)} of `amp_policy` asks for float32, but all "
                f"contractions there are {dtype} as written, and no rule widens what "
                f"its author wrote. The first is in {source_line(contractions[0].eqn)}."
                " Leave out the cast, or the `dtype=` of the layer.",
            )


def _asks_for_float32(step: Step) -> bool:
    rule, dtype = step.match.rule, step.match.compute_dtype
    if isinstance(rule, UsePrecision) and step.match.by_scope and rule.dtype:
        dtype = rule.dtype
    return dtype is not None and bits(dtype) >= 32


def _is_low_as_written(step: Step) -> bool:
    avals = [atom.aval for atom in step.eqn.invars[:2]]
    return all(is_float(aval.dtype) and bits(aval.dtype) < 32 for aval in avals)


_OTHER = {
    jnp.dtype(jnp.bfloat16): jnp.dtype(jnp.float16),
    jnp.dtype(jnp.float16): jnp.dtype(jnp.bfloat16),
}
_LAYERS = (
    "as written, and stays so. Leave the dtypes of layers (`dtype=`, `param_dtype=`, "
    "Keras' policy, `hk.mixed_precision`) at float32, for `amp` to lower, and leave "
    "out casts of parameters and inputs (`astype`, `cast_to_compute`)."
)


def _why_not_lowered(asked: DType, step: Step) -> str | None:
    """Why a contraction does not run in the dtype `asked`, though its rule says so."""
    params, match = step.eqn.params, step.match
    avals = [atom.aval for atom in step.eqn.invars]
    rule = match.rule.for_equation(params, avals)
    if not isinstance(rule, UsePrecision) or rule.dtype is not None:
        return None
    if match.compute_dtype not in (None, asked):
        return None
    names = {aval.dtype.name for aval in avals[:2]}
    if names == {_OTHER[asked].name}:
        scale = " In float16, a loss wants a scale, too." * (names == {"float16"})
        return f"is {_OTHER[asked].name} {_LAYERS}{scale}"
    if names == {asked.name}:
        return f"is {asked.name} {_LAYERS}"
    if names == {"float32", "float64"}:
        return (
            "reads a float64 array beside a float32 one, which makes it float64: that "
            "is never lowered. Make parameters and inputs float32: with "
            "`jax_enable_x64`, new arrays are float64."
        )
    if names == {"float64"}:
        return (
            "is float64 as written, which is never lowered. Make parameters and inputs "
            "float32: with `jax_enable_x64`, new arrays are float64."
        )
    if names == {"float32"} and asks_for_precision(params) and not match.by_scope:
        return (
            "asks for a precision by `precision=`, which is kept. "
            "Leave that out, or give the scope of the code a rule, which wins: "
            "`default_amp_policy | {scope: use_compute_precision}`."
        )
    return None


def report_of_float16_on_tpus(steps: list[Step]) -> str | None:
    """What to say where contractions are lowered to float16 and JAX runs on a TPU."""
    first = next((step for step in steps if is_lowered_to_float16(step)), None)
    if first is None or jax.default_backend() != "tpu":
        return None
    return (
        "JAX runs on a TPU, whose matrix units multiply bfloat16. In float16, as in "
        f"{source_line(first.eqn)}, contractions are no faster, and a loss wants a "
        "scale. Ask for `compute_dtype='bfloat16'`."
    )


def is_lowered_to_float16(step: Step) -> bool:
    return step.is_compute and any(
        read == jnp.float16 != atom.aval.dtype
        for read, atom in zip(step.decision.reads, step.eqn.invars, strict=True)
    )
