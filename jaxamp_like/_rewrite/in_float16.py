"""Where 16 bits are not those that the user wants, and what to say then."""

import jax
import jax.numpy as jnp

from .._dtypes import DType
from .._jax import source_line
from .._policies.dictionary import AMP_STOP, REWRITTEN
from .._primitives import CONTRACTIONS
from .._rules import UsePrecision
from .._structural import Step

_DECIDED = {*AMP_STOP, REWRITTEN}


def report_of_16_bits_by_hand(compute_dtype: DType, steps: list[Step]) -> str | None:
    """What to say where all contractions are in the other 16-bit dtype as written.

    Nothing is said if only some contractions are: then the author mixed dtypes on
    purpose."""
    other = {jnp.bfloat16: jnp.float16, jnp.float16: jnp.bfloat16}
    other = {jnp.dtype(k): jnp.dtype(v) for k, v in other.items()}.get(compute_dtype)
    contractions = [
        step
        for step in steps
        if step.eqn.primitive.name in CONTRACTIONS and _DECIDED.isdisjoint(step.scope)
    ]
    if other is None or not contractions:
        return None
    if not all(_stays_in(other, step, compute_dtype) for step in contractions):
        return None
    why = (
        ", and in float16 a loss wants a scale"
        if other == jnp.float16
        else ", since what the author made 16 bits wide stays as it is"
    )
    return (
        f"All contractions of the function are {other.name} as written, the first in "
        f"{source_line(contractions[0].eqn)}, and stay so: {compute_dtype.name} "
        f"changes nothing{why}. Leave the dtypes of layers (`dtype=`, `param_dtype=`, "
        "Keras' policy) at float32, for `amp` to lower."
    )


def report_of_float16_on_tpus(steps: list[Step]) -> str | None:
    """What to say where contractions are lowered to float16 and JAX runs on a TPU."""
    first = next((step for step in steps if _is_lowered(step)), None)
    if first is None or jax.default_backend() != "tpu":
        return None
    return (
        "JAX runs on a TPU, whose matrix units multiply bfloat16. In float16, as in "
        f"{source_line(first.eqn)}, contractions are no faster, and a loss wants a "
        "scale. Ask for `compute_dtype='bfloat16'`."
    )


def _stays_in(dtype: DType, step: Step, asked: DType) -> bool:
    """Whether a contraction that is to run in the dtype `asked` stays in `dtype`."""
    avals = [atom.aval for atom in step.eqn.invars]
    rule = step.match.rule.for_equation(step.eqn.params, avals)
    is_to = isinstance(rule, UsePrecision) and rule.dtype is None
    is_asked = is_to and step.match.compute_dtype in (None, asked)
    return is_asked and all(aval.dtype == dtype for aval in avals[:2])


def _is_lowered(step: Step) -> bool:
    return step.is_compute and any(
        read == jnp.float16 != atom.aval.dtype
        for read, atom in zip(step.decision.reads, step.eqn.invars, strict=True)
    )
